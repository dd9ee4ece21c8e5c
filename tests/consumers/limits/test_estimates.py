"""What a request is expected to use: the mean of what was seen, and a mean deviation more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.limits.estimates import Estimates, UsageClass

pytestmark = pytest.mark.slow


CHAT = UsageClass("critical", "shop.chat", "m")


def some() -> Estimates:
    return Estimates(first_output_tokens=512, first_bytes_per_token=4)


def seen(*tokens: float) -> Estimates:
    made = some()
    for each in tokens:
        made.learn(CHAT, text_bytes=1000, input_tokens=each, output_tokens=each)
    return made


def test_no_estimate_exceeds_max_tokens_or_is_less_than_one() -> None:
    assert seen(100).output_tokens(CHAT, max_tokens=120) == 120
    assert seen(0).output_tokens(CHAT, max_tokens=120) == 1
    assert some().input_tokens("m", 0) == 1


def answer(made: Estimates, *, text_bytes: int, media_tokens: int, input_tokens: float) -> None:
    made.learn(CHAT, text_bytes=text_bytes, media_tokens=media_tokens, input_tokens=input_tokens, output_tokens=9)


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**8), st.floats(0, 1e7)), max_size=30),
    st.integers(0, 10**7),
)
def test_whatever_was_learned_an_estimate_is_a_number_of_tokens(
    answers: list[tuple[int, int, float]], text_bytes: int
) -> None:
    made = some()
    for text, media, used in answers:
        answer(made, text_bytes=text, media_tokens=media, input_tokens=used)

    assert 1 <= made.input_tokens("m", text_bytes) < float("inf")
