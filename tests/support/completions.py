"""Requests, copies and completions for tests of the store."""

from consumers.state.base import Completion, Fingerprint, Identity

ME = Identity("tenant", "id-1")


def fingerprint(
    body: str = "body",
    mark: str = "mark",
    *,
    redelivered: bool = False,
    nonce: bytes = b"",
    dead_at_ms: int | None = None,
    keep_until_ms: int = 0,
) -> Fingerprint:
    return Fingerprint(
        body_hash=_16(body),
        mark=_16(mark),
        redelivered=redelivered,
        nonce=nonce,
        dead_at_ms=dead_at_ms,
        keep_until_ms=keep_until_ms,
    )


def answered(text: str = "answer", *, ended_ms: int = 1_000) -> Completion:
    return Completion(
        status="ok", body=text.encode(), headers={"x-lane-model": "ä", "x-lane-attempt": 1}, ended_ms=ended_ms
    )


def failed(code: str = "attempts_exhausted", *, ended_ms: int = 1_000) -> Completion:
    return Completion(status="error", code=code, body=b'{"code": "x"}\x00\xff', headers={}, ended_ms=ended_ms)


def untried(*, size: int) -> Completion:
    """The completion of a request that ended before any attempt."""
    body = b'{"code": "x", "detail": "%s"}' % (b"x" * size)
    headers = {"x-lane-attempt": 0}
    return Completion(status="error", code="deadline_exceeded", body=body, headers=headers, ended_ms=1_000)


CANCELLED = failed("cancelled", ended_ms=5)


def _16(text: str) -> bytes:
    return text.encode().ljust(16, b"\x00")
