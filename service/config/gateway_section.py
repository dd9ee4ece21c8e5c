"""Settings of the HTTP server, and the keys of its callers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from service.config.sections import Section
from service.config.table_types import each_of, read_models, read_tenant
from service.config.value_types import Number, not_empty, words
from topology.lanes import DEFAULT_LANES

LANES = tuple(lane.name for lane in DEFAULT_LANES)
KEYS_AT_MOST = 1000
"""How many API keys the gateway's settings may have at most."""
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayKey:
    """What a caller with one of the gateway's API keys may do: for which tenant, in which lanes, with which models."""

    tenant: str | None
    """The tenant to which the caller's requests belong. None: they belong to no tenant, which is only possible if no
    keys are set."""
    lanes: tuple[str, ...] = LANES
    """The lanes that calls may name. The first one is used for calls that name none."""
    models: tuple[str, ...] | None = None
    """The models that calls may name. None: all."""


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
    each_of(
        _hash,
        _key,
        f"for each key's SHA-256 (`lanekeeper key new` prints it) a table: tenant, and perhaps lanes (of "
        f"{', '.join(LANES)}; the first is the default) and models; in the environment as JSON",
    ),
    Field(max_length=KEYS_AT_MOST),
]


class GatewaySettings(Section):
    """The settings of a process's HTTP server: its address, and the API keys and limits of the gateway."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    """The address on which the server listens. If it is not a loopback address, the gateway requires `keys`; health
    checks never need a key. Example: 0.0.0.0"""
    port: Number[int] = Field(default=8080, ge=0, le=65_535)
    """The port on which the server listens; 0: any free port."""
    keys: KeyTable = Field(default={})
    """The API keys of callers: for the SHA-256 of each key, the tenant, lanes and models that it allows. None: all
    programs on this machine may call, without a key. Example:
    {"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08": {"tenant": "crm", "lanes": ["normal"]}}"""
    calls: Number[int] = Field(default=1000, ge=1, le=100_000)
    """How many HTTP calls are answered at the same time. Further calls get the status 529, after which SDKs try
    again."""
    followers: Number[int] = Field(default=1000, ge=1, le=100_000)
    """How many HTTP calls may follow requests at the same time: wait for a request's end (`?wait=`), or receive what
    happens to it (event streams, WebSockets). Further calls that would follow a request get the status 529."""
    ping_every_s: Number[float] = Field(default=10, ge=0.05, le=600)
    """While a streamed call waits for its answer, it gets a `ping` event whenever nothing was sent to it for this many
    seconds."""
    lookups_per_min: Number[float] = Field(default=2000, ge=1, le=1_000_000)
    """How many calls of `count_tokens` and `models` the gateway passes on to the provider in a minute. If there are
    keys of several tenants, each tenant may use at most half of this number. The provider has a separate limit for such
    calls, from 100 a minute for a new account to 8000."""
    cancel_abandoned: bool = True
    """Whether a request is cancelled when the client that waits for it disconnects. A request with an `Idempotency-Key`
    is never cancelled, because its client may ask again. Example: false"""
