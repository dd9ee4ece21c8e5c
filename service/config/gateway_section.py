"""Settings of the HTTP server, and the keys of its callers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from service.config.sections import Section
from service.config.table_types import each_of, read_models, read_tenant
from service.config.value_types import Number, not_empty, words
from topology.lanes import DEFAULT_LANES

LANES = tuple(lane.name for lane in DEFAULT_LANES)
KEYS_AT_MOST = 1000
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayKey:
    """What a key allows."""

    tenant: str | None
    """Whose requests these are. None: nobody's; only where no keys are set."""
    lanes: tuple[str, ...] = LANES
    """The first is the one of calls that name none."""
    models: tuple[str, ...] | None = None
    """None: all."""


def _hash(value: Any) -> str:
    if not isinstance(value, str) or _HASH.fullmatch(value) is None:
        raise ValueError
    return value


def _key(value: Mapping[str, Any]) -> GatewayKey:
    if not value.keys() <= {"tenant", "lanes", "models"}:
        raise ValueError
    given: dict[str, Any] = {"tenant": read_tenant(value["tenant"])}
    if "lanes" in value:
        given["lanes"] = not_empty(tuple(words(value["lanes"])))
        if not set(given["lanes"]) <= set(LANES):
            raise ValueError
    if "models" in value:
        given["models"] = read_models(value["models"])
    return GatewayKey(**given)


KeyTable = Annotated[
    Mapping[str, GatewayKey],
    PlainValidator(
        each_of(
            _hash,
            _key,
            f"for each key's SHA-256 (`lanekeeper key new` prints it) a table: tenant, and perhaps lanes (of "
            f"{', '.join(LANES)}; the first is the default) and models; in the environment as JSON",
        )
    ),
    Field(max_length=KEYS_AT_MOST),
]


class GatewaySettings(Section):
    """The HTTP server: health, and the gateway to the lanes."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    """Where it listens. Loopback alone by default; elsewhere the gateway needs `keys`, health does not.
    Example: 0.0.0.0"""
    port: Number[int] = Field(default=8080, ge=0, le=65_535)
    """Its port; 0: any free one."""
    keys: KeyTable = Field(default={})
    """Who may call: for each key's SHA-256 its tenant, lanes and models. None: whoever is on this machine. Example:
    {"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08": {"tenant": "crm", "lanes": ["normal"]}}"""
    calls: Number[int] = Field(default=1000, ge=1, le=100_000)
    """Calls at one time; further ones are answered 529, to be tried again."""
    followers: Number[int] = Field(default=1000, ge=1, le=100_000)
    """Calls that follow requests (`?wait=`, events, WebSockets) at one time; further ones are answered 529."""
    ping_every_s: Number[float] = Field(default=10, ge=0.05, le=600)
    """How long a streamed call that waits is silent before it gets a `ping` event."""
    lookups_per_min: Number[float] = Field(default=2000, ge=1, le=1_000_000)
    """How many calls of `count_tokens` and `models` it passes on to the provider; of several tenants, one has at most
    half of them. The provider has a limit of its own for them, from 100 for a new account to 8000."""
    cancel_abandoned: bool = True
    """Whether a request is cancelled when the client that waits for it has gone. One with an `Idempotency-Key` never
    is: its client may ask again. Example: false"""
