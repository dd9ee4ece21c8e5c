"""Types of settings that are tables with keys chosen by the user (models, prices, caps, shares), and the type of the
setting with the date of the prices."""

from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta, timezone
from typing import Annotated, Any

import jiter
from pydantic import PlainValidator

from consumers.fairness.lane_slots import TenantShare
from consumers.prices import Price
from consumers.spending import EVERY_TENANT, Cap, Spent
from service.config.masking import mask
from service.config.value_types import listed, model, not_bool, not_empty, words, wrong

_EARLIEST = timezone(timedelta(hours=14))
"""The time zone in which each date begins first: a date that has not begun in this zone is in the future everywhere."""


def _table(value: Any, what: str) -> Any:
    """Read a setting that is a table. As text, in an environment variable, it is a JSON object or `name=value` pairs
    separated by commas. `what`: what is allowed, for the error message."""
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
    """The validator of a setting that is a table. `name_of` checks each name in the table, and `read` the value beside
    it; both raise an exception for what is not allowed. `what`: what is allowed, for the error message."""

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
    """Check the name of a tenant, which is a user of the broker. Raises ValueError if no user can have that name."""
    if not isinstance(value, str) or not value.isprintable() or value != value.strip() or not 0 < len(value) < 256:
        raise ValueError
    if EVERY_TENANT in value:
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
    return Price(**_figures(value, ("input", "output", "cache_read", "cache_write")))


def _cap(value: Any) -> Cap:
    found = _figures(value, Spent._fields)
    if not all(found.values()):
        raise ValueError
    return Cap(**found)


def _share(value: Any) -> TenantShare:
    found = _figures(value, ("weight", "in_flight"))
    if not all(found.values()) or not found.get("in_flight", 1.0).is_integer():
        raise ValueError
    return TenantShare(
        weight=found.get("weight", 1.0), in_flight=int(found["in_flight"]) if "in_flight" in found else None
    )


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
ModelLists = Annotated[
    Mapping[str, tuple[str, ...]],
    each_of(read_tenant, read_models, "a table tenant = [models], in the environment as JSON, without *"),
]
PriceTable = Annotated[
    Mapping[str, Price],
    each_of(
        model,
        _price,
        "for each model a table of US dollars per million tokens: input, output, and perhaps cache_read and "
        "cache_write; in the environment as JSON",
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
CapTable = Annotated[
    Mapping[str, Cap],
    each_of(
        _tenant_or_every,
        _cap,
        "for each tenant (* alone: for every other) a table of numbers above 0: requests, tokens, usd, what is "
        "used in a day; in the environment as JSON",
    ),
]
