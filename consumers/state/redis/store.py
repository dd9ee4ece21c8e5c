"""The store in Redis, for workers on several machines.

What is decided about a request is decided here (`requests.py`), and written if the request still is what the decision
was about: by a script that compares and swaps. A process begins with the row that it saw last, or with none; if Redis
has another one, the script returns it, and the process decides again. So most operations take one round trip.

The promises of `Store` hold as long as Redis keeps the writes that it has acknowledged. With `appendonly yes` and
`appendfsync always` it keeps them through a crash; with `everysec` it may lose the last second. If Redis comes back
empty, claims and results are lost: a repeated id runs again, but no request is lost. Redis Cluster is not supported,
because one script renews many claims of a process, and the keys of these requests would be on several nodes of a
cluster.
"""

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from heapq import nsmallest
from itertools import repeat
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import quote, unquote

import structlog

from consumers.state import base, groups
from consumers.state.base import Identity, StoreSpec, StoreUnavailable
from consumers.state.decisions import KEEP, Change, ProgressRow, Row, Times
from consumers.state.groups import MEMBER_BYTES, MEMBERS_AT_ONCE
from consumers.state.redis.client import STORE, Argument, RedisClient
from consumers.state.requests import Decide
from consumers.state.rows import NO_ROWS, DecideRows, Place, Rows, RowsChange
from consumers.state.shedding import LOW_WATER, SURPLUS_ROWS, RowKind, Share, Surplus, cuts, next_step, oldest
from consumers.state.store import Store
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.figures import timings

T = TypeVar("T")
COMPLETED: Final = base.RequestState.COMPLETED
FIELDS: Final = (
    *("token", "hash", "mark", "lease", "claimed", "attempts", "noted", "cancelling", "nonce", "deaths", "due"),
    *("status", "code", "headers", "ended", "group", "line"),
)
LOOKED_AT: Final = 5000
"""How many lines of the list one run of the script looks at; it is small, because Redis does nothing else meanwhile."""
TIDIED: Final = 1000
SWAPPED_AT_ONCE: Final = 100
TRIES_AT_MOST: Final = 30
STALE_MS: Final = 1000
"""A decision is void if Redis hears of it so much later, because leases may have ended meanwhile."""
KNOWN_AT_MOST: Final = 10_000
"""How many rows of held claims are kept in memory, so that they need not be read again."""
REQUESTS_IN_A_LOOK: Final = 200
"""How many requests one run of the script reads; it is small, because Redis does nothing else meanwhile."""
KEYS_IN_A_LOOK: Final = 200
KEYS_NAMED: Final = 2000
SHARES_AT_ONCE: Final = 200
FULL_AT: Final = 7 / 8
"""Redis refuses writes when its memory reaches `maxmemory`, and then no worker can work. So the store removes rows when
this part of it is used."""
ENTRIES_IN_A_LOOK: Final = 2000
log = structlog.get_logger()


class RedisStore(Store):
    """The store in Redis."""

    is_full = False

    def __init__(self, url: str, *, namespace: str, spec: StoreSpec = base.DEFAULT) -> None:
        self._client = RedisClient(url, tls=spec.redis_tls)
        self._namespace = namespace
        self.spec = spec
        self._known: dict[Identity, _Seen] = {}
        self._time_ms = self._read_at_ms = 0
        self._warned = False
        self._surplus: deque[Surplus] = deque()
        self.times = timings()

    @property
    def trouble(self) -> str | None:
        return self._client.trouble

    async def __aenter__(self) -> Self:
        with suppress(StoreUnavailable):
            await self.probe()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def probe(self) -> None:
        used, most = await self._client.memory() or (0, 0)
        self.is_full = used > FULL_AT * most > 0
        await self._run("probe", [f"{self._namespace}:probe"])
        if not self._warned:
            self._warned = True
            for reason in await self._client.risks():
                log.warning(signals.STORE_VOLATILE, store=self._client.address, reason=reason)

    # ---- requests ----

    async def change_all(
        self, name: str, wanted: Sequence[tuple[Identity, Decide[T]]], *, durable: bool = True, bodies: bool = True
    ) -> Sequence[Change[T]]:
        done: list[Change[T]] = []
        for begin in range(0, len(wanted), SWAPPED_AT_ONCE):
            done += await self._change_some(name, wanted[begin : begin + SWAPPED_AT_ONCE], bodies=bodies)
        return done

    async def _change_some(
        self, name: str, wanted: Sequence[tuple[Identity, Decide[T]]], *, bodies: bool
    ) -> list[Change[T]]:
        done: dict[int, Change[T]] = {}
        at, seen, asked = self._now(), {}, {}
        for nth, (identity, decide) in enumerate(wanted):
            before = seen[nth] = self._known.pop(identity, NOTHING)
            asked[nth] = decide(before.row, at)
        for tries in range(TRIES_AT_MOST):
            after = {nth: _after(wanted[nth][0], change, seen[nth]) for nth, change in asked.items()}
            keys = [key for nth in asked for key in self._keys(wanted[nth][0])]
            values: list[Argument] = [at.now, STALE_MS, int(bodies), self._listed]
            for nth, change in asked.items():
                values += _swap(change, seen[nth], after[nth], self._counted(at, wanted[nth][0], change, seen[nth]))
            time_ms, *results = await self._run("swap", keys, *values, name=name)
            self._time_ms, self._read_at_ms = time_ms, _monotonic_ms()
            at, again = Times(now=time_ms, today=time_ms), {}
            for nth, result in zip(asked, results, strict=True):
                identity, decide = wanted[nth]
                change = asked[nth]
                if result != 1:
                    seen[nth] = after[nth] = _seen(result, time_ms)
                    change = decide(seen[nth].row, at)
                    if change.row is not KEEP:
                        again[nth] = change
                        continue
                done[nth] = change
                self._remember(identity, after[nth])
            if not again:
                return [done[nth] for nth in range(len(wanted))]
            asked = again
            if tries > 1:  # others change the same requests at the same time
                await asyncio.sleep(random.uniform(0, 0.002 * tries))
        raise StoreUnavailable(f"Redis at {self._client.address} is too slow: what it kept was other at each try")

    def _counted(self, at: Times, identity: Identity, change: Change[Any], before: "_Seen") -> str:
        if (counts := groups.counted(before.row, change)) is None:
            return ""
        tenant, (id, size, key, webhook) = identity.tenant, counts.group
        of_group = self._group(Identity(tenant, id))
        keys = (*of_group, self._of_tenant("groups", tenant), self._ended_groups, self._all_groups)
        head = groups.named(at, counts).as_json() if counts.was is None else ""
        told = (counts.ended_ms, counts.keep_ms, counts.saved_usd, size, key, webhook, head)
        values = (
            counts.was or "",
            counts.now,
            *told,
            identity.id,
            id,
            *keys,
            _place(tenant, id),
            self.spec.groups_per_tenant,
        )
        return "\0".join(map(str, values))

    def _remember(self, identity: Identity, now: "_Seen") -> None:
        if now.row is not None and now.row.lease_ms and now.row.status is None:
            if len(self._known) >= KNOWN_AT_MOST:
                self._known.clear()
            self._known[identity] = now

    def _now(self) -> Times:
        """The time by the clock of Redis, never ahead of it: the one that it told last, and what passed since."""
        now = self._time_ms + _monotonic_ms() - self._read_at_ms if self._time_ms else 0
        return Times(now=now, today=now)

    async def count_unseen(self, identity: Identity, keep_ms: int) -> Sequence[str]:
        values = (identity.id, keep_ms, self.spec.unseen_per_tenant, base.DISPLACED_AT_MOST)
        found = await self._run("count_unseen", [self._of_tenant("unseen", identity.tenant)], *values, name="cancel")
        return [id.decode() for id in found]

    # ---- small rows ----

    async def change_rows(self, name: str, wanted: Sequence[tuple[Place, DecideRows[T]]]) -> Sequence[T]:
        done: list[T] = []
        for begin in range(0, len(wanted), SWAPPED_AT_ONCE):
            done += await self._change_some_rows(name, wanted[begin : begin + SWAPPED_AT_ONCE])
        return done

    async def _change_some_rows(self, name: str, wanted: Sequence[tuple[Place, DecideRows[T]]]) -> list[T]:
        done: dict[int, T] = {}
        at = self._now()
        asked = {nth: (b"", decide(NO_ROWS, at)) for nth, (_, decide) in enumerate(wanted)}
        for _ in range(TRIES_AT_MOST):
            values: list[Argument] = [at.now, STALE_MS]
            for expected, change in asked.values():
                changed = [each or "" for row in change.values.items() for each in row]
                values += [expected, change.until_ms or "", len(changed), *changed]
            keys = [self._place(wanted[nth][0]) for nth in asked]
            time_ms, *results = await self._run("swap_rows", keys, *values, name=name)
            at, again = Times(now=time_ms, today=time_ms), {}
            for nth, result in zip(asked, results, strict=True):
                change = asked[nth][1]
                if result != 1:
                    left_ms, *found = result
                    rows = {name.decode(): value.decode() for name, value in zip(found[::2], found[1::2], strict=True)}
                    change = wanted[nth][1](Rows(rows, until_ms=time_ms + left_ms if left_ms > 0 else 0), at)
                    if change.values:
                        again[nth] = b"\0".join(found), change
                        continue
                done[nth] = change.answer
            if not again:
                return [done[nth] for nth in range(len(wanted))]
            asked = again
        raise StoreUnavailable(f"Redis at {self._client.address} is too slow: what it kept was other at each try")

    async def read_rows(self, name: str, place: Place) -> tuple[Rows, Times]:
        (found,) = await self.change_rows(name, [(place, lambda rows, at: RowsChange((rows, at)))])
        return found

    def _place(self, place: Place) -> str:
        if place.key is not None:
            return f"{self._of_tenant(place.kind, place.tenant)}:{place.key}"
        return self._of_tenant(place.kind, place.tenant) if place.tenant else f"{self._namespace}:{place.kind}"

    async def note_webhook(self, identity: Identity, row: bytes, *, until_ms: int) -> None:
        member = f"{quote(identity.tenant, safe='')}:{identity.id}"
        await self._run("note_webhook", self._webhooks, member, until_ms, row, base.WEBHOOKS_KEPT)

    async def webhook(self, identity: Identity) -> bytes | None:
        found: bytes | None = await self._run(
            "webhook", self._webhooks, f"{quote(identity.tenant, safe='')}:{identity.id}"
        )
        return found

    async def webhooks(self, *, most: int) -> Sequence[tuple[Identity, bytes]]:
        found: list[tuple[Identity, bytes]] = []
        for member, row in await self._run("webhooks", self._webhooks, most):
            tenant, _, id = member.decode().partition(":")
            found.append((Identity(unquote(tenant), id), row))
        return found

    async def endings(self, requests: Sequence[Identity]) -> list[base.Ending | None]:
        found: list[base.Ending | None] = []
        for begin in range(0, len(requests), REQUESTS_IN_A_LOOK):
            keys = [self._keys(each)[0] for each in requests[begin : begin + REQUESTS_IN_A_LOOK]]
            found += map(_ending, await self._run("endings", keys))
        return found

    async def listed(self, wanted: base.RequestFilter, *, most: int, after: str | None = None) -> base.RequestPage:
        at_ms, passed = wanted.until_ms - 1, 0
        if after is not None:
            at_ms, passed = base.RequestPage.place(after)
        filters = {
            "t": {quote(tenant, safe="") for tenant in wanted.tenants},
            "l": wanted.lanes,
            "a": wanted.apps,
            "m": wanted.models,
            "s": wanted.states,
            "c": wanted.codes,
            "k": wanted.causes,
            "g": wanted.groups,
        }
        texts: list[Argument] = []
        for name, allowed in filters.items():
            if allowed:
                texts += (len(allowed), *(f"\t{name}={value.translate(_NO_TABS)}\t" for value in allowed))
        is_uncompleted = wanted.codes or wanted.causes or (wanted.states and COMPLETED not in wanted.states)
        keys = [f"{self._listed}:uncompleted" if is_uncompleted else self._listed]
        found: list[base.ListedRequest] = []
        end_s = time.monotonic() + base.LISTED_WITHIN_S
        while True:
            values = (at_ms, passed, wanted.since_ms, LOOKED_AT, most - len(found), *texts)
            is_last, at_ms, passed, lines = await self._run("listed", keys, *values)
            found += (_listed_request(line.decode()) for line in lines)
            if is_last or len(found) >= most or time.monotonic() > end_s:
                return base.RequestPage(found, None if is_last else f"{at_ms}.{passed}")

    async def tenants_of(self, id: str) -> list[str]:
        begin, found, cursor = f"{self._namespace}:request:", set[str](), b"0"
        while True:
            cursor, *keys = await self._run("named", [], cursor, f"{begin}*:{id}", KEYS_NAMED)
            for key in keys:  # a pattern also fits longer ids with a colon
                tenant, _, its_id = key.decode().removeprefix(begin).partition(":")
                if its_id == id:
                    found.add(unquote(tenant))
            if cursor == b"0":
                return sorted(found)

    async def sweep(self) -> int:
        # what has expired, in lists: at the beginning, where most is, and anywhere
        tidied: int = 0
        for part in (0.0, random.random()):
            tidied += await self._run("tidy", [self._listed], f"{self._namespace}:request:", TIDIED, part)
            tidied += await self._run("tidy_groups", [self._all_groups], self._groups_begin, TIDIED, part)
        return tidied + await self._remove_surplus()

    async def _remove_surplus(self) -> int:
        if not self._surplus:
            self._surplus.extend(await self._found_surplus())
        removed: int = 0
        while not removed and (step := next_step(self._surplus)):
            keys = [
                key
                for row in step
                for key in (*self._keys(Identity(row.tenant, row.id)), self._of_tenant("unseen", row.tenant))
            ]
            removed = await self._run("remove", keys, *(value for row in step for value in (row.state, row.id)))
        return removed

    async def _found_surplus(self) -> list[Surplus]:
        # above `max_bytes`, or near to the `maxmemory` beyond which Redis refuses writes
        if (found := await self._client.memory()) is None:
            return []
        memory, most = found
        beyond = memory - FULL_AT * most if most else 0.0
        if beyond <= 0 and memory <= self.spec.max_bytes:
            return []
        used = await self._used_by_share()
        in_all = sum(used.values())
        at_most: float = in_all
        if beyond > 0:
            at_most -= beyond + most * (1 - LOW_WATER)
        if in_all > self.spec.max_bytes:
            at_most = min(at_most, self.spec.max_bytes * LOW_WATER)
        largest = cuts(used, at_most)[:SHARES_AT_ONCE]
        rows = await self._oldest([share for share, _ in largest]) if largest else {}
        return [row for share, cut in largest for row in oldest(rows.get(share, ()), cut)]

    async def _used_by_share(self) -> dict[Share, int]:
        used: dict[Share, int] = {}
        async for share, size in self._owned():
            key = _share(share)
            used[key] = used.get(key, 0) + size
        return used

    async def _oldest(self, shares: Sequence[Share]) -> dict[Share, list[Surplus]]:
        """The rows of these shares that expire first."""
        rows: dict[tuple[str, str], tuple[int, Share, Surplus]] = {}
        wanted = [f"{quote(tenant, safe='')} {kind}" for tenant, kind in shares]
        async for owner, id, size, left_ms in self._owned(*wanted):
            share = tenant, kind = _share(owner)
            id = id.decode()
            rows[tenant, id] = left_ms, share, Surplus(tenant, id, size, kind)  # a key may come twice
            if len(rows) >= 2 * SURPLUS_ROWS:
                rows = {(row[2].tenant, row[2].id): row for row in nsmallest(SURPLUS_ROWS, rows.values())}
        found: dict[Share, list[Surplus]] = {}
        for _, share, row in nsmallest(SURPLUS_ROWS, rows.values()):
            found.setdefault(share, []).append(row)
        return found

    async def _owned(self, *shares: str) -> AsyncGenerator[Any, None]:
        cursor = b"0"
        while True:
            cursor, *found = await self._run("owned", [], cursor, f"{self._namespace}:", KEYS_IN_A_LOOK, *shares)
            for row in found:
                yield row
            if cursor == b"0":
                return

    async def submission(self, identity: Identity) -> base.Submission | None:
        body_hash, lane, submitted, due, deadline = await self._run("submission", self._keys(identity))
        if body_hash is None:
            return None
        return base.Submission(
            body_hash=body_hash,
            lane=lane.decode(),
            submitted_ms=int(submitted),
            due_ms=int(due) if due else None,
            deadline_ms=int(deadline),
        )

    async def look(self, wanted: Sequence[tuple[Identity, int]]) -> list[base.Look | None]:
        found: list[base.Look | None] = [None] * len(wanted)
        for begin in range(0, len(wanted), REQUESTS_IN_A_LOOK):
            batch = wanted[begin : begin + REQUESTS_IN_A_LOOK]
            keys = [key for identity, _ in batch for key in self._keys(identity)]
            numbers = (after for _, after in batch)
            news = await self._run("look", keys, base.ENTRIES_AT_ONCE, ENTRIES_IN_A_LOOK, *numbers)
            for at, last, ended, is_known, entries in news:
                read = [_entry(entry) for entry in entries]
                found[begin + at] = base.Look(entries=read, last=last, ended=ended == 1, is_known=is_known == 1)
        return found

    # ---- groups ----

    async def change_group(self, identity: Identity, decide: groups.Decide) -> Any:
        keys = [self._group(identity)[0], self._of_tenant("groups", identity.tenant), self._all_groups]
        place = _place(identity.tenant, identity.id)
        for _ in range(TRIES_AT_MOST):
            now_ms, values = await self._run("group", keys[:1], name="change_group")
            found = _group_of(identity, values)
            change = decide(found, now_ms)
            if (head := change.head) is None:
                return change.answer
            expected = "" if found is None else found.head.as_json()
            is_void = int(head.state is groups.State.VOID)
            values = (identity.id, expected, head.as_json(), head.keep_ms, head.created_ms, place, is_void)
            if await self._run("swap_group", keys, *values):
                return change.answer
        raise StoreUnavailable(f"Redis at {self._client.address} is too slow: what it kept was other at each try")

    async def groups_of(self, tenant: str) -> list[groups.StoredGroup]:
        found: list[groups.StoredGroup] = []
        keys, begin = [self._of_tenant("groups", tenant)], self._group(Identity(tenant, ""))[0]
        for id, values in await self._run("groups_of", keys, begin):
            if (group := _group_of(Identity(tenant, id.decode()), values)) is not None:
                found.append(group)
        return found

    async def newest_groups(self, *, most: int, after: groups.GroupPlace = groups.NEWEST) -> list[groups.StoredGroup]:
        found: list[groups.StoredGroup] = []
        while (wanted := most - len(found)) > 0:
            place = _place(after.tenant, after.id)
            looked_at, rows = await self._run(
                "newest_groups", [self._all_groups], self._groups_begin, after.created_ms, place, wanted
            )
            some = [_group_of(_group_at(place.decode()), values) for place, values in rows]
            found += [group for group in some if group is not None]
            if looked_at < wanted:
                break
            after = found[-1].place if found else after
        return found

    async def ended_groups(self) -> list[groups.StoredGroup]:
        found: list[groups.StoredGroup] = []
        for key, values in await self._run("ended_groups", [self._ended_groups], groups.ENDED_AT_ONCE):
            identity = _group_at(key.decode().removeprefix(self._groups_begin))
            if (group := _group_of(identity, values)) is not None and group.has_ended:
                found.append(group)
        return found

    async def end_was_told(self, identity: Identity) -> None:
        await self._run("end_was_told", [self._ended_groups, self._group(identity)[0]])

    async def count_groups(self, tenant: str) -> int:
        count: int = await self._run("count_groups", [self._of_tenant("groups", tenant)])
        return count

    async def members(
        self, group: Identity, *, after: int = 0, most: int = MEMBERS_AT_ONCE, bodies: bool = True
    ) -> list[groups.Member]:
        keys, requests = self._group(group)[1:], self._keys(Identity(group.tenant, ""))[0]
        while True:  # some of them may have been removed
            after, rows = await self._run("members", keys, requests, after, most, MEMBER_BYTES if bodies else 0)
            if rows or not after:
                return [_member(row) for row in rows]

    async def remove_members(self, group: Identity) -> int:
        removed: int = await self._run(
            "remove_members", self._group(group)[1:], *self._keys(Identity(group.tenant, "")), MEMBERS_AT_ONCE
        )
        return removed

    @property
    def _ended_groups(self) -> str:
        return f"{self._namespace}:ended-groups"

    @property
    def _all_groups(self) -> str:
        return f"{self._namespace}:all-groups"

    @property
    def _groups_begin(self) -> str:
        return f"{self._namespace}:group:"

    def _group(self, identity: Identity) -> list[str]:
        end = _place(identity.tenant, identity.id)
        return [f"{self._groups_begin}{end}", f"{self._namespace}:members:{end}"]

    async def take(
        self,
        name: str,
        amount: float,
        *,
        limit: float,
        period: base.Period,
        reservation: base.AllowanceReservation | None = None,
    ) -> base.AllowanceTaken:
        values = (period.number, period.length_s * 1000, amount, limit, *(reservation or ()))
        granted, used = await self._run("take", self._allowance(name, period), *values)
        return base.AllowanceTaken(granted=granted == 1, used=float(used))

    async def settle(
        self, name: str, used: float, *, period: base.Period, reservation: base.AllowanceReservation
    ) -> None:
        values = (period.number, period.length_s * 1000, used, *reservation[:2])
        await self._run("settle", self._allowance(name, period), *values)

    async def give_back(self, name: str, amount: float, *, period: base.Period) -> None:
        keys = self._allowance(name, period)
        await self._run("give_back", keys, period.number, period.length_s * 1000, amount)

    async def keep_file(self, file: base.StoredFile) -> bool:
        await self.files(file.tenant)  # removes what has expired, which would count
        values = (file.id, json.dumps(asdict(file)), self.spec.files_per_tenant, _or_empty(file.until_ms), file.tenant)
        return bool(await self._run("keep_file", self._file(file), *values))

    async def find_files(self, ids: Sequence[str]) -> Mapping[str, base.StoredFile]:
        if not ids:
            return {}
        found = await self._run("find_files", [f"{self._namespace}:file:{id}" for id in ids])
        return {id: _stored_file(row) for id, row in zip(ids, found, strict=True) if row is not None}

    async def files(self, tenant: str) -> Sequence[base.StoredFile]:
        rows = await self._run("files", [self._of_tenant("files", tenant)])
        return sorted(map(_stored_file, rows), key=lambda file: (file.created_ms, file.id), reverse=True)

    async def forget_file(self, file: base.StoredFile) -> None:
        await self._run("forget_file", self._file(file), file.id)

    def _file(self, file: base.StoredFile) -> list[str]:
        return [f"{self._namespace}:file:{file.id}", self._of_tenant("files", file.tenant)]

    async def _run(self, function: str, keys: Sequence[str], *arguments: Argument, name: str = "") -> Any:
        began_s = time.monotonic()
        try:
            return await self._client.run(STORE[function], keys, *arguments)
        finally:
            self.times[name or function].add(time.monotonic() - began_s)

    def _keys(self, identity: Identity) -> list[str]:
        begin, end = self._namespace, f"{quote(identity.tenant, safe='')}:{identity.id}"
        return [f"{begin}:request:{end}", f"{begin}:followed:{end}", f"{begin}:entries:{end}"]

    def _of_tenant(self, kind: str, tenant: str) -> str:
        return f"{self._namespace}:{kind}:{quote(tenant, safe='')}"

    def _allowance(self, name: str, period: base.Period) -> list[str]:
        end = f"{period.length_s}:{name}"
        return [f"{self._namespace}:{kind}:{end}" for kind in ("allowance", "reserved", "reserved-until")]

    @property
    def _listed(self) -> str:
        return f"{self._namespace}:listed"

    @property
    def _webhooks(self) -> list[str]:
        return [f"{self._namespace}:webhooks", f"{self._namespace}:webhook-rows"]


def _stored_file(row: bytes) -> base.StoredFile:
    return base.StoredFile(**json.loads(row))


def _or_empty(number: int | None) -> Argument:
    return "" if number is None else number


class _Seen(NamedTuple):
    """A row, and the values of its fields in Redis (`FIELDS`), and of its progress."""

    row: Row | None
    values: Sequence[bytes]


NOTHING: Final = _Seen(None, ())


def _seen(found: list[Any], now_ms: int) -> _Seen:
    if not found:
        return NOTHING
    *values, left_ms, body = found
    token, hash, mark, lease, claimed, attempts, noted, cancelling, nonce, deaths, due = values[:11]
    status, code, headers, ended, group, line, submitted, last, events, size = values[11:]
    listed = _listed_request(line.decode()) if line else None
    row = Row(
        token=int(token),
        keep_ms=now_ms + left_ms,
        body_hash=hash or None,
        mark=mark or None,
        lease_ms=int(lease),
        claimed_ms=int(claimed),
        attempts=int(attempts),
        noted=int(noted or 0),
        cancelling=int(cancelling or 0),
        nonce=nonce or None,
        deaths=int(deaths or 0),
        due_ms=int(due) if due else None,
        status=status.decode() or None,
        code=code.decode(),
        headers=headers.decode() or None,
        ended_ms=int(ended) if ended else None,
        body=body,
        group_id=group.decode() or None,
        seen_ms=0 if listed is None else listed.seen_ms,
        **({} if listed is None else listed.labels._asdict()),
        cause="" if listed is None else listed.cause,
        progress=ProgressRow(submitted, int(last), int(events), int(size)) if submitted else None,
    )
    return _Seen(row, values)


def _after(identity: Identity, change: Change[Any], before: _Seen) -> _Seen:
    if change.row is KEEP:
        return before
    if change.row is None:
        return NOTHING
    row, progress = change.row, change.row.progress
    values = (
        b"%d" % row.token,
        row.body_hash or b"",
        row.mark or b"",
        b"%d" % row.lease_ms,
        b"%d" % row.claimed_ms,
        b"%d" % row.attempts,
        b"1" if row.noted else b"",
        b"1" if row.cancelling else b"",
        row.nonce or b"",
        b"%d" % row.deaths,
        b"" if row.due_ms is None else b"%d" % row.due_ms,
        (row.status or "").encode(),
        (row.code or "").encode(),
        (row.headers or "").encode(),
        b"" if row.ended_ms is None else b"%d" % row.ended_ms,
        (row.group_id or "").encode(),
        _line(identity, row),
        *((b"",) * 4 if progress is None else (progress.body_hash, *(b"%d" % each for each in progress[1:]))),
    )
    return _Seen(row, values)


def _swap(change: Change[Any], before: _Seen, after: _Seen, counted: str) -> list[Argument]:
    """The arguments for one request of the script's function `swap`."""
    expected = b"\0".join(before.values)
    if change.row is KEEP or change.row is None:
        return [expected, "" if change.row is KEEP else 0, 0, 0, 0, "", 0, ""]
    row, old = change.row, before.row
    fields: list[Argument] = []
    for name, new, kept in zip(FIELDS, after.values, before.values or repeat(b""), strict=False):
        if new != kept and name == "line":
            fields[:0] = (name, new)  # first, where the script looks for it
        elif new != kept:
            fields += (name, new)
    if row.body is not None and (old is None or row.body is not old.body):
        fields += ("body", row.body)
    keep_ms: Argument = "" if old is not None and old.keep_ms == row.keep_ms else row.keep_ms
    progress: list[Argument] = []
    entries: list[Argument] = []
    first = 0
    if change.entries and row.progress is not None:
        _, last, events, size = row.progress
        progress = ["last", last, "events", events, "bytes", size]
        first = last - len(change.entries) + 1
        keep_ms = row.keep_ms
        for entry in change.entries:
            entries += entry
    if change.submission is not None:
        progress += _of_submission(change.submission)
    sizes = (len(fields), len(progress), len(entries))
    return [expected, keep_ms, *sizes, change.forget, first, counted, *fields, *progress, *entries]


_LINE: Final = ("t", "i", "l", "a", "m", "s", "c", "k", "g")


def _line(identity: Identity, row: Row) -> bytes:
    """A request in the list: when the store heard of it first, then `name=value` for each of `_LINE`, between tabs.
    Steps and items of pipelines are in no list."""
    if "#" in identity.id:
        return b""
    values = (
        *(quote(identity.tenant, safe=""), identity.id, row.lane, row.app, row.model, row.state),
        *(row.code or "", row.cause, row.group_id or ""),
    )
    pairs = (f"{name}={value}".translate(_NO_TABS) for name, value in zip(_LINE, values, strict=True))
    return "\t".join((str(row.seen_ms), *pairs, "")).encode()


_NO_TABS: Final = str.maketrans("\t", " ")


def _listed_request(line: str) -> base.ListedRequest:
    seen_ms, *pairs, _ = line.split("\t")
    tenant, id, *labels, state, code, cause, group_id = (pair.partition("=")[2] for pair in pairs)
    return base.ListedRequest(
        Identity(unquote(tenant), id),
        int(seen_ms),
        base.Labels(*labels),
        base.RequestState(state),
        code,
        cause,
        group_id,
    )


def _of_submission(submission: base.Submission) -> list[Argument]:
    times = ("submitted", submission.submitted_ms, "due", _or_empty(submission.due_ms))
    return ["hash", submission.body_hash, "lane", submission.lane, *times, "deadline", submission.deadline_ms]


def _place(tenant: str, id: str) -> str:
    """Of a group, in the sets of groups of all tenants, and in the names of its keys."""
    return f"{quote(tenant, safe='')}:{id}"


def _group_at(place: str) -> Identity:
    tenant, _, id = place.partition(":")
    return Identity(unquote(tenant), id)


def _group_of(identity: Identity, values: list[bytes]) -> groups.StoredGroup | None:
    found = {name.decode(): value for name, value in zip(values[::2], values[1::2], strict=True)}
    if "head" not in found:
        return None
    return groups.StoredGroup(
        identity=identity,
        head=groups.Head.of_json(found["head"]),
        counts={kind: int(found.get(kind, 0)) for kind in groups.KINDS},
        last_ended_ms=int(found.get("ended", 0)),
        size=int(found.get("size", 0)),
        key=found.get("key", b"").decode(),
        webhook=found.get("webhook", b"").decode(),
        saved_usd=float(found.get("saved_usd", 0)),
    )


def _member(row: Sequence[Any]) -> groups.Member:
    position, id, status, code, headers, ended, cancelling, body = row
    completion = None
    if status and cancelling != b"1":
        completion = base.Completion(
            status="ok" if status == b"ok" else "error",
            code=code.decode(),
            headers=json.loads(headers or b"{}"),
            ended_ms=int(ended),
            body=body,
        )
    return groups.Member(position, id.decode(), completion)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _ending(found: Sequence[Any] | None) -> base.Ending | None:
    if found is None:
        return None
    status, code, ended_ms, size, cancelling, is_held = found
    if cancelling == b"1":
        return base.Ending(is_cancelled=True)
    if status == b"":
        return base.Ending(is_running=bool(is_held))
    return base.Ending("ok" if status == b"ok" else "error", code.decode(), int(ended_ms), size)


def _entry(found: Sequence[Any]) -> base.Entry:
    number, (kind, body) = found
    return base.Entry(int(number.partition(b"-")[2]), kind.decode(), body)


def _share(found: bytes) -> Share:
    tenant, _, kind = found.decode().rpartition(" ")
    return unquote(tenant), RowKind(kind)
