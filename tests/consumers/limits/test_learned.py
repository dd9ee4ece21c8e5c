"""Learned values are read by the version that wrote them; anything else is refused as a whole."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.limits import learned
from consumers.limits.account import Account
from consumers.limits.base import Amounts, Feedback, Kind
from consumers.limits.headers import BucketHeaders, RateHeaders
from consumers.limits.lines import Waiter
from consumers.limits.spec import BudgetSpec
from tests.support.examples import examples

RATE = RateHeaders(BucketHeaders(limit=60, remaining=50), BucketHeaders(limit=9_000, remaining=5_000), BucketHeaders())
HEARD = (
    Feedback(kind=Kind.ANSWERED, rate=RATE, counted=Amounts(1, 1_000, 10)),
    Feedback(kind=Kind.ANSWERED),
    Feedback(kind=Kind.RATE_LIMITED, rate=RATE),
    Feedback(kind=Kind.RATE_LIMITED, retry_after_s=3.0),
    Feedback(kind=Kind.OVERLOADED),
    Feedback(kind=Kind.SPEND_LIMIT),
)
heard = st.lists(st.tuples(st.sampled_from(HEARD), st.integers(0, 400)), max_size=12)
numbers = st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=3), st.booleans())
values = st.recursive(numbers, lambda inner: st.lists(inner, max_size=4), max_leaves=6)


def account_that(said: list[tuple[Feedback, int]]) -> tuple[Account, float]:
    account, now_s = Account("a", BudgetSpec(), now_s=0), 0.0
    for each, later_s in said:
        now_s += later_s
        account.learn(each, now_s)
    return account, now_s


def written() -> dict[str, Any]:
    account, _ = account_that([(each, 1) for each in HEARD])
    found: dict[str, Any] = json.loads(learned.to_json(account.learned()))
    return found


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(said=heard)
def test_another_process_reads_learned_values_unchanged(said: list[tuple[Feedback, int]]) -> None:
    account, now_s = account_that(said)
    other = Account("a", BudgetSpec(), now_s=now_s)
    other.load(learned.read(learned.to_json(account.learned())))

    assert other.learned() == account.learned()
    assert other.per_minute() == account.per_minute()
    assert [bucket.burst for bucket in other.buckets] == [bucket.burst for bucket in account.buckets]
    assert [bucket.most for bucket in other.buckets] == [bucket.most for bucket in account.buckets]


@pytest.mark.parametrize(
    "text",
    ["", "?", "null", "3", '"?"', "[]", "{}", "[[], [], 0, 0]", '{"version": 1}', b"\xff", "[" * 100_000, "1" * 5_000],
)
def test_text_that_is_not_learned_values_is_refused(text: str | bytes) -> None:
    with pytest.raises(learned.UnreadableError):
        learned.read(text)


@pytest.mark.parametrize("version", [0, 2, 99, "1", None, [1]])
def test_learned_values_of_another_version_are_refused_although_every_field_is_there(version: object) -> None:
    with pytest.raises(learned.UnreadableError, match="version"):
        learned.read(json.dumps(written() | {"version": version}))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=values, data=st.data())
def test_a_field_with_another_value_is_refused_or_harmless(value: object, data: st.DataObject) -> None:
    found = written()
    part = data.draw(st.sampled_from([found, found["limits"], found["bursts"]]))
    part[data.draw(st.sampled_from(sorted(part)))] = value
    try:
        read = learned.read(json.dumps(found))
    except learned.UnreadableError:
        return
    account = Account("a", BudgetSpec(), now_s=500.0)
    account.load(read)
    for at, each in enumerate(HEARD):
        account.learn(each, 500.0 + at)
    account.join(waiter := Waiter(0, Amounts(1, 10, 10), arrived_s=506.0))

    assert account.grant_next(1_000_000.0)[0] is waiter


def test_a_limit_that_no_account_can_have_is_refused() -> None:
    for told in (0, -5, 1e300, "60"):
        found = written()
        found["limits"]["told"] = [told, None, None]
        with pytest.raises(learned.UnreadableError):
            learned.read(json.dumps(found))


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("limits", "told", [0.9, None, None]),
        ("limits", "grown", [0, 0, -1]),
        ("limits", "factors", [1, 1, 0.0009]),
        ("limits", "factors", [1.1, 1, 1]),
        ("limits", "is_silent", 0),
        ("bursts", "proven_s", [None, -1, None]),
        ("bursts", "cut", [0.0009, 1, 1]),
        ("bursts", "cut", [1, 1, 1.1]),
        ("bursts", "cut", [1, 1]),
    ],
)
def test_a_value_outside_its_bounds_is_refused(part: str, field: str, value: object) -> None:
    found = written()
    found[part][field] = value
    with pytest.raises(learned.UnreadableError):
        learned.read(json.dumps(found))
