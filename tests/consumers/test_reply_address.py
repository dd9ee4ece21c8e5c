"""Where replies may go: never to a queue that the worker may write but the requester may not."""

import re

import pytest

from consumers.replies.address import ReplyRule
from lanekeeper.contract.names import Names

OPEN = ReplyRule(names=Names())
BOUND = ReplyRule(names=Names(), bound=True)
GEN = "amq.gen-abcdefghijklmnopqrstuv"
DIRECT = "amq.rabbitmq.reply-to.g1h2/+_-.abc=="
NEVER = [
    "lane",
    "lane.critical",
    "lane.dead",
    "lane.replyx",
    "amq.topic",
    "amq.rabbitmq.trace",
    "amq.gen-short",
    "x" * 256,
]


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.parametrize("rule", [OPEN, BOUND])
def test_never_to_a_queue_of_ours_or_of_the_brokers(rule: ReplyRule, address: str) -> None:
    assert not rule.allows(address, user="shop")
    assert not rule.allows_control(address, user="shop")


@pytest.mark.parametrize("address", [GEN, DIRECT, "lane.reply.anybody", "shop.answers"])
def test_open_it_may_go_to_any_other_queue(address: str) -> None:
    assert OPEN.allows(address, user=None)


@pytest.mark.parametrize(
    ("address", "user", "allowed"),
    [
        (DIRECT, None, True),
        (DIRECT, "shop", True),
        ("lane.reply.shop", "shop", True),
        ("lane.reply.shop.eu.1", "shop", True),
        ("lane.reply.shop", None, False),
        ("lane.reply.shop", "bank", False),
        ("lane.reply.shopping", "shop", False),
        ("lane.reply.shop", "", False),
        ("lane.reply.", "", False),
        ("lane.reply.shop.eu", "shop.eu", False),  # it is shop's
        ("shop.answers", "shop", False),
        (GEN, "shop", False),
    ],
)
def test_bound_it_goes_to_whoever_published_alone(address: str, user: str | None, allowed: bool) -> None:
    assert BOUND.allows(address, user=user) is allowed
    if not allowed:
        assert "direct reply-to" in BOUND.refusal(address, user=user).detail


def test_what_is_refused_says_what_would_do() -> None:
    assert "lane.reply.shop" in BOUND.refusal(GEN, user="shop").detail
    assert "user_id" in BOUND.refusal(GEN, user=None).detail


def test_a_list_narrows_both() -> None:
    allow = (re.compile(r"lane\.reply\..*"),)
    for bound in (False, True):
        rule = ReplyRule(names=Names(), allow=allow, bound=bound)
        assert rule.allows("lane.reply.shop", user="shop")
        assert not rule.allows(DIRECT, user="shop")
