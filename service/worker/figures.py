"""What a worker tells of itself: in its answers to `lanekeeper status` and `GET /v1/lanes` (`status`), and as metrics
(`sources`)."""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from consumers.flows.webhooks import STATES
from consumers.providers.registry import CallFigures
from consumers.slots.activity import WINDOWS, LaneActivity
from consumers.slots.admission import LaneSlots
from consumers.spending import DAY, LANE, TENANT
from lanekeeper.telemetry.figures import added
from service.metrics import Sample, Source, of_connection, of_publishes, of_store
from service.status import packed_sketch
from service.worker.assembly import Budgeting, Worker
from service.worker.memory import memory_kills
from topology.lanes import LaneSpec

CALL: Final = "chat"
TROUBLES: Final = 3
STOPS: Final = 10
STOP_CHARACTERS: Final = 200


def status(worker: Worker, worker_name: str) -> Mapping[str, Any]:
    """The answer to a status question, as JSON values."""
    budgeting, now_s, longest_s = worker.budgeting, asyncio.get_running_loop().time(), dict[str, int]()
    for job in (job for pool in worker.pools for job in pool.jobs):
        if job.lane is not None:
            for_s = (time.time_ns() // 1_000_000 - job.taken_ms) // 1000
            longest_s[job.lane.name] = max(for_s, longest_s.get(job.lane.name, 0))
    return {
        "worker": worker_name,
        "troubles": _troubles(worker),
        "lanes": {
            activity.lane: {**_told(activity), "longest_s": longest_s.get(activity.lane, 0)}
            for activity in worker.activities
        },
        "accounts": _accounts(worker),
        "reserves": {name: account.reserves for name, account, _ in worker.budgeting.budgets.known()},
        "waiting": {
            account: {lane: asdict(waiting) for lane, waiting in lanes.items()}
            for account, lanes in budgeting.budgets.waiting().items()
        },
        "providers": list(budgeting.registry.names),
        "paused": dict(budgeting.breakers.pauses.figures(now_s)),
        "schedules": worker.schedules.figures(),
        "pauses": [pause.as_json() for pause in worker.brake.pauses.values()],
        "breakers": dict(budgeting.breakers.states(now_s)),
        "spent": {
            kind: {name: spent._asdict() for name, spent in by_name.items()}
            for kind, by_name in budgeting.spending.totals().items()
        },
        "prices_as_of": budgeting.registry.prices.source,
        "simulated": worker.simulated,
        "memory": {
            "held_bytes": worker.broker.held.in_all,
            "at_most_bytes": worker.broker.held.at_most,
            "without_room": worker.broker.held.waiting,
            "kills": memory_kills() or 0,
        },
        "tenants": {lane: slots.snapshot() for lane, slots in worker.lane_slots.items()},
        "failures": list(worker.settler.lifecycle.failures),
        "undelivered": worker.settler.reply_retries.given_up,
        "dead_letters": _removed(worker),
        "webhooks": {"running": worker.posting.running, **worker.posting.posted},
        "control": _control(worker),
        "batches": {"waiting": _in_batches(worker), "tickets": worker.collector.tickets_waiting, **_batches(worker)},
        "caps": sorted(worker.budgeting.spending.used_up())[:TROUBLES],
    }


class MinuteNotes:
    """What a worker notes once a minute for the page's history: its lanes, and what stops work."""

    def __init__(self, worker: Worker, *, began_ms: int) -> None:
        self._worker = worker
        self._began_ms = began_ms
        self._counts = self._counted()

    def next(self) -> str:
        counts = self._counted()
        before, self._counts = self._counts, counts
        lanes = {
            activity.lane: {
                "waits": packed_sketch(activity.recent.over(WINDOWS["5m"])[0]),
                **{name: counts[activity.lane][name] - before[activity.lane][name] for name in counts[activity.lane]},
            }
            for activity in self._worker.activities
        }
        return json.dumps({"began_ms": self._began_ms, "lanes": lanes, "stops": _stops(self._worker)})

    def _counted(self) -> dict[str, dict[str, int]]:
        return {
            each.lane: {"done": each.answered, "failed": each.failed, "retried": each.retried}
            for each in self._worker.activities
        }


def _stops(worker: Worker) -> list[str]:
    breakers = worker.budgeting.breakers
    found = [
        *(f"{pause.kind} {pause.name} paused by {pause.who}" for pause in worker.brake.pauses.values()),
        *(f"provider {name} paused: {reason}" for name, reason in breakers.pauses.reasons().items()),
        *(f"circuit breaker of {name} open" for name in breakers.states(asyncio.get_running_loop().time())),
        *_troubles(worker),
    ]
    return [each[:STOP_CHARACTERS] for each in found[:STOPS]]


def sources(worker: Worker, *, tenants: Collection[str], store_url: str) -> list[Source]:
    """The worker's metrics, in parts; `tenants`: those that they may name."""
    named = frozenset(tenants)
    return [
        *(
            partial(_of_lane, worker, lane, activity)
            for lane, activity in zip(worker.lanes, worker.activities, strict=True)
        ),
        partial(_of_accounts, worker),
        partial(_of_calls, worker.budgeting),
        partial(_of_spending, worker, named),
        *(partial(_of_tenants, lane, slots, named) for lane, slots in worker.lane_slots.items() if named),
        partial(_of_process, worker, store_url),
    ]


def _of_process(worker: Worker, store_url: str) -> Iterator[Sample]:
    for lane in worker.lengths.others:
        if (intake := worker.lengths.intake(lane.name)) is not None:
            yield "lanekeeper.lane.waiting", {"lane": lane.name}, intake.ready
            yield "lanekeeper.lane.consumers", {"lane": lane.name}, intake.consumers
    if (dead := worker.lengths.dead) is not None:
        yield "lanekeeper.dead_letters", {}, dead
    for name, connection in (("consume", worker.broker.consuming), ("publish", worker.broker.publishing)):
        yield from of_connection(name, connection)
    yield from of_publishes(worker.broker.publisher.times)
    yield from of_store(worker.store.times, url=store_url, trouble=worker.store.trouble)
    yield "lanekeeper.replies.undelivered", {}, worker.settler.reply_retries.given_up
    yield "lanekeeper.webhooks.running", {}, worker.posting.running
    for state in STATES:  # also those that did not occur: Prometheus takes no first count for an increase
        yield "lanekeeper.webhooks", {"state": state}, worker.posting.posted[state]
    for schedule, late_s in worker.schedules.late().items():
        yield "lanekeeper.schedule.late", {"schedule": schedule}, late_s
    for schedule, has_failed in worker.schedules.failed().items():
        yield "lanekeeper.schedule.failed", {"schedule": schedule}, int(has_failed)
    if (gathering := worker.lengths.batches) is not None:
        yield "lanekeeper.batches.gathering", {}, gathering
    yield "lanekeeper.batches.waiting", {}, _in_batches(worker)
    for event, count in _batches(worker).items():
        yield "lanekeeper.batches", {"event": event}, count
    for how, count in _removed(worker).items():
        yield "lanekeeper.dead_letters.removed", {"how": how}, count
    for outcome, count in _control(worker).items():
        yield "lanekeeper.control", {"outcome": outcome}, count


def _of_lane(worker: Worker, lane: LaneSpec, activity: LaneActivity) -> Iterator[Sample]:
    labels, slots, lengths = {"lane": lane.name}, worker.lane_slots[lane.name], worker.lengths
    if (waiting := lengths.waiting(lane.name)) is not None:
        yield "lanekeeper.lane.waiting", labels, waiting
    if (intake := lengths.intake(lane.name)) is not None:
        yield "lanekeeper.lane.consumers", labels, intake.consumers
    if (oldest_s := lengths.oldest_s(lane.name, delivered_ms=activity.delivered_ms)) is not None:
        yield "lanekeeper.lane.oldest", labels, oldest_s
    yield "lanekeeper.lane.in_hand", labels, slots.in_hand
    yield "lanekeeper.lane.running", labels, activity.running
    yield "lanekeeper.lane.slots", labels, activity.slots
    yield "lanekeeper.lane.slots_used", labels, slots.running
    yield "lanekeeper.lane.slots_lost", labels, slots.running - activity.running
    yield "lanekeeper.lane.target_wait", labels, lane.target_wait_s
    yield "lanekeeper.lane.max_length", labels, lane.max_length
    for reason, delayed in activity.still_delayed().items():
        yield "lanekeeper.lane.delayed", {**labels, "reason": reason}, delayed["count"]
    yield "lanekeeper.lane.wait", labels, activity.waits
    yield "lanekeeper.lane.run", labels, activity.runs
    yield "lanekeeper.lane.total", labels, activity.totals
    yield "lanekeeper.lane.attempts", labels, activity.attempts
    for name, label, counts in (
        ("lanekeeper.lane.ended", "code", activity.ended_by),
        ("lanekeeper.lane.buried", "code", activity.buried_by),
        ("lanekeeper.lane.retries", "cause", activity.retried_for),
        ("lanekeeper.lane.deferrals", "reason", activity.deferred_for),
    ):
        for value, count in counts.items():
            yield name, {**labels, label: value}, count
    of_queue = {"messaging.system": "rabbitmq", "messaging.operation.name": "process"}
    for queue, count in activity.taken.items():
        yield "messaging.client.consumed.messages", {**of_queue, "messaging.destination.name": queue}, count
    for queue, worked in activity.worked.items():
        yield "messaging.process.duration", {**of_queue, "messaging.destination.name": queue}, worked


def _accounts(worker: Worker) -> dict[str, dict[str, dict[str, float]]]:
    return {name: dict(account.figures(now_s)) for name, account, now_s in worker.budgeting.budgets.known()}


def _of_accounts(worker: Worker) -> Iterator[Sample]:
    budgeting = worker.budgeting
    for name, limits in _accounts(worker).items():
        for limit, figures in limits.items():
            for what, value in figures.items():
                yield f"lanekeeper.account.{what}", {"account": name, "limit": limit}, value
    for name, lanes in budgeting.budgets.waiting().items():
        for lane, waiting in lanes.items():
            labels = {"account": name, "lane": lane}
            yield "lanekeeper.account.waiting", {**labels, "reason": waiting.reason}, waiting.count
            yield "lanekeeper.account.oldest_wait", labels, waiting.oldest_s
    for (name, lane, reason), count in budgeting.budget_gate.waits.items():
        yield "lanekeeper.account.waits", {"account": name, "lane": lane, "reason": reason}, count


def _of_calls(budgeting: Budgeting) -> Iterator[Sample]:
    breakers, now_s = budgeting.breakers, asyncio.get_running_loop().time()
    paused = breakers.pauses.reasons()
    for name in budgeting.registry.names:
        yield "lanekeeper.provider.paused", {"provider": name}, int(name in paused)
    is_open = dict.fromkeys(breakers.states(now_s), 1)
    outcomes: Counter[tuple[str, str]] = Counter()
    by_model: defaultdict[tuple[str, str], list[CallFigures]] = defaultdict(
        list
    )  # `other` has calls of several accounts
    for (provider, account, model), calls in budgeting.registry.calls.items():
        by_model[provider, model].append(calls)
        for outcome, histogram in calls.times.items():
            outcomes[account, outcome] += sum(histogram.counts)
        of_model = {"account": account, "model": model}
        for type, count in (
            ("input", calls.uncached),
            ("output", calls.outputs.sum),
            ("cache_read", calls.cache_read),
            ("cache_write", calls.cache_write),
        ):
            yield "lanekeeper.account.tokens", {**of_model, "type": type}, count
        yield "lanekeeper.account.web_searches", of_model, calls.web_searches
        yield "lanekeeper.account.cost_usd", of_model, calls.usd
        yield "lanekeeper.account.unpriced", of_model, calls.unpriced
    for (provider, model), several in by_model.items():
        is_open.setdefault(f"{provider} {model}", 0)
        common = {
            "gen_ai.operation.name": CALL,
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": model,
        }
        for outcome in dict.fromkeys(outcome for calls in several for outcome in calls.times):
            failed = {} if outcome == "answered" else {"error.type": outcome}
            times = added(calls.times[outcome] for calls in several if outcome in calls.times)
            yield "gen_ai.client.operation.duration", {**common, **failed}, times
        first_tokens = added(calls.first_tokens for calls in several)
        yield "gen_ai.client.operation.time_to_first_chunk", common, first_tokens
        for type in ("input", "output"):
            tokens = added(getattr(calls, f"{type}s") for calls in several)
            yield "gen_ai.client.token.usage", {**common, "gen_ai.token.type": type}, tokens
    for (lane, model, reason), count in budgeting.registry.stops.items():
        yield "lanekeeper.answers", {"lane": lane, "model": model, "stop_reason": reason}, count
    for (lane, model, category), count in budgeting.registry.refusals.items():
        yield "lanekeeper.refusals", {"lane": lane, "model": model, "category": category}, count
    for (account, outcome), count in outcomes.items():
        yield "lanekeeper.account.calls", {"account": account, "outcome": outcome}, count
    for name, value in is_open.items():
        provider, _, model = name.partition(" ")
        yield "lanekeeper.breaker.open", {"provider": provider, "model": model}, value


def _of_spending(worker: Worker, tenants: frozenset[str]) -> Iterator[Sample]:
    spending = worker.budgeting.spending
    totals = spending.totals()
    for lane, spent in totals[LANE].items():
        yield "lanekeeper.lane.tokens", {"lane": lane}, spent.tokens
        yield "lanekeeper.lane.cost_usd", {"lane": lane}, spent.usd
        yield "lanekeeper.lane.saved_usd", {"lane": lane}, spent.saved_usd
    for tenant in tenants & totals[TENANT].keys():
        for what, value in zip(("requests", "tokens", "cost_usd", "saved_usd"), totals[TENANT][tenant], strict=True):
            yield f"lanekeeper.tenant.{what}", {"tenant": tenant}, value
    for bound, used in spending.used().items():
        if bound.reason == LANE or (bound.reason == TENANT and bound.who in tenants):
            labels = {
                "kind": bound.reason,
                "name": bound.who,
                "what": bound.what if bound.per == DAY else f"{bound.what}_{bound.per}",
            }
            yield "lanekeeper.cap.limit", labels, bound.limit
            yield "lanekeeper.cap.used", labels, used


def _of_tenants(lane: str, slots: LaneSlots, tenants: frozenset[str]) -> Iterator[Sample]:
    for tenant, figures in slots.snapshot(tenants).items():
        for what in ("running", "in_hand", "begun", "set_aside"):
            yield f"lanekeeper.tenant.{what}", {"tenant": tenant, "lane": lane}, figures[what]


def _troubles(worker: Worker) -> list[str]:
    """The first reasons why `/readyz` says that it takes no work: of those that say the same, one."""
    found: dict[str, str] = {}
    for what, why in worker.reasons().items():
        if why is not None:
            found.setdefault(why, f"{what}: {why}")
    return list(found.values())[:TROUBLES]


def _removed(worker: Worker) -> dict[str, int]:
    dead, parking = worker.dead_letters, worker.settler.parking
    return {"exported": dead.exported, "dropped": dead.dropped, "unparked": parking.unparked}


def _in_batches(worker: Worker) -> int:
    """How many requests this worker gathers, or has in tickets."""
    return worker.gatherer.in_hand + worker.collector.requests_waiting


def _batches(worker: Worker) -> dict[str, int]:
    return {**worker.gatherer.counts, **worker.collector.counts}


def _control(worker: Worker) -> dict[str, int]:
    answers = worker.control.answers
    return {
        "refused": answers.refused,
        "unanswered": answers.unanswered,
        "displaced": worker.control.displaced,
    }


def _told(activity: LaneActivity) -> dict[str, Any]:
    recent = {window: activity.recent.over(minutes) for window, minutes in WINDOWS.items()}
    return {
        **activity.snapshot(),
        "buried": activity.buried_by.total(),
        "waits": {window: packed_sketch(waits) for window, (waits, _) in recent.items()},
        "runs": {window: packed_sketch(runs) for window, (_, runs) in recent.items()},
    }
