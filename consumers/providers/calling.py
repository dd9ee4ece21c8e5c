"""Makes one call of a provider, in any dialect: sends the request's body, and reads the answer, whole or as a stream.

How the request gets to the provider (address, key, headers) is the provider's; what its answer means is the dialect's.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import httpx2

from consumers.decoding import Parsing
from consumers.dialects.answers import Answer, OnEvent
from consumers.dialects.base import Dialect, StreamedAnswer
from consumers.failures import TIMEOUT, AnswerTooLargeError, ProviderError, TransientError
from consumers.limits.base import CallInProgress
from consumers.providers.errors import (
    NETWORK_ERRORS,
    from_event,
    from_fields,
    plain,
    refuse_html,
    request_id_in,
    translate_errors,
)
from consumers.providers.streams import EventSplitter, Splitter, bounded, from_json, parse_event, to_json
from consumers.providers.transport import SLICE_BYTES
from topology.codec import bounds
from topology.codec.decoding import Request

_LEAST_EVENTS: Final = 4
_OVERHEAD: Final = 4
"""A stream may be this many times as large as the largest accepted answer: each token may come in an event of some 130
bytes."""
_LENGTH: Final = "content-length"
_HINT: Final = f" ({bounds.ANSWER_SETTINGS})"
DRAIN_S: Final = 0.1
Send = Callable[[bytes], Awaitable[httpx2.Response]]
"""Sends a body to the provider. Raises ProviderError if the response is an error."""


@dataclass(slots=True, eq=False, repr=False, kw_only=True)  # it knows the key
class Calling:
    """How the answers of one provider are read. `secret`: the API key, which is removed from error texts."""

    name: str
    secret: str
    max_answer_bytes: int = bounds.ANSWER_BYTES
    max_values: int = bounds.VALUES
    parsing: Parsing = field(default_factory=Parsing)

    async def call(
        self,
        request: Request,
        dialect: Dialect,
        send: Send,
        *,
        timeout_s: float,
        parts: OnEvent | None,
        in_progress: CallInProgress | None = None,
        splitter: Callable[[int], Splitter] | None = None,
    ) -> Answer:
        """`splitter`: of a provider whose streams are not Server-Sent Events."""
        most = dialect.streams_above
        streamed = parts is not None or (most is not None and request.max_tokens > most)
        urgent = request.rank
        asked = await self.parsing.run(partial(dialect.body, request, streamed), rank=(urgent, len(request.body)))
        headers: Mapping[str, str] = {}
        rate = None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                response = await send(asked)
                headers = plain(response.headers)
                rate = dialect.read_rate(headers, time.time())
                try:
                    refuse_html(response.status_code, headers)
                    if streamed:
                        collected = dialect.new_stream(
                            request, max_bytes=self.max_answer_bytes, max_values=self.max_values
                        )
                        if in_progress is not None:
                            in_progress.used = collected.used
                        most_bytes = self.max_answer_bytes // _LEAST_EVENTS
                        events = EventSplitter(most_bytes, keeps=dialect.is_event)
                        await self._read_stream(
                            response.aiter_bytes() if "content-encoding" in headers else response.aiter_raw(),
                            collected,
                            dialect,
                            events if splitter is None else splitter(most_bytes),
                            urgent=urgent,
                            limit=limit,
                            pause_s=max(timeout_s, request.call_s),
                            parts=parts,
                        )
                        message = await self.parsing.run(collected.message, rank=(urgent, collected.size))
                        body = await self.parsing.run(partial(to_json, message), rank=(urgent, collected.size))
                    else:
                        body = await self._read_whole(response, headers)
                        message = await self._parse(body, headers.get("content-type", ""), urgent=urgent)
                        if (error := dialect.error_within(message)) is not None:
                            raise from_fields(error, dialect, secret=self.secret, data=body)
                    return dialect.read_answer(
                        message, body, provider=self.name, request_id=request_id_in(headers), rate=rate
                    )
                finally:
                    with suppress(*NETWORK_ERRORS):
                        await response.aclose()
        except TimeoutError as error:
            if not limit.expired():
                raise
            what = "no event" if streamed else "no whole answer"
            raise TransientError(f"{what} from the provider within {timeout_s:g} s", type=TIMEOUT) from error
        except ProviderError as error:
            if headers:
                error.rate, error.request_id = rate, request_id_in(headers)
            raise

    async def _parse(self, body: bytes, content_type: str, *, urgent: int) -> dict[str, Any]:
        excess = await self.parsing.excess(body, max_values=self.max_values, rank=(urgent, len(body)))
        if excess is not None:
            raise AnswerTooLargeError(excess)
        return await self.parsing.run(partial(parse_message, body, content_type), rank=(urgent, len(body)))

    async def _read_whole(self, response: httpx2.Response, headers: Mapping[str, str]) -> bytes:
        announced = headers.get(_LENGTH, "")
        if announced.isdigit() and len(announced) > len(str(self.max_answer_bytes)):
            raise AnswerTooLargeError(f"more than {self.max_answer_bytes} bytes{_HINT}")
        with translate_errors(secret=self.secret):
            body = b"".join(
                [chunk async for chunk in bounded(response.aiter_bytes(), self.max_answer_bytes, hint=_HINT)]
            )
        received = response.num_bytes_downloaded
        if announced.isdigit() and int(announced) != received:
            raise TransientError(f"the answer has {received} of its {announced} bytes", type="truncated")
        return body

    async def _read_stream(
        self,
        body_pieces: AsyncIterable[bytes],
        collected: StreamedAnswer,
        dialect: Dialect,
        splitter: Splitter,
        *,
        urgent: int,
        limit: asyncio.Timeout,
        pause_s: float,
        parts: OnEvent | None,
    ) -> None:
        """Pass each event on to `parts`, and add it to `collected`. The time that `parts` and our own parsing take does
        not count towards `limit`, the time limit for the first token. `pause_s`: that for each pause after it."""
        clock = asyncio.get_running_loop().time
        pauses = _Pauses(limit, longest_s=pause_s)
        found = _slices(body_pieces, _OVERHEAD * self.max_answer_bytes, secret=self.secret)
        async with aclosing(found) as slices, aclosing(pauses):
            is_complete, flows, until_s, since_s = False, False, limit.when(), clock()
            while not is_complete:
                piece = await anext(slices, None)
                if piece is None:
                    missing = collected.end()
                    if parts is not None and missing is not None:
                        await parts(missing)
                    return
                came_s = clock()
                if flows:
                    pauses.end()
                else:
                    until_s = limit.when()
                    limit.reschedule(None)
                events = await self.parsing.run(partial(self._events, splitter, piece), rank=(urgent, len(piece)))
                for data, event in events:
                    if (error := dialect.error_within(event)) is not None:
                        raise from_event(error, dialect, secret=self.secret, data=data)
                    passed = collected.take(event, data)
                    flows = flows or dialect.content in data
                    if parts is not None and passed is not None:
                        await parts(passed)
                    if collected.is_complete:
                        break
                is_complete = collected.is_complete
                if flows or until_s is None:
                    since_s = clock() if events else since_s + clock() - came_s
                    pauses.begin(since_s)
                else:
                    limit.reschedule(until_s + clock() - came_s)
            limit.reschedule(None)
            await _drain(slices)

    def _events(self, splitter: Splitter, piece: bytes) -> list[tuple[bytes, dict[str, Any]]]:
        return [(data, parse_event(data, max_values=self.max_values)) for data in splitter.feed(piece)]


def parse_message(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object of an answer that was not streamed, or an empty dict. Raises `TransientError` if the body is not
    JSON."""
    try:
        message = from_json(body)
    except ValueError as error:
        kind = content_type[:50] or "no content type"
        raise TransientError(f"the answer ({kind}, {len(body)} bytes) is not JSON", type="broken_answer") from error
    return message if isinstance(message, dict) else {}


class _Pauses:
    """Lets the limit of a stream expire when its provider sends nothing for `longest_s`. One timer serves all pauses:
    to set one at each event takes longer than all else that is done with it."""

    def __init__(self, limit: asyncio.Timeout, *, longest_s: float) -> None:
        self._limit = limit
        self._longest_s = longest_s
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, since_s: float) -> None:
        self._since_s = since_s
        if self._timer is None:
            self._check()

    def end(self) -> None:
        self._since_s = None

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        end_s = (now_s if self._since_s is None else self._since_s) + self._longest_s
        if now_s < end_s:
            self._timer = loop.call_at(end_s, self._check)
        else:
            self._timer = None
            self._limit.reschedule(now_s)


async def _slices(body_pieces: AsyncIterable[bytes], most: int, *, secret: str) -> AsyncGenerator[bytes, None]:
    """Raises AnswerTooLargeError, and the errors of `translate_errors`."""
    size = 0
    with translate_errors(secret=secret):
        async for piece in body_pieces:
            size += len(piece)
            if size > most:
                raise AnswerTooLargeError(f"more than {most} bytes{_HINT}")
            for at in range(0, len(piece), SLICE_BYTES):
                yield piece[at : at + SLICE_BYTES]


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """So that the connection can be reused; the body should end right after `message_stop`."""
    with suppress(ProviderError, *NETWORK_ERRORS):
        async with asyncio.timeout(DRAIN_S):
            async for _ in chunks:
                pass
