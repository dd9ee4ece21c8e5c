"""The gate of groups (`state/groups.py`): a request of a group runs when the group is sealed, and not if it was
cancelled before. It is dropped if the group's creator died before it had published all of the group."""

import asyncio
from collections import OrderedDict
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from consumers.job import Decoded, Job
from consumers.outcomes import Deferred, Outcome, Refused, Superseded
from consumers.state.base import Identity
from consumers.state.groups import Group, GroupedStore, State
from lanekeeper.contract.problems import RequestProblem

HOLD_S: Final = 3.0
"""So long a request keeps its slot while its group is being published, which takes a few seconds."""
LOOK_EVERY_S: Final = 0.25
LATER_MS: Final = 3000
KNOWN_FOR_S: Final = 1.0
"""How long a group counts as sealed and not cancelled, before the store is asked again."""
KNOWN_AT_MOST: Final = 1000


@dataclass(slots=True, eq=False)
class GroupGate:
    """Lets the requests of sealed groups pass, and all that belong to no group."""

    store: GroupedStore
    _: KW_ONLY
    _known: OrderedDict[Identity, float] = field(default_factory=OrderedDict, init=False)
    """The groups that may run, and since when that is known."""

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        """Raises StoreUnavailable."""
        if job.group is None or job.batch_result is not None:  # what was paid for is answered
            return None
        identity, clock = Identity(job.identity.tenant, job.group), asyncio.get_running_loop().time
        until_s = clock() + HOLD_S
        while clock() - self._known.get(identity, -KNOWN_FOR_S) >= KNOWN_FOR_S:
            group = await self.store.group(identity)
            if group is None or (group.head.state is State.SEALED and not group.head.cancelled_ms):
                self._remember(identity)  # the store may have lost it: its requests are lost never
            elif group.head.state is State.OPEN and clock() < until_s:
                await asyncio.sleep(LOOK_EVERY_S)
            else:
                return _outcome(group)
        return None

    def _remember(self, identity: Identity) -> None:
        self._known[identity] = asyncio.get_running_loop().time()
        self._known.move_to_end(identity)
        if len(self._known) > KNOWN_AT_MOST:
            self._known.popitem(last=False)


def _outcome(group: Group) -> Outcome:
    if group.head.state is State.OPEN:
        return Deferred(delay_ms=LATER_MS, reason="its group is being published")
    if group.head.state is State.VOID:
        # nothing is stored: the group may be created again, with the same requests
        return Refused(RequestProblem("cancelled", "its group was never whole, or was removed"), is_repeat=True)
    return Superseded(RequestProblem("cancelled", "its group was cancelled before it began"))
