"""What operators do with requests of all tenants, for `lanekeeper requests` and for `/v1/requests`: list, cancel and
replay those that fit a filter. What is known of them is in the store; only requests that a worker has received, or
that came through a gateway, are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, Final

import structlog

from consumers.clock import moment_text, now_ms
from consumers.state.base import Cancelling, Completion, Found, Identity, ListedRequest, RequestFilter, RequestState
from consumers.state.store import Store
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import signals
from service.deadletters import DeadLetters, LetterEdit, Replay
from service.deadletters import Filter as LetterFilter

FILTERS: Final = {
    "status": "states", "tenant": "tenants", "lane": "lanes", "app": "apps", "model": "models", "code": "codes",
    "cause": "causes", "group": "groups",
}  # fmt: skip
FILTER_NAMES: Final = FILTERS.keys() | {"since", "until"}
PAGE: Final = 50
PAGE_AT_MOST: Final = 200
READ_AT_ONCE: Final = 5000
CANCELLED_AT_ONCE: Final = 100
REPLAYED_AT_MOST: Final = 100_000
"""How many failed requests one replay looks for among the dead letters: their ids are in memory meanwhile."""
UNENDED: Final = frozenset({RequestState.WAITING, RequestState.RUNNING})
WordOf = Callable[[str, Found], str]
log = structlog.get_logger()


def filter_of(asked: Mapping[str, Any]) -> RequestFilter:
    """Each field is a text, or a list of texts. Raises ValueError, whose text says what is allowed."""
    found: dict[str, Any] = texts_in(asked, FILTERS)
    if unknown := sorted(found.get("states", frozenset()) - set(RequestState)):
        raise ValueError(f"status: {unknown[0][:40]!r} is none; allowed: {', '.join(RequestState)}")
    for name in ("since", "until"):
        if (when := moment_in(name, asked.get(name))) is not None:
            found[f"{name}_ms"] = when
    return RequestFilter(**found)


def texts_in(asked: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """The texts of a filter, by the fields that `names` gives them. Raises ValueError."""
    found: dict[str, frozenset[str]] = {}
    for name, field in names.items():
        if (given := asked.get(name)) is not None:
            values = given if isinstance(given, list) else [given]
            if not values or not all(isinstance(value, str) for value in values):
                raise ValueError(f"{name}: allowed is a text, or a list of texts that is not empty")
            found[field] = frozenset(values)
    return found


def moment_in(name: str, given: object) -> int | None:
    """Raises ValueError."""
    if given is None:
        return None
    try:
        when = datetime.fromisoformat(str(given[0] if isinstance(given, list) else given))
        if when.tzinfo is not None:
            return int(1000 * when.timestamp())
    except (ValueError, IndexError, OverflowError):
        pass
    raise ValueError(f"{name}: allowed is a time with its zone, such as 2026-11-21T18:00:00Z")


async def page(
    store: Store, wanted: RequestFilter, word_of: WordOf, *, limit: int = PAGE, after: str | None = None
) -> dict[str, Any]:
    """A page of requests, as JSON. `word_of`: its status in one word, of what the store has found. Raises ValueError if
    no page has named `after`."""
    found = await store.listed(wanted, most=limit, after=after)
    back_to = None if found.back_to_ms is None else moment_text(found.back_to_ms)
    return {"requests": await _shown(store, found.requests, word_of), "back_to": back_to, "next": found.next}


async def _shown(store: Store, listed: Sequence[ListedRequest], word_of: WordOf) -> list[dict[str, Any]]:
    endings = await store.endings([each.identity for each in listed])
    unended = [each.identity for each in listed if each.state in UNENDED]
    standing = dict(zip(unended, await asyncio.gather(*map(store.find, unended)), strict=True))
    shown = []
    for each, ending in zip(listed, endings, strict=True):
        if ending is None:
            continue  # it has expired
        status: str = each.state
        about: dict[str, Any] = {}
        if (found := standing.get(each.identity)) is not None:
            status = word_of(each.identity.id, found)
            about = {"attempts": found.attempts, "step": found.stands or None}
            if found.due_ms is not None and found.due_ms > now_ms():
                about["due_at"] = moment_text(found.due_ms)
        if ending.ended_ms:
            about["ended_at"] = moment_text(ending.ended_ms)
        shown.append(
            {
                "id": each.identity.id,
                "tenant": each.identity.tenant,
                **each.labels._asdict(),
                "status": status,
                "code": each.code or None,
                "cause": each.cause or None,
                "group": each.group_id or None,
                "seen_at": moment_text(each.seen_ms),
                **about,
            }
        )
    return shown


@dataclass(slots=True)
class Cancelled:
    """What a cancellation of several requests has done, or would do. `told`: of the cancelled ones, those that run:
    their workers stop them within seconds."""

    matched: int = 0
    cancelled: int = 0
    told: int = 0
    ended: int = 0
    """Before they could be cancelled."""

    def as_json(self) -> dict[str, int]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**found, "left": self.matched - self.cancelled - self.ended}


async def cancel(
    store: Store, wanted: RequestFilter, *, dry_run: bool = False, within_s: float | None = None, why: str
) -> Cancelled:
    """Cancel the requests that have not ended. `within_s`: end then, with requests left."""
    now_s = asyncio.get_running_loop().time
    began_s, done = now_s(), Cancelled()
    states = (wanted.states & UNENDED) if wanted.states else UNENDED
    if not states:
        return done
    # what comes meanwhile is not meant
    wanted = replace(wanted, states=states, until_ms=min(wanted.until_ms, now_ms() + 1))
    async for some in _pages(store, wanted):
        done.matched += len(some)
    if dry_run:
        return done
    async for some in _pages(store, wanted):
        for begin in range(0, len(some), CANCELLED_AT_ONCE):
            if within_s is not None and now_s() > began_s + within_s:
                return done
            chosen = some[begin : begin + CANCELLED_AT_ONCE]
            ends = await asyncio.gather(*(store.cancel(each.identity, _end(each.identity, why)) for each in chosen))
            done.told += ends.count(Cancelling.TOLD)
            done.ended += ends.count(Cancelling.ENDED)
            done.cancelled += len(ends) - ends.count(Cancelling.ENDED)
    log.info(signals.REQUESTS_CANCELLED, cancelled=done.cancelled, running=done.told, who=why)
    return done


async def replay(
    store: Store,
    letters: DeadLetters,
    wanted: RequestFilter,
    change: LetterEdit,
    *,
    rate_per_s: float | None = None,
    dry_run: bool = False,
    within_s: float | None = None,
) -> tuple[int, Replay]:
    """Run failed requests again whose messages are dead letters. Returns how many failed requests fit the filter, and
    what became of their letters."""
    states = frozenset({RequestState.FAILED})
    chosen: set[Identity] = set()
    if not wanted.states or wanted.states & states:
        async for some in _pages(store, replace(wanted, states=states)):
            chosen.update(each.identity for each in some)
            if len(chosen) >= REPLAYED_AT_MOST:
                break
    if not chosen:
        return 0, Replay()
    asked = LetterFilter(requests=frozenset((each.tenant, each.id) for each in chosen))
    done = await letters.replay(asked, change, rate_per_s=rate_per_s, dry_run=dry_run, within_s=within_s)
    return len(chosen), done


async def _pages(store: Store, wanted: RequestFilter) -> AsyncIterator[Sequence[ListedRequest]]:
    after = None
    while True:
        found = await store.listed(wanted, most=READ_AT_ONCE, after=after)
        yield found.requests
        if (after := found.next) is None:
            return


def _end(identity: Identity, why: str) -> Completion:
    problem = RequestProblem("cancelled", why)
    body = problem.document(request=identity.id, attempts=0)
    return Completion(status="error", code=problem.code, body=body, ended_ms=now_ms())
