"""Small rows that the store keeps beside requests: leases, what operators have paused, when schedules fired last,
debounced updates, and which requests are in providers' batches. Here is what is decided about them, for every engine.
An engine only reads and swaps rows, so a new kind of row needs no SQL and no Lua of its own."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from consumers.clock import now_ms
from consumers.state import base
from consumers.state.base import Fingerprint, Firing, Identity, Pause, StoreSpec
from consumers.state.decisions import Times

T = TypeVar("T")


class Place(NamedTuple):
    """Where rows are: one row (whose name is empty), or, without a key, all rows of a kind and tenant."""

    kind: str
    tenant: str = ""
    key: str | None = None


class Rows(NamedTuple):
    """The rows of a place. `values`: by their names."""

    values: Mapping[str, str]
    until_ms: int = 0
    """When they are removed (ms since 1970); 0: there are none, or it is not known."""


class RowsChange(NamedTuple, Generic[T]):
    """What was decided. `values`: the rows that change; None: the row is removed. `until_ms`: as in `Rows`; None: as
    before."""

    answer: T
    values: Mapping[str, str | None] = MappingProxyType({})
    until_ms: int | None = None


DecideRows = Callable[[Rows, Times], RowsChange[T]]
NO_ROWS = Rows({})
PAUSES = Place("pauses")
SCHEDULES = Place("schedules")
HISTORY_MINUTES = 60
HISTORY_WORKERS = 100
"""Of more workers than this, the history has only some."""
WAITING_PERIOD_S = 90 * base.DAY_S
"""Messages that still wait when such a period ends count no longer."""


# ---- leases ----------------------------------------------------------------------------------------------------------


def hold(rows: Rows, at: Times, owner: str, for_ms: int) -> RowsChange[bool]:
    if rows.values.get("owner", owner) != owner and int(rows.values.get("lease", 0)) > at.now:
        return RowsChange(False)
    # Earlier versions read the token. The rows are kept a day longer, because the calendar time may be set forward.
    held = {"owner": owner, "token": "0", "lease": str(at.now + for_ms)}
    return RowsChange(True, held, until_ms=at.today + for_ms + 1000 * base.DAY_S)


def let_go(rows: Rows, _: Times, owner: str) -> RowsChange[None]:
    return RowsChange(None, {"lease": "0"} if rows.values.get("owner") == owner else {})


# ---- pauses and schedules --------------------------------------------------------------------------------------------


def pauses_in(rows: Rows, at: Times) -> list[Pause]:
    found = base.pauses_in(row.partition(" ")[2] for row in rows.values.values())
    return [pause for pause in found if not pause.has_ended(at.today)]


def add_pause(rows: Rows, at: Times, new: Pause) -> RowsChange[bool]:
    kept = {each.id for each in pauses_in(rows, at)}
    if len(kept - {new.id}) >= base.PAUSES_AT_MOST:
        return RowsChange(False)
    ended: dict[str, str | None] = {id: None for id in rows.values if id not in kept}
    return RowsChange(True, {**ended, new.id: f"{new.until_ms or 0} {json.dumps(new.as_json())}"})


def remove_pause(rows: Rows, at: Times, id: str) -> RowsChange[Pause | None]:
    found = next((each for each in pauses_in(rows, at) if each.id == id), None)
    return RowsChange(found, {id: None} if id in rows.values else {})


def fired(rows: Rows, _: Times, schedule: str, firing: Firing, instead_of_ms: int) -> RowsChange[None]:
    last = rows.values.get(schedule)
    if last is not None and firing.at_ms <= _moment_and_id(last).at_ms != instead_of_ms:
        return RowsChange(None)
    return RowsChange(None, {schedule: f"{firing.at_ms} {firing.id}"})


# ---- history ---------------------------------------------------------------------------------------------------------


def note_minute(rows: Rows, _: Times, worker: str, row: str, until_ms: int) -> RowsChange[None]:
    if worker not in rows.values and len(rows.values) >= HISTORY_WORKERS:
        return RowsChange(None)
    return RowsChange(None, {worker: row}, until_ms=until_ms)


# ---- updates and batches ---------------------------------------------------------------------------------------------


def debounce(rows: Rows, _: Times, id: str, published_ms: int, until_ms: int) -> RowsChange[bool]:
    last = Firing(-1, "") if "" not in rows.values else _moment_and_id(rows.values[""])
    if last > (published_ms, id):
        return RowsChange(last.id == id)
    return RowsChange(True, {"": f"{published_ms} {id}"}, until_ms=max(rows.until_ms, until_ms))


def gather(rows: Rows, _: Times, ticket: str, until_ms: int, former: str) -> RowsChange[bool]:
    """A request's row says whether it was submitted (0 or 1), and in which ticket it is."""
    row = rows.values.get("", "0")
    is_free = row[0] == "0" or row[1:] == former
    return RowsChange(True, {"": f"0{ticket}"}, until_ms=until_ms) if is_free else RowsChange(False)


def submit(rows: Rows, _: Times, ticket: str, until_ms: int) -> RowsChange[bool | None]:
    """None: the request belongs to another ticket."""
    row = rows.values.get("")
    if row is not None and not ticket.startswith(row[1:]):
        return RowsChange(None)
    return RowsChange(row in (None, f"1{ticket}"), {"": f"1{ticket}"}, until_ms=until_ms)


def clear(rows: Rows, at: Times, ticket: str) -> RowsChange[None]:
    row = rows.values.get("", " ")
    if row[1:] != ticket:
        return RowsChange(None)
    return RowsChange(None, {"": row}, until_ms=min(rows.until_ms, at.today + base.LEFT_MS))


def enqueue(
    rows: Rows,
    at: Times,
    ticket: str,
    requests: int,
    tokens: int,
    most_requests: int,
    most_tokens: int | None,
    until: int,
) -> RowsChange[bool]:
    """An account's rows, by their tickets: requests, tokens, and until when they count."""
    queued = {each: tuple(map(int, row.split(" "))) for each, row in rows.values.items()}
    ended: dict[str, str | None] = {each: None for each, (*_, until_ms) in queued.items() if until_ms <= at.today}
    others = [row for each, row in queued.items() if each not in ended and each != ticket]
    requests_in_all, tokens_in_all = sum(row[0] for row in others), sum(row[1] for row in others)
    is_above = requests_in_all + requests > most_requests
    if others and (is_above or (most_tokens is not None and tokens_in_all + tokens > most_tokens)):
        return RowsChange(False)
    return RowsChange(True, {**ended, ticket: f"{requests} {tokens} {until}"}, until_ms=max(rows.until_ms, until))


def _read(rows: Rows, _: Times) -> RowsChange[Mapping[str, str]]:
    return RowsChange(rows.values)


# ---- the store -------------------------------------------------------------------------------------------------------


class SmallRows(base.Allowances, ABC):
    """The part of the store that is the same for every engine."""

    spec: StoreSpec

    @abstractmethod
    async def change_rows(self, name: str, wanted: Sequence[tuple[Place, DecideRows[T]]]) -> Sequence[T]:
        """Decide about the rows of each of these places, and swap them, in this order. `name`: of the operation."""

    @abstractmethod
    async def read_rows(self, name: str, place: Place) -> tuple[Rows, Times]:
        """The rows of a place, and the time."""

    async def _change(self, name: str, place: Place, decide: DecideRows[T]) -> T:
        (answer,) = await self.change_rows(name, [(place, decide)])
        return answer

    async def hold(self, name: str, owner: str, *, for_s: float) -> bool:
        """Take a lease, or renew it if `owner` has it already. Returns False if another owner has the lease."""
        return await self._change("hold", _lease(name), partial(hold, owner=owner, for_ms=round(for_s * 1000)))

    async def let_go(self, name: str, owner: str) -> None:
        await self._change("let_go", _lease(name), partial(let_go, owner=owner))

    async def pauses(self) -> Sequence[Pause]:
        return pauses_in(*await self.read_rows("pauses", PAUSES))

    async def pause(self, pause: Pause) -> bool:
        """Store a pause, in place of the one of the same kind and name. Returns False, and changes nothing, if
        `PAUSES_AT_MOST` others are stored."""
        return await self._change("pause", PAUSES, partial(add_pause, new=pause))

    async def resume(self, id: str) -> Pause | None:
        """Remove a pause, and return it; None if there is none with this id."""
        return await self._change("resume", PAUSES, partial(remove_pause, id=id))

    async def firings(self) -> Mapping[str, Firing]:
        rows, _ = await self.read_rows("firings", SCHEDULES)
        return {schedule: _moment_and_id(row) for schedule, row in rows.values.items()}

    async def fired(self, schedule: str, firing: Firing, *, instead_of_ms: int = 0) -> None:
        """Changes nothing if a later firing is stored, other than that of `instead_of_ms`."""
        decide = partial(fired, schedule=schedule, firing=firing, instead_of_ms=instead_of_ms)
        await self._change("fired", SCHEDULES, decide)

    async def note_history(self, minute: int, worker: str, row: str) -> None:
        """`minute`: since 1970."""
        decide = partial(note_minute, worker=worker, row=row, until_ms=(minute + HISTORY_MINUTES + 2) * 60_000)
        await self._change("note_history", _minute(minute), decide)

    async def history(self, now_minute: int) -> Mapping[int, Mapping[str, str]]:
        """What workers noted in the last hour, by minute and worker."""
        minutes = range(now_minute - HISTORY_MINUTES, now_minute + 1)
        found = await self.change_rows("history", [(_minute(each), _read) for each in minutes])
        return dict(zip(minutes, found, strict=True))

    async def reserve(
        self, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> base.WaitingLimit:
        """Count a message that waits in the broker until `until_ms`, as `weight` requests, if the limits of waiting
        requests allow it. It counts until then even if the request ends earlier, because the broker still holds the
        message. A message that is redelivered was counted before; each further message of the same request counts as
        well."""
        if fingerprint.redelivered:  # it was counted at its first delivery
            return base.WaitingLimit.WITHIN
        period = base.period_of(WAITING_PERIOD_S, now_ms())
        message = f"{identity.id} {fingerprint.mark.hex()}{fingerprint.nonce.hex()}"
        of_tenant, own = f"waiting {identity.tenant}", base.AllowanceReservation(message, "", until_ms)
        limit = self.spec.waiting_per_tenant
        if not (await self.take(of_tenant, weight, limit=limit, period=period, reservation=own)).granted:
            return base.WaitingLimit.TENANT
        of_all, limit = own._replace(id=f"{identity.tenant} {message}"), self.spec.waiting_in_all
        if not (await self.take("waiting", weight, limit=limit, period=period, reservation=of_all)).granted:
            await self.settle(of_tenant, 0, period=period, reservation=own)
            return base.WaitingLimit.TOTAL
        return base.WaitingLimit.WITHIN

    async def debounce(self, identity: Identity, key: str, *, published_ms: int, until_ms: int) -> bool:
        """Record that a request updates its tenant's `key`. Returns whether no later update is recorded; of two that
        were published in the same ms, that with the greater id is the later one. Kept until the greatest `until_ms`."""
        decide = partial(debounce, id=identity.id, published_ms=published_ms, until_ms=until_ms)
        return await self._change("debounce", Place("debounce", identity.tenant, key), decide)

    async def gather(
        self, ticket: str, requests: Sequence[Identity], *, until_ms: int, former: Mapping[Identity, str] | None = None
    ) -> set[Identity]:
        """Mark requests as belonging to this ticket. Returns those that now do: not those of another ticket that was
        submitted. `former`: for requests that came back from a ticket to be gathered again, which one that was."""
        left = former or {}
        wanted = [
            (_batched(each), partial(gather, ticket=ticket, until_ms=until_ms, former=left.get(each, "")))
            for each in requests
        ]
        found = await self.change_rows("gather", wanted)
        return {each for each, is_granted in zip(requests, found, strict=True) if is_granted}

    async def submit(self, ticket: str, requests: Sequence[Identity], *, until_ms: int) -> dict[Identity, bool]:
        """Mark requests as submitted. Returns those that belong to this ticket (or to the one of which it is a part),
        or to none, because the store was lost; and for each whether a batch with it may exist: it was submitted before,
        in this same ticket, or it is not known."""
        decide = partial(submit, ticket=ticket, until_ms=until_ms)
        found = await self.change_rows("submit", [(_batched(each), decide) for each in requests])
        return {each: before for each, before in zip(requests, found, strict=True) if before is not None}

    async def clear(self, ticket: str, requests: Sequence[Identity]) -> None:
        """Requests have left this ticket. Their marks are kept for `LEFT_MS`: until their outcomes are stored, a
        repeated message must not be put into another ticket."""
        await self.change_rows("clear", [(_batched(each), partial(clear, ticket=ticket)) for each in requests])

    async def enqueue(
        self,
        ticket: str,
        account: str,
        *,
        requests: int,
        tokens: int,
        most_requests: int,
        most_tokens: int | None,
        until_ms: int,
    ) -> bool:
        """Reserve room in the account's batch queue. Returns False if there is not enough; a ticket that is alone gets
        room whatever its size. What this ticket has reserved before is replaced."""
        decide = partial(
            enqueue,
            ticket=ticket,
            requests=requests,
            tokens=tokens,
            most_requests=most_requests,
            most_tokens=most_tokens,
            until=until_ms,
        )
        return await self._change("enqueue", _enqueued(account), decide)

    async def dequeue(self, ticket: str, account: str) -> None:
        def decide(rows: Rows, _: Times) -> RowsChange[None]:
            return RowsChange(None, {ticket: None} if ticket in rows.values else {})

        await self._change("dequeue", _enqueued(account), decide)


def _moment_and_id(row: str) -> Firing:
    at_ms, _, id = row.partition(" ")
    return Firing(int(at_ms), id)


def _lease(name: str) -> Place:
    return Place(f"lease:{name}")


def _minute(minute: int) -> Place:
    return Place(f"history:{minute}")


def _batched(identity: Identity) -> Place:
    return Place("batched", identity.tenant, identity.id)


def _enqueued(account: str) -> Place:
    return Place(f"enqueued:{account}")
