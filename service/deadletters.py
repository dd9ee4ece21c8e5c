"""What operators do with dead letters, for `lanekeeper dead` and for `/v1/dead`: list by cause, show, replay, drop,
export and import. `topology/broker/deadletters.py` reads the queue.

A replay publishes the letter to `lane.requests` under its own id, waits for the confirm, and then removes it. If it is
killed in between, the letter is still there. Published again, it does not run again: the store lets a request run again
only for the dead letter of its last error (`x-lane-dead-at`), and answers every other one with what it has stored.
"""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Final

import structlog

from consumers.clock import moment_text, now_ms
from consumers.flows.webhooks import UNDELIVERED, redelivered
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Encoded, Message, body_address_in
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing, trace_url
from service.config.settings import Settings
from topology.broker.deadletters import DeadLetter, held, line_of, message_of_line, normalised, scanned
from topology.codec.decoding import decode, unpacked
from topology.codec.headers import carried

PAGE: Final = 20
PAGE_AT_MOST: Final = 200
GROUPS: Final = 500
NAMES: Final = 20
"""How many lanes and tenants of a cause are named."""
HOUR_MS: Final = 3_600_000
OTHERS: Final = "others"
REFUSED_SHOWN: Final = 20
REPLAYED_SHOWN: Final = 20
TENANTS_SHOWN: Final = 5
HELD: Final = 1000
HELD_S: Final = 2.0
HELD_SCANS: Final = 5
"""A replay or a removal holds at most so many letters at a time, and, at a rate, as many as it
publishes in this time or in that of so many scans: meanwhile others do not see them."""
PUBLISHED_WITHIN_S: Final = 30.0
log = structlog.get_logger()


class ReplayRefused(LanekeeperError):
    """A dead letter cannot be published again in the way that was asked for."""


class AmbiguousId(LanekeeperError):
    """Dead letters of several tenants have this id."""

    def __init__(self, id: str, tenants: Iterable[str]) -> None:
        names = ", ".join(repr(tenant[:80]) if tenant else "none" for tenant in sorted(tenants)[:TENANTS_SHOWN])
        super().__init__(f"id {id[:128]!r}: several tenants have a dead letter of it ({names}); name the tenant too")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which dead letters are meant: those that have one of the values of each field that is not empty."""

    ids: frozenset[str] = frozenset()
    codes: frozenset[str] = frozenset()
    lanes: frozenset[str] = frozenset()
    apps: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()
    causes: frozenset[str] = frozenset()
    requests: frozenset[tuple[str, str]] = frozenset()
    """Tenant and id of each."""
    since_ms: int = 0

    @property
    def is_empty(self) -> bool:
        return self == Filter()

    def matches(self, letter: DeadLetter) -> bool:
        if self.requests and (letter.tenant, letter.id) not in self.requests:
            return False
        return letter.at_ms >= self.since_ms and all(
            not wanted or getattr(letter, name) in wanted
            for name, wanted in (
                ("id", self.ids), ("code", self.codes), ("lane", self.lanes), ("app", self.apps),
                ("tenant", self.tenants), ("cause", self.causes),
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterEdit:
    """What a replay changes: fields of the body (`patch`, a JSON Merge Patch), the lane, the model."""

    patch: Any = None
    to_lane: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if self.patch is not None and not isinstance(self.patch, dict):
            raise ReplayRefused(
                "the edit has to be a JSON object (a JSON Merge Patch), because a request's body is one"
            )

    @property
    def of_body(self) -> dict[str, Any]:
        return {**(self.patch or {}), **({} if self.model is None else {"model": self.model})}


def merge_patch(target: Any, patch: Any) -> Any:
    """JSON Merge Patch, RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


# ---- what is shown ---------------------------------------------------------------------------------------------------


SUMMARY: Final = (
    "id", "code", "detail", "cause", "lane", "app", "tenant", "at", "attempts", "replays", "replayed_at", "body_bytes",
    "trace_id",
)  # fmt: skip


def summary(letter: DeadLetter, *, jaeger_url: str | None) -> dict[str, Any]:
    """A letter in a list."""
    found = {name: getattr(letter, name) for name in SUMMARY}
    return {**found, "trace_url": trace_url(jaeger_url, letter.trace_id)}


def whole(letter: DeadLetter, *, jaeger_url: str | None) -> dict[str, Any]:
    """A letter with its errors, properties, headers and body."""
    return {
        **summary(letter, jaeger_url=jaeger_url),
        "routing_key": letter.routing_key,
        "errors": list(letter.errors),
        "message": json.loads(line_of(letter.message)),
    }


@dataclass(slots=True)
class DeadLetterGroup:
    """Dead letters with one cause."""

    cause: str
    code: str
    error: str
    example: str = ""
    count: int = 0
    relapses: int = 0
    oldest_ms: int = 2**63
    newest_ms: int = -1
    last_hour: int = 0
    lanes: set[str] = field(default_factory=set)
    tenants: set[str] = field(default_factory=set)

    def add(self, letter: DeadLetter, *, hour_ago_ms: int) -> None:
        if letter.at_ms >= self.newest_ms:
            self.newest_ms, self.example = letter.at_ms, letter.id
        self.oldest_ms = min(self.oldest_ms, letter.at_ms)
        self.count += 1
        self.relapses += letter.replays > 0
        self.last_hour += letter.at_ms >= hour_ago_ms
        for names, name in ((self.lanes, letter.lane), (self.tenants, letter.tenant)):
            if name and len(names) < NAMES:
                names.add(name)

    def as_json(self) -> dict[str, Any]:
        times = {"oldest": moment_text(self.oldest_ms), "newest": moment_text(self.newest_ms)}
        names = ("cause", "code", "error", "example", "count", "relapses", "last_hour")
        found = {name: getattr(self, name) for name in names}
        return {**found, **times, "lanes": sorted(self.lanes), "tenants": sorted(self.tenants)}


class Overview:
    """Counts letters by cause, and keeps a page of the newest. `after`: `next` of the page before."""

    is_enough = False

    def __init__(self, wanted: Filter, *, limit: int = PAGE, after: tuple[int, int] | None = None) -> None:
        self._wanted = wanted
        self._limit = limit
        self._after = after
        self._groups: dict[str, DeadLetterGroup] = {}
        self._page: list[tuple[int, int, int, DeadLetter]] = []
        self._left_out = 0
        self._numbers = count()
        self._hour_ago_ms = now_ms() - HOUR_MS
        self.total = 0
        self.matched = 0

    def keeps(self, message: Message, tag: int) -> bool:
        letter = DeadLetter(message)
        self.total += 1
        if self._wanted.matches(letter):
            self.matched += 1
            self._group_of(letter).add(letter, hour_ago_ms=self._hour_ago_ms)
            if self._after is None or (letter.at_ms, letter.key) < self._after:
                heapq.heappush(self._page, (letter.at_ms, letter.key, next(self._numbers), letter.without_body()))
                if len(self._page) > self._limit:
                    heapq.heappop(self._page)
                    self._left_out += 1
        return False

    def as_json(self, *, jaeger_url: str | None) -> dict[str, Any]:
        page = sorted(self._page, reverse=True)
        return {
            "total": self.total,
            "matched": self.matched,
            "groups": [each.as_json() for each in sorted(self._groups.values(), key=lambda each: -each.count)],
            "letters": [summary(letter, jaeger_url=jaeger_url) for *_, letter in page],
            "next": f"{page[-1][0]}.{page[-1][1]}" if self._left_out and page else None,
        }

    def _group_of(self, letter: DeadLetter) -> DeadLetterGroup:
        cause = letter.cause
        if (found := self._groups.get(cause)) is None:
            if len(self._groups) < GROUPS:
                found = self._groups[cause] = DeadLetterGroup(cause, letter.code, normalised(letter.detail))
            else:
                found = self._groups.setdefault(OTHERS, DeadLetterGroup(OTHERS, "", ""))
        return found


def position(text: str) -> tuple[int, int]:
    """Reads `next` of a page. Raises ValueError."""
    at_ms, _, key = text.partition(".")
    return int(at_ms), int(key)


# ---- what is done ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Replay:
    """What a replay has done, or would do."""

    matched: int = 0
    replayed: int = 0
    refused: list[dict[str, str]] = field(default_factory=list)
    """The first letters that cannot be published again, each with the reason; nothing was sent then."""
    refusals: int = 0
    requests: list[dict[str, str]] = field(default_factory=list)
    """The first that were replayed. Their status says what they become; until then it ended at `failed_at`."""

    @property
    def left(self) -> int:
        return self.matched - self.replayed

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "left": self.left}


@dataclass(slots=True)
class _Each:
    """Raises AmbiguousId if letters that are chosen by their ids alone are those of several tenants."""

    call: Callable[[DeadLetter], None]
    wanted: Filter
    is_enough: bool = False
    _tenants: dict[str, set[str]] = field(default_factory=dict)

    def keeps(self, message: Message, tag: int) -> bool:
        letter = DeadLetter(message)
        if self.wanted.matches(letter):
            if self.wanted.ids and not self.wanted.tenants:
                tenants = self._tenants.setdefault(letter.id, set())
                tenants.add(letter.tenant)
                if len(tenants) > 1:
                    raise AmbiguousId(letter.id, tenants)
            self.call(letter)
        return False


class DeadLetters:
    """The dead letters of one installation. Its methods raise BrokerError, and AmbiguousId where letters are chosen by
    their ids alone."""

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._connection = connection
        self._publisher = Publisher(connection, tracing=Tracing())
        self._names = settings.names()
        self._lanes = {lane.name: lane for lane in settings.lane_specs()}
        self._settings = settings
        self._user = settings.credentials[0]

    async def overview(self, wanted: Filter, *, limit: int = PAGE, after: tuple[int, int] | None = None) -> Overview:
        reader = partial(Overview, wanted, limit=limit, after=after)
        async with scanned(self._connection, self._names.dead, reader) as scan:
            return scan.reader

    async def find(self, wanted: Filter) -> DeadLetter | None:
        found: list[DeadLetter] = []

        def keep_newest(letter: DeadLetter) -> None:
            if not found or letter.at_ms >= found[0].at_ms:
                found[:] = [letter]

        await self._each(wanted, keep_newest)
        return found[0] if found else None

    async def export(self, wanted: Filter, write: Callable[[bytes], object]) -> int:
        # a scan that has to give way begins again, and what it has written cannot be taken back
        keys: set[int] = set()

        def export_once(letter: DeadLetter) -> None:
            if letter.key not in keys:
                keys.add(letter.key)
                write(line_of(letter.message))

        await self._each(wanted, export_once)
        return len(keys)

    async def import_(self, lines: Iterable[bytes]) -> int:
        """Put exported letters into `lane.dead`. Raises ValueError for a line that is none."""
        done = 0
        for line in lines:
            message = message_of_line(line)
            await self._publisher.publish_surely(
                message, exchange=self._names.dead, routing_key=message.routing_key, within_s=PUBLISHED_WITHIN_S
            )
            done += 1
        return done

    async def drop(self, wanted: Filter, *, within_s: float | None = None) -> int:
        """`within_s`: end then, with letters left."""
        now_s = asyncio.get_running_loop().time
        began_s, done, keys = now_s(), 0, set[int]()
        await self._each(wanted, lambda letter: keys.add(letter.key))
        async with aclosing(held(self._connection, self._names.dead, keys, most=HELD)) as scans:
            async for scan in scans:
                await scan.remove_all()
                for _, letter in scan.reader.held:
                    done += 1
                    log.info(signals.DEAD_LETTER_DROPPED, request=letter.id, code=letter.code, lane=letter.lane)
                if within_s is not None and now_s() > began_s + within_s:
                    break
        return done

    async def replay(
        self,
        wanted: Filter,
        change: LetterEdit,
        *,
        rate_per_s: float | None = None,
        dry_run: bool = False,
        within_s: float | None = None,
    ) -> Replay:
        """If one letter cannot be published, none is. `within_s`: end then, with letters left."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        done = Replay()
        keys: set[int] = set()

        def check(letter: DeadLetter) -> None:
            if letter.key in keys:
                return
            keys.add(letter.key)
            try:
                self.prepared(letter, change)
            except (RequestProblem, ReplayRefused) as error:
                done.refusals += 1
                if len(done.refused) < REFUSED_SHOWN:
                    reason = error.detail if isinstance(error, RequestProblem) else str(error)
                    done.refused.append({"id": letter.id, "reason": reason})

        await self._each(wanted, check)
        held_s = max(HELD_S, HELD_SCANS * (loop.time() - began_s))
        done.matched = len(keys)
        if dry_run or done.refusals:
            return done
        most = HELD if rate_per_s is None else max(1, min(HELD, int(rate_per_s * held_s)))
        next_s = loop.time()
        published: set[int] = set()
        async with aclosing(held(self._connection, self._names.dead, keys, most=most)) as scans:
            async for scan in scans:
                for tag, letter in scan.reader.held:
                    if letter.key in published:  # a copy
                        await scan.remove(tag)
                        continue
                    if within_s is not None and max(next_s, loop.time()) > began_s + within_s:
                        return done
                    if rate_per_s is not None:
                        await asyncio.sleep(next_s - loop.time())
                        next_s = max(next_s, loop.time() - 1 / rate_per_s) + 1 / rate_per_s
                    message = self.prepared(letter, change)
                    exchange, key = message.exchange, message.routing_key
                    await self._publisher.publish_surely(
                        message, exchange=exchange, routing_key=key, within_s=PUBLISHED_WITHIN_S
                    )
                    published.add(letter.key)
                    await scan.remove(tag)
                    done.replayed += 1
                    if len(done.requests) < REPLAYED_SHOWN:
                        done.requests.append({"id": letter.id, "tenant": letter.tenant, "failed_at": letter.at})
                    log.info(signals.DEAD_LETTER_REPLAYED, request=letter.id, code=letter.code, lane=letter.lane)
        return done

    def prepared(self, letter: DeadLetter, change: LetterEdit) -> Message:
        """The request, or an outcome for its webhook. Raises RequestProblem, ReplayRefused."""
        message, patch, settings = letter.message, change.of_body, self._settings
        if letter.code == UNDELIVERED:
            if change != LetterEdit():
                raise ReplayRefused("it is an outcome that could not be posted: it is posted again as it is")
            again = redelivered(message)
            return replace(again, exchange=self._names.webhooks, routing_key=self._names.webhook_key(letter.lane))
        lane = letter.lane if change.to_lane is None else change.to_lane
        if (spec := self._lanes.get(lane)) is None:
            raise ReplayRefused(f"there is no lane {lane[:40]!r}; choose one of {', '.join(self._lanes)}")
        if letter.tenant not in ("", self._user) and self._user not in settings.speakers:
            raise ReplayRefused(
                f"it is a request of tenant {letter.tenant!r}: the broker's user {self._user!r} has to be in "
                "LANEKEEPER_SPEAKERS, here and for the workers, to publish it again"
            )
        body, encoding = message.body, message.content_encoding
        if patch:
            is_for_a_model = n.PIPELINE not in message.headers and message.type in (None, "", "messages")
            if change.model is not None and not is_for_a_model:
                raise ReplayRefused("its body is the input of a pipeline or a handler, and names no model")
            if body_address_in(message.headers) is not None:
                text = f"its body is not in the message, but at the address in {n.BODY}: no field is edited"
                raise ReplayRefused(text)
            body, encoding = _edited(unpacked(message), patch), None
        headers = {
            **carried(message.headers, of=self._names),
            n.DEAD_AT: letter.at,
            n.REPLAYS: letter.replays + 1,
            n.REPLAYED_AT: moment_text(now_ms()),
            n.TENANT: letter.tenant if letter.tenant != self._user else None,
            n.DELAY_MS: None,
            n.AT: None,
            n.DEBOUNCE: None,
        }
        is_own_reply = not settings.binds_replies or letter.user_id == self._user
        request = replace(
            message,
            body=body,
            content_encoding=encoding,
            exchange=self._names.requests,
            routing_key=".".join([lane, *letter.routing_key.split(".")[1:]]),
            headers={name: value for name, value in headers.items() if value not in (None, "")},
            message_id=letter.id,
            reply_to=message.reply_to if is_own_reply else None,
            user_id=self._user if letter.tenant or settings.needs_user_id else None,
            expiration=None,
            persistent=True,
        )
        readable = {
            name: message.headers[name] if isinstance(value, Encoded) else value
            for name, value in request.headers.items()
        }
        checked = replace(request, headers=readable)
        decode(
            checked, lane=spec, request_id=letter.id, hop=None, now_ms=now_ms(), max_values=settings.json_values,
            handlers=settings.handlers.keys(), pipelines=settings.pipelines.keys(),
        )  # fmt: skip
        return request

    async def _each(self, wanted: Filter, call: Callable[[DeadLetter], None]) -> None:
        """Call it with each letter, and perhaps again, if the scan has to begin again."""
        async with scanned(self._connection, self._names.dead, lambda: _Each(call, wanted)):
            pass


def _edited(body: bytes, patch: dict[str, Any]) -> bytes:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ReplayRefused("its body is no JSON object, so that the edit does not apply")
    try:
        return json.dumps(
            merge_patch(found, patch), ensure_ascii=False, allow_nan=False, separators=(",", ":")
        ).encode()
    except (ValueError, UnicodeEncodeError, RecursionError) as error:
        raise ReplayRefused(f"the edited body cannot be written as JSON: {error}") from error
