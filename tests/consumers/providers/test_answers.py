"""What is believed of what an answer says that it used."""

import json
from typing import Any

import pytest

from consumers.failures import TransientError
from consumers.providers.answers import MOST_TOKENS, parse_message, read_answer
from consumers.providers.base import Usage


def usage(**said: Any) -> Usage:
    message = {"type": "message", "content": [], "stop_reason": "end_turn", "usage": said}
    body = json.dumps(message).encode()
    return read_answer(parse_message(body, "application/json"), body, provider="anthropic", request_id=None).usage


@pytest.mark.parametrize("absurd", [10**30, 1e30, -1, -(10**30), MOST_TOKENS + 1, True, "9", None, [9]])
@pytest.mark.parametrize(
    "name", ["input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"]
)
def test_a_figure_that_cannot_be_true_is_as_if_it_had_not_been_said(name: str, absurd: object) -> None:
    said = {"input_tokens": 3, "output_tokens": 4, name: absurd}
    without = {key: value for key, value in said.items() if key != name}

    assert usage(**said) == usage(**without)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_no_reader_of_json_could_read_is_no_answer(number: float) -> None:
    with pytest.raises(TransientError, match="is not JSON"):
        usage(input_tokens=number)


def test_the_largest_call_there_is_counts_whole() -> None:
    assert usage(input_tokens=MOST_TOKENS, output_tokens=128_000) == Usage(
        input_tokens=MOST_TOKENS, output_tokens=128_000
    )
