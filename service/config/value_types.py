"""Types of settings that have a single value or a list: numbers, names, URLs, files."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import jiter
from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_core import PydanticCustomError

from consumers import failpoints
from lanekeeper.amqp.driver.urls import urls_of
from service.config.masking import mask

ALLOWED = "allowed"
"""The pydantic error type of Lanekeeper's own validation errors. Their context contains a text that says which values
are allowed."""
_NAMESPACE = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_PROVIDER = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_PLACE = re.compile(r"[a-z0-9][a-z0-9.:-]{0,99}")  # it becomes a part of the provider's address
_USER = re.compile(r"[^\x00-\x1f\x7f{}\[\]\"',]{1,255}")
_PRINTABLE = re.compile(r"[!-~]{1,2000}")
N = TypeVar("N", int, float)


def wrong(what: str) -> PydanticCustomError:
    """The validation error for a setting's wrong value. `what`: which values are allowed."""
    return PydanticCustomError(ALLOWED, "allowed is {what}", {"what": what})


def not_bool(value: Any) -> Any:
    """Check that the value of a numeric setting is not a boolean, because pydantic would accept `true` as 1."""
    if isinstance(value, bool):
        raise wrong("a number")
    return value.strip() if isinstance(value, str) else value


def _finite(value: N) -> N:
    if not abs(value) <= sys.float_info.max:  # an integer can exceed every float; for nan the comparison is false
        raise ValueError
    return value


def _namespace(value: str) -> str:
    # A namespace must not begin with `x-`, because the headers by which delayed messages are routed begin with the
    # namespace, and headers exchanges ignore headers that begin with `x-`. It must not begin with `amq`, because the
    # broker reserves names that begin with `amq`.
    if _NAMESPACE.fullmatch(value) is None or value.startswith(("x-", "amq")) or value == "x":
        raise wrong("a to z, 0 to 9, _ and -, up to 40, a letter first, not beginning with amq or x-")
    return value


def _named(name: re.Pattern[str], what: str) -> Callable[[str], str]:
    """Make a validator that accepts only text that matches the pattern `name`. `what`: what is allowed, for the error
    message."""

    def validate(value: str) -> str:
        if name.fullmatch(value) is None:
            raise wrong(what)
        return value

    return validate


model = _named(_MODEL, "the name of a model, such as claude-haiku-5-5")
"""Checks a setting that is a model's name, as a request may give it. Raises a validation error for any other text."""
_place = _named(_PLACE, "the name of a region, such as eu-central-1, or of a project: a to z, 0 to 9, - . :")
_provider = _named(_PROVIDER, "a list of providers' names: a to z, 0 to 9, _ and -, up to 40, a letter first")


def is_provider_name(value: str) -> bool:
    """Whether a provider may have this name: it becomes part of environment variables, account names and log lines."""
    return _PROVIDER.fullmatch(value) is not None


def words(value: Any) -> Any:
    """Read a setting that is a list. As text, in an environment variable, its items are separated by commas, or it is a
    JSON array."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return jiter.from_json(value.encode())
        except (ValueError, UnicodeEncodeError):
            raise wrong("names separated by commas, or a JSON array of them") from None
    return [word.strip() for word in value.split(",") if word.strip()]


def _user(value: str) -> str:
    """Check the name of a broker's user. Brackets and quotes are refused, because a name with these characters shows
    that the setting was written as JSON, but not as a JSON array."""
    if _USER.fullmatch(value) is None or value != value.strip():
        raise wrong("users of the broker, separated by commas, or a JSON array of them; none with { } [ ] or quotes")
    return value


def not_empty(value: tuple[str, ...]) -> tuple[str, ...]:
    """Check that a list is not empty, and contains no empty name."""
    if not value or any(not word.strip() for word in value):
        raise wrong("at least one name")
    return value


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [name for name in dict.fromkeys(value) if value.count(name) > 1]:
        raise wrong(f"each name once, and {listed(twice)} is there again")
    return value


def listed(names: Sequence[Any]) -> str:
    """Join the first five names for an error message, followed by how many more there are."""
    return ", ".join(mask(name) for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _secret(check: Callable[[str], str]) -> AfterValidator:
    """The validator of a setting whose text is secret. `check` returns the text in the form in which it is used, or
    raises a validation error."""
    return AfterValidator(lambda value: SecretStr(check(value.get_secret_value().strip())))


def _key(text: str) -> str:
    if _PRINTABLE.fullmatch(text) is None:
        raise wrong("a key without spaces or control characters")
    return text


def _split(url: str, *, schemes: tuple[str, ...], example: str) -> SplitResult:
    what = f"a URL such as {example}, other characters in user and password as %XX"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong(what) from None
    is_printable = _PRINTABLE.fullmatch(url) is not None
    if parts.scheme not in schemes or not parts.hostname or port == 0 or parts.fragment or not is_printable:
        raise wrong(what)
    return parts


def _amqp_urls(text: str) -> str:
    """Check the setting with the broker's URL, or the URLs of one cluster's nodes, separated by commas. All must have
    the same scheme and virtual host."""
    every = [_amqp_url(url) for url in urls_of(text)]
    if len({(parts.scheme, unquote(parts.path[1:]) or "/") for parts in every}) > 1:
        raise wrong("URLs of one cluster: all amqp:// or all amqps://, and with the same virtual host")
    return ",".join(parts.geturl() for parts in every)


def _amqp_url(url: str) -> SplitResult:
    parts = _split(url.strip(), schemes=("amqp", "amqps"), example="amqps://user:password@host:5671/vhost")
    if parts.query:
        # A query is refused: `?no_verify_ssl=1`, for example, would silently turn off the check of the certificate.
        raise wrong("a URL without ?…: for certificates there are LANEKEEPER_TLS__CA_FILE, …__CERT_FILE, …__KEY_FILE")
    if parts.path.count("/") > 1:
        raise wrong("a URL with one virtual host after the address; write / in its name as %2F")
    if "," in parts.path:
        raise wrong("a whole URL, amqp://…, after each comma; write , in a virtual host's name as %2C")
    return parts


def _http_url(text: str) -> str:
    parts = _split(text, schemes=("http", "https"), example="https://host:8443")
    if parts.query:
        raise wrong("a URL without ?…")
    return parts.geturl().rstrip("/")


def _store_url(text: str) -> str:
    if text.startswith("sqlite:"):
        file = text.removeprefix("sqlite:///")
        if file in (text, "", "/") or file.endswith("/") or "?" in text or "#" in text or not text.isprintable():
            raise wrong("sqlite:///relative/file or sqlite:////absolute/file, with ?, # and % in it as %XX")
        return text
    parts = _split(
        text, schemes=("redis", "rediss"), example="redis://:password@host:6379/0 or sqlite:////absolute/file"
    )
    if parts.query or re.fullmatch(r"/?|/[0-9]{1,5}", parts.path) is None:
        # A query is refused: `?ssl_cert_reqs=none`, for example, would silently turn off the check of the certificate.
        raise wrong("a URL with nothing after the address but the database's number, such as redis://host:6379/0")
    return text


def _chances(value: Any) -> Any:
    """Read the probability of each failpoint (a place at which the process kills itself, for tests), from a table or
    from text such as `after_store:0.2,before_claim:1`."""
    if isinstance(value, str):
        pairs = (pair.partition(":") for pair in value.split(",") if pair.strip())
        value = {name.strip(): chance.strip() or "1" for name, _, chance in pairs}
    try:
        chances = {name: float(chance) for name, chance in value.items()}
    except (AttributeError, TypeError, ValueError):
        chances = {"": 0.0}  # the empty name is no failpoint, so this is refused below
    if not chances.keys() <= failpoints.NAMES or not all(0 <= chance <= 1 for chance in chances.values()):
        raise wrong(f"name:probability from 0 to 1, separated by commas; names: {', '.join(sorted(failpoints.NAMES))}")
    return chances


def _readable_file(value: Path) -> Path:
    try:
        is_there = value.is_file()
    except OSError:  # for example, its name is too long
        is_there = False
    if not is_there:
        raise ValueError
    return value


Number = Annotated[N, BeforeValidator(not_bool), AfterValidator(_finite)]
Namespace = Annotated[str, AfterValidator(_namespace)]
ModelName = Annotated[str, AfterValidator(model)]
ProviderName = Annotated[str, AfterValidator(_provider)]
PlaceName = Annotated[str, AfterValidator(_place)]
_Once = (BeforeValidator(words), AfterValidator(not_empty), AfterValidator(_each_once))
ModelWords = Annotated[tuple[ModelName, ...], *_Once]
ProviderNames = Annotated[tuple[ProviderName, ...], *_Once]
Patterns = Annotated[tuple[str, ...], BeforeValidator(words), AfterValidator(not_empty)]
UserNames = Annotated[tuple[Annotated[str, AfterValidator(_user)], ...], BeforeValidator(words)]
Key = Annotated[SecretStr, _secret(_key)]
AmqpUrl = Annotated[SecretStr, _secret(_amqp_urls)]
HttpUrl = Annotated[SecretStr, _secret(_http_url)]
StoreUrl = Annotated[SecretStr, _secret(_store_url)]
Chances = Annotated[dict[str, float], BeforeValidator(_chances)]
ReadableFile = Annotated[Path, AfterValidator(_readable_file)]
