"""What the store keeps of requests, for every engine: claims, results, and the progress that clients follow. What is
decided is in `decisions.py`; an engine reads rows and swaps them (`change`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from consumers.state import base, decisions
from consumers.state.base import NO_LABELS, Completion, Fingerprint, Held, Identity, InGroup, Labels, StoreSpec
from consumers.state.decisions import Change, Row, Times

T = TypeVar("T")
Decide = Callable[[Row | None, Times], Change[T]]


class Requests(ABC):
    """The part of the store that is the same for every engine."""

    spec: StoreSpec

    @abstractmethod
    async def change_all(
        self, name: str, wanted: Sequence[tuple[Identity, Decide[T]]], *, durable: bool = True, bodies: bool = True
    ) -> Sequence[Change[T]]:
        """Decide about each of these requests, and swap its row, in this order. `name`: of the operation. `durable`:
        False if what is written need not survive a power cut. `bodies`: False if the decisions do not need the bodies
        of results."""

    @abstractmethod
    async def count_unseen(self, identity: Identity, keep_ms: int) -> Sequence[str]:
        """Count a cancellation of a request that no worker has seen. Returns the ids of its tenant's oldest of these
        that are beyond its limit, at most `DISPLACED_AT_MOST`."""

    @abstractmethod
    async def endings(self, requests: Sequence[Identity]) -> Sequence[base.Ending | None]: ...

    async def change(self, name: str, identity: Identity, decide: Decide[T], *, durable: bool = True) -> Change[T]:
        (change,) = await self.change_all(name, [(identity, decide)], durable=durable)
        return change

    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> base.ClaimAnswer:
        decide = partial(decisions.claim, message=fingerprint, spec=self.spec)
        return (await self.change("claim", identity, decide, durable=False)).answer

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, base.Stop]:
        owners = list({Identity(each.identity.tenant, each.item_of) for each in held if each.item_of})
        ended = dict(zip(owners, await self.endings(owners), strict=True)) if owners else {}
        wanted: list[tuple[Identity, Decide[base.Stop | None]]] = []
        for each in held:
            owner = ended.get(Identity(each.identity.tenant, each.item_of))
            wanted.append((each.identity, partial(decisions.renew, token=each.token, owner=owner, spec=self.spec)))
        done = await self.change_all("renew", wanted, durable=False, bodies=False)
        return {each: change.answer for each, change in zip(held, done, strict=True) if change.answer is not None}

    async def shelter(self, held: Held) -> None:
        await self.change("shelter", held.identity, partial(decisions.shelter, token=held.token), durable=False)

    async def note_waiting(self, held: Held, *, is_waiting: bool) -> None:
        decide = partial(decisions.note_waiting, token=held.token, is_waiting=is_waiting)
        await self.change("note_waiting", held.identity, decide, durable=False)

    async def release(
        self, held: Held, *, attempts: int = 0, due_ms: int | None = None, is_survived: bool = True, step: str = ""
    ) -> None:
        decide = partial(
            decisions.release,
            token=held.token,
            spec=self.spec,
            attempts=attempts,
            due_ms=due_ms,
            is_survived=is_survived,
            step=step,
        )
        await self.change("release", held.identity, decide)

    async def defer(
        self,
        identity: Identity,
        *,
        due_ms: int,
        keep_until_ms: int,
        group: InGroup | None = None,
        labels: Labels = NO_LABELS,
    ) -> bool:
        decide = partial(decisions.defer, due_ms=due_ms, keep_until_ms=keep_until_ms, group=group, labels=labels)
        return (await self.change("defer", identity, decide)).answer

    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion | None:
        decide = partial(decisions.complete, message=fingerprint, completion=completion, token=token, spec=self.spec)
        return (await self.change("complete", identity, decide)).answer

    async def note(
        self,
        identity: Identity,
        completion: Completion,
        *,
        keep_until_ms: int = 0,
        group: InGroup | None = None,
        labels: Labels = NO_LABELS,
    ) -> None:
        decide = partial(
            decisions.note,
            completion=completion,
            keep_until_ms=keep_until_ms,
            group=group,
            labels=labels,
            spec=self.spec,
        )
        await self.change("note", identity, decide)

    async def cancel(self, identity: Identity, completion: Completion) -> base.Cancelling:
        done = await self.change("cancel", identity, partial(decisions.cancel, completion=completion, spec=self.spec))
        if not isinstance(done.row, Row) or not done.row.is_unseen:
            return done.answer
        displaced = await self.count_unseen(identity, done.row.keep_ms)
        for id in displaced:
            await self.change("cancel", Identity(identity.tenant, id), decisions.forget_unseen)
        is_displaced = displaced and done.answer is base.Cancelling.UNSEEN
        return base.Cancelling.DISPLACED if is_displaced else done.answer

    async def find(self, identity: Identity) -> base.Found | None:
        return (await self.change("find", identity, decisions.find)).answer

    async def follow(
        self,
        identity: Identity,
        submission: base.Submission,
        *,
        first_entry: base.NewEntry,
        keep_until_ms: int,
        group: InGroup | None = None,
        labels: Labels = NO_LABELS,
    ) -> base.Submitted:
        decide = partial(
            decisions.follow,
            submission=submission,
            first_entry=first_entry,
            keep_until_ms=keep_until_ms,
            group=group,
            labels=labels,
        )
        return (await self.change("follow", identity, decide)).answer

    async def unfollow(self, identity: Identity) -> None:
        await self.change("unfollow", identity, decisions.unfollow)

    async def forget(self, identity: Identity) -> None:
        await self.change("forget", identity, decisions.forget)

    async def append(self, parts: Sequence[base.NewEntries]) -> Sequence[base.AppendRefusal | None]:
        wanted = [(each.held.identity, partial(decisions.append, part=each, spec=self.spec)) for each in parts]
        done = await self.change_all("append", wanted, durable=False, bodies=False)
        return [change.answer for change in done]
