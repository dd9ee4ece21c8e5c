"""Where replies may go: never to a queue to which the worker may publish but the requester may not."""

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
def test_no_reply_goes_to_one_of_our_or_the_brokers_own_queues(rule: ReplyRule, address: str) -> None:
    assert not rule.allows(address, user="shop")
    assert not rule.allows_control(address, user="shop")


@pytest.mark.parametrize("address", [GEN, DIRECT, "lane.reply.anybody", "shop.answers"])
def test_unbound_replies_may_go_to_any_other_queue(address: str) -> None:
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
        ("lane.reply.shop.eu", "shop.eu", False),  # this queue belongs to the user shop
        ("shop.answers", "shop", False),
        (GEN, "shop", False),
    ],
)
def test_bound_replies_go_only_to_the_user_who_published(address: str, user: str | None, allowed: bool) -> None:
    assert BOUND.allows(address, user=user) is allowed
    if not allowed:
        assert "direct reply-to" in BOUND.refusal(address, user=user).detail


def test_a_refusal_says_which_addresses_are_allowed() -> None:
    assert "lane.reply.shop" in BOUND.refusal(GEN, user="shop").detail
    assert "user_id" in BOUND.refusal(GEN, user=None).detail


def test_an_allow_list_restricts_bound_and_unbound_replies() -> None:
    allow = (re.compile(r"lane\.reply\..*"),)
    for bound in (False, True):
        rule = ReplyRule(names=Names(), allow=allow, bound=bound)
        assert rule.allows("lane.reply.shop", user="shop")
        assert not rule.allows(DIRECT, user="shop")
