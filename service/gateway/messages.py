"""Answers `POST /v1/messages`: handles one call, from its body to the last byte of its answer."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass

from aiohttp import web

from lanekeeper import Client, Final, Part
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import LanekeeperError
from service.config.gateway_section import GatewayKey
from service.gateway.answers import Answers
from service.gateway.bodies import Bodies
from service.gateway.call_reader import request_id_of
from service.gateway.error_answers import ABOUT_REQUEST
from service.gateway.problems import ApiError, api_error_of
from service.gateway.streams import PING, Forwarding, error_event, events_of
from service.gateway.writing import event_stream, send_pieces
from service.side_tasks import beside

REPLY_HEADERS_SENT = (n.LANE_NAME, n.MODEL, n.PROVIDER, n.ATTEMPT, n.WAIT_MS, n.RUN_MS, n.WAIT_FROM, n.REPLAYED)
"""The headers of a worker's reply that the gateway copies into its HTTP answer."""


@dataclass(slots=True)
class Messages:
    """Answers `POST /v1/messages`: publishes each call as a request to its lane, waits for the answer, and sends it to
    the HTTP client, whole or as a stream."""

    client: Client
    _: KW_ONLY
    bodies: Bodies
    answers: Answers
    ping_every_s: float

    async def answer(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Answer one call. If the HTTP client disconnects, aiohttp cancels this coroutine, and `Client` then cancels
        the request. Raises ApiError, LanekeeperError."""
        request_id, chose_id = request_id_of(request.headers)
        request[ABOUT_REQUEST] = request_id
        try:
            async with self.bodies.checked_call(request, caller, request_id=request_id, chose_id=chose_id) as call:
                if not call.stream:
                    final = await self.client.request(call.body, key=call.key, timeout_s=call.timeout_s, **call.options)
                    return await self._whole(request, final, request_id)
                replies = self.client.stream(call.body, key=call.key, timeout_s=call.timeout_s, **call.options)
                async with aclosing(replies):
                    return await self._streamed(request, replies, request_id, chose_id=chose_id)
        except LanekeeperError as error:
            raise api_error_of(error, chose_id=chose_id) from error

    async def _whole(self, request: web.Request, final: Final, request_id: str) -> web.StreamResponse:
        headers = {name: _text(final.headers[name]) for name in REPLY_HEADERS_SENT if name in final.headers}
        headers |= {"content-type": "application/json", "cache-control": "no-store", "request-id": request_id}
        if (kept := final.kept) is None:
            return web.Response(body=final.body, headers=headers)
        async with self.answers.fetched(kept) as answer:
            return await send_pieces(request, answer.pieces(), size=answer.size, headers=headers)

    async def _streamed(
        self, request: web.Request, replies: AsyncGenerator[Part | Final, None], request_id: str, *, chose_id: bool
    ) -> web.StreamResponse:
        writing = event_stream(request, request_id)
        forwarding = Forwarding()
        async with beside(writing.pings(PING, every_s=self.ping_every_s), name=f"pings {request_id}"):
            try:
                async for reply in replies:
                    if isinstance(reply, Part):
                        await writing.write(forwarding.part(reply))
                    elif (end := forwarding.end()) is not None:
                        await writing.write(end)
                    elif (kept := reply.kept) is None:
                        await writing.write(b"".join(events_of(reply.message)))
                    else:
                        async with self.answers.converted(kept, lambda body: events_of(json.loads(body))) as answer:
                            await writing.write_all(answer.pieces())
            except ConnectionError:
                return writing.response  # the caller then closes `replies`, which cancels the request
            except (ApiError, LanekeeperError) as error:
                if not writing.has_begun:
                    raise
                await writing.write(error_event(api_error_of(error, chose_id=chose_id), request_id))
        return await writing.end()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
