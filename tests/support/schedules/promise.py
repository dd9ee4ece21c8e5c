"""Checks what is promised for every request, after each thing that happens (docs/decisions/0004)."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from consumers.clock import moment_text
from consumers.state.base import Fingerprint, Held, Identity
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import PROBLEMS
from tests.support.schedules.broker import NAMES, Channel, Entry
from tests.support.schedules.operation import DELIVERY
from topology.codec.decoding import Request

NOT_KEPT = "idempotency_conflict"
UNKNOWN_BODY = ("poison", "deadline_exceeded")
"""Codes that a copy with another body than its id's stored request may be answered with, although they are not
stored."""


class Ending(NamedTuple):
    status: str
    code: str
    body: bytes
    ended_ms: int


class Promise:
    """Collects all violations. `bodies`: the bodies that were published under each id."""

    def __init__(self, connection: sqlite3.Connection, bodies: Mapping[str, set[bytes]]) -> None:
        self._execute = connection.execute
        self._bodies = bodies
        self.violations: list[str] = []
        self.calls: dict[str, int] = defaultdict(int)
        self.doomed: set[str] = set()
        """Workers that a poison request will crash."""
        self.endings: dict[str, list[Ending]] = defaultdict(list)
        """Stored endings by id, in order. Those that were only noted are in `noted`."""
        self.noted: dict[str, list[Ending]] = defaultdict(list)
        self._holds: dict[str, Ending] = {}
        self._granted: dict[object, Held] = {}
        self._latest: dict[Identity, int] = {}
        self._told: dict[object, set[tuple[str, str]]] = defaultdict(set)
        self._numbers = 0

    def on_stored(self, fingerprint: Fingerprint | None) -> None:
        """Check that an id has at most one ending, unless the dead letter of exactly this ending is run again."""
        found = self._execute("SELECT id, noted, cancelling, status, code, body, ended_ms FROM request").fetchall()
        for id, noted, cancelling, *ending in found:
            now = Ending(*ending) if ending[0] is not None and not cancelling else None
            if noted:
                if now is not None and now not in self.noted[id]:
                    self.noted[id].append(now)
                continue
            before = self._holds.get(id)
            if now == before:
                continue
            if before is not None:
                again = (
                    fingerprint is not None and fingerprint.dead_at_ms == before.ended_ms and before.status == "error"
                )
                if not again:
                    self.violations.append(f"{id}: {_short(before)} was replaced by {_short(now)}")
                del self._holds[id]
            if now is not None:
                self._holds[id] = now
                self.endings[id].append(now)
                if now.code == "internal":
                    self.violations.append(f"{id}: an unforeseen error buried it: {now.body.decode()}")

    def on_granted(self, held: Held) -> None:
        """The store has granted a claim; the worker may never learn of it."""
        self._latest[held.identity] = held.token

    def on_claimed(self, delivery: object, held: Held) -> None:
        """The worker has learnt that its claim was granted."""
        self._granted[delivery] = held

    def on_completed(self, held: Held, *, is_own: bool) -> None:
        """Check that a worker whose claim was granted to another since does not complete the request."""
        if is_own and held.token < self._latest[held.identity]:
            self.violations.append(f"{held.identity.id}: completed by a worker that was fenced off")

    def on_call(self, delivery: object, owner: str, request: Request) -> int:
        """Check that the provider is called only with a claim granted to this delivery. Returns the call's number."""
        held = self._granted.get(delivery)
        if held is None or held.identity.id != request.id:
            self.violations.append(f"{request.id}: its provider was called without a claim")
        self.calls[request.id] += 1
        self._numbers += 1
        if request.id.startswith("poison"):
            self.doomed.add(owner)
        return self._numbers

    def on_published(self, delivery: object, message: Message, exchange: str, routing_key: str) -> None:
        """Check that replies and dead letters say what is stored."""
        if exchange == "":
            self._told[delivery].add(("reply", routing_key))
            self._check_reply(message)
        elif exchange == NAMES.dead:
            self._check_dead(message)
        else:
            self._told[delivery].add(("delay", message.message_id or ""))

    def on_settle(self, channel: Channel, entry: Entry, how: str) -> None:
        """Check that a delivery is settled only once, and acknowledged only after its own work has answered the request
        or sent it through a delay."""
        message = entry.message
        told = self._told[DELIVERY.get()]
        if how == "twice":
            self.violations.append(f"{message.message_id}: settled twice")
        done = ("reply", message.reply_to or "") in told or ("delay", message.message_id or "") in told
        if how == "ack" and not done:
            self.violations.append(f"{message.message_id}: acknowledged, and nothing came of it")

    def _check_reply(self, message: Message) -> None:
        id, status = str(message.headers[n.REQUEST_ID]), message.headers[n.STATUS]
        code = "" if status == "ok" else json.loads(message.body)["code"]
        if code == NOT_KEPT or self._is_foreign(id, code):
            return
        if (status, message.body) not in {(each.status, each.body) for each in self._kept(id)}:
            self.violations.append(f"{id}: told {status} {code} {message.body[:80]!r}, which is not stored")

    def _check_dead(self, message: Message) -> None:
        id, code, at = message.message_id or "", message.headers[n.DEAD_CODE], message.headers[n.DEAD_AT]
        if self._is_foreign(id, code):
            return
        if code not in {each.code for each in self.noted[id]} and not any(
            (each.code, moment_text(each.ended_ms)) == (code, at) for each in self.endings[id]
        ):
            self.violations.append(f"{id}: buried with {code} at {at}, which is not stored")

    def _kept(self, id: str) -> list[Ending]:
        return self.endings[id] + self.noted[id]

    def _is_foreign(self, id: str, code: str) -> bool:
        return code == "invalid_request" or (len(self._bodies[id]) > 1 and code in UNKNOWN_BODY)

    def unburied(self, dead: list[Message]) -> list[str]:
        """Endings that should have a dead letter but have none."""
        there = {(each.message_id, each.headers[n.DEAD_CODE]) for each in dead}
        return [
            f"{id}: ended as {each.code}, and lies nowhere"
            for id, kept in self.endings.items()  # not `noted`: such a request may have ended differently since
            for each in kept
            if each.code and PROBLEMS[each.code].parked and (id, each.code) not in there
        ]


def _short(ending: Ending | None) -> str:
    return "nothing" if ending is None else f"{ending.status} {ending.code} {ending.body[:40]!r}"
