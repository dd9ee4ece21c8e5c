"""The client's transport over AMQP: one connection, which is opened again when it is lost.

The connection has one channel for requests and their replies, and one for control messages. If the user has no
permission to send control messages, the broker closes only the channel for control messages, so no reply to a request
is lost.

Replies arrive by direct reply-to, so the user needs no right to declare queues.

docs/contract.md ("Control") has the control messages, which cancel a request or fetch its result.
"""

import asyncio
import json
import ssl
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar
from urllib.parse import unquote, urlsplit

from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.amqp.replies import DirectReplies
from lanekeeper.amqp.tolerant import HEADERS_BYTES, write_table
from lanekeeper.bodies import MIB, OVER_BYTES, PIECE_BYTES, BodiesUnavailable, BodyError, BodyStore
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import urls_of
from lanekeeper.contract.messages import Depth, Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerBlocked,
    BrokerError,
    ClientMisused,
    InvalidArgument,
    PublishRefused,
    ReplyLost,
    TopologyMismatch,
    Unroutable,
)
from lanekeeper.groups import Found, Outcome
from lanekeeper.replies import (
    Cancelled,
    ControlRefused,
    Final,
    NoReply,
    NotEnded,
    Part,
    Problem,
    final_of,
    lost_answer,
)
from lanekeeper.requests import OutgoingRequest, time_in, until_ended
from lanekeeper.telemetry import logs, signals

if TYPE_CHECKING:
    from lanekeeper.telemetry.tracing import Tracing

WORKERS_COUNTED_AFTER_S = 0.5
"""If a cancellation has no answer after this time, the broker is asked whether any worker runs."""
T = TypeVar("T")
_START_ONE = "start one with `lanekeeper serve` or `lanekeeper consume`"
ANSWERED_WITHIN_S = 5.0
ASKED_AT_ONCE = 100
"""So many ids of any length are in one control message."""
PATIENT_FOR_S = 30.0
DROP_WITHIN_S = 10.0
FETCH_WITHIN_S = 60.0
LARGEST_ANSWER_BYTES = 512 * MIB
"""Also the highest value of the setting `LANEKEEPER_RESULTS__ANSWER_BYTES`."""


class OverAmqp:
    """How a `Client` with the URL of a broker reaches the workers. The methods are those of `Client`; `answer` and
    `replies` (its `request` and `stream`) raise TimeoutError at `outgoing.end`."""

    def __init__(
        self,
        url: str,
        *,
        names: Names,
        ssl_context: ssl.SSLContext | None,
        tracing: "Tracing | None",
        bodies: BodyStore | str | None,
        fetches_answers: bool,
    ) -> None:
        self._bodies = bodies
        self._store = BodyStore(bodies) if isinstance(bodies, str) else bodies
        self._fetches = fetches_answers
        self._names = names
        self.user = unquote(urlsplit(urls_of(url)[0]).username or "guest")
        self.connection = Connection(url, name="lanekeeper client", ssl_context=ssl_context)
        self.direct = DirectReplies()
        self.publisher = Publisher(self.connection, tracing=tracing, on_channel=self.direct.consume)
        self._answers = DirectReplies()
        self._asking = Publisher(self.connection, tracing=tracing, on_channel=self._answers.consume)

    @property
    def trouble(self) -> str | None:
        return self.connection.trouble or self.connection.blocked

    async def __aenter__(self) -> Self:
        await self.connection.__aenter__()
        if isinstance(self._bodies, str):  # one that was closed works no more, and a client may be opened again
            self._store = BodyStore(self._bodies)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.__aexit__(*_)
        if self._store is not None:
            self._store.close()

    async def publish(self, outgoing: OutgoingRequest) -> None:
        _check_headers(outgoing.message)
        await self._store_body(outgoing)
        try:
            await self.publisher.publish_surely(
                outgoing.message,
                exchange=self._names.requests,
                routing_key=outgoing.key,
                within_s=outgoing.publish_within_s,
                refused_within_s=outgoing.full_within_s,
                absent_within_s=outgoing.absent_within_s,
                gives_up_on=(TopologyMismatch, BrokerBlocked),
            )
        except (BrokerError, ClientMisused) as error:
            if not (error.maybe_published or outgoing.may_be_published):
                await self._remove_body(outgoing)
            outgoing.may_be_published |= error.maybe_published
            if not isinstance(error, PublishRefused):
                raise
            lane = outgoing.key.partition(".")[0]
            depth = await self.depth(lane)
            holds = "" if depth is None else f" holds {depth.ready} requests and"
            full = PublishRefused(f"the lane is full: {self._names.intake(lane)}{holds} takes no more; try again later")
            full.maybe_published = error.maybe_published
            raise full from error
        outgoing.may_be_published = True

    async def answer(self, outgoing: OutgoingRequest) -> Final:
        while True:
            try:
                async with aclosing(self.replies(outgoing)) as replies:
                    async for came in replies:
                        if isinstance(final := came[-1], Final):
                            return final
            except ReplyLost as lost:
                if outgoing.chose_id:
                    continue
                try:
                    return await self._stored_result(outgoing, lost)
                except AccessRefused:
                    continue  # publish the request again with the same id: a worker then sends the stored reply

    async def replies(self, outgoing: OutgoingRequest) -> AsyncGenerator[Sequence[Part | Final], None]:
        """What has come together, each time."""
        message = outgoing.message
        if n.STREAM in message.headers:
            message.headers = {**message.headers, n.PARTS_TOGETHER: True}
        with self.direct.expecting(message) as arrived:
            await self.publish(outgoing)
            self.direct.published(arrived)
            while True:
                came = await arrived.all(end=outgoing.end)
                parts = [reply for reply in came if isinstance(reply, Part)]
                if parts:
                    outgoing.end = time_in(outgoing.timeout_s)
                    yield parts
                if len(parts) < len(came):
                    final = next(reply for reply in came if isinstance(reply, Message))
                    yield [await self._whole(final_of(final), end=outgoing.end)]
                    return

    async def result(self, id: str, *, tenant: str | None, end: float | None) -> Final:
        return await self._whole(await self._result(id, tenant=tenant, end=end), end=None)

    async def results(self, ids: Sequence[str], *, tenant: str | None) -> Mapping[str, Found]:
        found: dict[str, Found] = {}
        left = list(dict.fromkeys(ids))
        while left:
            some, left = left[:ASKED_AT_ONCE], left[ASKED_AT_ONCE:]
            came = await _patiently(partial(self._results, some, tenant=tenant))
            found |= came
            left = [id for id in some if id not in came] + left
        return found

    async def _results(self, ids: Sequence[str], *, tenant: str | None) -> Mapping[str, Found]:
        """Some of them, if they are large together; at least one."""
        message = _passing(_control_message(n.RESULTS_KEY, ids, tenant=tenant, user=self.user))
        found: dict[str, Found] = {}
        with self._answers.expecting(message) as arrived:
            await self._send(message, within_s=ANSWERED_WITHIN_S)
            self._answers.published(arrived)
            while True:
                try:
                    reply = await arrived.next(end=asyncio.get_running_loop().time() + ANSWERED_WITHIN_S)
                except TimeoutError:
                    raise NoReply(f"no worker answered within {ANSWERED_WITHIN_S:g} s: {_START_ONE}") from None
                _raise_if_refused(reply)
                if n.STATUS not in reply.headers:
                    break
                id = str(reply.headers.get(n.REQUEST_ID))
                try:
                    found[id] = await self._whole(final_of(reply), end=None)
                except Problem as problem:
                    found[id] = problem
                except BodyError as error:  # one lost answer must not hide all others
                    found[id] = lost_answer(id, str(error))
        states = json.loads(reply.body)["results"]
        return found | {str(each["id"]): _not_ended(each) for each in states if each["status"] != "ended"}

    async def group(self, id: str, *, tenant: str | None, after: int = 0) -> Mapping[str, Any]:
        message = _passing(_control_message(n.GROUP_KEY, id, tenant=tenant, user=self.user, after=after))
        return await self._asked(message)

    async def cancel_group(self, id: str, *, tenant: str | None) -> Mapping[str, Any]:
        return await self._asked(_passing(_control_message(n.CANCEL_GROUP_KEY, id, tenant=tenant, user=self.user)))

    async def group_results(
        self, id: str, *, tenant: str | None, told: set[str]
    ) -> AsyncGenerator[tuple[str, Outcome], None]:
        after = 0
        while (page := await self.group(id, tenant=tenant, after=after))["requests"]:
            after = page["next"]
            ended = [each["id"] for each in page["requests"] if each["has_ended"] and each["id"] not in told]
            found = await self.results(ended, tenant=tenant)
            for each in ended:
                if not isinstance(outcome := found[each], NotEnded):
                    yield each, outcome

    async def _asked(self, message: Message) -> Mapping[str, Any]:
        async def ask() -> Mapping[str, Any]:
            reply = await self._ask(message)
            _raise_if_refused(reply)
            found: Mapping[str, Any] = json.loads(reply.body)
            return found

        return await _patiently(ask)

    async def cancel(self, id: str, *, tenant: str | None) -> Cancelled:
        return outcome_of(await self._ask(cancellation(id, tenant=tenant, user=self.user)))

    async def send_cancellation(self, id: str, *, tenant: str | None, within_s: float) -> None:
        await self._send(cancellation(id, tenant=tenant, user=self.user), within_s=within_s)

    async def depth(self, lane: str) -> Depth | None:
        return await self._depth_of(self._names.intake(lane))

    async def _depth_of(self, queue: str) -> Depth | None:
        try:
            return (await depths(self.connection, [queue]))[queue]
        except BrokerError:
            return None

    async def _send(self, message: Message, *, within_s: float) -> None:
        try:
            await self._asking.publish_surely(
                message,
                exchange=self._names.control,
                routing_key=message.type or "",
                within_s=within_s,
                gives_up_on=(TopologyMismatch, Unroutable),
            )
        except Unroutable as error:
            raise TopologyMismatch(f"{error}; run: lanekeeper topology apply") from error

    async def _ask(self, message: Message) -> Message:
        with self._answers.expecting(message) as arrived:
            await self._send(message, within_s=ANSWERED_WITHIN_S)
            self._answers.published(arrived)
            began_s = asyncio.get_running_loop().time()
            if message.persistent:
                # a cancellation: the broker keeps it, so without workers there is nothing to wait for
                with suppress(TimeoutError):
                    return await arrived.next(end=began_s + WORKERS_COUNTED_AFTER_S)
                depth = await self._depth_of(self._names.control)
                if depth is not None and not depth.consumers:
                    raise NoReply(f"no worker runs; it is recorded as soon as one runs: {_START_ONE}")
            try:
                return await arrived.next(end=began_s + ANSWERED_WITHIN_S)
            except TimeoutError:
                kept = "; it is recorded as soon as one runs" if message.persistent else ""
                raise NoReply(f"no worker answered within {ANSWERED_WITHIN_S:g} s{kept}: {_START_ONE}") from None

    async def _result(self, id: str, *, tenant: str | None, end: float | None) -> Final:

        async def ask(_: float | None) -> Final:
            return result_of(await self._ask(question(id, tenant=tenant, user=self.user)))

        return await until_ended(ask, end=end)

    async def _stored_result(self, outgoing: OutgoingRequest, lost: ReplyLost) -> Final:
        try:
            final = await self._result(outgoing.id, tenant=outgoing.tenant, end=outgoing.end)
        except (NotEnded, NoReply):
            raise TimeoutError from None
        except AccessRefused:
            raise
        except (BrokerError, ControlRefused) as error:
            raise ReplyLost(f"{lost}; fetching its result failed: {error}") from error
        return await self._whole(final, end=outgoing.end)

    async def _store_body(self, outgoing: OutgoingRequest) -> None:
        message = outgoing.message
        if outgoing.content is None and len(message.body) <= OVER_BYTES:
            return
        if self._store is None:
            if outgoing.content is not None:
                message.body, outgoing.content = await asyncio.to_thread(outgoing.content.read), None
            return
        try:
            kept = await self._store.keep(
                [message.body] if outgoing.content is None else _pieces(outgoing.content),
                tenant=outgoing.tenant or message.user_id or "",
            )
        except BodiesUnavailable as error:
            logs.warning(signals.BODY_UNAVAILABLE, error=error.cause)
            raise
        message.body, outgoing.content = b"", None
        message.headers = {**message.headers, **kept.headers}
        outgoing.kept = kept

    async def _remove_body(self, outgoing: OutgoingRequest) -> None:
        if outgoing.kept is not None and self._store is not None:
            with suppress(BodiesUnavailable, TimeoutError):
                async with asyncio.timeout(DROP_WITHIN_S):
                    await self._store.drop(outgoing.kept)

    async def _whole(self, final: Final, *, end: float | None) -> Final:
        """The final reply, with an answer fetched that was too large for a message. Raises BodyError,
        BodiesUnavailable, and TimeoutError at `end`."""
        if (kept := final.kept) is None or not self._fetches:
            return final
        if self._store is None or not self._store.holds(kept.address):
            raise BodiesUnavailable(
                f"the answer is too large for a message; it lies at {kept.address}: give the client `bodies`, "
                "its store (commands: LANEKEEPER_BODIES__URL)"
            )
        try:
            async with asyncio.timeout_at(end):
                try:
                    async with asyncio.timeout(FETCH_WITHIN_S):
                        body = await self._store.fetch(kept, most_bytes=LARGEST_ANSWER_BYTES)
                except TimeoutError:
                    raise BodiesUnavailable(f"the answer could not be fetched within {FETCH_WITHIN_S:g} s") from None
        except BodiesUnavailable as error:
            logs.warning(signals.BODY_UNAVAILABLE, error=error.cause)
            raise
        return replace(final, body=body)


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again while the tenant has sent too many control messages."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + PATIENT_FOR_S
    while True:
        try:
            return await ask()
        except ControlRefused as refused:
            if not refused.is_passing or loop.time() > end_s:
                raise
        await asyncio.sleep(1)


def _check_headers(message: Message) -> None:
    """The broker would close the connection (501 FRAME_ERROR), at every try."""
    try:
        size = len(write_table(message.headers))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"headers: cannot be written: {error}") from error
    if size > HEADERS_BYTES:
        raise InvalidArgument(f"headers: {size} bytes, allowed are {HEADERS_BYTES}")


# ---- control messages ------------------------------------------------------------------------------------------------


def cancellation(id: str, *, tenant: str | None, user: str) -> Message:
    """The control message that cancels a request. `user`: the connection's."""
    return _control_message(n.CANCEL_KEY, id, tenant=tenant, user=user)


def question(id: str, *, tenant: str | None, user: str) -> Message:
    """The broker drops it after `ANSWERED_WITHIN_S`, when nobody waits any more."""
    return _passing(_control_message(n.RESULT_KEY, id, tenant=tenant, user=user))


def _passing(message: Message) -> Message:
    message.persistent = False
    message.expiration = str(round(ANSWERED_WITHIN_S * 1000))
    return message


def outcome_of(reply: Message) -> Cancelled:
    """The outcome in a worker's answer. Raises ControlRefused."""
    _raise_if_refused(reply)
    outcome: Cancelled = json.loads(reply.body)["outcome"]
    return outcome


def result_of(reply: Message) -> Final:
    """The final reply in a worker's answer. Raises Problem, NotEnded, ControlRefused."""
    _raise_if_refused(reply)
    if n.STATUS in reply.headers:
        return final_of(reply)
    raise _not_ended(json.loads(reply.body))


def _not_ended(found: Mapping[str, Any]) -> NotEnded:
    attempts = int(found.get("attempts", 0))
    return NotEnded(
        str(found["id"]), str(found["status"]), attempts=attempts, due_at=found.get("due_at"), step=found.get("step")
    )


def _control_message(key: str, id: str | Sequence[str], *, tenant: str | None, user: str, after: int = 0) -> Message:
    said = {key: id, **({} if tenant is None else {"tenant": tenant}), **({"after": after} if after else {})}
    return Message(
        body=json.dumps(said).encode(),
        content_type="application/json",
        type=key,
        message_id=uuid.uuid4().hex,
        user_id=None if tenant is None else user,
    )


def _raise_if_refused(reply: Message) -> None:
    if reply.headers.get(n.CONTROL) == "error":
        raise ControlRefused(json.loads(reply.body))


def _pieces(content: BinaryIO) -> Iterable[bytes]:
    return iter(lambda: content.read(PIECE_BYTES), b"")
