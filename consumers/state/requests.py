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
    async def endings(self, requests: Sequence[Identity]) -> Sequence[base.Ending | None]:
        """Like `find`, for several requests, without the bytes of their outcomes."""

    async def change(self, name: str, identity: Identity, decide: Decide[T], *, durable: bool = True) -> Change[T]:
        (change,) = await self.change_all(name, [(identity, decide)], durable=durable)
        return change

    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> base.ClaimAnswer:
        """Ask for the claim of a request.

        It is granted if no worker holds it, if its lease has expired, or if it is held for this same message (with the
        same mark, and the same first byte of the nonce), which was redelivered. A dead letter that is published again
        (its `dead_at_ms` is the time of the stored error) also gets the claim, even if its body is another one. A
        request for which only `note` or `defer` has stored something is granted like a new one.
        """
        decide = partial(decisions.claim, message=fingerprint, spec=self.spec)
        return (await self.change("claim", identity, decide, durable=False)).answer

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, base.Stop]:
        """Renew several claims, so that they do not expire. Returns the claims whose holder must stop, with the reason;
        the others are valid for another lease. A claim that the store has lost is not returned: no other worker holds
        it, so the outcome of its request can still be stored. An item whose pipeline has ended is cancelled."""
        owners = list({Identity(each.identity.tenant, each.item_of) for each in held if each.item_of})
        ended = dict(zip(owners, await self.endings(owners), strict=True)) if owners else {}
        wanted: list[tuple[Identity, Decide[base.Stop | None]]] = []
        for each in held:
            owner = ended.get(Identity(each.identity.tenant, each.item_of))
            wanted.append((each.identity, partial(decisions.renew, token=each.token, owner=owner, spec=self.spec)))
        done = await self.change_all("renew", wanted, durable=False, bodies=False)
        return {each: change.answer for each, change in zip(held, done, strict=True) if change.answer is not None}

    async def shelter(self, held: Held) -> None:
        """Let no redelivery of the message take the claim over while its lease is valid, because the request has an
        answer that was paid for, and storing it may take longer than the delivery lasts."""
        await self.change("shelter", held.identity, partial(decisions.shelter, token=held.token), durable=False)

    async def note_waiting(self, held: Held, *, is_waiting: bool) -> None:
        """Note that the request of a claim waits, so that it is not at fault if its worker dies (`Granted.deaths`); or
        that it waits no longer, which is how each claim begins."""
        decide = partial(decisions.note_waiting, token=held.token, is_waiting=is_waiting)
        await self.change("note_waiting", held.identity, decide, durable=False)

    async def release(
        self, held: Held, *, attempts: int = 0, due_ms: int | None = None, is_survived: bool = True, step: str = ""
    ) -> None:
        """Give up a claim although the request has not ended, because the request waits for its next attempt, which may
        begin at `due_ms`. `is_survived`: whether the worker has worked on the request and lives, so that earlier deaths
        (`Granted.deaths`) were not the request's fault and are forgotten. If another delivery has taken the claim over,
        the caller was counted as dead; this is corrected now."""
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
        """Store that an unclaimed request waits until `due_ms`.

        What is stored does not prevent a claim, and is removed at `keep_until_ms`. Nothing is stored if the request was
        claimed or has ended. Returns False if the request has ended, so that it need not wait.
        """
        decide = partial(decisions.defer, due_ms=due_ms, keep_until_ms=keep_until_ms, group=group, labels=labels)
        return (await self.change("defer", identity, decide)).answer

    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion | None:
        """Store how a request ended, unless a completion is stored already.

        Returns the valid completion, which is the given one or the one that was stored first; or None if another
        delivery holds the claim. `token` is None if the caller holds no claim, because the deadline passed before it
        asked for one, or because the message cannot be decoded. Then the completion is stored if `claim` would grant a
        claim. If `claim` would return a Conflict, the given completion is returned but not stored, because it concerns
        only this message, not the request that owns the id.
        """
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
        """Store how a request ended, if it was refused before it could be claimed, so that its result can be read; in
        place of what was noted before.

        A valid message with the same id is still granted a claim. Nothing is stored if the request was claimed or
        deferred, or has ended.
        """
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
        """End a request as cancelled: at once, or through the worker that holds its claim, at the next renewal."""
        done = await self.change("cancel", identity, partial(decisions.cancel, completion=completion, spec=self.spec))
        if not isinstance(done.row, Row) or not done.row.is_unseen:
            return done.answer
        displaced = await self.count_unseen(identity, done.row.keep_ms)
        for id in displaced:
            await self.change("cancel", Identity(identity.tenant, id), decisions.forget_unseen)
        is_displaced = displaced and done.answer is base.Cancelling.UNSEEN
        return base.Cancelling.DISPLACED if is_displaced else done.answer

    async def find(self, identity: Identity) -> base.Found | None:
        """Returns None if no worker has received the request, or if its result is no longer kept."""
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
        """Store the submission of a request that is about to be published, and its first entry. Both are removed at
        `keep_until_ms` unless a worker sees the request before. Changes nothing if a worker has seen the request, or if
        it has ended."""
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
        """Remove the submission of a request that could not be published, unless a worker has seen it."""
        await self.change("unfollow", identity, decisions.unfollow)

    async def forget(self, identity: Identity) -> None:
        """Remove all that is kept of a request that has ended. A cancelled one stays: its message may not have arrived
        yet."""
        await self.change("forget", identity, decisions.forget)

    async def append(self, parts: Sequence[base.NewEntries]) -> Sequence[base.AppendRefusal | None]:
        """Append entries to several requests; those of one part together or not at all. Returns for each part why its
        entries were refused, or None if they were appended. A power cut may lose entries that were appended last."""
        wanted = [(each.held.identity, partial(decisions.append, part=each, spec=self.spec)) for each in parts]
        done = await self.change_all("append", wanted, durable=False, bodies=False)
        return [change.answer for change in done]
