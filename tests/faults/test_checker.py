"""The checker finds every broken promise, and accepts what is allowed; a schedule follows from its seed; the report
shows the results."""

from typing import Any

import pytest

from tests.faults import checker
from tests.faults.checker import OK, Asked, Called, Disturbed, Event, Posted, Published, Replied, Told, check
from tests.faults.faults import FAULTS, plan
from tests.faults.ground import Ending
from tests.faults.run import Run


def asked(question: str = "q", *, at_s: float = 0.0, identity: str = "", **more: Any) -> Asked:
    return Asked(
        at_s=at_s,
        question=question,
        identity=identity or question,
        lane=more.pop("lane", "critical"),
        words="hi",
        **more,
    )


def published(question: str = "q", *, at_s: float = 0.1, told: Told = "confirmed") -> Published:
    return Published(at_s=at_s, question=question, sent_s=at_s - 0.01, told=told)


def replied(question: str = "q", *, at_s: float = 1.0, code: str = OK, digest: str = "d", **more: Any) -> Replied:
    return Replied(
        at_s=at_s,
        question=question,
        identity=more.pop("identity", question),
        code=code,
        digest=digest,
        text=more.pop("text", "echo: hi"),
    )


def called(identity: str = "q", *, at_s: float = 0.5, outcome: str = OK, step: str = "", batch: str = "") -> Called:
    return Called(at_s=at_s, ended_s=at_s + 0.1, identity=identity, outcome=outcome, step=step, batch=batch)


def fault(at_s: float, healed_s: float) -> Disturbed:
    return Disturbed(at_s=at_s, healed_s=healed_s, code="A1", title="killed", against="worker 1", in_flight=3)


GOOD: tuple[Event, ...] = (asked(), published(), called(), replied())
STEPS = tuple(called(at_s=at_s, step=step) for at_s, step in ((0.4, "1"), (0.5, "2.1"), (0.6, "2.2"), (0.8, "3")))
PIPED: tuple[Event, ...] = (asked(piped=True), published(), *STEPS, replied())


def kinds(*events: Event, **how: Any) -> set[str]:
    return {each.kind for each in check(events, **how).violations}


def test_a_request_may_be_in_another_batch_after_it_failed_in_one_and_live_after_it_was_in_one() -> None:
    failed = (called(batch="one", outcome="overloaded"), called(at_s=0.6, batch="two"), called(at_s=0.7))
    assert kinds(asked(), published(), *failed, replied()) == set()


def test_a_correct_history_passes() -> None:
    verdict = check(GOOD)
    assert verdict.violations == ()
    assert (verdict.asked, verdict.confirmed, verdict.answered_twice, verdict.repeated_calls) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        (checker.LOST, (asked(), published())),
        (checker.LOST, (asked(), published(told="unknown"), published(at_s=0.3), called())),
        (checker.TWO_OUTCOMES, (*GOOD, replied(at_s=2, code="attempts_exhausted"))),
        (checker.TWO_BODIES, (*GOOD, replied(at_s=2, digest="other"))),
        (checker.TWO_BODIES, (*GOOD, asked("again", identity="q"), replied("again", identity="q", digest="other"))),
        (checker.NEVER_ASKED, (*GOOD, replied("stranger"))),
        (checker.NEVER_ASKED, (*GOOD, called("stranger"))),
        (checker.IN_TWO_BATCHES, (*GOOD, called(batch="one"), called(at_s=0.6, batch="two"))),
        (checker.OF_ANOTHER, (asked(), published(), replied(identity="other"))),
        (checker.OF_ANOTHER, (asked(), published(), replied(text="echo: other"))),
        (checker.UNEXPECTED, (asked(), published(), replied(code="internal"))),
        (checker.PAID_AGAIN, (*GOOD, called(at_s=0.7))),
        (checker.PAID_AGAIN, (*PIPED, called(at_s=0.65, step="2.1"))),
        (checker.CALLED_AFTER_END, (*GOOD, called(at_s=1.5))),
        (checker.LOST, PIPED[:-1]),
        (checker.CALLED_AFTER_STEP, (*PIPED, called(at_s=0.7, step="1"))),
        (checker.CALLED_AFTER_STEP, (*PIPED, called(at_s=0.9, step="2.1"))),
        (checker.CALLED_AFTER_END, (*PIPED, called(at_s=1.5, step="3"))),
        (checker.NOT_POSTED, (asked(posted=True), published(), called(), replied())),
        (
            checker.TWO_BODIES,
            (asked(posted=True), published(), replied(), Posted(at_s=2, identity="q", digest="another")),
        ),
        (
            checker.POSTED_AGAIN,
            (
                asked(posted=True),
                published(),
                replied(),
                *(Posted(at_s=at_s, identity="q", digest="d") for at_s in (2, 3)),
            ),
        ),
        (checker.NOT_PARKED, (asked(expects=("provider_rejected",)), published(), replied(code="provider_rejected"))),
    ],
)
def test_each_violation_is_found(kind: str, events: tuple[Event, ...]) -> None:
    assert kind in kinds(*events)


@pytest.mark.parametrize("told", ["refused", "returned", "unknown"])
def test_a_request_that_was_never_confirmed_needs_no_answer(told: Told) -> None:
    assert kinds(asked(), published(told=told)) == set()


def test_a_repeated_equal_reply_is_counted_and_allowed() -> None:
    verdict = check((*GOOD, replied(at_s=2)))
    assert verdict.violations == ()
    assert verdict.answered_twice == 1


def test_a_call_that_the_provider_failed_is_not_a_repeated_call() -> None:
    assert check((*GOOD, called(at_s=0.2, outcome="overloaded"))).repeated_calls == 0
    assert check((*GOOD, called(at_s=0.2, outcome="client_gone"))).repeated_calls == 1
    assert check((*GOOD, called(at_s=0.2, outcome=OK))).repeated_calls == 1


def test_a_pipelines_calls_are_counted_by_step_and_item() -> None:
    verdict = check(PIPED)
    assert (verdict.violations, verdict.pipelines, verdict.repeated_calls) == ((), 1, 0)
    again = check((*PIPED, fault(0.61, 0.62), called(at_s=0.65, step="2.1")))
    assert (again.violations, again.repeated_calls) == ((), 1), "its worker died before it was stored"


def test_after_a_lost_store_a_second_completion_is_allowed_and_a_second_outcome_is_not() -> None:
    again = (*GOOD, called(at_s=1.5), replied(at_s=2, digest="other"))
    assert kinds(*again, store_was_lost=True) == set()
    assert kinds(*again, replied(at_s=3, code="internal"), store_was_lost=True) >= {checker.TWO_OUTCOMES}


def test_a_stall_is_the_time_in_which_a_lane_had_requests_and_no_answer() -> None:
    def answered(question: str, from_s: float, to_s: float) -> tuple[Event, ...]:
        return asked(question, at_s=from_s), published(question, at_s=from_s), replied(question, at_s=to_s)

    verdict = check((*answered("a", 0, 1), *answered("b", 0.5, 4), *answered("c", 3, 4.5), *answered("d", 10, 10.2)))
    assert verdict.stalls["critical"].lasted_s == 3, "from a's answer to b's; nothing was owed from 4.5 to 10"


def test_recovery_is_measured_from_a_faults_end_to_the_last_answer_awaited_then() -> None:
    def answered(question: str, from_s: float, to_s: float) -> tuple[Event, ...]:
        return asked(question, at_s=from_s), published(question, at_s=from_s), replied(question, at_s=to_s)

    events = (*answered("a", 1, 7), *answered("b", 6, 9), fault(2, 5), called("a", at_s=1.1), called("a", at_s=5.5))
    (recovery,) = check(events).recoveries
    assert recovery.recovered_s == 2
    assert recovery.stall is not None
    assert recovery.stall.lasted_s == 5, "what of it came before the fault is not the fault's"
    assert (recovery.confirmed, recovery.repeated_calls) == (1, 1)


def test_a_delayed_request_is_awaited_from_its_due_time() -> None:
    events = (asked(due_s=5.0), published(), called(at_s=5), replied(at_s=5.25), fault(0.5, 1))
    verdict = check(events)
    assert verdict.stalls["critical"].lasted_s == 0.25
    assert verdict.recoveries[0].recovered_s == 0.25


def test_several_runs_together_cause_every_fault_before_repeating_one() -> None:
    begun = [
        each.fault
        for at in range(3)
        for each in plan(FAULTS, seed=at, seconds=60, part=(at, 3))[: len(FAULTS) // 3 + 1]
    ]
    assert set(begun) == set(FAULTS)


def a_run() -> Run:
    events = (
        Asked(at_s=0, question="q", identity="q", lane="batch", words="q"),
        Published(at_s=0.1, question="q", sent_s=0, told="confirmed"),
        Disturbed(at_s=0.05, healed_s=0.2, code="A1", title="worker killed", against="worker 1", in_flight=2),
    )
    return Run("single", 1, 2.0, check(events), (Ending(1.0, 0, -11, frozenset()),), 0)


def test_a_run_fails_if_a_request_was_lost_or_a_worker_crashed() -> None:
    lost, crashed = a_run().failures
    assert lost.startswith("lost: q: batch")
    assert crashed == "crashed: worker 0 ended by itself with -11"
