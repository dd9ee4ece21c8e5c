"""The rows of the SQLite table `request` as values (one row for each request, with its claim and its result), and the
time of a transaction."""

import json
from dataclasses import dataclass
from typing import Literal, NamedTuple

from consumers.state.base import Completion, Fingerprint

as_json = json.JSONEncoder(ensure_ascii=False).encode
"""Returns a value as JSON text. Its encoder is made only once here, because `json.dumps` would make one for each
call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The time of a transaction, by both clocks of the store. It is read once, for all operations of the
    transaction."""

    now: int
    """The time since the machine was booted, in ms; leases are compared with it."""
    today: int
    """The time since 1970, in ms; retention times are compared with it."""


class Row(NamedTuple):
    """One row of the table `request`. The table's definition in `file.py` explains the fields; their order here is the
    order in SQL."""

    token: int
    keep_ms: int
    body_hash: bytes | None = None
    mark: bytes | None = None
    lease_ms: int = 0
    claimed_ms: int = 0
    attempts: int = 0
    noted: int = 0
    cancelling: int = 0
    nonce: bytes | None = None
    deaths: int = 0
    due_ms: int | None = None
    status: Literal["ok", "error"] | None = None
    code: str | None = None
    headers: str | None = None
    ended_ms: int | None = None
    body: bytes | None = None

    @property
    def ended(self) -> bool:
        """True if the request has ended."""
        return self.status is not None and not self.cancelling

    @property
    def is_deferred(self) -> bool:
        """True if the request was deferred, or submitted so that clients can follow it, and no worker has claimed it
        yet."""
        return bool(self.noted) and self.status is None

    def is_held_against(self, message: Fingerprint, now: int) -> bool:
        """True if a worker holds the claim of the request for another message, and the lease is valid. A message that
        was redelivered may take over its own earlier claim."""
        is_own = self.mark == message.mark and (self.nonce or b"")[:1] == message.nonce[:1]
        return self.lease_ms > now and not (message.redelivered and is_own)

    def ended_by(self, completion: Completion) -> "Row":
        """A copy of this row in which the request has ended with the given completion."""
        return self._replace(
            status=completion.status,
            code=completion.code,
            headers=as_json(dict(completion.headers)),
            ended_ms=completion.ended_ms,
            body=completion.body,
        )

    def completion(self) -> Completion:
        """How the request of this row ended. Call it only if the request has ended."""
        assert self.status is not None
        assert self.ended_ms is not None
        return Completion(
            status=self.status,
            code=self.code or "",
            body=self.body or b"",
            headers=json.loads(self.headers or "{}"),
            ended_ms=self.ended_ms,
            mark=self.mark,
        )
