"""The numbers that docs/contract.md states about a request: each is allowed, and one more is refused."""

import gzip
from typing import Any

import pytest

from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem
from topology.codec import bounds, decoding
from topology.lanes import CRITICAL

YEAR_MS = 31_536_000_000


def padded(size: int) -> bytes:
    return b'{"prompt": "x"}'.ljust(size)


def decode(body: bytes, **properties: Any) -> None:
    fields = {"exchange": "lane.requests", "routing_key": "critical.shop.chat", **properties}
    decoding.decode(Message(body=body, **fields), lane=CRITICAL, request_id="r-1", hop=None, now_ms=0)


@pytest.mark.parametrize(
    ("allowed", "above", "code"),
    [
        ({"body": padded(1_048_576)}, {"body": padded(1_048_577)}, "too_large"),
        (
            {"body": gzip.compress(padded(8_388_608)), "content_encoding": "gzip"},
            {"body": gzip.compress(padded(8_388_609)), "content_encoding": "gzip"},
            "too_large",
        ),
        ({"message_id": "a" * 128}, {"message_id": "a" * 129}, "invalid_request"),
        ({"priority": 9}, {"priority": 10}, "invalid_request"),
        (
            {"headers": {"x-lane-delay-ms": YEAR_MS}},
            {"headers": {"x-lane-delay-ms": YEAR_MS + 1}},
            "invalid_request",
        ),
        ({"headers": {"x-lane-delay-ms": 100}}, {"headers": {"x-lane-delay-ms": 99}}, "invalid_request"),
        ({"headers": {"x-lane-deadline-ms": 1}}, {"headers": {"x-lane-deadline-ms": 0}}, "invalid_request"),
    ],
    ids=["as sent", "unpacked", "id", "priority", "longest delay", "shortest delay", "shortest deadline"],
)
def test_a_request_may_have_what_the_contract_states_and_no_more(
    allowed: dict[str, Any], above: dict[str, Any], code: str
) -> None:
    decode(**{"body": padded(0), **allowed})
    with pytest.raises(RequestProblem) as refused:
        decode(**{"body": padded(0), **above})
    assert refused.value.code == code


def test_a_body_may_have_100_000_keys_and_values() -> None:
    assert bounds.excess(b"[" + b"0," * 99_999 + b"0]", max_values=bounds.VALUES) is None
    assert bounds.excess(b"[" + b"0," * 100_000 + b"0]", max_values=bounds.VALUES) is not None


def test_a_number_may_have_128_digits() -> None:
    filler = b" " * bounds.SMALL_BYTES
    assert bounds.excess(filler + b"9" * 128, max_values=10) is None
    assert bounds.excess(filler + b"9" * 129, max_values=10) == "a number of more than 128 digits"


def test_a_text_of_32_kib_is_not_measured() -> None:
    assert bounds.excess(b"9" * 32_768, max_values=40_000) is None
    assert bounds.excess(b"9" * 32_769, max_values=40_000) == "a number of more than 128 digits"
