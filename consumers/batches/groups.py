"""The gate of groups (`state/groups.py`): a request of a group that was created as a whole runs when the group is
sealed, and is dropped if the group's creator died before; no request of a group that was cancelled begins. And what
tells the end of a group, and cancels one."""

import asyncio
import json
from collections import OrderedDict
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

import structlog

from consumers.background import Background
from consumers.claiming import in_time
from consumers.clock import now_ms
from consumers.flows.webhooks import Webhooks
from consumers.job import Decoded, Job
from consumers.lifecycle import Lifecycle
from consumers.outcomes import Deferred, Outcome, Refused, Superseded, end_with
from consumers.state.base import Completion, Identity, StoreSpec, StoreUnavailable
from consumers.state.groups import State, StoredGroup, all_members, described, progress
from consumers.state.store import Store
from lanekeeper.contract.identity import GROUP_AT_MOST
from lanekeeper.contract.problems import BrokerError, RequestProblem
from lanekeeper.telemetry import signals

HOLD_S: Final = 3.0
"""So long a request keeps its slot while its group is being published, which takes a few seconds."""
LOOK_EVERY_S: Final = 0.25
LATER_MS: Final = 3000
KNOWN_FOR_S: Final = 1.0
"""How long a group counts as sealed and not cancelled, before the store is asked again."""
KNOWN_AT_MOST: Final = 1000
CANCELLED_AGAIN_S: Final = (0.0, 0.5, 2.0, 8.0, 30.0)
SHOWN_WITHIN_S: Final = 2.0
"""For so long a call waits for what it has begun, so that its answer tells what came of it."""
ENDS_EVERY_S: Final = 1.0
ENDS_LEASE: Final = "group ends"
ENDS_LEASE_S: Final = 30.0
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class GroupGate:
    """Lets the requests of sealed groups pass, and all that belong to no group."""

    store: Store
    spec: StoreSpec
    _: KW_ONLY
    _known: OrderedDict[Identity, float] = field(default_factory=OrderedDict, init=False)
    """The groups that may run, and since when that is known."""

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        """Raises StoreUnavailable."""
        if job.group is None or job.batch_result is not None:  # what was paid for is answered
            return None
        identity, clock = Identity(job.identity.tenant, job.group.id), asyncio.get_running_loop().time
        until_s = clock() + HOLD_S
        while clock() - self._known.get(identity, -KNOWN_FOR_S) >= KNOWN_FOR_S:
            group = await in_time(lambda: self.store.group(identity))
            if not job.came_before and (refused := await self._refused(identity, group)):
                return refused
            if group is None or (group.head.state is State.SEALED and not group.head.cancelled_ms):
                self._remember(identity)  # it is new, or the store has lost it: its requests are lost never
            elif group.head.state is State.OPEN and clock() < until_s:
                await asyncio.sleep(LOOK_EVERY_S)
            else:
                return _outcome(group)
        return None

    async def _refused(self, identity: Identity, group: StoredGroup | None) -> Outcome | None:
        """Of a request that was not seen before: why it cannot be one of the group."""
        if group is not None:
            if sum(group.counts.values()) < GROUP_AT_MOST or group.head.state is not State.SEALED:
                return None
            return end_with("invalid_request", f"its group has {GROUP_AT_MOST} requests, as many as one may have")
        if await in_time(lambda: self.store.count_groups(identity.tenant)) < self.spec.groups_per_tenant:
            return None
        most = self.spec.groups_per_tenant
        return end_with(
            "too_many_waiting",
            f"this tenant has {most} groups, as many as are kept (LANEKEEPER_GATEWAY__BATCHES_PER_TENANT)",
        )

    def _remember(self, identity: Identity) -> None:
        self._known[identity] = asyncio.get_running_loop().time()
        self._known.move_to_end(identity)
        if len(self._known) > KNOWN_AT_MOST:
            self._known.popitem(last=False)


def _outcome(group: StoredGroup) -> Outcome:
    if group.head.state is State.OPEN:
        return Deferred(delay_ms=LATER_MS, reason="its group is being published")
    if group.head.state is State.VOID:
        # nothing is stored: the group may be created again, with the same requests
        return Refused(RequestProblem("cancelled", "its group was never whole, or was removed"), is_silent=True)
    return Superseded(RequestProblem("cancelled", "its group was cancelled before it began"))


@dataclass(slots=True, kw_only=True)
class GroupEnds:
    """Tells the end of each group at least once: by an event, and to its webhook. The store says which have ended,
    whatever has ended the last of their requests."""

    store: Store
    webhooks: Webhooks
    lifecycle: Lifecycle

    async def run(self, *, owner: str) -> None:
        while True:
            await asyncio.sleep(ENDS_EVERY_S)
            try:
                if await self.store.ended_groups() and await self.store.hold(ENDS_LEASE, owner, for_s=ENDS_LEASE_S):
                    await self._tell()
            except (BrokerError, StoreUnavailable) as error:
                log.warning(signals.GROUP_END_UNTOLD, error=str(error))

    async def _tell(self) -> None:
        for group in await self.store.ended_groups():
            try:
                await self._tell_of(group)
            except (BrokerError, StoreUnavailable):
                raise
            except Exception:  # by a fault of ours in one group the others' ends are told, and this process goes on
                log.exception(signals.HANDLER_FAILED, where="group end", group=group.identity.id)
            await self.store.end_was_told(group.identity)

    async def _tell_of(self, group: StoredGroup) -> None:
        if group.webhook and self.webhooks.spec.refusal(group.webhook, tenant=group.identity.tenant) is None:
            body = json.dumps({"type": "group", **described(group, now_ms=now_ms())}).encode()
            outcome = Completion(status="ok", body=body, ended_ms=group.last_ended_ms)
            await self.webhooks.send(outcome, url=group.webhook, identity=group.identity, routing_key=group.key)
        self.lifecycle.publish_group(group.key, **progress(group, now_ms=now_ms()))


@dataclass(slots=True, eq=False)
class GroupCancelling:
    """Cancels groups, for gateways and in answer to control messages."""

    store: Store
    _: KW_ONLY
    _background: Background = field(default_factory=Background, init=False)
    _cancelling: dict[Identity, asyncio.Task[None]] = field(default_factory=dict, init=False)
    """One for each group, however often it is cancelled: each reads all its requests, several times."""

    async def cancel(self, identity: Identity) -> None:
        """Let no further request of a group begin, and end those that wait. Raises StoreUnavailable."""
        await self.store.cancel_group(identity)
        if (cancelling := self._cancelling.get(identity)) is None:
            cancelling = self._background.begin(self._cancel_waiting(identity), name=f"cancel {identity.id}")
            self._cancelling[identity] = cancelling
            cancelling.add_done_callback(lambda _: self._cancelling.pop(identity, None))
        await asyncio.wait((cancelling,), timeout=SHOWN_WITHIN_S)

    async def _cancel_waiting(self, identity: Identity) -> None:
        """End what does not run; look again for what ran for a moment, because it was on its way into a provider's
        batch. What this does not reach, because this process dies, ends when it would begin."""
        try:
            for pause_s in CANCELLED_AGAIN_S:
                await asyncio.sleep(pause_s)
                is_left = False
                async for members in all_members(self.store, identity, bodies=False):
                    waiting = [each.id for each in members if each.completion is None]
                    await self.store.cancel_waiting([(Identity(identity.tenant, id), _cancelled(id)) for id in waiting])
                    is_left |= bool(waiting)
                if not is_left:
                    return
        except StoreUnavailable as error:
            log.warning(signals.GROUP_UNCANCELLED, group=identity.id, error=str(error))


def _cancelled(id: str) -> Completion:
    problem = RequestProblem("cancelled", "its group was cancelled before it began")
    return Completion(
        status="error", code=problem.code, body=problem.document(request=id, attempts=0), ended_ms=now_ms()
    )
