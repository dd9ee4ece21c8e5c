"""What a setting may be: the types of its values, and one line for each value that is none of them."""

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin
from urllib.parse import SplitResult, unquote, urlsplit

import annotated_types
import jiter
from pydantic import AfterValidator, BaseModel, BeforeValidator, FilePath, PlainValidator, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from consumers import failpoints
from consumers.prices import Price
from consumers.spending import Cap, Spent
from service.masking import mask, mask_url
from service.sources import Known, Place, Reading, is_section
from topology.broker.urls import urls_of

ALLOWED = "allowed"
"""Type of our own errors; their context says what is allowed."""
_NAMESPACE = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
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


def _namespace(value: str) -> str:
    # `x-` would begin the delay bits' headers, which headers exchanges then pass over; `amq` belongs to the broker.
    if _NAMESPACE.fullmatch(value) is None or value.startswith(("x-", "amq")) or value == "x":
        raise _wrong("a to z, 0 to 9, _ and -, up to 40, a letter first, not beginning with amq or x-")
    return value


def _model(value: str) -> str:
    if _MODEL.fullmatch(value) is None:
        raise _wrong("the name of a model, such as claude-haiku-5-5")
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


def _table(value: Any) -> Any:
    """A table; in the environment a JSON object, or `name=value` separated by commas."""
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("{"):
        pairs = (each.partition("=") for each in value.split(",") if each.strip())
        return {name.strip(): said.strip() for name, _, said in pairs}
    try:
        return jiter.from_json(value.encode())
    except (ValueError, UnicodeEncodeError):
        return None


def _each(read: Callable[[Any], Any], what: str) -> Callable[[Any], dict[str, Any]]:
    """A validator of tables whose values `read` reads; it raises where one cannot be read."""

    def validate(value: Any) -> dict[str, Any]:
        table = _table(value)
        try:
            found = {name: read(said) for name, said in table.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise _wrong(what) from None
        if not all(isinstance(name, str) and name for name in found):
            raise _wrong(what)
        return found

    return validate


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
        return date.fromisoformat(str(value).strip()).isoformat()
    except ValueError:
        raise _wrong("a date such as 2026-11-21") from None


Day = Annotated[str, PlainValidator(_day)]
ModelNames = Annotated[
    Mapping[str, str], PlainValidator(_each(_one_model, "a table model = model, or model=model, separated by commas"))
]
ModelLists = Annotated[
    Mapping[str, tuple[str, ...]],
    PlainValidator(_each(_some_models, "a table name = [models], in the environment as JSON")),
]
PriceTable = Annotated[
    Mapping[str, Price],
    PlainValidator(
        _each(
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
            _cap,
            "for each tenant (* for every other) a table of numbers above 0: requests, tokens, usd, what is used in a "
            "day; in the environment as JSON",
        )
    ),
]
Number = Annotated[N, BeforeValidator(_not_bool)]
Namespace = Annotated[str, AfterValidator(_namespace)]
ModelName = Annotated[str, AfterValidator(_model)]
Words = Annotated[tuple[ModelName, ...], BeforeValidator(_words), AfterValidator(_not_empty)]
Patterns = Annotated[tuple[str, ...], BeforeValidator(_words), AfterValidator(_not_empty)]
UserNames = Annotated[tuple[str, ...], BeforeValidator(_words)]
Key = Annotated[SecretStr, AfterValidator(_key)]
AmqpUrl = Annotated[SecretStr, AfterValidator(_amqp_urls)]
HttpUrl = Annotated[SecretStr, AfterValidator(_http_url)]
StoreUrl = Annotated[SecretStr, AfterValidator(_store_url)]
Chances = Annotated[dict[str, float], BeforeValidator(_chances)]
ReadableFile = FilePath


def validate(kind: type[S], reading: Reading, known: Known) -> tuple[S | None, list[str]]:
    """The settings, or one line for each wrong value."""
    try:
        return kind(**reading.nested()), []
    except ValidationError as error:
        return None, list(dict.fromkeys(_line(kind, each, reading, known) for each in error.errors()))


def _line(kind: type[BaseModel], error: ErrorDetails, reading: Reading, known: Known) -> str:
    place = _place(error, known)
    if known.pattern(place) not in known.env_names:  # a section whose values do not fit together
        names = [each.name for path, each in reading.found.items() if path[: len(place)] == place]
        return f"{', '.join(names)}: {error['msg'].removeprefix('Value error, ')}"
    found = reading.found.get(place)
    name = known.env_names[known.pattern(place)] if found is None else found.name
    field = _field(kind, place)
    allowed = error["ctx"]["what"] if error["type"] == ALLOWED else _allowed(field)
    return f"{name}: found {_shown(field, error['input'] if found is None else found.value)}, allowed is {allowed}"


def _place(error: ErrorDetails, known: Known) -> Place:
    """The setting that an error is about: its location can go on into the items of a list."""
    location = tuple(str(step) for step in error["loc"])
    places = (location[:n] for n in range(len(location), 0, -1))
    return next((each for each in places if known.pattern(each) in known.env_names), location)


def _field(kind: type[BaseModel], place: Place) -> FieldInfo:
    field = kind.model_fields[place[0]]
    if len(place) == 1:
        return field
    if is_section(field.annotation):
        return _field(field.annotation, place[1:])  # type: ignore[arg-type]
    return _field(get_args(field.annotation)[1], place[2:])


def _types(field: FieldInfo) -> Iterator[Any]:
    """What a field's annotation is made of, `None` left out."""
    todo: list[Any] = [field.annotation]
    while todo:
        each = todo.pop(0)
        if each is not type(None):
            yield each
            if get_origin(each) is not Literal:
                todo.extend(get_args(each))


def _shown(field: FieldInfo, value: Any) -> str:
    if SecretStr not in _types(field):
        return mask(value)
    if isinstance(value, str) and "://" in value:
        return mask_url(value.strip())
    return "(hidden)"


def _allowed(field: FieldInfo) -> str:
    types = list(_types(field))
    for each in types:
        if get_origin(each) is Literal:
            return " or ".join(get_args(each))
    if bool in types:
        return "true or false"
    if int in types or float in types:
        return ("a whole number" if int in types else "a number") + _limits(field)
    if SecretStr in types or str in types:
        return "text" if tuple not in {get_origin(each) for each in types} else "a list of names"
    return "a file that is there and can be read"


def _limits(field: FieldInfo) -> str:
    said = ""
    for each in field.metadata:
        match each:
            case annotated_types.Ge(ge=low):
                said += f" from {low}"
            case annotated_types.Gt(gt=low):
                said += f" above {low}"
            case annotated_types.Le(le=high):
                said += f" to {high}" if " from " in said else f", at most {high}"
    return said
