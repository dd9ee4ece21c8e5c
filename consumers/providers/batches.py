"""What the batches of providers have in common: `Batches`, which each API of batches implements, and how their answers
are read. Requests are passed on as bytes, and results are read line by line: neither is ever parsed as a whole.

A batch costs nothing but the answers in it. Which limits a batch has, and how it is priced: docs/facts.md, section 10.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVar

import httpx2

from consumers.dialects.answers import Answer
from consumers.failures import (
    AccountError,
    AnswerTooLargeError,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.providers.calling import Calling
from consumers.providers.errors import translate_errors, within
from consumers.providers.streams import bounded, from_json

CREATE_WITHIN_S: Final = 180.0
WITHIN_S: Final = 30.0
PIECE_WITHIN_S: Final = 60.0
RESULTS_WITHIN_S: Final = 20 * 60.0
"""Reading all results of a batch takes at most this long, with the work on each: less than the broker waits for the
acknowledgement of the message that they belong to."""
MISSING_FOR_S: Final = 3600.0
NO_SUCH_PATH: Final = (404, 405)
NONE_MADE: Final = (RejectedError, RateLimitedError, OverloadedError, AccountError)
"""What `Batches.create` raises if the provider has answered, and made no batch."""
PAGE: Final = 100
PAGES: Final = 100
LINE_BYTES: Final = 8 * 1024 * 1024
"""A longer result is not read: it returns to its lane in one message with its request."""
_OBJECT_BYTES: Final = 1024 * 1024
_LEAST_URGENT: Final = 1_000_000
_HEAD_BYTES: Final = 512

Parsed = TypeVar("Parsed")
Kind = Literal["succeeded", "errored", "canceled", "expired", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInfo:
    """A batch as the provider describes it. `requests`: how many it has."""

    id: str
    status: Literal["in_progress", "canceling", "ended"]
    requests: int
    created_ms: int
    ticket: str | None = None
    """The ticket that it was created for; empty: none of Lanekeeper's. None: the provider does not keep that."""
    refusal: ProviderError | None = None
    """Why the provider ran none of its requests, if it found that out after the batch was created."""
    input_file: str | None = None
    """The file with its requests, where they are uploaded before the batch is created."""

    @property
    def is_ended(self) -> bool:
        return self.status == "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine:
    """One line of a batch's results. `custom_id`: empty if the line has none. `kind`: `broken` if it is no result."""

    custom_id: str
    kind: Kind
    line: bytes


class Batches(Protocol):
    """The batches of one provider's account. All methods raise `ProviderError`, of the same classes as live calls."""

    @property
    def is_missing(self) -> bool:
        """Whether the provider has answered within the last hour that it has no batches."""

    async def create(
        self, requests: Sequence[tuple[str, bytes]], *, dialect: str, ticket: str, headers: Mapping[str, str]
    ) -> BatchInfo:
        """Create a batch of (custom_id, body of a call in this dialect) for a ticket. `headers`: the requesters', for
        all.

        What is raised says whether a batch may exist: `RejectedError` and `RateLimitedError`: none; others: perhaps. A
        `RejectedError` with status 404 or 405 means that this provider has no batches (`is_missing`)."""

    async def retrieve(self, id: str) -> BatchInfo:
        """Raises `RejectedError` with status 404 if there is no such batch."""

    async def cancel(self, id: str) -> BatchInfo: ...

    def list_since(self, ms: int) -> AsyncIterator[BatchInfo]:
        """The batches that were created at `ms` or later, the newest first; at most the newest 10,000."""

    def results(self, id: str) -> AsyncGenerator[ResultLine, None]:
        """The results of a batch that has ended, in any order, each read when the one before it was worked on."""

    async def delete_input(self, batch: BatchInfo) -> None:
        """Delete the `input_file` of a batch that has ended. Raises nothing: the provider deletes it some day, too. The
        results stay, because the ticket may be delivered again to another worker, which reads them."""

    async def answer(self, line: bytes, *, dialect: str) -> Answer:
        """The answer in one line of results, without its cost. Raises the `ProviderError` that it tells instead."""


@dataclass(slots=True, eq=False, repr=False)  # it knows the key
class BatchReader:
    """Reads what an API of batches answers, within the bounds of the provider's calls."""

    calling: Calling
    _missing_until_s: float = field(default=0.0, init=False)

    @property
    def secret(self) -> str:
        return self.calling.secret

    @property
    def is_missing(self) -> bool:
        return asyncio.get_running_loop().time() < self._missing_until_s

    def note_missing(self) -> None:
        """The provider has no batches."""
        self._missing_until_s = asyncio.get_running_loop().time() + MISSING_FOR_S

    @property
    def max_line_bytes(self) -> int:
        return min(self.calling.max_answer_bytes, LINE_BYTES)

    async def object(
        self, opened: AbstractAsyncContextManager[httpx2.Response], *, within_s: float | None = None
    ) -> dict[str, Any]:
        """The JSON object of a response."""
        most_s = WITHIN_S if within_s is None else within_s
        async with within(most_s, why=f"no answer from the provider within {most_s:g} s"), opened as response:
            with translate_errors(secret=self.secret):
                body = b"".join([piece async for piece in bounded(response.aiter_bytes(), _OBJECT_BYTES)])
        return parsed(body)

    async def lines(self, response: httpx2.Response) -> AsyncGenerator[tuple[bytes, bool], None]:
        """Each line that is not empty, and whether it is whole: of one that is too long, only the begin is kept."""
        kept, size = bytearray(), 0
        body_pieces = aiter(response.aiter_bytes())
        until_s = asyncio.get_running_loop().time() + RESULTS_WITHIN_S
        while (piece := await self._piece(body_pieces, until_s)) is not None:
            for nth, part in enumerate(piece.split(b"\n")):
                if nth:  # a line has ended
                    if kept.strip():
                        yield bytes(kept), size <= self.max_line_bytes
                    kept.clear()
                    size = 0
                size += len(part)
                if size <= self.max_line_bytes:
                    kept += part
                else:
                    del kept[_HEAD_BYTES:]
        if kept.strip():
            if size <= self.max_line_bytes:
                parsed(bytes(kept))  # raises if the last line, which has no end, was cut
            yield bytes(kept), size <= self.max_line_bytes

    async def _piece(self, body_pieces: AsyncIterator[bytes], until_s: float) -> bytes | None:
        left_s = until_s - asyncio.get_running_loop().time()
        async with within(min(PIECE_WITHIN_S, left_s), why="the batch's results stopped coming, or took too long"):
            with translate_errors(secret=self.secret):
                return await anext(body_pieces, None)

    async def parse(self, line: bytes, work: Callable[[bytes], Parsed]) -> Parsed:
        """Raises `AnswerTooLargeError` if the line would take long to parse."""
        parsing, rank = self.calling.parsing, (_LEAST_URGENT, len(line))
        if (excess := await parsing.excess(line, max_values=self.calling.max_values, rank=rank)) is not None:
            raise AnswerTooLargeError(excess)
        return await parsing.run(partial(work, line), rank=rank)

    def too_large(self) -> AnswerTooLargeError:
        """What is told of a line that was not kept."""
        return AnswerTooLargeError(f"more than {self.max_line_bytes} bytes")


async def listed(
    page_after: Callable[[str], Awaitable[Mapping[str, Any]]], info_in: Callable[[Any], BatchInfo], *, since_ms: int
) -> AsyncIterator[BatchInfo]:
    """`Batches.list_since` over pages. `page_after`: the page that follows a batch's id; with "", the first one."""
    after = ""
    for _ in range(PAGES):
        page = await page_after(after)
        found = page.get("data")
        for each in found if isinstance(found, list) else ():
            if (info := info_in(each)).created_ms < since_ms:
                return
            yield info
        last_id = page.get("last_id")
        if page.get("has_more") is not True or not isinstance(last_id, str):
            return
        after = last_id


def too_large_line(custom_id: str) -> ResultLine:
    """In place of a line that was not kept."""
    line = json.dumps({"custom_id": custom_id, "result": {"type": "too_large"}}).encode()
    return ResultLine(custom_id=custom_id, kind="errored", line=line)


def object_in(body: bytes) -> dict[str, Any] | None:
    """None if it is no JSON object."""
    try:
        found = from_json(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def parsed(body: bytes) -> dict[str, Any]:
    """Raises `TransientError` if it is no JSON object."""
    if (found := object_in(body)) is None:
        raise TransientError(f"the answer ({len(body)} bytes) is no JSON object", type="broken_answer")
    return found
