"""`POST /v1/messages`: one call, from its body to the last byte of its answer."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial

from aiohttp import web

from lanekeeper import Client, Final, Part
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from service.config.gateway_section import GatewayKey
from service.gateway.asking import Asked, Reading, request_id_of
from service.gateway.bodies import Bodies
from service.gateway.problems import ApiError, of_error, of_problem
from service.gateway.room import Room
from service.gateway.streams import PING, Forwarding, error_event
from service.side_tasks import beside

EVENT_STREAM = "text/event-stream; charset=utf-8"
WRITE_WITHIN_S = 30.0
"""A client that reads nothing for this long has gone."""
TOLD = (n.LANE_NAME, n.MODEL, n.PROVIDER, n.ATTEMPT, n.WAIT_MS, n.RUN_MS, n.WAIT_FROM, n.REPLAYED)
"""Headers of the reply that the client gets."""


class Messages:
    """Publishes each call to its lane and sends the answer."""

    def __init__(self, client: Client, *, reading: Reading, room: Room, bodies: Bodies, ping_every_s: float) -> None:
        self._client = client
        self._reading = reading
        self._room = room
        self._bodies = bodies
        self._ping_every_s = ping_every_s

    async def answer(self, request: web.BaseRequest, caller: GatewayKey) -> web.StreamResponse:
        """If the client goes away, aiohttp cancels this, and `Client` cancels the request. Raises ApiError."""
        try:
            request_id, chose_id = request_id_of(request.headers)
        except RequestProblem as problem:
            raise of_problem(problem, chose_id=True) from None
        try:
            read = partial(self._reading.read, request.headers, caller=caller, request_id=request_id, chose_id=chose_id)
            with self._room.taken(self._bodies.memory_of(request)):
                async with self._bodies.asked(request, read) as asked:
                    if not asked.stream:
                        return _whole(await self._final(asked), request_id)
                    replies = self._client.stream(asked.body, key=asked.key, timeout_s=asked.timeout_s, **asked.options)
                    async with aclosing(replies):
                        return await self._streamed(request, replies, request_id, chose_id=chose_id)
        except ApiError as error:
            return error.response(request_id)
        except LanekeeperError as error:
            return of_error(error, chose_id=chose_id).response(request_id)

    async def _final(self, asked: Asked) -> Final:
        return await self._client.request(asked.body, key=asked.key, timeout_s=asked.timeout_s, **asked.options)

    async def _streamed(
        self,
        request: web.BaseRequest,
        replies: AsyncGenerator[Part | Final, None],
        request_id: str,
        *,
        chose_id: bool,
    ) -> web.StreamResponse:
        writing = Writing(request, request_id)
        forwarding = Forwarding()
        async with beside(writing.pings(every_s=self._ping_every_s), name=f"pings {request_id}"):
            try:
                async for reply in replies:
                    if isinstance(reply, Part):
                        await writing.write(forwarding.part(reply))
                    else:
                        await writing.write(forwarding.final(reply))
            except ConnectionError:
                return writing.response  # leaving its replies unread cancels the request
            except (ApiError, LanekeeperError) as error:
                told = error if isinstance(error, ApiError) else of_error(error, chose_id=chose_id)
                if not writing.has_begun:
                    raise told from error
                await writing.write(error_event(told, request_id))
        return await writing.end()


class Writing:
    """The response of a stream. Its status goes with the first bytes; an error before them has its own status."""

    def __init__(self, request: web.BaseRequest, request_id: str) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={
                "content-type": EVENT_STREAM,
                "cache-control": "no-store",
                "x-accel-buffering": "no",
                "request-id": request_id,
            }
        )
        self._one = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def write(self, data: bytes) -> None:
        """Raises ConnectionError if the client has gone, or reads nothing."""
        if not data:
            return
        self._last = self._loop.time()
        try:
            async with asyncio.timeout(WRITE_WITHIN_S), self._one:
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                await self.response.write(data)
        except TimeoutError:
            if (transport := self._request.transport) is not None:
                transport.abort()
            raise ConnectionResetError("the client reads nothing") from None

    async def pings(self, *, every_s: float, ping: bytes = PING) -> None:
        """Write a ping whenever nothing was written for that long."""
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(self._last + every_s - self._loop.time())
                if self._loop.time() >= self._last + every_s:
                    await self.write(ping)

    async def end(self) -> web.StreamResponse:
        await self.response.write_eof()
        return self.response


def _whole(final: Final, request_id: str) -> web.Response:
    told = {name: _text(final.headers[name]) for name in TOLD if name in final.headers}
    return web.Response(body=final.body, headers={**told, "content-type": "application/json", "request-id": request_id})


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
