"""Lanes of one's own: how they are declared, what they have by default, and which settings are refused."""

import pytest

from lanekeeper.contract.names import Names
from tests.support.settings import lane, load, wrong
from topology.declaration import declare
from topology.lanes import DEFAULT_LANES

VIP = {"LANEKEEPER_LANES__VIP__RANK": "5"}


pytestmark = pytest.mark.usefixtures("empty_folder")


def test_a_rank_declares_a_lane_which_is_like_the_nearest_default_lane() -> None:
    settings = load(env={**VIP, "LANEKEEPER_LANES__VIP__SLOTS": "3", "LANEKEEPER_LANES__FREE_TIER__RANK": "25"})

    assert [each.name for each in settings.lane_specs()] == ["vip", "critical", "normal", "free-tier", "batch"]
    vip, free = lane(settings, "vip"), lane(settings, "free-tier")
    assert (vip.slots, vip.most_slots, vip.deadline_s) == (3, 3, 120)
    assert (free.slots, free.deadline_s, free.model) == (4, 86_400, "claude-haiku-5-5"), "of two, the less urgent"
    assert not free.batches.enabled, "those of the default lane are not taken over"
    declared = declare(settings.lane_specs(), names=Names(), broker_version="4.3.6")
    assert {"lane.vip", "lane.vip.due", "lane.free-tier", "lane.free-tier.side.07"} <= {q.name for q in declared.queues}


def test_a_lane_without_a_rank_is_refused_by_name() -> None:
    told = wrong(
        "[lanes.urgent]\nslots = 'many'",
        env={"LANEKEEPER_LANES__BATHC__SLOTS": "4"},
    )

    assert (
        "LANEKEEPER_LANES__BATHC__SLOTS: no such lane, did you mean batch? a lane is declared by its rank, "
        "LANEKEEPER_LANES__BATHC__RANK" in told
    )
    assert "lanes.urgent.slots in given.toml: found 'many', allowed is a whole number from 1 to 10000" in told
    told = wrong(env={"LANEKEEPER_CAPS__LANES__NIGHTLY__USD": "5"})
    assert "LANEKEEPER_CAPS__LANES__NIGHTLY__USD: no lane 'nightly'; there are critical, normal, batch" in told


def test_names_and_ranks_that_cannot_be_are_refused_all_at_once() -> None:
    told = wrong(
        "[lanes.VIP]\nrank = 4\n[lanes.dead]\nrank = 7",
        env={"LANEKEEPER_LANES__A__RANK": "10"},
    )

    assert "lanes.VIP.rank in given.toml: 'VIP' is no name for a lane: a to z, 0 to 9 and -" in told
    assert "lanes.dead.rank in given.toml: 'dead' is no name for a lane" in told
    assert "LANEKEEPER_LANES__A__RANK: the lanes critical and a have one rank, 10" in told
    told = wrong(env={"LANEKEEPER_LANES__B__RANK": "0", "LANEKEEPER_LANES__C__RANK": "x"})
    assert "LANEKEEPER_LANES__B__RANK: found '0', allowed is a whole number from 1" in told
    assert "LANEKEEPER_LANES__C__RANK: found 'x', allowed is a whole number from 1" in told
    assert len(told.splitlines()) == 3, "no further errors that follow from these"


def test_at_least_one_lane_and_at_most_sixteen() -> None:
    none = "\n".join(f"[lanes.{each.name}]\nenabled = false" for each in DEFAULT_LANES)
    assert "0 lanes are enabled, allowed are 1 to 16" in wrong(none)
    many = {f"LANEKEEPER_LANES__OWN{n}__RANK": str(100 + n) for n in range(14)}
    assert "17 lanes are enabled, allowed are 1 to 16" in wrong(env=many)


def test_shares_above_100_percent_are_refused_with_those_of_all_lanes() -> None:
    told = wrong(env={**VIP, "LANEKEEPER_BUDGET__LANES__VIP__SHARE": "0.5"})

    assert "LANEKEEPER_BUDGET__LANES__VIP__SHARE: the shares are 105 % together (vip 50 %, critical 30 %" in told


def test_the_keys_of_a_gateway_may_name_lanes_of_ones_own_and_no_others() -> None:
    key = '[gateway.keys.%s]\ntenant = "guest"\nlanes = ["vip"]' % ("0" * 64)

    assert load(key, env=VIP).gateway.keys["0" * 64].lanes == ("vip",)
    assert "the key of guest names the lane 'vip'; there are critical, normal, batch" in wrong(key)
