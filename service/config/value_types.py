"""Types of settings, and how a value is shown in messages: short, and without secrets."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import jiter
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainValidator, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from consumers.prices import Price
from consumers.settle import FAILPOINTS
from consumers.slots.admission import TenantShare
from consumers.spending import DAY, EVERY_TENANT, MONTH, PERIODS, WEEK, Cap, Spent
from consumers.state.redis_url import SENTINELS, SINGLE, SentinelUrl
from lanekeeper.contract.identity import is_tenant, urls_of
from service.telemetry import redaction
from topology.codec.headers import is_version

SHOWN = 60
_PLAIN_HOST = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?"
_PLAIN_URL = re.compile(rf"[a-z][a-z0-9+.-]*://{_PLAIN_HOST}(,{_PLAIN_HOST})*(/[A-Za-z0-9._%/-]*)?")


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Settings that contradict each other, or one that another requires."""

    text: str
    at: tuple[tuple[str, ...], ...]
    """The paths of the settings that contradict each other. The error message names those that the user has set."""

    def under(self, place: tuple[str, ...]) -> "Disagreement":
        """Below the path `place` of its group."""
        return Disagreement(self.text, tuple((*place, *setting) for setting in self.at))


def clash(text: str, *fields: str) -> Disagreement:
    """A disagreement between fields of one section."""
    return Disagreement(text, at=tuple((field,) for field in fields))


CONTRADICTION = "contradiction"
"""The pydantic error type of settings in one group that contradict each other. Its context has the disagreements."""


class Section(BaseModel):
    """A group of settings. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def disagreements(self) -> Iterator[Disagreement]:
        return iter(())

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if found := tuple(self.disagreements()):
            raise PydanticCustomError(CONTRADICTION, "settings contradict each other", {"found": found})
        return self


def mask_url(url: str) -> str:
    """A URL without user, password and query; `(hidden, … characters)` if they cannot be recognised."""
    head, _, rest = url.partition("://")
    address, credentials = rest, ""
    if "@" in rest:
        _, _, address = rest.rpartition("@")
        credentials = "***@"
    address = address.partition("?")[0].partition("#")[0]
    if _PLAIN_URL.fullmatch(f"{head}://{address}") is None:
        return f"(hidden, {len(url)} characters)"
    return f"{head}://{credentials}{address}"


def mask(value: Any) -> str:
    """A value in an error message: short, and without what looks like a key or a password."""
    if isinstance(value, str) and "://" in value:
        return mask_url(value.strip())
    shown = redaction.text(repr(value))
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "…"


ALLOWED = "allowed"
"""The pydantic error type of Lanekeeper's own validation errors. Their context contains a text that says which values
are allowed."""
NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
"""Of a namespace, provider, handler, pipeline or schedule: it becomes a part of variables, names and log lines."""
_MODEL = re.compile(r"[A-Za-z0-9/][A-Za-z0-9._:/@-]{0,255}")  # of local servers, also a path
_PLACE = re.compile(r"[a-z0-9][a-z0-9.:-]{0,99}")  # it becomes a part of the provider's address
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}")
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
    if NAME.fullmatch(value) is None or value.startswith(("x-", "amq")) or value == "x":
        raise wrong("a to z, 0 to 9, _ and -, up to 40, a letter first, not beginning with amq or x-")
    return value


def matching(allowed: re.Pattern[str], what: str) -> Callable[[str], str]:
    """A validator of texts that match as a whole. `what`: which they are, for the error message."""

    def validate(value: str) -> str:
        if allowed.fullmatch(value) is None:
            raise wrong(what)
        return value

    return validate


_pattern = matching(
    re.compile(r"[A-Za-z0-9._:/@*-]{1,128}"), "the name of a model, or a pattern such as claude-sonnet-*"
)
model = matching(_MODEL, "the name of a model, such as claude-haiku-5-5")
_place = matching(_PLACE, "the name of a region, such as eu-central-1, or of a project: a to z, 0 to 9, - . :")
_account = matching(_ACCOUNT, "the name of a project or organization: letters, digits, _ - . :")
_provider = matching(NAME, "a list of providers' names: a to z, 0 to 9, _ and -, up to 40, a letter first")


_header_pattern = matching(
    re.compile(r"anthropic-[a-z0-9*-]{1,100}"), "headers' names or patterns, such as anthropic-*, separated by commas"
)


def _api_version(value: str) -> str:
    if not is_version(value):
        raise wrong("a date, such as 2023-06-01")
    return value


def _azure_version(value: str) -> str:
    if value not in ("preview", "latest") and not is_version(value.removesuffix("-preview")):
        raise wrong("a date, such as 2024-10-21 or 2025-04-01-preview")
    return value


def _cloud_version(value: str) -> str:
    if not is_version(value.removeprefix("bedrock-").removeprefix("vertex-")):
        raise wrong("a date, such as 2023-06-01 or bedrock-2023-05-31")
    return value


def words(value: Any) -> Any:
    """A list; as text separated by commas, or a JSON array."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return jiter.from_json(value.encode())
        except (ValueError, UnicodeEncodeError):
            raise wrong("names separated by commas, or a JSON array of them") from None
    return [word.strip() for word in value.split(",") if word.strip()]


def _user(value: str) -> str:
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
    return AfterValidator(lambda value: SecretStr(check(value.get_secret_value().strip())))


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


def _origin(text: str) -> str:
    parts = _split(text, schemes=("http", "https"), example="https://app.example.com")
    if parts.path or parts.query or "@" in parts.netloc:
        raise wrong("origins of web pages, such as https://app.example.com, separated by commas")
    return text


def _http_url(text: str) -> str:
    parts = _split(text, schemes=("http", "https"), example="https://host:8443")
    if parts.query:
        raise wrong("a URL without ?…")
    return parts.geturl().rstrip("/")


_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


def _provider_url(text: str) -> str:
    """One that can be called: else each request would fail, as if it were wrong."""
    url = _http_url(text)
    parts = urlsplit(url)
    host = (parts.hostname or "").removesuffix(".")
    if "@" in parts.netloc:
        raise wrong("a URL without user and password; the key is a setting of its own")
    if ":" not in host and (len(host) > 253 or not all(map(_LABEL.fullmatch, host.split(".")))):
        raise wrong("a URL whose host is a name or an address, such as https://host.example.com")
    return url


SENTINEL_EXAMPLE = "redis+sentinel://:password@host:26379,host2:26379/service/0"


def _store_url(text: str) -> str:
    if text.startswith("sqlite:"):
        file = text.removeprefix("sqlite:///")
        if file in (text, "", "/") or file.endswith("/") or "?" in text or "#" in text or not text.isprintable():
            raise wrong("sqlite:///relative/file or sqlite:////absolute/file, with ?, # and % in it as %XX")
        return text
    if text.partition("://")[0] in SENTINELS:
        try:
            if _PRINTABLE.fullmatch(text) is not None and SentinelUrl.of(text) is not None:
                return text
        except ValueError:
            pass
        raise wrong(f"a URL such as {SENTINEL_EXAMPLE}, other characters in user and password as %XX")
    parts = _split(
        text, schemes=SINGLE, example=f"redis://:password@host:6379/0, {SENTINEL_EXAMPLE} or sqlite:////absolute/file"
    )
    if parts.query or re.fullmatch(r"/?|/[0-9]{1,5}", parts.path) is None:
        # A query is refused: `?ssl_cert_reqs=none`, for example, would silently turn off the check of the certificate.
        raise wrong("a URL with nothing after the address but the database's number, such as redis://host:6379/0")
    return text


def _chances(value: Any) -> Any:
    """A table, or text such as `after_store:0.2,before_claim:1`."""
    if isinstance(value, str):
        pairs = (pair.partition(":") for pair in value.split(",") if pair.strip())
        value = {name.strip(): chance.strip() or "1" for name, _, chance in pairs}
    try:
        chances = {name: float(chance) for name, chance in value.items()}
        if chances.keys() <= FAILPOINTS and all(0 <= chance <= 1 for chance in chances.values()):
            return chances
    except (AttributeError, TypeError, ValueError):
        pass
    raise wrong(f"name:probability from 0 to 1, separated by commas; names: {', '.join(sorted(FAILPOINTS))}")


def _readable_file(value: Path) -> Path:
    try:
        is_there = value.is_file()
    except OSError:  # for example, its name is too long
        is_there = False
    if not is_there:
        raise ValueError
    return value


ApiVersion = Annotated[str, AfterValidator(_api_version)]
AzureVersion = Annotated[str, AfterValidator(_azure_version)]
CloudVersion = Annotated[str, AfterValidator(_cloud_version)]
HeaderPatterns = Annotated[tuple[Annotated[str, AfterValidator(_header_pattern)], ...], BeforeValidator(words)]
Number = Annotated[N, BeforeValidator(not_bool), AfterValidator(_finite)]
Namespace = Annotated[str, AfterValidator(_namespace)]
ModelName = Annotated[str, AfterValidator(model)]
ProviderName = Annotated[str, AfterValidator(_provider)]
PlaceName = Annotated[str, AfterValidator(_place)]
AccountName = Annotated[str, AfterValidator(_account)]
_Once = (BeforeValidator(words), AfterValidator(not_empty), AfterValidator(_each_once))
ModelWords = Annotated[tuple[ModelName, ...], *_Once]
ProviderNames = Annotated[tuple[ProviderName, ...], *_Once]
Patterns = Annotated[tuple[str, ...], BeforeValidator(words), AfterValidator(not_empty)]
UserNames = Annotated[tuple[Annotated[str, AfterValidator(_user)], ...], BeforeValidator(words)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], BeforeValidator(words)]
Key = Annotated[SecretStr, _secret(matching(_PRINTABLE, "a key without spaces or control characters"))]
AmqpUrl = Annotated[SecretStr, _secret(_amqp_urls)]
HttpUrl = Annotated[SecretStr, _secret(_http_url)]
ProviderUrl = Annotated[SecretStr, _secret(_provider_url)]
StoreUrl = Annotated[SecretStr, _secret(_store_url)]
Chances = Annotated[dict[str, float], BeforeValidator(_chances)]
ReadableFile = Annotated[Path, AfterValidator(_readable_file)]


_EARLIEST = timezone(timedelta(hours=14))
"""The time zone in which each date begins first: a date that has not begun in this zone is in the future everywhere."""


def _table(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return jiter.from_json(value.encode(), catch_duplicate_keys=True)
        except ValueError as error:
            why = "a name is there twice" if "duplicate" in str(error) else "this is no JSON"
            raise wrong(f"{what}; {why}") from None
    found: dict[str, str] = {}
    for name, _, text in (pair.partition("=") for pair in value.split(",") if pair.strip()):
        if name.strip() in found:
            raise wrong(f"{what}; {mask(name.strip())} is there twice")
        found[name.strip()] = text.strip()
    return found


def each_of(name_of: Callable[[Any], str], read: Callable[[Any], Any], what: str) -> PlainValidator:
    """The validator of a table: of each name, and of what is beside it. `what`: is allowed, for the error message."""

    def validate(value: Any) -> dict[str, Any]:
        table = _table(value, what)
        if not isinstance(table, Mapping):
            raise wrong(what)
        found: dict[str, Any] = {}
        refused: list[str] = []
        for name, entry in table.items():
            try:
                found[name_of(name)] = read(entry)
            except (AttributeError, KeyError, TypeError, ValueError):
                refused.append(name)
        if refused:
            raise wrong(f"{what}; not so: {listed(refused)}")
        return found

    return PlainValidator(validate)


def read_tenant(value: Any) -> str:
    """Check the name of a tenant. Raises ValueError."""
    if not isinstance(value, str) or not is_tenant(value):
        raise ValueError
    return value


def _tenant_or_every(value: Any) -> str:
    return EVERY_TENANT if value == EVERY_TENANT else read_tenant(value)


def read_models(value: Any) -> tuple[str, ...]:
    """Read a setting that is a list of at least one model's name."""
    return tuple(model(name) for name in not_empty(tuple(words(value))))


def _figure(value: Any) -> float:
    found = float(not_bool(value))
    if not 0 <= found < 1e15:
        raise ValueError
    return found


def _figures(value: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, float]:
    if not value or not value.keys() <= set(fields):
        raise ValueError
    return {name: _figure(figure) for name, figure in value.items()}


def _price(value: Any) -> Price:
    return Price(**_figures(value, ("input", "output", "cache_read", "cache_write", "cache_write_1h")))


def _cap(value: Any) -> Cap:
    if isinstance(value, str):
        value = jiter.from_json(value.encode())
    found = _figures(value, Spent._fields)
    if not all(found.values()):
        raise ValueError
    return Cap(**found)


def _caps(value: Mapping[str, Any]) -> Mapping[str, Cap]:
    """Figures that stand alone are the day's."""
    of_day = {name: figure for name, figure in value.items() if name not in PERIODS}
    given = {DAY: of_day or value.get(DAY), WEEK: value.get(WEEK), MONTH: value.get(MONTH)}
    if of_day and DAY in value:
        raise ValueError
    found = {per: _cap(figures) for per, figures in given.items() if figures is not None}
    if not found:
        raise ValueError
    return found


def _name_or_every(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise ValueError
    return value


def _share(value: Any) -> TenantShare:
    found = _figures(value, ("weight", "in_flight"))
    in_flight = found.get("in_flight")
    if not all(found.values()) or (in_flight is not None and not in_flight.is_integer()):
        raise ValueError
    return TenantShare(weight=found.get("weight", 1.0), in_flight=None if in_flight is None else int(in_flight))


def _day(value: Any) -> str:
    try:
        found = date.fromisoformat(str(value).strip())
    except ValueError:
        raise wrong("a date such as 2026-11-21") from None
    if found > (today := datetime.now(_EARLIEST).date()):
        raise wrong(f"the day from which these prices are known, {today} at the latest")
    return found.isoformat()


Day = Annotated[str, PlainValidator(_day)]
ModelNames = Annotated[
    Mapping[str, str],
    each_of(model, model, "a table model = model, or model=model, separated by commas"),
]


def _line(value: Any) -> str:
    if not isinstance(value, str) or NAME.fullmatch(value) is None:
        raise ValueError
    return value


def _patterns(value: Any) -> tuple[str, ...]:
    return tuple(_pattern(name) for name in not_empty(tuple(words(value))))


LimitLines = Annotated[
    Mapping[str, tuple[str, ...]],
    each_of(_line, _patterns, "a table line = [models], where * stands for any characters; in the environment as JSON"),
]
ModelLists = Annotated[
    Mapping[str, tuple[str, ...]],
    each_of(read_tenant, read_models, "a table tenant = [models], in the environment as JSON, without *"),
]
PriceTable = Annotated[
    Mapping[str, Price],
    each_of(
        model,
        _price,
        "for each model a table of US dollars per million tokens: input, output, and perhaps cache_read, cache_write "
        "and cache_write_1h; in the environment as JSON",
    ),
]
ShareTable = Annotated[
    Mapping[str, TenantShare],
    each_of(
        _tenant_or_every,
        _share,
        "for each tenant (* alone: for every other) a table of numbers above 0: weight, in_flight (a whole one); "
        "in the environment as JSON",
    ),
]
_CAPS = (
    "a table of numbers above 0: requests, tokens, usd, what may be used in a day, and the same in tables week and "
    "month; in the environment as JSON"
)
CapOfOne = Annotated[Cap, PlainValidator(_cap)]
TenantCaps = Annotated[
    Mapping[str, Mapping[str, Cap]],
    each_of(_tenant_or_every, _caps, f"for each tenant (* alone: for every other) {_CAPS}"),
]
NameCaps = Annotated[
    Mapping[str, Mapping[str, Cap]],
    each_of(_name_or_every, _caps, f"for each name (* alone: for every other) {_CAPS}"),
]
