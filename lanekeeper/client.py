"""The Python client of Lanekeeper. It publishes requests, waits for answers or yields their parts, cancels requests and
fetches results.

async with Client("amqp://guest:guest@localhost:5672/") as client:
    reply = await client.request({"prompt": "Name three rivers."}, key="critical.docs.example")
    print(reply.text)
    id = await client.publish({"prompt": "Name all rivers."}, key="batch.docs.example")
    later = await client.result(id, wait_s=600)
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, BinaryIO, Self, Unpack

from lanekeeper.abandoned import Abandoned
from lanekeeper.contract import names as n
from lanekeeper.contract.names import Names
from lanekeeper.errors import Cancelled, no_answer
from lanekeeper.options import Options, bound_s, message_of
from lanekeeper.replies import Final, Part
from lanekeeper.telemetry.tracing import Tracing
from lanekeeper.transport import OutgoingRequest, Transport, time_in

if TYPE_CHECKING:
    from lanekeeper.amqp.depth import Depth
    from lanekeeper.bodies import BodyStore

Body = Mapping[str, Any] | bytes | BinaryIO
"""The body of a request: a mapping, JSON text as bytes, or an open binary file of JSON text. If a file is copied to the
store for large bodies, it is read in pieces, so that it is never in memory as a whole."""
PUBLISH_WITHIN_S = 30.0
"""The default time limit, in seconds, for publishing one request, including all repetitions."""
FULL_WITHIN_S = 2.0
"""For how many seconds, by default, a client tries to publish to a lane whose queue is full. The time is short because
a full queue seldom has room soon."""


class Client:
    """Publishes requests and receives their replies: over a connection to RabbitMQ (`over_amqp.py`), which is opened
    again when it is lost, or by calls to Lanekeeper's HTTP gateway (`over_http.py`), which are repeated while the
    gateway cannot be reached."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        names: Names | None = None,
        ssl_context: ssl.SSLContext | None = None,
        tracing: Tracing | None = None,
        publish_within_s: float = PUBLISH_WITHIN_S,
        absent_within_s: float | None = None,
        cancel_abandoned: bool = True,
        identified: bool = False,
        bodies: "BodyStore | str | None" = None,
        fetches_answers: bool = True,
    ) -> None:
        """`url`: `amqp(s)://…` of the broker, or `http(s)://…` of a gateway. `api_key`: the key for the gateway.

        `publish_within_s`: for how many seconds the client tries to publish a request. `absent_within_s`: a shorter
        time limit for the case that the broker or gateway cannot be reached; None: no shorter limit.

        `cancel_abandoned`: if the caller of a request is cancelled (`wait_for`, a task group, Ctrl-C) or leaves its
        stream early, the request is cancelled too. If `cancel_abandoned` is false, the request continues, and its
        result can be fetched later.

        The following parameters are used only over AMQP; a gateway has its own settings for them:

        `names`: the names of the exchanges and queues. `identified`: whether every message has the property `user_id`,
        the connection's user, which the broker checks. Then no other user can fetch or cancel these requests. Workers
        may be set to refuse messages without `user_id` (docs/production.md).

        `bodies`: the store for bodies over 1 MiB, a folder or bucket as a URL (`file:///…`, `s3://…`). The message then
        contains only the body's address, and the workers fetch the body (`LANEKEEPER_BODIES__URL` or `…__ALLOW`).
        Without `bodies`, a body may have at most 1 MiB. Large answers, which workers put into the same store, are
        fetched and checked. If `fetches_answers` is false, they are not fetched, and `Final.kept` has their address.

        Raises ValueError if a gateway cannot have this URL, or if `api_key` is given for a broker."""
        tracing = tracing or Tracing()
        # only the library that the URL needs is imported
        if url.lstrip().lower().startswith(("http://", "https://")):
            from lanekeeper.over_http import OverHttp

            self._transport: Transport = OverHttp(
                url.strip(), api_key=api_key, ssl_context=ssl_context, tracing=tracing
            )
        elif api_key is not None:
            raise ValueError(
                "api_key: it is for the http(s):// address of a gateway; a broker's URL has user and password"
            )
        else:
            from lanekeeper.large_bodies import LargeBodies
            from lanekeeper.over_amqp import OverAmqp

            large = LargeBodies(bodies, fetches=fetches_answers)
            self._transport = OverAmqp(
                url, names=names or Names(), ssl_context=ssl_context, tracing=tracing, bodies=large
            )
        self._publish_within_s = publish_within_s
        self._absent_within_s = absent_within_s
        self._own = self._transport.user or None if identified else None
        self._abandoned = Abandoned(self._transport, is_on=cancel_abandoned)

    async def __aenter__(self) -> Self:
        """Connect to the broker or gateway. Raises BrokerUnreachable, AccessRefused."""
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._abandoned.finish()
        finally:
            await self._transport.__aexit__()

    async def publish(self, body: Body, *, key: str, **options: Unpack[Options]) -> str:
        """Publish without waiting for the answer. Returns the request's id, with which `result` fetches the answer.

        Raises PublishRefused (the lane was full for all of `full_within_s`), BrokerBlocked, BrokerUnreachable,
        ConfirmUnknown, AccessRefused, TopologyMismatch, MessageTooLarge, and Problem for a wrong priority.
        """
        outgoing = self._outgoing(body, key, options, stream=False)
        await self._transport.publish(outgoing)
        return outgoing.id

    async def request(
        self, body: Body, *, key: str, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Final:
        """Publish and wait for the answer.

        Raises the errors of `publish`, and Problem (the request failed), NoReply (after `timeout_s`) and ReplyLost (the
        connection was lost, and the result could not be fetched afterwards). For an answer in the store for large
        bodies: BodiesUnavailable (the store cannot be used), BodyError (the answer is missing, or its digest is wrong).

        If this call is cancelled, the request is cancelled too (see `cancel_abandoned`). The cancellation is then
        stored as the outcome of this request id, so a new try needs a new id.

        If the connection is lost while the client waits, it reconnects and fetches the result by the request's id. If
        the user may not fetch results, the client publishes the request again instead. It also does so if the caller
        chose the id, because only a publish detects that the id was used before with another body.
        """
        outgoing = self._outgoing(body, key, options, stream=False, timeout_s=timeout_s)
        try:
            return await self._transport.answer(outgoing)
        except TimeoutError:
            raise no_answer(outgoing.id, outgoing.timeout_s) from None
        except asyncio.CancelledError:
            self._abandon(outgoing, options)
            raise

    async def stream(
        self, body: Body, *, key: str, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Part | Final, None]:
        """Publish, yield the parts of the answer as they arrive, and at last the whole answer.

        If the caller leaves before the end (`break`, `aclose`, cancellation), the request is cancelled (see
        `cancel_abandoned`).

        Raises the errors of `publish`, and Problem, NoReply (after `timeout_s`), and ReplyLost: parts are missing,
        because the connection was lost or the caller reads too slowly. `result` can fetch the whole answer.
        """
        outgoing = self._outgoing(body, key, options, stream=True, timeout_s=timeout_s)
        reply: Part | Final | None = None
        try:
            async with aclosing(self._transport.replies(outgoing)) as replies:
                async for reply in replies:
                    yield reply
        except TimeoutError:
            raise no_answer(outgoing.id, outgoing.timeout_s) from None
        except (asyncio.CancelledError, GeneratorExit):
            if not isinstance(reply, Final):
                self._abandon(outgoing, options)
            raise

    async def cancel(self, id: str, *, tenant: str | None = None) -> Cancelled:
        """Cancel a request, whether it waits or runs. Returns how far the cancellation got: a word that `Cancelled`
        (errors.py) explains.

        Raises ControlRefused, NoReply (no worker runs; the next worker that starts records the cancellation),
        AccessRefused, TopologyMismatch, BrokerUnreachable.
        """
        return await self._transport.cancel(id, tenant=tenant or self._own)

    async def result(self, id: str, *, tenant: str | None = None, wait_s: float = 0) -> Final:
        """Fetch the final reply to a request. If the request has not ended, wait for up to `wait_s` seconds until it
        has.

        Raises Problem if the request ended in an error, NotEnded, ControlRefused, NoReply (no worker runs),
        AccessRefused, TopologyMismatch, BrokerUnreachable.
        """
        return await self._transport.result(id, tenant=tenant or self._own, end=time_in(wait_s))

    async def depth(self, lane: str) -> "Depth | None":
        """How many messages wait in a lane's intake queue (that of its new requests), and how many consumers the queue
        has. Returns None if this cannot be read, for example because the user has no right to the queue."""
        return await self._transport.depth(lane)

    @property
    def trouble(self) -> str | None:
        """The reason why nothing can be published at present; None if publishing is possible."""
        return self._transport.trouble

    def _outgoing(
        self, body: Body, key: str, options: Options, *, stream: bool, timeout_s: float | None = None
    ) -> OutgoingRequest:
        if self._own is not None:
            options.setdefault("tenant", self._own)
        content: BinaryIO | None = None
        if not isinstance(body, (Mapping, bytes)):
            if not hasattr(body, "read"):
                raise TypeError(f"body: found {type(body).__name__}, allowed are an object, bytes, and an open file")
            content, body = body, b""
        message = message_of(body, options, stream=stream, user=self._transport.user)
        timeout_s = bound_s(message) if timeout_s is None else timeout_s
        full_within_s = options.get("full_within_s")
        within_s = max(self._publish_within_s, full_within_s or 0)
        if isinstance(deadline_ms := message.headers.get(n.DEADLINE_MS), int):
            # a request published after its deadline would only be answered with deadline_exceeded
            within_s = min(within_s, deadline_ms / 1000)
        return OutgoingRequest(
            message=message,
            content=content,
            key=key,
            tenant=options.get("tenant"),
            chose_id="message_id" in options,
            publish_within_s=within_s,
            absent_within_s=self._absent_within_s,
            full_within_s=min(FULL_WITHIN_S if full_within_s is None else full_within_s, within_s),
            timeout_s=timeout_s,
            end=time_in(timeout_s),
        )

    def _abandon(self, outgoing: OutgoingRequest, options: Options) -> None:
        """Cancel a request whose caller does not wait for the answer any more."""
        if options.get("cancel_abandoned", True):
            self._abandoned.cancel(outgoing.id, tenant=outgoing.tenant)
