"""Which of an answer's usage figures are believed."""

import json
from typing import Any

import pytest

from consumers.failures import TransientError
from consumers.prices import Usage
from consumers.providers.answers import MOST_TOKENS, parse_message, read_answer


def usage(**said: Any) -> Usage:
    message = {"type": "message", "content": [], "stop_reason": "end_turn", "usage": said}
    body = json.dumps(message).encode()
    return read_answer(parse_message(body, "application/json"), body, provider="anthropic", request_id=None).usage


@pytest.mark.parametrize("absurd", [10**30, 1e30, -1, -(10**30), MOST_TOKENS + 1, True, "9", None, [9]])
@pytest.mark.parametrize(
    "name", ["input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"]
)
def test_an_impossible_usage_figure_is_ignored(name: str, absurd: object) -> None:
    said = {"input_tokens": 3, "output_tokens": 4, name: absurd}
    without = {key: value for key, value in said.items() if key != name}

    assert usage(**said) == usage(**without)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_an_answer_that_is_not_valid_json_is_a_failure(number: float) -> None:
    with pytest.raises(TransientError, match="is not JSON"):
        usage(input_tokens=number)


def test_the_largest_possible_call_is_counted_in_full() -> None:
    assert usage(input_tokens=MOST_TOKENS, output_tokens=128_000) == Usage(
        input_tokens=MOST_TOKENS, output_tokens=128_000
    )
