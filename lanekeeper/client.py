"""The Python client: publishes requests, waits for answers or streams their parts, cancels requests, fetches results.

async with Client("amqp://guest:guest@localhost:5672/") as client:
    reply = await client.request({"prompt": "Name three rivers."}, key="critical.docs.example")
    print(reply.text)
    id = await client.publish({"prompt": "Name all rivers."}, key="batch.docs.example")
    later = await client.result(id, wait_s=600)
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any, BinaryIO, Self, Unpack

from lanekeeper.abandoned import Abandoned
from lanekeeper.contract import names as n
from lanekeeper.contract.names import Names
from lanekeeper.errors import Cancelled, no_answer
from lanekeeper.options import Options, bound_s, message_of
from lanekeeper.replies import Final, Part
from lanekeeper.telemetry.tracing import Tracing
from lanekeeper.transport import Asked, Transport, moment

if TYPE_CHECKING:
    from lanekeeper.amqp.depth import Depth
    from lanekeeper.bodies import BodyStore

Body = Mapping[str, Any] | bytes | BinaryIO
"""A body as an object, as its JSON, or as an open file of its JSON, which is read in pieces where it is kept beside the
broker."""
PUBLISH_WITHIN_S = 30.0
FULL_WITHIN_S = 2.0
"""A full lane seldom has room a moment later, so the caller gets the error after this time."""


class Client:
    """Publishes requests and receives their replies: over a connection to the broker (`over_amqp.py`), or by calls to a
    gateway (`over_http.py`). What is lost is opened or called again."""

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
    ) -> None:
        """`url`: `amqp(s)://…` of the broker, or `http(s)://…` of a gateway, with `api_key`.

        `absent_within_s`: how long a request waits for a broker or gateway that is away; None: `publish_within_s`.

        `cancel_abandoned`: if the caller of a request is cancelled (`wait_for`, a task group, Ctrl-C) or leaves its
        stream early, the request is cancelled too. False: the request continues, and its result can be fetched.

        `names`, `identified`: only over AMQP, because a gateway has them in its settings and keys. `identified`: every
        message carries `user_id`, the connection's user, which the broker checks. Then no other user can fetch or
        cancel these requests. Workers may require it (docs/production.md).

        `bodies`: only over AMQP, because a gateway has a store of its own. Bodies over 1 MiB are kept there, and the
        message has their address: a folder or bucket as a URL (`file:///…`, `s3://…`) from which the workers fetch
        (`LANEKEEPER_BODIES__URL` or `…__ALLOW`). Without it, the largest body is 1 MiB.

        Raises ValueError for a URL that cannot be a gateway's, and an `api_key` for a broker."""
        self._transport = _transport(url, api_key, names, ssl_context, tracing or Tracing(), bodies)
        self._publish_within_s = publish_within_s
        self._absent_within_s = absent_within_s
        self._own = self._transport.user or None if identified else None
        self._abandoned = Abandoned(self._transport, is_on=cancel_abandoned)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Connect. Raises BrokerUnreachable, AccessRefused."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._transport)
            stack.push_async_callback(self._abandoned.finish)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def publish(self, body: Body, *, key: str, **options: Unpack[Options]) -> str:
        """Publish without waiting for the answer. Returns the request's id, with which `result` fetches the answer.

        Raises PublishRefused (the lane is full, for `full_within_s`), BrokerBlocked, BrokerUnreachable, ConfirmUnknown,
        AccessRefused, TopologyMismatch, MessageTooLarge, and Problem for a wrong priority.
        """
        asked = self._asked(body, key, options, stream=False)
        await self._transport.publish(asked)
        return asked.id

    async def request(
        self,
        body: Body,
        *,
        key: str,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Final:
        """Publish and wait for the answer. Raises what `publish` raises, and Problem, NoReply (after `timeout_s`),
        ReplyLost.

        If this call is cancelled, the request is cancelled too (see `cancel_abandoned`). Its id then keeps this
        outcome: use a new id to try again.

        If the connection is lost meanwhile, the client reconnects and fetches the result by the request's id. It
        publishes the request again instead if the user may not fetch results, or if the caller chose the id: that
        also detects an id used before with another body. ReplyLost means that the result could not be fetched.
        """
        asked = self._asked(body, key, options, stream=False, timeout_s=timeout_s)
        try:
            return await self._transport.answer(asked)
        except TimeoutError:
            raise no_answer(asked.id, asked.timeout_s) from None
        except asyncio.CancelledError:
            self._abandon(asked, options)
            raise

    async def stream(
        self,
        body: Body,
        *,
        key: str,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Part | Final, None]:
        """Publish and yield the parts of the answer as they come, then the whole answer.

        If the caller leaves before the end (`break`, `aclose`, cancellation), the request is cancelled (see
        `cancel_abandoned`).

        Raises what `publish` raises, and Problem, NoReply (after `timeout_s`), and ReplyLost if the connection is lost
        or the caller reads much too slowly: parts are then missing, but `result` can fetch the whole answer.
        """
        asked = self._asked(body, key, options, stream=True, timeout_s=timeout_s)
        reply: Part | Final | None = None
        try:
            async with aclosing(self._transport.replies(asked)) as replies:
                async for reply in replies:
                    yield reply
        except TimeoutError:
            raise no_answer(asked.id, asked.timeout_s) from None
        except (asyncio.CancelledError, GeneratorExit):
            if not isinstance(reply, Final):
                self._abandon(asked, options)
            raise

    async def cancel(self, id: str, *, tenant: str | None = None) -> Cancelled:
        """Cancel a request wherever it is. Returns `recorded`, `told`, `ended` or `unseen`; `Cancelled` explains them.

        Raises ControlRefused, NoReply (no worker runs; the next one to start records the cancellation), AccessRefused,
        TopologyMismatch, BrokerUnreachable.
        """
        return await self._transport.cancel(id, tenant=tenant or self._own)

    async def result(self, id: str, *, tenant: str | None = None, wait_s: float = 0) -> Final:
        """Fetch the final reply to a request. While there is none, ask repeatedly for up to `wait_s`.

        Raises Problem if the request ended in an error, NotEnded, ControlRefused, NoReply (no worker runs),
        AccessRefused, TopologyMismatch, BrokerUnreachable.
        """
        return await self._transport.result(id, tenant=tenant or self._own, end=moment(wait_s))

    async def depth(self, lane: str) -> "Depth | None":
        """How many messages wait in a lane's intake, and how many consumers it has; None if that cannot be found out,
        for example because the user has no right to the queue."""
        return await self._transport.depth(lane)

    @property
    def trouble(self) -> str | None:
        """Why nothing can be published at present; None if it can."""
        return self._transport.trouble

    def _asked(
        self,
        body: Body,
        key: str,
        options: Options,
        *,
        stream: bool,
        timeout_s: float | None = None,
    ) -> Asked:
        if self._own is not None:
            options.setdefault("tenant", self._own)
        content = None if isinstance(body, (Mapping, bytes)) else body
        message = message_of(
            body if isinstance(body, (Mapping, bytes)) else b"", options, stream=stream, user=self._transport.user
        )
        timeout_s = bound_s(message) if timeout_s is None else timeout_s
        full_within_s = options.get("full_within_s")
        within_s = max(self._publish_within_s, full_within_s or 0)
        if isinstance(deadline_ms := message.headers.get(n.DEADLINE_MS), int):
            # published after its deadline, the request would only be answered deadline_exceeded
            within_s = min(within_s, deadline_ms / 1000)
        return Asked(
            message=message,
            content=content,
            key=key,
            tenant=options.get("tenant"),
            chose_id="message_id" in options,
            publish_within_s=within_s,
            absent_within_s=self._absent_within_s,
            full_within_s=min(FULL_WITHIN_S if full_within_s is None else full_within_s, within_s),
            timeout_s=timeout_s,
            end=moment(timeout_s),
        )

    def _abandon(self, asked: Asked, options: Options) -> None:
        """Cancel a request whose caller no longer waits."""
        if options.get("cancel_abandoned", True):
            self._abandoned.cancel(asked.id, tenant=asked.tenant)


def _transport(
    url: str,
    api_key: str | None,
    names: Names | None,
    ssl_context: ssl.SSLContext | None,
    tracing: Tracing,
    bodies: "BodyStore | str | None",
) -> Transport:
    """Only the library that the URL needs is imported."""
    if url.lstrip().lower().startswith(("http://", "https://")):
        from lanekeeper.over_http import OverHttp

        return OverHttp(url.strip(), api_key=api_key, ssl_context=ssl_context, tracing=tracing)
    if api_key is not None:
        raise ValueError("api_key: it is for the http(s):// address of a gateway; a broker's URL has user and password")
    from lanekeeper.large_bodies import LargeBodies
    from lanekeeper.over_amqp import OverAmqp

    return OverAmqp(url, names=names or Names(), ssl_context=ssl_context, tracing=tracing, bodies=LargeBodies(bodies))
