"""The gate of the brake: a request of a paused tenant or application, or whose routes are all paused, waits on the
broker, with its attempts unchanged.

It comes back after a quarter of the time for which it was paused, at most every 15 to 22 s, so that the end of a pause
is soon noticed. A process takes back at most `BACK_PER_S` of these requests in a second. So with a backlog of very many
each comes back less often, and no lane is kept busy by requests that may not run.
"""

import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from consumers.brake import Brake
from consumers.claiming import Claiming
from consumers.clock import NowMs, now_ms
from consumers.job import Decoded, Job
from consumers.outcomes import Deferred, Outcome
from consumers.state.base import Pause
from topology.codec.decoding import app_of

SHARE_OF_PAUSE = 0.25
LEAST_MS = 1000
MOST_MS = 15_000
SPREAD = 0.5
"""The delay is lengthened at random by up to this share, so that the requests do not come back together."""
BACK_PER_S = 200
"""Each costs about a millisecond of CPU, and a write to the store."""
LONGEST_MS = 300_000


@dataclass(slots=True, eq=False)
class BrakeGate:
    """`publish`: `Lifecycle.publish`."""

    brake: Brake
    claiming: Claiming
    _: KW_ONLY
    now_ms: NowMs = now_ms
    rng: random.Random = field(default_factory=random.Random)
    publish: Callable[..., None]
    _next_ms: dict[Pause, float] = field(default_factory=dict, init=False)
    """When the next of very many requests may come back."""

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        if not self.brake.pauses:
            return None
        app = app_of(job.routing_key)
        pause = self.brake.of_request(tenant=job.identity.tenant, app=app, routes=decoded.chain.routes)
        if pause is None:
            return None
        now_ms, deadline_ms = self.now_ms(), decoded.request.deadline_ms
        delay_ms = max(1, min(self._delay_ms(pause, now_ms), deadline_ms - now_ms))
        if not await self.claiming.defer(job, due_ms=now_ms + delay_ms, deadline_ms=deadline_ms):
            return None  # it has ended, or was cancelled: the claim gate answers it
        if job.hop.is_fresh:
            self.publish(job, "paused", kind=pause.kind, name=pause.name, why=pause.why)
        return Deferred(delay_ms=delay_ms, reason="paused")

    def _delay_ms(self, pause: Pause, now_ms: int) -> int:
        delay_ms = min(max(LEAST_MS, SHARE_OF_PAUSE * (now_ms - pause.since_ms)), MOST_MS)
        delay_ms *= 1 + self.rng.uniform(0, SPREAD)
        if pause.until_ms is not None:
            delay_ms = min(delay_ms, pause.until_ms - now_ms + self.rng.uniform(0, LEAST_MS))
        if pause not in self._next_ms:
            self._next_ms = {each: next for each, next in self._next_ms.items() if each in self.brake.pauses.values()}
        self._next_ms[pause] = max(self._next_ms.get(pause, 0.0), now_ms) + 1000 / BACK_PER_S
        return round(min(max(delay_ms, self._next_ms[pause] - now_ms), LONGEST_MS))
