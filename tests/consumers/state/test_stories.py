"""A long story of the embedded store, chosen at random once, with all that came of it: stories/embedded.txt.

.venv/bin/python -m tests.consumers.state.test_stories
"""

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from consumers.state.base import Fingerprint, Found, Granted, Held, Identity
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.counters import Counters
from consumers.state.sqlite.file import SCHEMA
from consumers.state.sqlite.requests import Requests
from consumers.state.sqlite.rows import Times
from consumers.state.sqlite.shares import Waiting
from consumers.state.sqlite.sweeping import Sweeping
from tests.support.completions import CANCELLED, answered, failed, fingerprint, untried

TOLD = Path(__file__).with_name("stories") / "embedded.txt"
STEPS = 500
SPEC = StoreSpec(
    keep_s=20,
    cancelled_s=30,
    unseen_per_tenant=3,
    untried_per_tenant=4,
    waiting_per_tenant=4,
    waiting_in_all=7,
    lease_s=2,
)
MIDNIGHT_MS = 1_790_035_200_000


class Story:
    """Two tenants with four ids each; `lines` tells what happened."""

    def __init__(self) -> None:
        self._chosen = random.Random("embedded")
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.executescript(SCHEMA)
        self._requests = Requests(connection, SPEC)
        self._sweeping = Sweeping(connection, SPEC)
        self._waiting = Waiting(connection, SPEC)
        self._counters = Counters(connection)
        self._now_ms = 5_000
        self._tokens: dict[Identity, int] = {}
        self.lines: list[str] = []

    def run(self) -> list[str]:
        steps: list[Callable[[Identity], Any]] = [self._claim, self._complete, self._end, self._renew, self._release]
        steps += [self._defer, self._note, self._cancel, self._reserve, self._take, self._hold, self._sweep]
        weights = (30, 14, 10, 8, 8, 5, 5, 8, 12, 8, 6, 6)
        for _ in range(STEPS):
            self._now_ms += self._chosen.choice((0, 0, 0, 1, 300, 800, 1_999, 4_000))
            identity = Identity(self._chosen.choice(("crm", "shop")), self._chosen.choice("abcd"))
            (step,) = self._chosen.choices(steps, weights)
            came_to = step(identity)
            found = self._requests.find(self._at, identity)
            self._note_line(
                f"{step.__name__[1:]} {identity.tenant} {identity.id}: {_said(came_to)}; now {_said(found)}"
            )
        return self.lines

    @property
    def _at(self) -> Times:
        return Times(now=self._now_ms, today=MIDNIGHT_MS - 60_000 + self._now_ms)

    def _note_line(self, text: str) -> None:
        self.lines.append(f"{self._now_ms} {text}".replace(str(MIDNIGHT_MS)[:7], "…"))

    def _fingerprint(self) -> Fingerprint:
        body, mark = (
            self._chosen.choice(("body", "body", "body", "other")),
            self._chosen.choice(("mark", "mark", "again")),
        )
        nonce, dead_at_ms = self._chosen.choice((b"", b"n1", b"n2")), self._chosen.choice((None, None, 100))
        return fingerprint(body, mark, redelivered=self._chosen.random() < 0.3, nonce=nonce, dead_at_ms=dead_at_ms)

    def _held(self, identity: Identity) -> Held:
        return Held(identity, self._tokens.get(identity, 1) - self._chosen.choice((0, 0, 0, 1)))

    def _claim(self, identity: Identity) -> object:
        found = self._requests.claim(self._at, identity, self._fingerprint())
        if isinstance(found, Granted):
            self._tokens[identity] = found.token
        return found

    def _complete(self, identity: Identity) -> object:
        completion = self._chosen.choice((answered(), answered("x" * 3_000), failed(ended_ms=100)))
        token = self._held(identity).token
        return self._requests.complete(self._at, identity, self._fingerprint(), completion, token)

    def _end(self, identity: Identity) -> object:
        own = Identity(identity.tenant, f"{identity.id}{self._chosen.randrange(40)}")
        size = self._chosen.choice((500, 9_000))
        return self._requests.complete(self._at, own, self._fingerprint(), untried(size=size), None)

    def _renew(self, identity: Identity) -> object:
        return [str(each) for each in self._requests.renew(self._at, [self._held(identity)]).values()]

    def _release(self, identity: Identity) -> None:
        due_ms = self._chosen.choice((None, MIDNIGHT_MS))
        self._requests.release(self._at, self._held(identity), self._chosen.randrange(3), due_ms)

    def _defer(self, identity: Identity) -> object:
        return self._requests.defer(self._at, identity, MIDNIGHT_MS, self._at.today + 5_000)

    def _note(self, identity: Identity) -> None:
        self._requests.note(self._at, identity, failed())

    def _cancel(self, identity: Identity) -> object:
        own = Identity(
            identity.tenant, self._chosen.choice((identity.id, f"{identity.id}{self._chosen.randrange(40)}"))
        )
        return str(self._requests.cancel(self._at, own, CANCELLED))

    def _reserve(self, identity: Identity) -> object:
        until_ms = self._at.today + self._chosen.choice((1_000, 20_000))
        weight = self._chosen.choice((1, 1, 2))
        return str(
            self._waiting.reserve(self._at.today, identity, self._fingerprint(), weight=weight, until_ms=until_ms)
        )

    def _take(self, identity: Identity) -> object:
        if self._chosen.random() < 0.3:
            amount = self._chosen.choice((0.5, 3, -1))
            self._counters.correct(self._at, identity.tenant, amount, period_s=60)
            return None
        amount = self._chosen.choice((0, 1.25, 4))
        return self._counters.take(
            self._at, identity.tenant, amount, limit=10, period_s=self._chosen.choice((60, 3600))
        )

    def _hold(self, identity: Identity) -> object:
        if self._chosen.random() < 0.2:
            self._counters.let_go(identity.tenant, identity.id)
            return None
        return self._counters.hold(self._at, identity.tenant, identity.id, for_s=1.5)

    def _sweep(self, identity: Identity) -> object:
        late = Times(now=self._at.now, today=self._at.today + self._chosen.choice((0, 0, 0, 86_400_000)))
        counters = self._counters.sweep(late)
        return [self._sweeping.sweep(self._at), self._waiting.sweep(self._at.today), counters]


def _said(value: object) -> str:
    """Without the bodies, which are long."""
    completion = value.completion if isinstance(value, Found) else value
    size = len(getattr(completion, "body", b""))
    if isinstance(value, Found):
        ending = value.completion and f"{value.completion.code or 'ok'} of {size} at {value.completion.ended_ms}"
        return f"found {ending}, running {value.running}, attempts {value.attempts}, due {value.due_ms}"
    return (
        f"{type(value).__name__} of {size}" if size else str(value) if len(str(value)) < 100 else type(value).__name__
    )


def test_the_recorded_story_of_the_sqlite_store_has_the_same_results() -> None:
    assert Story().run() == TOLD.read_text().splitlines()


if __name__ == "__main__":
    TOLD.write_text("\n".join(Story().run()) + "\n")
