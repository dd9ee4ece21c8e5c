"""Stories chosen at random once, with all that came of them: stories/*.txt. See limits/test_stories.py.

.venv/bin/python -m tests.consumers.test_stories
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from consumers.capacity.lending import QueueLoad, decide
from consumers.chain import Route
from consumers.failures import (
    UNREACHABLE,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.fairness.lane_slots import LaneSlots, QueueSlots, TenantShare
from consumers.gates.waiting_room import WaitingRoom
from consumers.limits.estimates import Estimates, UsageClass, task_of
from consumers.outcomes import Retried
from consumers.providers.breakers import Breakers, Permit
from consumers.retry import RetryPolicy
from consumers.retry import decide as decide_retry
from tests.support.virtual_time import virtually

FOLDER = Path(__file__).with_name("stories")
TENANTS = ("shop", "search", "crm", "tools")


def slots_of_tenants() -> list[str]:
    """Four tenants take and give back the slots of two queues."""
    chosen, lines = random.Random("turns"), []

    async def story() -> None:
        shares = {"shop": TenantShare(weight=2), "tools": TenantShare(in_flight=2), "*": TenantShare()}
        turns = LaneSlots(shares, lambda tenant: tenant in ("crm", "tools"))
        benches = [turns.queue(4), turns.queue(2)]
        held: list[tuple[QueueSlots, str]] = []
        tasks: list[asyncio.Task[None]] = []

        async def ask(number: int, at: int, tenant: str) -> None:
            bench = benches[at]
            rank, movable, is_head = chosen.choice((0, 0, 5)), chosen.random() < 0.5, chosen.random() < 0.2
            if bench.begin(tenant):
                lines.append(f"{number} {tenant} begins at once in {at}")
            else:
                turn = await bench.wait(tenant, rank=rank, movable=movable, is_head=is_head)
                lines.append(f"{number} {tenant} is told in {at}: {turn.name}, at {_now_s()}")
                if turn.name == "ASIDE":
                    bench.lane.figures(tenant).set_aside += 1
                    return
            held.append((bench, tenant))

        for number in range(200):
            what, tenant, at = chosen.random(), chosen.choice(TENANTS), chosen.choice((0, 0, 1))
            if what < 0.55:
                tasks.append(asyncio.ensure_future(ask(number, at, tenant)))
            elif what < 0.85 and held:
                bench, tenant = held.pop(chosen.randrange(len(held)))
                bench.end(tenant)
                lines.append(f"{number} {tenant} ends in {benches.index(bench)}")
            elif what < 0.88:
                benches[at].resize(chosen.choice((1, 3, 5)))
            elif what < 0.92:
                benches[at].set_surplus_aside(chosen.random() < 0.5)
            elif what < 0.95 and tasks:
                chosen.choice(tasks).cancel()
            await asyncio.sleep(chosen.choice((0, 0, 1, 20)))
            lines.append(f"{[(each.running, each.waiting, each.is_full, each.begun) for each in benches]}")
            if not number % 10:
                lines.append(f"{turns.snapshot()} {turns.in_hand} {turns.is_shared}")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(700)
        lines.append(f"{turns.is_shared} {turns.snapshot()}")

    virtually(story())
    return lines


def slots_that_are_lent() -> list[str]:
    """What is decided for three queues, in 150 situations."""
    chosen, lines = random.Random("lending"), []
    for _ in range(150):
        queues = []
        for slots, most in ((8, 16), (5, 7), (1, 12)):
            extra = chosen.randrange(most - slots + 1)
            grown = chosen.randrange(extra + 1)
            reserved = chosen.choice((0, 1, slots))
            queue = QueueLoad(slots=slots, reserved=reserved, max_slots=most, target_wait_s=2.0, extra=extra)
            queue = replace(queue, grown=grown, ending=chosen.choice((0, 0, extra - grown)))
            queue = replace(queue, busiest=chosen.randrange(slots + extra + 1), waiting=chosen.choice((0, 0, 1, 4, 50)))
            queues.append(
                replace(queue, wait_s=chosen.choice((0, 2.0, 2.1, 9)), bottleneck=chosen.choice((None, None, "rpm")))
            )
        lines.append(" | ".join(f"{each.lent} {each.grown} {each.limit}" for each in decide(queues)))
    return lines


def patience_of_lanes() -> list[str]:
    """How long requests of two lanes may hold a slot while they wait for one of three accounts."""
    chosen, lines, room = random.Random("patience"), [], WaitingRoom()
    waiting: list[tuple[str, str]] = []
    for _ in range(250):
        lane, account = chosen.choice(("normal", "batch")), chosen.choices(("one", "two", "three"), (20, 1, 1))[0]
        what = chosen.random()
        if what < 0.55:
            lines.append(f"{lane} {account} {room.enter(lane, account, slots=chosen.choice((1, 3, 4)))}")
            waiting.append((lane, account))
        elif what < 0.95 and waiting:
            room.leave(*waiting.pop(chosen.randrange(len(waiting))))
        else:
            room.passed(lane, account)
    return lines


ERRORS: tuple[ProviderError, ...] = (
    TransientError("500", status=500),
    TransientError("not in time", type="timeout"),
    TransientError("no connection", type=UNREACHABLE),
    OverloadedError("529", status=529, type="overloaded_error"),
    OverloadedError("529", status=529, type="overloaded_error", retry_after_s=7.5),
    RateLimitedError("429", status=429, type="rate_limit_error"),
    RateLimitedError("429", status=429, type="rate_limit_error", retry_after_s=40.0),
    RejectedError("400", status=400),
    RejectedError("401", status=401),
)


def pauses_between_attempts() -> list[str]:
    """What becomes of 400 failed attempts."""
    chosen, lines = random.Random("pauses"), []
    policies = (
        RetryPolicy(),
        RetryPolicy(base_s=0.2, span_s=3, cap_s=1.5),
        RetryPolicy(base_s=4, span_s=900, cap_s=300),
    )
    for _ in range(400):
        found = decide_retry(
            chosen.choice(ERRORS),
            attempts=chosen.randrange(1, 7),
            max_attempts=chosen.choice((2, 4, 6, 8)),
            left_ms=chosen.choice((0, 500, 2_000, 30_000, 600_000, 86_400_000)),
            policy=chosen.choice(policies),
            rng=chosen,
            has_other=chosen.random() < 0.2,
        )
        lines.append(f"{found.delay_ms} ms" if isinstance(found, Retried) else found.problem.detail)
    return lines


def breakers_of_two_providers() -> list[str]:
    """Calls that fail, are answered or cancelled, and how the breakers change."""
    chosen, lines = random.Random("breakers"), []
    routes = [Route(provider=each, model="m", name="m", account=each) for each in ("one", "two")]

    async def story() -> None:
        loop, breakers = asyncio.get_running_loop(), Breakers(rng=chosen)
        running: list[Permit] = []
        for number in range(300):
            await asyncio.sleep(chosen.choice((0, 0, 0, 0, 0.5, 2, 6)))
            route, now_s, what = chosen.choice(routes), loop.time(), chosen.random()
            if what < 0.5 or not running:
                permit = await breakers.enter(route, now_s, request=str(number // 2))
                lines.append(f"{now_s:.3f} {route.provider}: {permit and (permit.is_probe, permit.change)}")
                running += [permit] if permit else []
            else:
                permit = running.pop(chosen.randrange(len(running)))
                if what < 0.96:
                    error, timeout_s = (
                        chosen.choices(ERRORS, (9, 5, 5, 5, 5, 1, 0, 1, 1))[0],
                        chosen.choice((3, 60, 60)),
                    )
                    change = await breakers.failed(permit, error, now_s, timeout_s=timeout_s)
                    lines.append(f"{now_s:.3f} {permit.route.provider} fails by {error.detail}: {change}")
                elif what < 0.98:
                    lines.append(f"{permit.route.provider} answers: {await breakers.answered(permit, now_s)}")
                else:
                    await breakers.unknown(permit, now_s)
            waits = [f"{breakers.wait_s(each, now_s):.3f} {breakers.down_s(each, now_s):.3f}" for each in routes]
            usable = [each.provider for each in breakers.usable(routes)]
            lines.append(f"{waits} {usable} {breakers.least_wait_s(routes):.3f} {breakers.states(now_s)}")

    virtually(story())
    return lines


def estimates_of_two_kinds() -> list[str]:
    """What requests are expected to use, learned from 60 answers."""
    chosen, lines = random.Random("estimates"), []
    estimates = Estimates(first_output_tokens=512, first_bytes_per_token=3.5)
    kinds = [UsageClass("batch", task_of(key), "m") for key in ("batch.crm.enrich.eu", "batch.crm", "batch")]
    for _ in range(60):
        kind, size = chosen.choice(kinds), chosen.choice((0, 1, 800, 9_000))
        expected = (
            estimates.input_tokens("m", size),
            estimates.output_tokens(kind, max_tokens=400),
            estimates.run_s(kind),
        )
        lines.append(f"{kind.task} {size} bytes: {' '.join(f'{each:.4f}' for each in expected)}")
        used = chosen.uniform(0, 600)
        estimates.learn(kind, body_bytes=size, input_tokens=size / chosen.uniform(2, 5), output_tokens=used)
        estimates.learn_run(kind, chosen.uniform(0.1, 9), was_cut=chosen.random() < 0.3)
    return lines


def _now_s() -> str:
    return f"{asyncio.get_running_loop().time() - 1000:.3f}"


STORIES = (
    slots_of_tenants,
    slots_that_are_lent,
    patience_of_lanes,
    pauses_between_attempts,
    breakers_of_two_providers,
    estimates_of_two_kinds,
)


def _path(story: Callable[[], list[str]]) -> Path:
    return FOLDER / f"{story.__name__.replace('_', '-')}.txt"


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_story_comes_out_as_it_did(story: Callable[[], list[str]]) -> None:
    assert story() == _path(story).read_text().splitlines()


if __name__ == "__main__":
    for each in STORIES:
        _path(each).write_text("\n".join(each()) + "\n")
