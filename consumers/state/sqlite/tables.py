"""What the store keeps, as rows of a SQLite file: claims and results, the progress of requests that clients follow,
allowances, leases, messages that wait in the broker, and pauses. Each method works within a transaction that its caller
opened."""

import json
import sqlite3
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, fields
from functools import cache
from math import inf
from typing import Any, Final, TypeVar

from consumers.state import base, decisions, groups
from consumers.state.base import (
    Identity,
    Labels,
    ListedRequest,
    RequestFilter,
    RequestPage,
    RequestState,
    StoredFile,
    Submission,
)
from consumers.state.decisions import KEEP, Change, ProgressRow, Row, Times, as_json
from consumers.state.groups import KINDS, MEMBER_BYTES, MEMBERS_AT_ONCE, NEWEST, GroupPlace, Head, Member, StoredGroup
from consumers.state.rows import DecideRows, Place, Rows
from consumers.state.shedding import (
    LOW_WATER,
    STEP_ROWS,
    SURPLUS_ROWS,
    RowKind,
    Share,
    Surplus,
    cuts,
    next_step,
    oldest,
)
from lanekeeper.contract.names import ATTEMPT

T = TypeVar("T")
COLUMNS: Final = Row._fields[:-1]
"""Those of the table `request`; the progress is in the table `followed`."""
KNOWN_AT_MOST: Final = 10_000
"""How many rows of held claims are kept in memory, so that they need not be read again."""
_UNSEEN = "FROM request WHERE body_hash IS NULL AND noted = 0 AND due_ms IS NULL AND code = 'cancelled' AND tenant = ?"
_READ = (
    f"SELECT {', '.join(f'r.{name}' for name in COLUMNS)}, f.body_hash, f.last, f.events, f.bytes FROM request r"
    " LEFT JOIN followed f ON f.tenant = r.tenant AND f.id = r.id WHERE r.tenant = ? AND r.id = ?"
)
_INSERT = (
    f"INSERT INTO request (tenant, id, {', '.join(COLUMNS)}) VALUES (?, ?{', ?' * len(COLUMNS)}) ON CONFLICT DO NOTHING"
)
_OF: Final = "WHERE tenant = ? AND id = ?"
_DELETE: Final = f"DELETE FROM request {_OF}"
_COUNT_UNSEEN = f"SELECT count(*) {_UNSEEN}"
_OLDEST_UNSEEN = f"SELECT id {_UNSEEN} ORDER BY keep_ms LIMIT ?"
_ENDINGS: Final = (
    "SELECT held.key, status, code, coalesce(ended_ms, 0), coalesce(length(body), 0), cancelling, lease_ms > ? FROM"
    " (SELECT key, json_extract(value, '$[0]') AS tenant, json_extract(value, '$[1]') AS id FROM json_each(?)) AS held"
    " CROSS JOIN request ON request.tenant = held.tenant AND request.id = held.id WHERE keep_ms > ? OR lease_ms > ?"
)


_TENANTS_OF: Final = (
    # from each tenant's first row to the next tenant's: there is no index by id
    "WITH RECURSIVE each(tenant) AS (SELECT min(tenant) FROM request UNION ALL"
    " SELECT (SELECT min(tenant) FROM request WHERE tenant > each.tenant) FROM each WHERE tenant IS NOT NULL)"
    " SELECT request.tenant FROM each CROSS JOIN request ON request.tenant = each.tenant AND request.id = ?"
    " WHERE keep_ms > ? OR lease_ms > ?"
)
_STATE: Final = (
    "CASE WHEN status IS NULL OR cancelling THEN iif(lease_ms > 0, 'running', 'waiting')"
    f" WHEN status = 'ok' THEN 'completed' WHEN code = '{decisions.CANCELLED}' THEN 'cancelled' ELSE 'failed' END"
)
_LISTED: Final = (
    f"SELECT rowid, tenant, id, seen_ms, lane, app, model, {_STATE} AS state, coalesce(code, ''), cause,"
    " coalesce(group_id, '') FROM request"
    " WHERE rowid >= ? AND rowid < ? AND seen_ms > 0 AND seen_ms >= ? AND seen_ms < ? AND instr(id, '#') = 0"
)
LOOKED_AT: Final = 20_000
"""How many rows one statement of a list looks at; after each, the list may end because its time is over."""
_FROM_ROW: Final = "SELECT seen_ms FROM request WHERE rowid >= ? ORDER BY rowid LIMIT 1"
_GROUP_FIELDS: Final = f"SELECT tenant, id, head, ended_ms, size, key, webhook, saved_usd, {', '.join(KINDS)}"
_GROUP: Final = f"{_GROUP_FIELDS} FROM request_group WHERE tenant = ? AND until_ms > ?"
_IS_LISTED: Final = f"json_extract(head, '$.state') <> '{groups.State.VOID}'"
_ENDED_GROUPS: Final = (
    f"{_GROUP_FIELDS} FROM request_group WHERE told = 0 AND processing = 0 AND until_ms > ?"
    " AND size BETWEEN 1 AND succeeded + errored + canceled + expired"
    f" AND json_extract(head, '$.state') = '{groups.State.SEALED}' LIMIT ?"
)
_NEWEST_GROUPS: Final = (
    f"{_GROUP_FIELDS} FROM request_group WHERE (created_ms, tenant, id) < (?, ?, ?) AND until_ms > ? AND {_IS_LISTED}"
    " ORDER BY created_ms DESC, tenant DESC, id DESC LIMIT ?"
)
_COUNT_GROUPS: Final = f"SELECT count(*) FROM request_group WHERE tenant = ? AND until_ms > ? AND {_IS_LISTED}"
_SET_HEAD: Final = (
    "INSERT INTO request_group (tenant, id, head, until_ms) VALUES (?, ?, ?, ?)"
    " ON CONFLICT DO UPDATE SET head = excluded.head, until_ms = max(until_ms, excluded.until_ms)"
)
_MEMBERS: Final = "FROM request WHERE tenant = ? AND group_id = ? AND rowid > ? AND keep_ms > ? ORDER BY rowid LIMIT ?"
_REMOVE_MEMBERS: Final = (
    "DELETE FROM request WHERE rowid IN"
    f" (SELECT rowid FROM request WHERE tenant = ? AND group_id = ? LIMIT {STEP_ROWS})"
)


@cache
def _count(was: str | None, now: str) -> str:
    less = f"{was} = {was} - 1, " if was else ""
    return (
        f"UPDATE request_group SET {less}{now} = {now} + 1, ended_ms = max(ended_ms, ?), until_ms = max(until_ms, ?),"
        " saved_usd = saved_usd + ?, size = max(size, ?), key = coalesce(nullif(key, ''), ?),"
        f" webhook = coalesce(nullif(webhook, ''), ?) {_OF}"
    )


@cache
def _update(*names: str) -> str:
    return f"UPDATE request SET {', '.join(f'{name} = ?' for name in names)} {_OF}"


_FIELDS: Final = ", ".join(Submission._fields)
_ADD: Final = (
    f"INSERT INTO followed (streams, last, events, bytes, tenant, id, {_FIELDS})"
    " VALUES (0, 0, 0, 0, ?, ?, ?, ?, ?, ?, ?)"
)
_GO_ON: Final = f"UPDATE followed SET last = ?, events = ?, bytes = ? {_OF} RETURNING key"
_FORGET_EVENTS: Final = f"DELETE FROM entry WHERE followed = (SELECT key FROM followed {_OF}) AND kind = '{base.EVENT}'"
_PROGRESS: Final = (
    "SELECT f.key, coalesce(f.last, 0), r.status IS NOT NULL AND NOT r.cancelling FROM request r"
    " LEFT JOIN followed f ON f.tenant = r.tenant AND f.id = r.id WHERE r.tenant = ? AND r.id = ?"
)
_ENTRIES: Final = "SELECT number, kind, body FROM entry WHERE followed = ? AND number > ? ORDER BY number LIMIT ?"
ENTRIES_IN_A_LOOK: Final = 5000
KEPT_AFTER_MS = 86_400_000
"""How long what was used in a period is kept after its end, in case the calendar time is set back into it."""
_USED_IN: Final = "SELECT used FROM allowance WHERE name = ? AND period_s = ? AND period = ?"
_SET_USED: Final = "INSERT OR REPLACE INTO allowance VALUES (?, ?, ?, ?, ?)"
_OF_PERIOD: Final = "WHERE name = ? AND period_s = ? AND period = ?"
_FREED: Final = f"DELETE FROM hold {_OF_PERIOD} AND (until_ms <= ? OR id = ?) RETURNING amount"
_RESERVE: Final = "INSERT INTO hold (name, period_s, period, id, nonce, amount, until_ms) VALUES (?, ?, ?, ?, ?, ?, ?)"
_SETTLE: Final = f"DELETE FROM hold {_OF_PERIOD} AND id = ? AND nonce = ? RETURNING amount"
_ENDED: Final = (
    f"DELETE FROM hold WHERE (name, period_s, period, id) IN (SELECT name, period_s, period, id FROM hold"
    f" WHERE until_ms <= ? LIMIT {STEP_ROWS}) RETURNING amount, name, period_s, period"
)
_FREE: Final = f"UPDATE allowance SET used = max(0, used - ?) {_OF_PERIOD}"
_EXPIRED_ALLOWANCES: Final = (
    "DELETE FROM allowance WHERE (name, period_s, period) IN "
    f"(SELECT name, period_s, period FROM allowance WHERE ends_ms < ? LIMIT {STEP_ROWS})"
)
_EXPIRED_KEPT: Final = (
    "DELETE FROM kept WHERE (kind, tenant, key) IN "
    f"(SELECT kind, tenant, key FROM kept WHERE until_ms <= ? LIMIT {STEP_ROWS})"
)
_EXPIRED_FILES: Final = f"DELETE FROM file WHERE id IN (SELECT id FROM file WHERE until_ms <= ? LIMIT {STEP_ROWS})"
_SURPLUS_WEBHOOKS: Final = (
    "DELETE FROM kept WHERE kind = 'webhook' AND (tenant, key) IN (SELECT tenant, key FROM ("
    "SELECT tenant, key, until_ms, row_number() OVER (PARTITION BY tenant ORDER BY until_ms DESC) AS nth "
    "FROM kept WHERE kind = 'webhook') "
    f"ORDER BY nth, until_ms DESC LIMIT {STEP_ROWS} OFFSET ?)"
)
_KEEP: Final = "INSERT OR REPLACE INTO kept (kind, tenant, key, until_ms, body) VALUES (?, ?, ?, ?, ?)"
_ROWS: Final = "SELECT key, body, until_ms FROM kept WHERE kind = ? AND tenant = ? AND until_ms > ?"
NEVER_MS: Final = 2**53
_WEBHOOKS: Final = "FROM kept WHERE kind = 'webhook' AND until_ms > ?"
_FILE: Final = ", ".join(field.name for field in fields(StoredFile))
_EXISTS: Final = "(until_ms IS NULL OR until_ms > ?)"


# Sizes that are assumed, in bytes: of a request's row with its entries in indexes, but without headers and body; of the
# submission of a followed request; of an entry of its progress, without its content; of a row of the table `share`.
ROW_BYTES: Final = 550
FOLLOWED_BYTES: Final = 300
ENTRY_BYTES: Final = 30
COUNTED_BYTES: Final = 400
_SIZE: Final = (
    f"{ROW_BYTES} + coalesce(length(headers), 0) + coalesce(length(body), 0)"
    f" + coalesce((SELECT {FOLLOWED_BYTES} + bytes + {ENTRY_BYTES} * last"
    # an entry of over a quarter of a page takes pages of its own
    f" + (bytes > 900 * last) * 4096 * last FROM followed f"
    " WHERE f.tenant = request.tenant AND f.id = request.id), 0)"
)
_KIND: Final = (
    f"CASE WHEN lease_ms > ? THEN '{RowKind.KEPT}'"
    # an id with # is of a step or item of a pipeline, whose request's id is before it
    f" WHEN instr(id, '#') AND NOT EXISTS (SELECT 1 FROM request p WHERE p.tenant = request.tenant"
    " AND p.id = substr(request.id, 1, instr(request.id, '#') - 1) AND p.status IS NOT NULL AND NOT p.cancelling)"
    f" THEN '{RowKind.FLOW}'"
    f" WHEN status IS NULL OR cancelling THEN '{RowKind.LIVE}'"
    f" WHEN body_hash IS NULL AND NOT noted THEN '{RowKind.CANCELLED}'"
    f" WHEN status = 'error' AND (noted OR instr(headers, '\"{ATTEMPT}\": 0')) THEN '{RowKind.FREE}'"
    f" ELSE '{RowKind.PAID}' END"
)
_USED: Final = (
    f"SELECT tenant, {_KIND} AS kind, sum({_SIZE}) FROM request NOT INDEXED GROUP BY tenant, kind UNION ALL"
    f" SELECT tenant, '{RowKind.KEPT}', sum({COUNTED_BYTES} + coalesce(length(body), 0)) FROM kept GROUP BY tenant"
    f" UNION ALL SELECT tenant, '{RowKind.KEPT}', count(*) * {COUNTED_BYTES} FROM file GROUP BY tenant"
)
_EXPIRED: Final = (
    f"SELECT tenant, id, {_SIZE}, keep_ms FROM request WHERE keep_ms <= ? AND lease_ms <= ?"
    f" ORDER BY keep_ms LIMIT {STEP_ROWS}"
)
_OLDEST: Final = f"SELECT id, {_SIZE}, keep_ms FROM request WHERE tenant = ? AND {_KIND} = ? ORDER BY keep_ms LIMIT ?"
_REMOVE: Final = "DELETE FROM request WHERE tenant = ? AND id = ? AND keep_ms = ? AND lease_ms <= ?"


class Tables:
    """The methods of `Store` on one connection."""

    def __init__(self, connection: sqlite3.Connection, spec: base.StoreSpec) -> None:
        self.connection = connection
        self._execute = connection.execute
        self._spec = spec
        self._known: dict[tuple[str, str], Row] = {}
        self._version: int | None = None

    def trust(self) -> None:
        """Called when a transaction begins: rows that this connection has written are as it knows them, unless another
        one has written since."""
        (version,) = self._execute("PRAGMA data_version").fetchone()
        if version != self._version or len(self._known) > KNOWN_AT_MOST:
            self._version = version
            self._known.clear()

    def distrust(self) -> None:
        """Called when a transaction was rolled back."""
        self._known.clear()

    def change(self, at: Times, identity: Identity, decide: Callable[[Row | None, Times], Change[T]]) -> Change[T]:
        me = (identity.tenant, identity.id)
        row = self._known.pop(me, None)
        if row is not None and row.is_over(at):
            row = None
        change = decide(row, at)
        new = change.row
        # most requests are new: a row for one that turns out to be known is not inserted
        if row is None and not (isinstance(new, Row) and self._execute(_INSERT, (*me, *new[:-1])).rowcount):
            row = self._read(at, me)
            change = decide(row, at)
            new = change.row
            if row is None and isinstance(new, Row):
                self._execute(_INSERT, (*me, *new[:-1]))
        if new is None:
            self._execute(_DELETE, me)
        elif new is not KEEP:
            if row is not None:
                self._update(me, row, new)
            if change.entries and new.progress is not None:
                self._go_on(me, new.progress, change)
        if (counts := groups.counted(row, change)) is not None:
            self._count(at, identity.tenant, counts)
        if isinstance(left := row if new is KEEP else new, Row) and left.lease_ms:
            self._known[me] = left
        return change

    def _count(self, at: Times, tenant: str, counts: groups.Counted) -> None:
        group = counts.group
        values = (counts.ended_ms, counts.keep_ms, counts.saved_usd, group.size, group.key, group.webhook)
        statement, me = _count(counts.was, counts.now), (tenant, group.id)
        if self._execute(statement, (*values, *me)).rowcount or counts.was is not None:
            return
        if self.count_groups(at, tenant) < self._spec.groups_per_tenant:
            self._execute(_SET_HEAD, (*me, groups.named(at, counts).as_json(), counts.keep_ms))
            self._execute(statement, (*values, *me))

    def _read(self, at: Times, me: tuple[str, str]) -> Row | None:
        found = self._execute(_READ, me).fetchone()
        if found is None:
            return None
        *columns, body_hash, last, events, size = found
        row = Row._make((*columns, None if body_hash is None else ProgressRow(body_hash, last, events, size)))
        if row.is_over(at):
            self._execute(_DELETE, me)
            return None
        return row

    def _update(self, me: tuple[str, str], row: Row, new: Row) -> None:
        if changed := [each for each in zip(COLUMNS, new, row, strict=False) if each[1] != each[2]]:
            names, values, _ = zip(*changed, strict=True)
            self._execute(_update(*names), (*values, *me))

    def _go_on(self, me: tuple[str, str], to: ProgressRow, change: Change[T]) -> None:
        if change.forget == "event":
            self._execute(_FORGET_EVENTS, me)
        elif change.forget == "all":
            self._execute(f"DELETE FROM followed {_OF}", me)
        if change.submission is not None:
            self._execute(_ADD, (*me, *change.submission))
        ((key,),) = self._execute(_GO_ON, (to.last, to.events, to.size, *me)).fetchall()
        first = to.last - len(change.entries) + 1
        rows = [(key, number, entry.kind, entry.body) for number, entry in enumerate(change.entries, first)]
        self.connection.executemany("INSERT INTO entry VALUES (?, ?, ?, ?)", rows)

    def oldest_unseen(self, _: Times, tenant: str) -> list[str]:
        (count,) = self._execute(_COUNT_UNSEEN, (tenant,)).fetchone()
        surplus = min(count - self._spec.unseen_per_tenant, base.DISPLACED_AT_MOST)
        return [id for (id,) in self._execute(_OLDEST_UNSEEN, (tenant, surplus))] if surplus > 0 else []

    def endings(self, at: Times, requests: Sequence[Identity]) -> list[base.Ending | None]:
        found: list[base.Ending | None] = [None] * len(requests)
        asked = as_json([(each.tenant, each.id) for each in requests])
        given = (at.now, asked, at.today, at.now)
        for key, status, code, ended_ms, size, cancelling, is_held in self._execute(_ENDINGS, given):
            if cancelling:
                found[key] = base.Ending(is_cancelled=True)
            elif status is None:
                found[key] = base.Ending(is_running=bool(is_held))
            else:
                found[key] = base.Ending(status, code or "", ended_ms, size)
        return found

    def tenants_of(self, at: Times, id: str) -> list[str]:
        return [tenant for (tenant,) in self._execute(_TENANTS_OF, (id, at.today, at.now))]

    def listed(self, at: Times, wanted: RequestFilter, *, most: int, after: str | None = None) -> RequestPage:
        """Rows are numbered in the order in which the store heard of the requests, so a list needs no index, which each
        claim and completion would have to write."""
        first, end = self._execute(
            "SELECT coalesce(min(rowid), 0), coalesce(max(rowid), -1) + 1 FROM request"
        ).fetchone()
        lowest = self._row_at(wanted.since_ms, first, end)
        below = self._row_at(wanted.until_ms, first, end) if after is None else min(end, RequestPage.place(after)[1])
        asked = _LISTED
        values: list[str | int] = [wanted.since_ms, wanted.until_ms]
        for column, allowed in (
            ("tenant", wanted.tenants), ("lane", wanted.lanes), ("app", wanted.apps), ("model", wanted.models),
            ("code", wanted.codes), ("cause", wanted.causes), ("group_id", wanted.groups), (_STATE, wanted.states),
        ):  # fmt: skip
            if allowed:
                asked += f" AND {column} IN ({', '.join('?' * len(allowed))})"
                values += allowed
        asked += " AND (keep_ms > ? OR lease_ms > ?) ORDER BY rowid DESC LIMIT ?"
        found: list[ListedRequest] = []
        end_s = time.monotonic() + base.LISTED_WITHIN_S
        while below > lowest:
            looked_at = max(lowest, below - LOOKED_AT)
            rows = self._execute(asked, (looked_at, below, *values, at.today, at.now, most - len(found))).fetchall()
            for _, tenant, id, seen_ms, *labels, state, code, cause, group_id in rows:
                labelled, of = Labels(*labels), Identity(tenant, id)
                found.append(ListedRequest(of, seen_ms, labelled, RequestState(state), code, cause, group_id))
            below = rows[-1][0] if len(found) >= most else looked_at
            if len(found) >= most or time.monotonic() > end_s:
                break
        if below <= lowest:
            return RequestPage(found, None)
        (back_to_ms,) = self._execute(_FROM_ROW, (below,)).fetchone() or (0,)
        return RequestPage(found, f"{back_to_ms}.{below}")

    def _row_at(self, time_ms: int, first: int, end: int) -> int:
        """The number of the first row of a request that the store heard of then or later."""
        return bisect_left(
            range(end),
            time_ms,
            lo=first,
            key=lambda row: (self._execute(_FROM_ROW, (row,)).fetchone() or (time_ms,))[0],
        )

    def submission(self, _: Times, identity: Identity) -> Submission | None:
        found = self._execute(f"SELECT {_FIELDS} FROM followed {_OF}", (identity.tenant, identity.id)).fetchone()
        return None if found is None else Submission._make(found)

    def look(self, _: Times, wanted: Sequence[tuple[Identity, int]]) -> Sequence[base.Look | None]:
        found: list[base.Look | None] = []
        left = ENTRIES_IN_A_LOOK
        for identity, after in wanted:
            row = self._execute(_PROGRESS, (identity.tenant, identity.id)).fetchone()
            if row is None:
                found.append(base.Look(is_known=False))
                continue
            key, last, ended = row
            if last <= after and not ended:
                found.append(None)
                continue
            read = self._execute(_ENTRIES, (key, after, min(base.ENTRIES_AT_ONCE, left)))
            entries = [base.Entry._make(each) for each in read]
            left -= len(entries)
            found.append(base.Look(entries=entries, last=last, ended=bool(ended)))
        return found

    # ---- groups ------------------------------------------------------------------------------------------------------

    def change_group(self, at: Times, identity: Identity, decide: groups.Decide) -> object:
        found = next(iter(self.groups_of(at, identity.tenant, identity.id)), None)
        change = decide(found, at.today)
        if (head := change.head) is not None:
            self._execute(_SET_HEAD, (identity.tenant, identity.id, head.as_json(), head.keep_ms))
        return change.answer

    def groups_of(self, at: Times, tenant: str, *id: str) -> list[StoredGroup]:
        return _groups(self._execute(f"{_GROUP} AND {'id = ?' if id else _IS_LISTED}", (tenant, at.today, *id)))

    def newest_groups(self, at: Times, *, most: int, after: GroupPlace = NEWEST) -> list[StoredGroup]:
        return _groups(self._execute(_NEWEST_GROUPS, (*after, at.today, most)))

    def ended_groups(self, at: Times) -> list[StoredGroup]:
        return _groups(self._execute(_ENDED_GROUPS, (at.today, groups.ENDED_AT_ONCE)))

    def end_was_told(self, at: Times, identity: Identity) -> None:
        self._execute(f"UPDATE request_group SET told = 1 {_OF}", (identity.tenant, identity.id))

    def count_groups(self, at: Times, tenant: str) -> int:
        (count,) = self._execute(_COUNT_GROUPS, (tenant, at.today)).fetchone()
        return int(count)

    def members(
        self, at: Times, group: Identity, *, after: int = 0, most: int = MEMBERS_AT_ONCE, bodies: bool = True
    ) -> list[Member]:
        columns = f"rowid, id, status, code, headers, ended_ms, cancelling, {'body' if bodies else 'NULL'}"
        found: list[Member] = []
        size = 0
        for row in self._execute(f"SELECT {columns} {_MEMBERS}", (group.tenant, group.id, after, at.today, most)):
            position, id, status, code, headers, ended_ms, cancelling, body = row
            completion = None
            if status is not None and not cancelling:
                completion = base.Completion(
                    status=status,
                    code=code or "",
                    headers=json.loads(headers or "{}"),
                    ended_ms=ended_ms,
                    body=body or b"",
                )
            found.append(Member(position, id, completion))
            size += len(body or b"")
            if size >= MEMBER_BYTES:
                break
        return found

    def remove_members(self, _: Times, group: Identity) -> int:
        self._known.clear()
        return self._execute(_REMOVE_MEMBERS, (group.tenant, group.id)).rowcount

    # ---- counters and pauses -----------------------------------------------------------------------------------------

    def take(
        self,
        at: Times,
        name: str,
        amount: float,
        *,
        limit: float,
        period: base.Period,
        reservation: base.AllowanceReservation | None = None,
    ) -> base.AllowanceTaken:
        own = None if reservation is None else reservation.id
        ended = self._execute(_FREED, (name, period.length_s, period.number, at.today, own)).fetchall()
        before = self._used_in(name, period)
        taken = decisions.take(before, [held for (held,) in ended], amount, limit)
        if taken.granted or taken.used != before:
            self._set_used(name, period, taken.used)
        if reservation is not None and taken.granted:
            self._execute(
                _RESERVE, (name, period.length_s, period.number, *reservation[:2], amount, reservation.until_ms)
            )
        return taken

    def settle(
        self, _: Times, name: str, used: float, *, period: base.Period, reservation: base.AllowanceReservation
    ) -> None:
        held = self._execute(_SETTLE, (name, period.length_s, period.number, *reservation[:2])).fetchall()
        before = self._used_in(name, period)
        self._set_used(name, period, decisions.take(before, [amount for (amount,) in held], used, inf).used)

    def give_back(self, at: Times, name: str, amount: float, *, period: base.Period) -> None:
        # not below 0: the amount may have been taken in the period before
        self._set_used(name, period, max(0.0, self._used_in(name, period) - amount))

    def _set_used(self, name: str, period: base.Period, used: float) -> None:
        self._execute(_SET_USED, (name, period.length_s, period.number, period.ends_ms, used))

    def _used_in(self, name: str, period: base.Period) -> float:
        found = self._execute(_USED_IN, (name, period.length_s, period.number)).fetchone()
        return 0.0 if found is None else float(found[0])

    def rows(self, at: Times, place: Place) -> Rows:
        key = () if place.key is None else (place.key,)
        found = self._execute(
            f"{_ROWS}{' AND key = ?' if key else ''}", (place.kind, place.tenant, at.today, *key)
        ).fetchall()
        values = {"" if key else name: body.decode() for name, body, _ in found}
        return Rows(values, until_ms=max((until_ms for *_, until_ms in found), default=0))

    def change_rows(self, at: Times, wanted: Sequence[tuple[Place, DecideRows[T]]]) -> Sequence[T]:
        return [self._change_rows(at, *each) for each in wanted]

    def _change_rows(self, at: Times, place: Place, decide: DecideRows[T]) -> T:
        rows = self.rows(at, place)
        change = decide(rows, at)
        until_ms = change.until_ms or rows.until_ms or NEVER_MS
        for name, value in change.values.items():
            row = (place.kind, place.tenant, name if place.key is None else place.key)
            if value is None:
                self._execute("DELETE FROM kept WHERE (kind, tenant, key) = (?, ?, ?)", row)
            else:
                self._execute(_KEEP, (*row, until_ms, value.encode()))
        return change.answer

    def note_webhook(self, at: Times, identity: Identity, row: bytes, *, until_ms: int) -> None:
        self._execute(_KEEP, ("webhook", identity.tenant, identity.id, until_ms, row))

    def webhook(self, at: Times, identity: Identity) -> bytes | None:
        found = self._execute(
            f"SELECT body {_WEBHOOKS} AND (tenant, key) = (?, ?)", (at.today, identity.tenant, identity.id)
        )
        return next((body for (body,) in found), None)

    def webhooks(self, at: Times, *, most: int) -> Sequence[tuple[Identity, bytes]]:
        rows = self._execute(f"SELECT tenant, key, body {_WEBHOOKS} ORDER BY until_ms DESC LIMIT ?", (at.today, most))
        return [(Identity(tenant, id), body) for tenant, id, body in rows]

    # ---- files at providers ------------------------------------------------------------------------------------------

    def keep_file(self, at: Times, file: StoredFile) -> bool:
        if (found := self.find_files(at, [file.id]).get(file.id)) is not None:
            return found.tenant == file.tenant
        if len(self.files(at, file.tenant)) >= self._spec.files_per_tenant:
            return False
        self._execute(f"INSERT OR REPLACE INTO file ({_FILE}) VALUES (?, ?, ?, ?, ?, ?)", astuple(file))
        return True

    def find_files(self, at: Times, ids: Sequence[str]) -> dict[str, StoredFile]:
        asked = f"SELECT {_FILE} FROM file WHERE id IN (SELECT value FROM json_each(?)) AND {_EXISTS}"
        return {row[0]: _stored_file(row) for row in self._execute(asked, (as_json(list(ids)), at.today))}

    def files(self, at: Times, tenant: str) -> list[StoredFile]:
        asked = f"SELECT {_FILE} FROM file WHERE tenant = ? AND {_EXISTS} ORDER BY created_ms DESC, id DESC"
        return [_stored_file(row) for row in self._execute(asked, (tenant, at.today))]

    def forget_file(self, _: Times, file: StoredFile) -> None:
        self._execute("DELETE FROM file WHERE id = ? AND tenant = ?", (file.id, file.tenant))

    # ---- what is removed ---------------------------------------------------------------------------------------------

    def remove_expired(self, at: Times) -> int:
        found = self._execute(_EXPIRED, (at.today, at.now)).fetchall()
        others = (
            (_EXPIRED_ALLOWANCES, at.today - KEPT_AFTER_MS),
            (_EXPIRED_KEPT, at.today),
            (_EXPIRED_FILES, at.today),
            (_SURPLUS_WEBHOOKS, base.WEBHOOKS_KEPT),
            ("DELETE FROM request_group WHERE until_ms <= ?", at.today),
        )
        removed = sum(self._execute(statement, (value,)).rowcount for statement, value in others)
        ended = self._execute(_ENDED, (at.today,)).fetchall()
        self.connection.executemany(_FREE, ended)
        removed += len(ended)
        return removed + self.remove(at, next_step(deque(map(Surplus._make, found))))

    def remove(self, at: Times, rows: Iterable[Surplus]) -> int:
        self._known.clear()
        return sum(self._execute(_REMOVE, (row.tenant, row.id, row.state, at.now)).rowcount for row in rows)

    def used_bytes(self) -> int:
        pages, free, page_bytes = (
            int(self._execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * page_bytes

    def used_by_share(self, at: Times) -> dict[Share, int]:
        found: dict[Share, int] = {}
        for tenant, kind, size in self._execute(_USED, (at.now,)):
            share = (tenant, RowKind(kind))
            found[share] = found.get(share, 0) + size
        return found

    def surplus(self, at: Times) -> list[Surplus]:
        """Returns rows to remove, the oldest of each share first, if the file is above its limit."""
        if (in_file := self.used_bytes()) <= self._spec.max_bytes:
            return []
        used = self.used_by_share(at)
        found: list[Surplus] = []
        for (tenant, kind), cut in cuts(used, sum(used.values()) * LOW_WATER * self._spec.max_bytes / in_file):
            rows = self._execute(_OLDEST, (tenant, at.now, kind, SURPLUS_ROWS - len(found)))
            found += oldest((Surplus(tenant, *row) for row in rows), cut)
        return found


def _stored_file(row: Sequence[Any]) -> StoredFile:
    return StoredFile(**dict(zip(_FILE.split(", "), row, strict=True)))


def _groups(rows: Iterable[Any]) -> list[StoredGroup]:
    return [
        StoredGroup(
            identity=Identity(tenant, id),
            head=Head.of_json(head),
            counts=dict(zip(KINDS, counts, strict=True)),
            last_ended_ms=ended_ms,
            size=size,
            key=key,
            webhook=webhook,
            saved_usd=saved_usd,
        )
        for tenant, id, head, ended_ms, size, key, webhook, saved_usd, *counts in rows
    ]
