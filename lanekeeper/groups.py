"""Groups of requests, as a client follows them."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, Self, TypeAlias

from lanekeeper.replies import Final, NotEnded, Problem

Outcome: TypeAlias = Final | Problem
"""How a request ended."""
PAUSE_S = 1.0
PAUSE_CAP_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """How far a group is."""

    id: str
    status: Literal["unknown", "in_progress", "cancelling", "ended"]
    """`unknown`: no worker has seen a request of it yet, or its results are kept no longer."""
    size: int | None
    """How many requests it has; None: none of them says."""
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    saved_usd: float
    predicted_end_at: datetime | None

    @property
    def ended(self) -> int:
        """How many of its requests have ended."""
        return self.completed + self.failed + self.cancelled

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        predicted = found.get("predicted_end_at")
        return cls(
            id=found["id"],
            status=found["status"],
            size=found.get("size"),
            saved_usd=found.get("saved_usd", 0.0),
            predicted_end_at=None if predicted is None else datetime.fromisoformat(predicted),
            **found["counts"],
        )


class GroupTransport(Protocol):
    """How a client reaches groups."""

    async def group(self, id: str, *, tenant: str | None) -> Mapping[str, Any]: ...

    async def cancel_group(self, id: str, *, tenant: str | None) -> Mapping[str, Any]: ...

    def group_results(
        self, id: str, *, tenant: str | None, told: set[str]
    ) -> AsyncGenerator[tuple[str, Outcome], None]:
        """The outcomes that there are now, in the group's order, without those that were `told`."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of requests (`x-lane-group`), from `Client.group` or `Client.publish_many`."""

    id: str
    _transport: GroupTransport
    _tenant: str | None

    async def progress(self) -> GroupProgress:
        """Raises ControlRefused, NoReply, AccessRefused, TopologyMismatch, BrokerUnreachable."""
        return GroupProgress.of(await self._transport.group(self.id, tenant=self._tenant))

    async def cancel(self) -> GroupProgress:
        """End what has not begun. Raises the errors of `progress`."""
        return GroupProgress.of(await self._transport.cancel_group(self.id, tenant=self._tenant))

    async def results(self, *, in_order: bool = False) -> AsyncGenerator[tuple[str, Outcome], None]:
        """Each request's id with its Final, or its Problem, until all of the group has ended: as they come; `in_order`:
        at its end, in the order in which the service has seen them. Raises the errors of `progress`."""
        told: set[str] = set()
        pause_s = PAUSE_S
        while True:
            found = await self.progress()
            is_over, before = found.status == "ended", len(told)
            if found.ended > before and (is_over or not in_order):
                async with aclosing(self._transport.group_results(self.id, tenant=self._tenant, told=told)) as outcomes:
                    async for id, outcome in outcomes:
                        told.add(id)
                        yield id, outcome
            if is_over:
                return
            pause_s = PAUSE_S if len(told) > before else min(PAUSE_CAP_S, pause_s * 1.5)
            await asyncio.sleep(pause_s)


Found: TypeAlias = Final | Problem | NotEnded
"""What is known of a request: how it ended, or that it has not."""
