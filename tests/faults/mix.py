"""The requests of applications, drawn at random, so that every kind of request meets every fault."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.faults.history import OK

REPLY_QUEUE = "lane.reply.faults"
NOBODY = ("lane.reply.nobody", None)
"""Reply addresses that nobody reads: a missing queue, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The shares of the kinds of requests, from 0 to 1."""

    lanes: Mapping[str, float]
    latency_s: tuple[float, float] = (0.02, 0.6)
    streamed: float = 0.15
    delayed: float = 0.03
    refused: float = 0.02
    """Rejected by the provider for good."""
    unheard: float = 0.0
    """No reply is possible; the result is fetched at the end."""
    twice: float = 0.05
    conflicting: float = 0.01
    """The same id with another body, after the first was answered."""
    tenants: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})
    """Their shares of the requests; without a name, the connection's user."""


EVERYTHING = Mix(
    lanes={"critical": 0.3, "normal": 0.4, "batch": 0.3},
    unheard=0.02,
    tenants={"": 0.1, "many": 0.6, "some": 0.2, "few": 0.1},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One request that an application wants to send."""

    identity: str
    """The message id."""
    lane: str
    body: Mapping[str, Any]
    headers: Mapping[str, Any] = field(default_factory=dict)
    expects: tuple[str, ...] = (OK,)
    reply_to: str | None = REPLY_QUEUE
    delay_s: float = 0.0
    is_sent_twice: bool = False
    is_contradicted: bool = False
    tenant: str = ""

    @property
    def is_heard(self) -> bool:
        return self.reply_to == REPLY_QUEUE


def draw(rng: random.Random, mix: Mix, *, identity: str) -> Wish:
    """The next request."""
    prompt = f"{identity} [[latency: {round(1000 * rng.uniform(*mix.latency_s))}ms]]"
    headers: dict[str, Any] = {}
    is_refused = rng.random() < mix.refused
    if is_refused:
        prompt += " [[fault: invalid]]"
    elif rng.random() < mix.streamed:
        headers["x-lane-stream"] = True
    delay_ms = rng.randrange(300, 3000) if rng.random() < mix.delayed else 0
    if delay_ms:
        headers["x-lane-delay-ms"] = delay_ms
    is_unheard = rng.random() < mix.unheard and not headers
    tenant = rng.choices(list(mix.tenants), weights=list(mix.tenants.values()))[0]
    if tenant:
        headers["x-lane-tenant"] = tenant
    return Wish(
        identity=identity,
        tenant=tenant,
        lane=rng.choices(list(mix.lanes), weights=list(mix.lanes.values()))[0],
        body={"prompt": prompt},
        headers=headers,
        expects=("provider_rejected",) if is_refused else (OK,),
        reply_to=rng.choice(NOBODY) if is_unheard else REPLY_QUEUE,
        delay_s=delay_ms / 1000,
        is_sent_twice=rng.random() < mix.twice,
        is_contradicted=rng.random() < mix.conflicting and not is_unheard,
    )
