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
import uuid
from collections.abc import AsyncGenerator, Awaitable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO, Self, Unpack, cast

from lanekeeper.contract import names as n
from lanekeeper.contract.identity import GROUP_AT_MOST, REQUEST_ID, is_request_id
from lanekeeper.contract.messages import Depth
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import AccessRefused, BrokerError, ClientMisused, InvalidArgument, InvalidUrl
from lanekeeper.groups import Found, Group
from lanekeeper.replies import Cancelled, ControlRefused, Final, Part, no_answer
from lanekeeper.requests import Json, Options, OutgoingRequest, bound_s, check_argument, ms_in, request_message, time_in
from lanekeeper.telemetry import logs, signals

if TYPE_CHECKING:
    from lanekeeper.bodies import BodyStore
    from lanekeeper.http import OverHttp
    from lanekeeper.over_amqp import OverAmqp
    from lanekeeper.telemetry.tracing import Tracing

Body = Json | BinaryIO
"""The body of a request: a mapping, JSON text as bytes, or an open binary file of JSON text. If a file is copied to the
store for large bodies, it is read in pieces, so that it is never in memory as a whole."""
PUBLISH_WITHIN_S = 30.0
FULL_WITHIN_S = 2.0
CANCEL_WITHIN_S = 3.0
PUBLISHED_AT_ONCE = 256


class Client:
    """Sends requests and receives their replies: over a connection to RabbitMQ, which is opened again when it is lost,
    or by calls to an HTTP gateway, which are repeated while it cannot be reached."""

    _transport: "OverHttp | OverAmqp"
    amqp: "OverAmqp | None" = None
    """How it reaches the workers over AMQP; None over HTTP."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        names: Names | None = None,
        ssl_context: ssl.SSLContext | None = None,
        tracing: "Tracing | None" = None,
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

        Raises InvalidUrl and InvalidArgument."""
        tracing = _global_tracing() if tracing is None else tracing
        scheme = url.strip().partition("://")[0].lower() if isinstance(url, str) and "://" in url else ""
        if scheme not in ("http", "https", "amqp", "amqps"):
            raise InvalidUrl(
                f"url: found {f'the scheme {scheme[:20]}://' if scheme else 'no scheme'}, allowed are amqp:// and "
                "amqps:// (a broker), http:// and https:// (a gateway)"
            )
        check_argument("publish_within_s", publish_within_s, int, float)
        if absent_within_s is not None:
            check_argument("absent_within_s", absent_within_s, int, float)
        if api_key is not None:
            check_argument("api_key", api_key, str)
        # only the library that the URL needs is imported
        if scheme in ("http", "https"):
            from lanekeeper.http import OverHttp

            self._transport = OverHttp(url.strip(), api_key=api_key, ssl_context=ssl_context, tracing=tracing)
        elif api_key is not None:
            raise InvalidArgument(
                "api_key: it is for the http(s):// address of a gateway; a broker's URL has user and password"
            )
        else:
            from lanekeeper.over_amqp import OverAmqp

            self._transport = self.amqp = OverAmqp(
                url, names=names or Names(), ssl_context=ssl_context, tracing=tracing, bodies=bodies,
                fetches_answers=fetches_answers,
            )  # fmt: skip
        self._publish_within_s = publish_within_s
        self._absent_within_s = absent_within_s
        self._own = self._transport.user or None if identified else None
        self._cancels_abandoned = cancel_abandoned
        self._cancelling: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop = None
        try:
            if self._cancelling:
                await asyncio.wait(self._cancelling, timeout=CANCEL_WITHIN_S)
        finally:
            await self._transport.__aexit__()

    async def publish(self, body: Body, *, key: str, **options: Unpack[Options]) -> str:
        """Publish without waiting for the answer. Returns the request's id, with which `result` fetches the answer.

        Raises PublishRefused (the lane was full for all of `full_within_s`), BrokerBlocked, BrokerUnreachable,
        ConfirmUnknown, AccessRefused, TopologyMismatch, MessageTooLarge, ClientMisused, and Problem for a wrong
        priority. The `message_id` of the error is the request's id: published again under it, it is the same request.
        """
        outgoing = self._outgoing(body, key, options, stream=False)
        with _naming(outgoing):
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
        """
        outgoing = self._outgoing(body, key, options, stream=False, timeout_s=timeout_s)
        try:
            with _naming(outgoing):
                return await self._transport.answer(outgoing)
        except TimeoutError:
            raise no_answer(outgoing.id, outgoing.timeout_s) from None
        except asyncio.CancelledError:
            self.abandon(outgoing.id, options)
            raise

    async def stream(
        self, body: Body, *, key: str, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Part | Final, None]:
        """Publish, yield the parts of the answer as they arrive, and at last the whole answer.

        If the caller leaves before the end (`break`, `aclose`, cancellation), the request is cancelled (see
        `cancel_abandoned`).

        Raises the errors of `publish`, and Problem, NoReply (no part came for `timeout_s`), and ReplyLost: parts are
        missing, because the connection was lost or the caller reads too slowly. `result` can fetch the whole answer.
        """
        async with aclosing(self.streamed(body, key=key, timeout_s=timeout_s, **options)) as replies:
            async for came in replies:
                for reply in came:
                    yield reply

    async def streamed(
        self, body: Body, *, key: str, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Sequence[Part | Final], None]:
        """Like `stream`, but yields what has arrived together as one list."""
        outgoing = self._outgoing(body, key, options, stream=True, timeout_s=timeout_s)
        came: Sequence[Part | Final] = ()
        try:
            with _naming(outgoing):
                async with aclosing(self._transport.replies(outgoing)) as replies:
                    async for came in replies:
                        yield came
        except TimeoutError:
            raise no_answer(outgoing.id, outgoing.timeout_s) from None
        except (asyncio.CancelledError, GeneratorExit):
            if not (came and isinstance(came[-1], Final)):
                self.abandon(outgoing.id, options)
            raise

    async def cancel(self, id: str, *, tenant: str | None = None) -> Cancelled:
        """Cancel a request, whether it waits or runs. Returns how far that got (see `Cancelled`). Raises
        ControlRefused, NoReply (no worker runs; the next one records it), AccessRefused, TopologyMismatch,
        BrokerUnreachable."""
        self._check_open()
        _check_named(id, tenant)
        return await self._transport.cancel(id, tenant=tenant or self._own)

    async def result(self, id: str, *, tenant: str | None = None, wait_s: float = 0) -> Final:
        """Fetch the final reply; wait up to `wait_s` for it. Raises Problem if the request ended in an error, NotEnded,
        ControlRefused, NoReply (no worker runs), AccessRefused, TopologyMismatch, BrokerUnreachable."""
        self._check_open()
        _check_named(id, tenant)
        check_argument("wait_s", wait_s, int, float)
        return await self._transport.result(id, tenant=tenant or self._own, end=time_in(wait_s))

    async def results(self, ids: Sequence[str], *, tenant: str | None = None) -> Mapping[str, Found]:
        """Fetch many final replies by few messages: for each id its Final, its Problem, or a NotEnded that says how it
        stands. Raises ControlRefused, NoReply, AccessRefused, TopologyMismatch, BrokerUnreachable."""
        self._check_open()
        if isinstance(ids, (str, bytes)):
            raise InvalidArgument("ids: found one id, allowed is a list of them")
        check_argument("ids", ids, Collection)
        for id in ids:
            _check_named(id, tenant)
            if not is_request_id(id):
                raise InvalidArgument(f"ids: {REQUEST_ID}")
        return await self._transport.results(ids, tenant=tenant or self._own)

    async def publish_many(
        self,
        bodies: Mapping[str, Body] | Sequence[Body],
        *,
        key: str,
        group: str | None = None,
        **options: Unpack[Options],
    ) -> Group:
        """Publish many requests as one group. `bodies`: by their names, or a list, whose names are 0, 1, …: a request's
        id is `<group>.<name>`. `group`: the id of the group; without it, one is made. With `webhook`, its end is posted
        there.

        Raises the errors of `publish`. Then call it again with the same `group` and bodies: what was published already
        is not run twice.
        """
        if isinstance(bodies, (str, bytes)):
            raise InvalidArgument("bodies: found one body, allowed are several")
        check_argument("bodies", bodies, Collection)
        named = bodies if isinstance(bodies, Mapping) else {str(number): body for number, body in enumerate(bodies)}
        if not 1 <= len(named) <= GROUP_AT_MOST:
            raise InvalidArgument(f"bodies: found {len(named)}, allowed are 1 to {GROUP_AT_MOST}")
        id = uuid.uuid4().hex if group is None else group
        made = self.group(id, tenant=options.get("tenant"))
        wrong = next((name for name in named if not is_request_id(f"{id}.{name}")), None)
        if wrong is not None:
            raise InvalidArgument(f"bodies: the name {wrong!r:.200} makes no request's id: {REQUEST_ID}")
        given = options.get("headers") or {}
        check_argument("headers", given, Mapping)
        headers = {**given, n.GROUP: id, n.GROUP_SIZE: len(named)}
        waiting = iter(named.items())
        while some := list(islice(waiting, PUBLISHED_AT_ONCE)):
            publishing: list[Awaitable[str]] = []
            for name, body in some:
                each = Options(**options)
                each["headers"], each["message_id"] = headers, f"{id}.{name}"
                publishing.append(self.publish(body, key=key, **each))
            await asyncio.gather(*publishing)
        return made

    def group(self, id: str, *, tenant: str | None = None) -> Group:
        """A group of requests, to follow or cancel it."""
        self._check_open()
        _check_named(id, tenant)
        if not is_request_id(id):
            raise InvalidArgument(f"group: {REQUEST_ID}")
        return Group(id, self._transport, tenant or self._own)

    async def depth(self, lane: str) -> Depth | None:
        """How many requests wait in a lane's intake, and how many consumers it has; None if this cannot be read."""
        self._check_open()
        return await self._transport.depth(lane)

    @property
    def trouble(self) -> str | None:
        """Why nothing can be published at present; None if it can."""
        return self._transport.trouble

    def _check_open(self) -> None:
        if self._loop is None:
            raise ClientMisused("the client is not open: use it inside `async with Client(…) as client:`")
        if self._loop is not asyncio._get_running_loop():  # None in a thread without one
            raise ClientMisused("the client was opened in another event loop: open one in each event loop")

    def _outgoing(
        self, body: Body, key: str, options: Options, *, stream: bool, timeout_s: float | None = None
    ) -> OutgoingRequest:
        if self._own is not None:
            options.setdefault("tenant", self._own)
        check_argument("key", key, str)
        if timeout_s is not None:
            check_argument("timeout_s", timeout_s, int, float)
        content: BinaryIO | None = None
        any_json = n.PIPELINE in (options.get("headers") or {}) or any(
            options.get(name) is not None for name in ("handler", "pipeline")
        )
        if isinstance(body, (Mapping, bytes)) or (any_json and isinstance(body, (list, tuple, str))):
            given: Json = body
        elif hasattr(body, "read") and not hasattr(body, "encoding"):
            given, content = b"", cast(BinaryIO, body)
        else:
            raise InvalidArgument(
                f"body: found {type(body).__name__}, allowed are an object, bytes, and a file opened in binary mode; "
                "for a handler or a pipeline a list and a str as well"
            )
        message = request_message(given, options, stream=stream, user=self._transport.user)
        self._check_open()
        timeout_s = bound_s(message) if timeout_s is None else timeout_s
        full_within_s = options.get("full_within_s")
        within_s = max(self._publish_within_s, full_within_s or 0)
        if (deadline_ms := ms_in(message, n.DEADLINE_MS)) is not None:
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

    def abandon(self, id: str, options: Options) -> None:
        """Cancel a request in the background: a cancelled caller must not wait. Closing waits until it is sent."""
        if self._cancels_abandoned and options.get("cancel_abandoned", True):
            cancelling = self._send_cancellation(id, options.get("tenant", self._own))
            task = asyncio.create_task(cancelling, name=f"cancel {id}")
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)

    async def _send_cancellation(self, id: str, tenant: str | None) -> None:
        try:
            async with asyncio.timeout(CANCEL_WITHIN_S):
                await self._transport.send_cancellation(id, tenant=tenant, within_s=CANCEL_WITHIN_S)
        except AccessRefused as error:
            # a refusal closes the channel that other control messages share, so send no further cancellations
            self._cancels_abandoned = False
            logs.warning(
                signals.CANCELLATION_UNSENT, request=id, error=str(error), hint="its user needs the role client"
            )
        except (BrokerError, ClientMisused, ControlRefused, TimeoutError) as error:
            why = str(error) or f"not within {CANCEL_WITHIN_S:g} s"
            logs.warning(signals.CANCELLATION_UNSENT, request=id, error=why)


def _check_named(id: str, tenant: str | None) -> None:
    check_argument("id", id, str)
    if tenant is not None:
        check_argument("tenant", tenant, str)


def _global_tracing() -> "Tracing | None":
    try:
        from lanekeeper.telemetry.tracing import Tracing
    except ImportError:  # OpenTelemetry's API is not installed
        return None
    return Tracing()


@contextmanager
def _naming(outgoing: OutgoingRequest) -> Iterator[None]:
    try:
        yield
    except (BrokerError, ClientMisused) as error:
        error.message_id = outgoing.id
        raise
