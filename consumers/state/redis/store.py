"""The store in Redis, for workers on several machines. Each method calls one function of a Lua script, and so takes one
round trip; `look` takes one for every 200 requests.

The promises of `Store` hold as long as Redis keeps the writes that it has acknowledged. With `appendonly yes` and
`appendfsync always` it keeps them through a crash; with `everysec` it may lose the last second. If Redis comes back
empty, claims and results are lost: a repeated id runs again, but no request is lost. Redis Cluster is not supported,
because one script renews all claims of a process, and the keys of these requests would be on several nodes of a
cluster.
"""

import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from heapq import nsmallest
from typing import Any, Final, Self
from urllib.parse import quote, unquote

from consumers.state import base
from consumers.state.base import Completion, Fingerprint, Held, Identity, StoreSpec, StoreUnavailable
from consumers.state.redis.client import STORE, Argument, RedisClient
from consumers.state.shedding import LOW_WATER, SURPLUS_ROWS, Kind, Share, Surplus, cuts, next_step, oldest
from lanekeeper.telemetry import logs, signals
from lanekeeper.telemetry.figures import timings

REQUESTS_IN_A_LOOK: Final = 200
"""How many requests one run of the script reads; it is small, because Redis does nothing else meanwhile."""
KEYS_IN_A_LOOK: Final = 200
SHARES_AT_ONCE: Final = 200
FULL_AT: Final = 7 / 8
"""Redis refuses writes when its memory reaches `maxmemory`, and then no worker can work. So the store removes rows when
this part of it is used."""
ENTRIES_IN_A_LOOK: Final = 2000
log = logs.logger()


class RedisStore:
    """Implements `FollowedStore`."""

    is_full = False

    def __init__(self, url: str, *, namespace: str, spec: StoreSpec = base.DEFAULT) -> None:
        self._client = RedisClient(url, tls=spec.redis_tls)
        self._namespace = namespace
        self._lease_ms = round(spec.lease_s * 1000)
        self._keep_ms = round(spec.keep_s * 1000)
        self._cancelled_ms = round(spec.cancelled_s * 1000)
        self._spec = spec
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

    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> base.ClaimAnswer:
        values = (self._lease_ms, self._keep_ms, self._cancelled_ms, *_of_fingerprint(fingerprint))
        match await self._run("claim", self._keys(identity), *values):
            case [b"granted", token, deaths, followed]:
                return base.Granted(token=token, deaths=deaths, followed=followed == 1)
            case [b"running", for_ms]:
                return base.Running(for_ms=for_ms)
            case [b"ended", is_same_message, ending]:
                return base.Ended(completion=_completion(ending), is_same_message=is_same_message == 1)
            case _:
                return base.Conflict()

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, base.Stop]:
        if not held:
            return {}
        keys = [self._keys(claim.identity)[0] for claim in held]
        owners = {claim.item_of: Identity(claim.identity.tenant, claim.item_of) for claim in held if claim.item_of}
        at = {id: len(keys) + nth for nth, id in enumerate(owners, 1)}
        keys += (self._keys(owner)[0] for owner in owners.values())
        claims = [value for claim in held for value in (claim.token, at.get(claim.item_of, 0))]
        stops = await self._run("renew", keys, self._lease_ms, self._keep_ms, *claims)
        return {claim: base.Stop(stop.decode()) for claim, stop in zip(held, stops, strict=True) if stop}

    async def shelter(self, held: Held) -> None:
        await self._run("shelter", self._keys(held.identity), held.token)

    async def note_waiting(self, held: Held, *, is_waiting: bool) -> None:
        await self._run("note_waiting", self._keys(held.identity), held.token, int(is_waiting))

    async def release(
        self, held: Held, *, attempts: int = 0, due_ms: int | None = None, is_survived: bool = True, step: str = ""
    ) -> None:
        values = (self._keep_ms, self._cancelled_ms, held.token, attempts, _or_empty(due_ms), int(is_survived), step)
        await self._run("release", self._keys(held.identity), *values)

    async def defer(self, identity: Identity, *, due_ms: int, keep_until_ms: int) -> bool:
        return bool(await self._run("defer", self._keys(identity), due_ms, keep_until_ms))

    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion | None:
        values = (self._keep_ms, _or_empty(token), *_of_fingerprint(fingerprint), *_of_completion(completion))
        match await self._run("complete", self._keys(identity), *values):
            case [b"given"]:
                return completion
            case [b"held", ending]:
                return _completion(ending)
            case _:
                return None

    async def note(self, identity: Identity, completion: Completion, *, keep_until_ms: int = 0) -> None:
        await self._run("note", self._keys(identity), self._keep_ms, keep_until_ms, *_of_completion(completion))

    async def cancel(self, identity: Identity, completion: Completion) -> base.Cancelling:
        unseen = (identity.id, self._keys(Identity(identity.tenant, ""))[0], self._spec.unseen_per_tenant)
        keys = [*self._keys(identity), self._of_tenant("unseen", identity.tenant)]
        kept = (self._cancelled_ms, self._keep_ms)
        found = await self._run("cancel", keys, *kept, *unseen, *_of_completion(completion))
        return base.Cancelling(found.decode())

    async def reserve(
        self, identity: Identity, fingerprint: Fingerprint, *, weight: int, until_ms: int
    ) -> base.WaitingLimit:
        member = f"{identity.id} {fingerprint.mark.hex()}"
        tenant, redelivered = quote(identity.tenant, safe=""), int(fingerprint.redelivered)
        message = (tenant, member, fingerprint.nonce.hex(), redelivered, weight, until_ms)
        keys = [self._of_tenant("waiting", identity.tenant), f"{self._namespace}:waiting"]
        bounds = (self._spec.waiting_per_tenant, self._spec.waiting_in_all)
        return base.WaitingLimit((await self._run("reserve", keys, *message, *bounds)).decode())

    async def debounce(self, identity: Identity, key: str, *, published_ms: int, until_ms: int) -> bool:
        keys = [f"{self._of_tenant('debounce', identity.tenant)}:{key}"]
        return bool(await self._run("debounce", keys, published_ms, identity.id, until_ms))

    async def gather(
        self, ticket: str, requests: Sequence[Identity], *, until_ms: int, former: Mapping[Identity, str] | None = None
    ) -> set[Identity]:
        left = former or {}
        found = await self._run(
            "gather", self._batched(requests), ticket, until_ms, *(left.get(each, "") for each in requests)
        )
        return {each for each, is_granted in zip(requests, found, strict=True) if is_granted}

    async def submit(self, ticket: str, requests: Sequence[Identity], *, until_ms: int) -> dict[Identity, bool]:
        found = await self._run("submit", self._batched(requests), ticket, until_ms)
        return {each: before == 1 for each, before in zip(requests, found, strict=True) if before >= 0}

    async def clear(self, ticket: str, requests: Sequence[Identity]) -> None:
        await self._run("clear", self._batched(requests), ticket, base.LEFT_MS)

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
        values = (ticket, requests, tokens, most_requests, _or_empty(most_tokens), until_ms)
        return bool(await self._run("enqueue", [f"{self._namespace}:enqueued:{account}"], *values))

    async def dequeue(self, ticket: str, account: str) -> None:
        await self._run("dequeue", [f"{self._namespace}:enqueued:{account}"], ticket)

    def _batched(self, requests: Sequence[Identity]) -> list[str]:
        return [f"{self._of_tenant('batched', each.tenant)}:{each.id}" for each in requests]

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

    async def find(self, identity: Identity) -> base.Found | None:
        match await self._run("find", self._keys(identity)):
            case [b"ended", attempts, ending]:
                return base.Found(completion=_completion(ending), running=False, attempts=int(attempts))
            case [state, attempts, due, step]:
                return base.Found(
                    completion=None,
                    running=state == b"running",
                    attempts=int(attempts),
                    due_ms=int(due) if due else None,
                    step=step.decode(),
                )
            case _:
                return None

    async def endings(self, requests: Sequence[Identity]) -> list[base.Ending | None]:
        found: list[base.Ending | None] = []
        for begin in range(0, len(requests), REQUESTS_IN_A_LOOK):
            keys = [self._keys(each)[0] for each in requests[begin : begin + REQUESTS_IN_A_LOOK]]
            found += map(_ending, await self._run("endings", keys))
        return found

    async def sweep(self) -> int:
        if not self._surplus:
            self._surplus.extend(await self._found_surplus())
        removed = 0
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
        if beyond <= 0 and memory <= self._spec.max_bytes:
            return []
        used = await self._used_by_share()
        in_all = sum(used.values())
        at_most: float = in_all
        if beyond > 0:
            at_most -= beyond + most * (1 - LOW_WATER)
        if in_all > self._spec.max_bytes:
            at_most = min(at_most, self._spec.max_bytes * LOW_WATER)
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

    async def follow(
        self, identity: Identity, submission: base.Submission, *, first_entry: base.NewEntry, keep_until_ms: int
    ) -> base.Submitted:
        _, *values = _of_submission(submission)  # without the name of the first field
        found = await self._run("follow", self._keys(identity), keep_until_ms, *first_entry, *values)
        return base.Submitted(found.decode())

    async def unfollow(self, identity: Identity) -> None:
        await self._run("unfollow", self._keys(identity))

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

    async def append(self, parts: Sequence[base.Part]) -> list[base.Refused | None]:
        keys = [key for part in parts for key in self._keys(part.held.identity)]
        values: list[Argument] = [self._keep_ms, self._spec.events_per_request, self._spec.event_bytes_per_request]
        for part in parts:
            values += [part.held.token, len(part.entries), *_of_submission(part.submission)]
            values += [value for entry in part.entries for value in entry]
        found = await self._run("append", keys, *values)
        return [base.Refused(reason.decode()) if reason else None for reason in found]

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

    async def take(self, name: str, amount: float, *, limit: float, period: base.Period) -> base.Taken:
        keys = [self._allowance(name, period)]
        granted, used = await self._run("take", keys, period.number, period.length_s * 1000, amount, limit)
        return base.Taken(granted=granted == 1, used=float(used))

    async def give_back(self, name: str, amount: float, *, period: base.Period) -> None:
        keys = [self._allowance(name, period)]
        await self._run("give_back", keys, period.number, period.length_s * 1000, amount)

    async def hold(self, name: str, owner: str, *, for_s: float) -> bool:
        return bool(await self._run("hold", [self._lease(name)], owner, round(for_s * 1000)))

    async def let_go(self, name: str, owner: str) -> None:
        await self._run("let_go", [self._lease(name)], owner)

    async def pauses(self) -> Sequence[base.Pause]:
        return base.pauses_in(await self._run("pauses", self._pauses))

    async def pause(self, pause: base.Pause) -> bool:
        row = f"{pause.until_ms or 0} {json.dumps(pause.as_json())}"
        return bool(await self._run("pause", self._pauses, pause.id, row, base.PAUSES_AT_MOST))

    async def resume(self, id: str) -> base.Pause | None:
        removed = await self._run("resume", self._pauses, id)
        return None if removed is None else base.pauses_in([removed])[0]

    async def fired(self, schedule: str, firing: base.Firing, *, instead_of_ms: int = 0) -> None:
        await self._run("fired", [f"{self._namespace}:schedules"], schedule, *firing, instead_of_ms)

    async def firings(self) -> Mapping[str, base.Firing]:
        found = await self._run("firings", [f"{self._namespace}:schedules"])
        rows = [
            (schedule.decode(), *row.decode().split(" ")) for schedule, row in zip(found[::2], found[1::2], strict=True)
        ]
        return {schedule: base.Firing(int(at_ms), id) for schedule, at_ms, id in rows}

    async def _run(self, function: str, keys: Sequence[str], *arguments: Argument) -> Any:
        began_s = time.monotonic()
        try:
            return await self._client.run(STORE[function], keys, *arguments)
        finally:
            self.times[function].add(time.monotonic() - began_s)

    def _keys(self, identity: Identity) -> list[str]:
        begin, end = self._namespace, f"{quote(identity.tenant, safe='')}:{identity.id}"
        return [f"{begin}:request:{end}", f"{begin}:followed:{end}", f"{begin}:entries:{end}"]

    def _of_tenant(self, kind: str, tenant: str) -> str:
        return f"{self._namespace}:{kind}:{quote(tenant, safe='')}"

    def _allowance(self, name: str, period: base.Period) -> str:
        return f"{self._namespace}:allowance:{period.length_s}:{name}"

    @property
    def _pauses(self) -> list[str]:
        return [f"{self._namespace}:pauses"]

    @property
    def _webhooks(self) -> list[str]:
        return [f"{self._namespace}:webhooks", f"{self._namespace}:webhook-rows"]

    def _lease(self, name: str) -> str:
        return f"{self._namespace}:lease:{name}"


def _or_empty(number: int | None) -> Argument:
    return "" if number is None else number


def _of_fingerprint(fingerprint: Fingerprint) -> tuple[Argument, ...]:
    dead_at = _or_empty(fingerprint.dead_at_ms)
    message = (fingerprint.body_hash, fingerprint.mark, int(fingerprint.redelivered), dead_at, fingerprint.nonce)
    return (*message, fingerprint.keep_until_ms)


def _of_completion(completion: Completion) -> tuple[Argument, ...]:
    headers = json.dumps(dict(completion.headers), ensure_ascii=False)
    ending = ("status", completion.status, "code", completion.code, "headers", headers)
    return (*ending, "ended", completion.ended_ms, "body", completion.body)


def _of_submission(submission: base.Submission) -> tuple[Argument, ...]:
    times = ("submitted", submission.submitted_ms, "due", _or_empty(submission.due_ms))
    return ("hash", submission.body_hash, "lane", submission.lane, *times, "deadline", submission.deadline_ms)


def _completion(ending: Sequence[Any]) -> Completion:
    status, code, headers, ended_ms, body, mark = ending
    return Completion(
        status="ok" if status == b"ok" else "error",
        code=code.decode(),
        body=body,
        headers=json.loads(headers),
        ended_ms=int(ended_ms),
        mark=mark or None,
    )


def _ending(found: Sequence[Any] | None) -> base.Ending | None:
    if found is None:
        return None
    status, code, ended_ms, size, cancelling = found
    if cancelling == b"1":
        return base.Ending(is_cancelled=True)
    if status == b"":
        return base.Ending()
    return base.Ending("ok" if status == b"ok" else "error", code.decode(), int(ended_ms), size)


def _entry(found: Sequence[Any]) -> base.Entry:
    number, (kind, body) = found
    return base.Entry(int(number.partition(b"-")[2]), kind.decode(), body)


def _share(found: bytes) -> Share:
    tenant, _, kind = found.decode().rpartition(" ")
    return unquote(tenant), Kind(kind)
