"""What a setting may be: the types of its values."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from typing import Annotated, Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import jiter
from pydantic import AfterValidator, BaseModel, BeforeValidator, FilePath, PlainValidator, SecretStr
from pydantic_core import PydanticCustomError

from consumers import failpoints
from consumers.prices import Price
from consumers.spending import EVERY_TENANT, Cap, Spent
from service.masking import mask
from topology.broker.urls import urls_of

ALLOWED = "allowed"
"""Type of our own errors; their context says what is allowed."""
_NAMESPACE = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_PROVIDER = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_PLACE = re.compile(r"[a-z0-9][a-z0-9.:-]{0,99}")
_EARLIEST = timezone(timedelta(hours=14))
"""Where a day begins first."""
_PRINTABLE = re.compile(r"[!-~]{1,2000}")
N = TypeVar("N", int, float)
S = TypeVar("S", bound=BaseModel)


def _wrong(what: str) -> PydanticCustomError:
    return PydanticCustomError(ALLOWED, "allowed is {what}", {"what": what})


def _not_bool(value: Any) -> Any:
    """pydantic takes `true` for 1."""
    if isinstance(value, bool):
        raise _wrong("a number")
    return value.strip() if isinstance(value, str) else value


def _finite(value: N) -> N:
    if not math.isfinite(value):
        raise ValueError
    return value


def _namespace(value: str) -> str:
    # `x-` would begin the delay bits' headers, which headers exchanges then pass over; `amq` belongs to the broker.
    if _NAMESPACE.fullmatch(value) is None or value.startswith(("x-", "amq")) or value == "x":
        raise _wrong("a to z, 0 to 9, _ and -, up to 40, a letter first, not beginning with amq or x-")
    return value


def _model(value: str) -> str:
    if _MODEL.fullmatch(value) is None:
        raise _wrong("the name of a model, such as claude-haiku-5-5")
    return value


def _place(value: str) -> str:
    if _PLACE.fullmatch(value) is None:  # it becomes a part of the provider's address
        raise _wrong("the name of a region, such as eu-central-1, or of a project: a to z, 0 to 9, - . :")
    return value


def is_provider_name(value: str) -> bool:
    """As it can stand in an environment variable, in an account's name and in the log."""
    return _PROVIDER.fullmatch(value) is not None


def _provider(value: str) -> str:
    if not is_provider_name(value):
        raise _wrong("a list of providers' names: a to z, 0 to 9, _ and -, up to 40, a letter first")
    return value


def _words(value: Any) -> Any:
    """A list; in the environment separated by commas, or a JSON array."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return jiter.from_json(value.encode())
        except (ValueError, UnicodeEncodeError):
            raise _wrong("names separated by commas, or a JSON array of them") from None
    return [word.strip() for word in value.split(",") if word.strip()]


def _not_empty(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or any(not word.strip() for word in value):
        raise _wrong("at least one name")
    return value


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [name for name in dict.fromkeys(value) if value.count(name) > 1]:
        raise _wrong(f"each name once, and {_list(twice)} is there again")
    return value


def _key(value: SecretStr) -> SecretStr:
    text = value.get_secret_value().strip()
    if _PRINTABLE.fullmatch(text) is None:
        raise _wrong("a key without spaces or control characters")
    return SecretStr(text)


def _split(value: SecretStr, *, schemes: tuple[str, ...], example: str) -> SplitResult:
    what = f"a URL such as {example}, other characters in user and password as %XX"
    try:
        parts = urlsplit(value.get_secret_value().strip())
        port = parts.port
    except ValueError:
        raise _wrong(what) from None
    printable = _PRINTABLE.fullmatch(value.get_secret_value().strip()) is not None
    if parts.scheme not in schemes or not parts.hostname or port == 0 or parts.fragment or not printable:
        raise _wrong(what)
    return parts


def _amqp_urls(value: SecretStr) -> SecretStr:
    """One URL, or several with commas between them: of one cluster, and so with one virtual host."""
    every = [_amqp_url(SecretStr(each)) for each in urls_of(value.get_secret_value())]
    if len({(parts.scheme, unquote(parts.path[1:]) or "/") for parts in every}) > 1:
        raise _wrong("URLs of one cluster: all amqp:// or all amqps://, and with the same virtual host")
    return SecretStr(",".join(parts.geturl() for parts in every))


def _amqp_url(value: SecretStr) -> SplitResult:
    parts = _split(value, schemes=("amqp", "amqps"), example="amqps://user:password@host:5671/vhost")
    if parts.query:
        # `no_verify_ssl=1` among them would turn the check of the broker's certificate off without a word.
        raise _wrong("a URL without ?…: for certificates there are LANEKEEPER_TLS__CA_FILE, …__CERT_FILE, …__KEY_FILE")
    if parts.path.count("/") > 1:
        raise _wrong("a URL with one virtual host after the address; write / in its name as %2F")
    if "," in parts.path:
        raise _wrong("a whole URL, amqp://…, after each comma; write , in a virtual host's name as %2C")
    return parts


def _http_url(value: SecretStr) -> SecretStr:
    parts = _split(value, schemes=("http", "https"), example="https://host:8443")
    if parts.query:
        raise _wrong("a URL without ?…")
    return SecretStr(parts.geturl().rstrip("/"))


def _store_url(value: SecretStr) -> SecretStr:
    text = value.get_secret_value().strip()
    if text.startswith("sqlite:"):
        file = text.removeprefix("sqlite:///")
        if file in (text, "", "/") or file.endswith("/") or "?" in text or "#" in text or not text.isprintable():
            raise _wrong("sqlite:///relative/file or sqlite:////absolute/file, with ?, # and % in it as %XX")
        return SecretStr(text)
    parts = _split(
        SecretStr(text),
        schemes=("redis", "rediss"),
        example="redis://:password@host:6379/0 or sqlite:////absolute/file",
    )
    if parts.query or re.fullmatch(r"/?|/[0-9]{1,5}", parts.path) is None:
        # `ssl_cert_reqs=none` among them would turn the check of the certificate off without a word.
        raise _wrong("a URL with nothing after the address but the database's number, such as redis://host:6379/0")
    return SecretStr(text)


def _chances(value: Any) -> Any:
    """`after_store:0.2,before_claim:1`, or a table: a probability for each place."""
    if isinstance(value, str):
        pairs = (each.partition(":") for each in value.split(",") if each.strip())
        value = {name.strip(): chance.strip() or "1" for name, _, chance in pairs}
    try:
        chances = {name: float(chance) for name, chance in value.items()}
    except (AttributeError, TypeError, ValueError):
        chances = {"": 0.0}
    if not chances.keys() <= failpoints.NAMES or not all(0 <= chance <= 1 for chance in chances.values()):
        raise _wrong(f"name:probability from 0 to 1, separated by commas; names: {', '.join(sorted(failpoints.NAMES))}")
    return chances


class _OddError(ValueError):
    """What is odd about a table, in words."""


def _table(value: Any) -> Any:
    """A table; in the environment a JSON object, or `name=value` separated by commas. Raises ValueError."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return jiter.from_json(value.encode(), catch_duplicate_keys=True)
        except ValueError as error:
            raise _OddError("a name is there twice" if "duplicate" in str(error) else "this is no JSON") from None
    found: dict[str, str] = {}
    for name, _, said in (each.partition("=") for each in value.split(",") if each.strip()):
        if name.strip() in found:
            raise _OddError(f"{mask(name.strip())} is there twice")
        found[name.strip()] = said.strip()
    return found


def _each(name_of: Callable[[Any], str], read: Callable[[Any], Any], what: str) -> Callable[[Any], dict[str, Any]]:
    """A validator of tables whose names and values are read by these; they raise where one cannot be."""

    def validate(value: Any) -> dict[str, Any]:
        try:
            table = _table(value)
        except _OddError as odd:
            raise _wrong(f"{what}; {odd}") from None
        if not isinstance(table, Mapping):
            raise _wrong(what)
        found: dict[str, Any] = {}
        wrong: list[str] = []
        for name, said in table.items():
            try:
                found[name_of(name)] = read(said)
            except (AttributeError, KeyError, TypeError, ValueError):
                wrong.append(name)
        if wrong:
            raise _wrong(f"{what}; not so: {_list(wrong)}")
        return found

    return validate


def _list(names: Sequence[Any]) -> str:
    """A few of them, shown."""
    return ", ".join(mask(each) for each in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _tenant(value: Any) -> str:
    """A broker's user, as it is written there."""
    if not isinstance(value, str) or not value.isprintable() or value != value.strip() or not 0 < len(value) < 256:
        raise ValueError
    if "*" in value:
        raise ValueError
    return value


def _tenant_or_every(value: Any) -> str:
    return EVERY_TENANT if value == EVERY_TENANT else _tenant(value)


def _one_model(value: Any) -> str:
    if not isinstance(value, str) or _MODEL.fullmatch(value) is None:
        raise ValueError
    return value


def _some_models(value: Any) -> tuple[str, ...]:
    return tuple(_one_model(each) for each in _not_empty(tuple(_words(value))))


def _figure(value: Any) -> float:
    found = float(_not_bool(value))
    if not 0 <= found < 1e15:
        raise ValueError
    return found


def _figures(value: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, float]:
    if not value or not value.keys() <= set(fields):
        raise ValueError
    return {name: _figure(said) for name, said in value.items()}


def _price(value: Any) -> Price:
    return Price(**_figures(value, ("input", "output", "cache_read", "cache_write")))


def _cap(value: Any) -> Cap:
    found = _figures(value, Spent._fields)
    if not all(found.values()):
        raise ValueError
    return Cap(**found)


def _day(value: Any) -> str:
    try:
        found = date.fromisoformat(str(value).strip())
    except ValueError:
        raise _wrong("a date such as 2026-11-21") from None
    if found > (today := datetime.now(_EARLIEST).date()):
        raise _wrong(f"the day from which these prices are known, {today} at the latest")
    return found.isoformat()


Day = Annotated[str, PlainValidator(_day)]
ModelNames = Annotated[
    Mapping[str, str],
    PlainValidator(_each(_one_model, _one_model, "a table model = model, or model=model, separated by commas")),
]
ModelLists = Annotated[
    Mapping[str, tuple[str, ...]],
    PlainValidator(_each(_tenant, _some_models, "a table tenant = [models], in the environment as JSON, without *")),
]
PriceTable = Annotated[
    Mapping[str, Price],
    PlainValidator(
        _each(
            _one_model,
            _price,
            "for each model a table of US dollars per million tokens: input, output, and perhaps cache_read and "
            "cache_write; in the environment as JSON",
        )
    ),
]
CapTable = Annotated[
    Mapping[str, Cap],
    PlainValidator(
        _each(
            _tenant_or_every,
            _cap,
            "for each tenant (* alone: for every other) a table of numbers above 0: requests, tokens, usd, what is "
            "used in a day; in the environment as JSON",
        )
    ),
]
Number = Annotated[N, BeforeValidator(_not_bool), AfterValidator(_finite)]
Namespace = Annotated[str, AfterValidator(_namespace)]
ModelName = Annotated[str, AfterValidator(_model)]
ProviderName = Annotated[str, AfterValidator(_provider)]
PlaceName = Annotated[str, AfterValidator(_place)]
_Once = (BeforeValidator(_words), AfterValidator(_not_empty), AfterValidator(_each_once))
ModelWords = Annotated[tuple[ModelName, ...], *_Once]
ProviderNames = Annotated[tuple[ProviderName, ...], *_Once]
Patterns = Annotated[tuple[str, ...], BeforeValidator(_words), AfterValidator(_not_empty)]
UserNames = Annotated[tuple[str, ...], BeforeValidator(_words)]
Key = Annotated[SecretStr, AfterValidator(_key)]
AmqpUrl = Annotated[SecretStr, AfterValidator(_amqp_urls)]
HttpUrl = Annotated[SecretStr, AfterValidator(_http_url)]
StoreUrl = Annotated[SecretStr, AfterValidator(_store_url)]
Chances = Annotated[dict[str, float], BeforeValidator(_chances)]
ReadableFile = FilePath
