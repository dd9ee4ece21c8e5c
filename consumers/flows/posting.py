"""Consumes `lane.webhooks`, and posts what it holds: see `webhooks.py`."""

import asyncio
import hashlib
import json
import random
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

import structlog
from standardwebhooks import Webhook
from yarl import URL

from consumers.addresses import PrivateAddress, Resolver
from consumers.background import background_task
from consumers.clock import moment_text
from consumers.failures import read_retry_after_s
from consumers.flows.lines import Line, PostLines, PostPlace
from consumers.flows.posts import NotReached, PostAnswer, Poster
from consumers.flows.webhooks import (
    LONGEST_PAUSE_S,
    PRIVATE,
    UNDELIVERED,
    Log,
    Post,
    PostFailed,
    PostForbidden,
    WebhookSpec,
)
from consumers.settle import FAULTS_AT_MOST, Settler
from consumers.state.base import UNIT_BYTES, Fingerprint, Identity, StoreUnavailable, WaitingLimit
from consumers.state.store import Store
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, MessageTooLarge
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import record_status
from topology.broker.consume import Deliveries, Delivery

SPREAD: Final = 0.25
LOGGED: Final = 10
"""The attempts that are remembered of a webhook."""
KEPT_MS: Final = 86_400_000
"""For how long the log of a webhook is kept after its end."""
GONE: Final = 410
STORED_WITHIN_S: Final = 5.0
log = structlog.get_logger()


@dataclass(slots=True, eq=False, repr=False)
class Posting:
    """Consumes `lane.webhooks`, and posts what it holds."""

    deliveries: Deliveries
    _: KW_ONLY
    spec: WebhookSpec
    settler: Settler
    store: Store
    rng: random.Random = field(default_factory=random.Random)
    posted: Counter[str] = field(default_factory=Counter, init=False)
    """How attempts ended."""
    lines: PostLines = field(default_factory=PostLines, init=False)
    _signers: dict[str, list[Webhook]] = field(init=False)
    """By tenant."""
    _poster: Poster = field(init=False)

    def __post_init__(self) -> None:
        hooks = {"": self.spec.hooks, **self.spec.tenants}
        self._signers = {name: [Webhook(secret) for secret in each.secrets] for name, each in hooks.items()}
        self._poster = Poster(Resolver(private=self.spec.private))

    @property
    def trouble(self) -> str | None:
        return self.deliveries.trouble if self.spec.is_on else None

    @property
    def running(self) -> int:
        return self.lines.running.total()

    async def run(self) -> None:
        if not self.spec.is_on:  # others may post what is in the queue
            await self.deliveries.stopped()
            return
        try:
            async with background_task(self._close_lines(), name="webhooks stop"):
                await self.deliveries.take_each(self._take, on_fault=self.settler.reject_later)
        finally:
            await self._poster.resolver.close()

    async def _close_lines(self) -> None:
        await self.deliveries.stopped()
        self.lines.close()

    async def _take(self, delivery: Delivery) -> None:
        try:
            if await self._handle(delivery):
                await self.settler.ack(delivery)
            else:
                await self.settler.nack(delivery)
        except BrokerError as error:
            log.error(signals.HANDLER_FAILED, where="webhook", error=str(error))
            await self.settler.nack_later(delivery)
        except Exception as error:
            log.exception(signals.HANDLER_FAILED, where="webhook")
            if (delivery.times_delivered or 1) >= FAULTS_AT_MOST:
                with suppress(BrokerError):  # then it is delivered once more
                    await self._bury(delivery.message, UNDELIVERED, f"a fault of Lanekeeper: {type(error).__name__}")
                    await self.settler.ack(delivery)
                    return
            await self.settler.reject_later(delivery)

    async def _handle(self, delivery: Delivery) -> bool:
        """False: this process stops, and another one posts it."""
        message, now_ms = delivery.message, self.settler.now_ms()
        try:
            if not self._is_trusted(message):
                raise ValueError
            post = Post.of(message, now_ms=now_ms)
            line = Line(post.tenant, post.endpoint)
        except (KeyError, TypeError, ValueError, OverflowError):
            await self._bury(message, "invalid_request", "not a webhook's message, or none that a worker has published")
            return True
        place = await self.lines.enter(line, len(message.body))
        if isinstance(place, PostPlace):
            try:
                with self.settler.tracing.process(message, queue=delivery.queue, delivery_tag=delivery.tag):
                    await self._attempt(replace(post, attempts=post.attempts + 1), delivery, place)
            finally:
                self.lines.leave(place)
        elif place is not None:
            await self._put_off(post, delivery, round(1000 * place))
        return place is not None

    def _is_trusted(self, message: Message) -> bool:
        """Whether a worker or an operator has published it: nobody else may write to these exchanges."""
        names, exchange = self.settler.names, message.exchange
        return exchange in (names.webhooks, names.due_exchange) or exchange.startswith(names.delay_prefix)

    async def _attempt(self, post: Post, delivery: Delivery, place: PostPlace) -> None:
        began_s, answer, not_for_s = time.monotonic(), None, 0.0
        error: PostFailed | None = None
        try:
            answer = await self._post(post, delivery.message.body)
            if not 200 <= answer.status < 300:
                error = PostFailed(f"answered {answer.status}")
                if answer.status != GONE:
                    not_for_s = read_retry_after_s(answer.headers, now_s=self.settler.now_ms() / 1000) or 0.0
        except PostFailed as failed:
            error = failed
        finally:
            took_s = time.monotonic() - began_s
            self.lines.learn(place.line, took_s=took_s, is_answered=answer is not None, not_for_s=not_for_s)
            self.lines.leave(place)
        self.settler.failpoints.reach("after_post")
        status = 0 if answer is None else answer.status
        await self._conclude(post, delivery, error, status=status, took_ms=round(1000 * took_s), not_for_s=not_for_s)

    async def _post(self, post: Post, body: bytes) -> PostAnswer:
        """Raises PostFailed."""
        if (why := self.spec.refusal(post.url, tenant=post.tenant)) is not None:
            # another worker may have other settings, as in a rolling restart
            raise PostForbidden(why) if why == PRIVATE else PostFailed(why)
        url = URL(post.url)
        with self.settler.tracing.post(url.host or "") as span:
            try:
                headers = self._signed(post, body)
                answer = await self._poster.post(url, headers=headers, body=body, within_s=self.spec.timeout_s)
                record_status(span, answer.status)
                return answer
            except TimeoutError:
                raise PostFailed(f"no answer within {self.spec.timeout_s:g} s") from None
            except PrivateAddress:
                raise PostForbidden(PRIVATE) from None
            except NotReached as error:
                raise PostFailed(f"not reached: {error}") from None
            except (OSError, ValueError) as error:
                # The error's text is left out: it may contain the URL, and the URL a secret.
                raise PostFailed(f"failed: {type(error).__name__}") from None

    def _signed(self, post: Post, body: bytes) -> dict[str, str]:
        at, text = datetime.fromtimestamp(self.settler.now_ms() // 1000, UTC), body.decode()
        headers = {
            "content-type": post.content_type,
            "user-agent": "lanekeeper",
            "webhook-id": post.id,
            "webhook-timestamp": str(int(at.timestamp())),
            "webhook-signature": " ".join(signer.sign(post.id, at, text) for signer in self._signers[post.tenant]),
            n.STATUS: post.status,
        }
        if (traceparent := self.settler.tracing.traceparent()) is not None:
            headers[n.TRACEPARENT] = traceparent
        return headers

    async def _conclude(
        self, post: Post, delivery: Delivery, error: PostFailed | None, *, status: int, took_ms: int, not_for_s: float
    ) -> None:
        now_ms, next_ms = self.settler.now_ms(), None
        give_up_ms = self._give_up_ms(post, now_ms)
        if error is not None:
            failure = f"{moment_text(now_ms)} attempt {post.attempts}: {error}, after {took_ms} ms"
            post = replace(post, errors=(failure, *post.errors)[:LOGGED])
        if error is None:
            state = "delivered"
        elif status == GONE:
            state = "gone"
        elif isinstance(error, PostForbidden) or now_ms >= give_up_ms:
            state = "undelivered"
            await self._give_up(post, delivery.message, f"{error}")
        else:
            state = "retrying"
            pause_s = max(min(self.spec.first_pause_s * 2 ** (post.attempts - 1), LONGEST_PAUSE_S), not_for_s)
            pause_ms = min(round(1000 * pause_s * self.rng.uniform(1, 1 + SPREAD)), give_up_ms - now_ms)
            next_ms = now_ms + pause_ms
            post = replace(post, due_ms=next_ms)
            self.settler.failpoints.reach_soon("after_repost")
            if not await self._publish_again(post, delivery, pause_ms):
                state, next_ms = "undelivered", None
        self.posted[state] += 1
        told: dict[str, Any] = {"state": state, "took_ms": took_ms, "status": status or None}
        tell = log.debug if state == "delivered" else log.info if state == "retrying" else log.warning
        why = {} if error is None else {"error": str(error)}
        tell(signals.WEBHOOK_POSTED, request=post.id, attempt=post.attempts, endpoint=post.endpoint, **told, **why)
        self.settler.lifecycle.publish_webhook(post.id, post.routing_key, attempt=post.attempts, **told, **why)
        row = Log(
            url=post.url,
            routing_key=post.routing_key,
            endpoint=post.endpoint,
            state=state,
            attempts=post.attempts,
            errors=post.errors,
            at=moment_text(now_ms),
            next_at=None if next_ms is None else moment_text(next_ms),
        )
        with suppress(StoreUnavailable, TimeoutError):  # it is for people only: the message itself has what is needed
            identity, until_ms = Identity(post.tenant, post.id), max(now_ms, next_ms or 0) + KEPT_MS
            async with asyncio.timeout(STORED_WITHIN_S):
                await self.store.note_webhook(identity, json.dumps(asdict(row)).encode(), until_ms=until_ms)

    def _give_up_ms(self, post: Post, now_ms: int) -> int:
        return (now_ms if post.first_ms is None else post.first_ms) + round(1000 * self.spec.give_up_s)

    async def _put_off(self, post: Post, delivery: Delivery, delay_ms: int) -> None:
        """Bring a post that finds no place back later; no attempt was made."""
        now_ms = self.settler.now_ms()
        if (left_ms := self._give_up_ms(post, now_ms) - now_ms) <= 0:
            await self._give_up(post, delivery.message, "its endpoint has other posts to answer")
        else:
            await self._publish_again(post, delivery, min(delay_ms, left_ms))

    async def _publish_again(self, post: Post, delivery: Delivery, delay_ms: int) -> bool:
        """False: too many posts wait, or it is too large, so that it is a dead letter now."""
        message = delivery.message
        if (limit := await self._reserve(post, delivery, delay_ms)) is not WaitingLimit.WITHIN:
            why = "its tenant has too many posts waiting (LANEKEEPER_WAITING__PER_TENANT)"
            if limit is WaitingLimit.TOTAL:
                why = "too many requests and posts of all tenants wait (LANEKEEPER_WAITING__IN_ALL)"
            await self._give_up(post, message, why)
            return False
        again = post.message(message.body)
        again.headers = {**_trace_in(message), **again.headers}
        try:
            await self.settler.send_around(again, delay_ms, routing_key=self.settler.names.webhook_key(post.lane))
        except MessageTooLarge as error:
            await self._give_up(post, message, f"the broker takes it no longer: {error}")
            return False
        return True

    async def _reserve(self, post: Post, delivery: Delivery, delay_ms: int) -> WaitingLimit:
        """Count it like a request that waits in the broker, but apart from the tenant's requests: a tenant's name has
        no space."""
        mark = hashlib.sha256((delivery.message.message_id or "").encode(errors="backslashreplace")).digest()
        fingerprint = Fingerprint(
            body_hash=bytes(16), mark=mark[:16], redelivered=delivery.redelivered, nonce=mark[16:24]
        )
        try:
            async with asyncio.timeout(STORED_WITHIN_S):
                return await self.store.reserve(
                    Identity(f"webhooks of {post.tenant}", post.id),
                    fingerprint,
                    weight=1 + len(delivery.message.body) // UNIT_BYTES,
                    until_ms=self.settler.now_ms() + delay_ms,
                )
        except (StoreUnavailable, TimeoutError):  # the limit is not worth a post
            return WaitingLimit.WITHIN

    async def _give_up(self, post: Post, message: Message, why: str) -> None:
        letter = replace(message, headers={**_trace_in(message), **post.headers()})
        detail = f"posted {post.attempts} times to {post.endpoint} in vain: {why}"
        await self._bury(letter, UNDELIVERED, detail)

    async def _bury(self, message: Message, code: str, detail: str) -> None:
        headers = {
            **{name: value for name, value in message.headers.items() if not name.startswith(n.STRIPPED_ON_REPUBLISH)},
            n.DEAD_CODE: code,
            n.DEAD_DETAIL: detail,
            n.DEAD_AT: moment_text(self.settler.now_ms()),
        }
        letter = replace(message, exchange="", routing_key="", headers=headers, user_id=None, expiration=None)
        letter.message_id = str(message.headers.get(n.REQUEST_ID) or uuid.uuid4().hex)
        key = str(message.headers.get(n.ROUTING_KEY) or self.settler.names.webhook_key("none"))
        await self.settler.publish_letter(letter, routing_key=key)


def _trace_in(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.headers.items() if name in n.TRACE_CONTEXT}
