"""The replay of recorded traffic: its figures must come from our budget gate, not from the replay itself."""

from dataclasses import replace

import pytest

from benchmarks.replaying import guarantees
from benchmarks.replaying.replay import run
from benchmarks.replaying.result import Result
from benchmarks.replaying.scenarios import LANES, SCENARIOS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result() -> Result:
    return run(SCENARIOS["full-104"])


def test_a_scenario_gives_the_same_figures_every_time(result: Result) -> None:
    assert run(SCENARIOS["full-104"]).asks == result.asks


def test_every_recorded_request_is_answered_in_the_end(result: Result) -> None:
    assert all(each.answered_s is not None for each in result.asks if each.counts)


def test_no_more_is_used_than_the_provider_allows(result: Result) -> None:
    calls = sorted((each.started_s, each.used) for each in result.asks if each.started_s is not None)

    for bucket, limit in enumerate(result.load.limits):
        level, at_s = limit, 0.0
        for started_s, used in calls:
            level = min(limit, level + (started_s - at_s) * limit / 60) - used[bucket]
            at_s = started_s
            # a call's output tokens are estimated at its start, and settled after it
            assert level > -0.03 * limit


@pytest.mark.parametrize("name", ["three-104", "large-104", "down-104", "1s-104", "cold-104"])
def test_failures_during_the_replay_lose_no_request(name: str) -> None:
    found = run(replace(SCENARIOS[name], slice_s=(1455, 1515), down_s=(10, 30) if name == "down-104" else None))

    assert all(each.answered_s is not None for each in found.asks if each.counts)
    assert found.refused == sum(each.refused for each in found.asks)


def test_requests_wait_until_an_outage_is_over() -> None:
    found = run(replace(SCENARIOS["down-104"], slice_s=(1455, 1515), down_s=(10, 30)))

    began = [each.started_s for each in found.asks if each.started_s is not None]
    assert not [at_s for at_s in began if 10 <= at_s < 29.9]


@pytest.mark.parametrize("name", ["full-70", "full-90", "full-104", "full-110", "full-150"])
def test_no_request_is_later_than_with_an_account_of_its_own_lane(name: str) -> None:
    found = run(SCENARIOS[name])

    assert {lane: guarantees.beside_own(found, lane).late for lane in LANES[:2]} == {"critical": 0, "normal": 0}
    least = {lane: guarantees.reserve(found, lane).least for lane in LANES}
    assert all(share is None or share >= 0.9 for share in least.values())
    assert least["batch"] is not None
    assert found.refused == 0


@pytest.mark.parametrize(("name", "part"), [("weather-5", 0.99), ("weather-12", 0.99), ("weather-30", 0.97)])
def test_refusals_at_random_take_no_throughput(name: str, part: float) -> None:
    found = run(SCENARIOS[name])

    assert found.answers_per_s >= part * len(found.asks) / found.load.ends_s
    assert found.waits("critical").p50 == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(
    ("name", "most_calls"), [("narrow-4", 4), pytest.param("narrow-40", 40, marks=pytest.mark.slow)]
)
def test_a_provider_that_overloads_above_a_number_of_calls_is_used_and_seldom_overloaded(
    name: str, most_calls: int
) -> None:
    found = run(SCENARIOS[name])

    assert 0.9 * most_calls <= found.busy_calls <= most_calls + 0.1
    assert found.overloaded < 0.05
    assert found.waits("critical").p95 < 3


def test_a_large_request_of_another_lane_delays_no_critical_request() -> None:
    scenario = SCENARIOS["large-104"]
    found = run(replace(scenario, large=tuple(each for each in scenario.large if each.lane != "critical")))

    assert guarantees.beside_own(found, "critical").late == 0
