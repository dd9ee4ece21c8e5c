"""What a request is expected to use: the mean of what was seen, and a mean deviation more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.limits import estimates
from consumers.limits.estimates import Estimates, UsageClass, task_of

CHAT, OTHER = UsageClass("critical", "shop.chat", "m"), UsageClass("critical", "shop.other", "m")


def some() -> Estimates:
    return Estimates(first_output_tokens=512, first_bytes_per_token=4)


def seen(*tokens: float) -> Estimates:
    made = some()
    for each in tokens:
        made.learn(CHAT, text_bytes=1000, input_tokens=each, output_tokens=each)
    return made


def test_the_first_answer_is_taken_for_the_mean_with_half_of_it_as_deviation() -> None:
    assert seen(100).output_tokens(CHAT, max_tokens=1000) == 150


def test_each_further_answer_moves_mean_and_deviation_by_a_tenth() -> None:
    # mean 100 + 10, deviation 50 + 0.1 * (100 - 50)
    assert seen(100, 200).output_tokens(CHAT, max_tokens=1000) == pytest.approx(110 + 55)


def test_no_estimate_exceeds_max_tokens_or_is_less_than_one() -> None:
    assert seen(100).output_tokens(CHAT, max_tokens=120) == 120
    assert seen(0).output_tokens(CHAT, max_tokens=120) == 1
    assert some().input_tokens("m", 0) == 1


def test_input_goes_by_the_size_of_the_body_for_each_model() -> None:
    assert some().input_tokens("m", 1000) == 250
    assert seen(500).input_tokens("m", 2000) == 1000
    assert seen(500, 600).input_tokens("m", 1000) == pytest.approx(510)
    assert seen(500).input_tokens("other", 1000) == 250


def test_an_answer_to_an_empty_body_says_nothing_about_input() -> None:
    made = some()
    made.learn(CHAT, text_bytes=0, input_tokens=9, output_tokens=9)
    assert made.input_tokens("m", 1000) == 250


def test_how_long_a_call_takes_is_learned_from_calls_that_ended_by_themselves() -> None:
    made = some()
    assert made.run_s(CHAT) == 0
    made.learn_run(CHAT, 10, was_cut=False)
    assert made.run_s(CHAT) == 15
    assert made.run_s(OTHER) == 0


def test_a_call_that_was_cut_counts_only_if_it_had_taken_longer_than_expected() -> None:
    made = some()
    made.learn_run(CHAT, 10, was_cut=False)
    made.learn_run(CHAT, 15, was_cut=True)
    assert made.run_s(CHAT) == 15
    made.learn_run(CHAT, 20, was_cut=True)
    assert made.run_s(CHAT) == pytest.approx(11 + 5.5)


def test_the_kind_and_the_model_that_were_seen_longest_ago_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimates, "KINDS", 2)
    made = some()
    kinds = [UsageClass("critical", "", model) for model in "abac"]
    for kind in kinds:
        made.learn(kind, text_bytes=1000, input_tokens=500, output_tokens=100)
        made.learn_run(kind, 10, was_cut=False)

    assert [made.output_tokens(kind, max_tokens=9999) for kind in kinds] == [145, 512, 145, 150]
    assert [made.run_s(kind) for kind in kinds] == [14.5, 0, 14.5, 15]
    assert [made.input_tokens(kind.model, 1000) for kind in kinds] == [500, 250, 500, 500]


def answer(made: Estimates, *, text_bytes: int, media_tokens: int, input_tokens: float) -> None:
    made.learn(CHAT, text_bytes=text_bytes, media_tokens=media_tokens, input_tokens=input_tokens, output_tokens=9)


def test_images_and_documents_are_added_to_the_text() -> None:
    assert some().input_tokens("m", 1000, 1600) == 1850


def test_an_answer_to_more_media_than_text_says_nothing_about_text() -> None:
    made = some()
    for _ in range(50):
        answer(made, text_bytes=1000, media_tokens=1600, input_tokens=40)
        answer(made, text_bytes=1000, media_tokens=250, input_tokens=9000)

    assert made.input_tokens("m", 1000) == 250


def test_an_answer_to_more_text_than_media_teaches_by_the_part_of_the_text() -> None:
    right, fewer = some(), some()
    answer(right, text_bytes=8000, media_tokens=1000, input_tokens=3000)
    answer(fewer, text_bytes=8000, media_tokens=1000, input_tokens=1500)

    assert right.input_tokens("m", 1000) == pytest.approx(250)
    assert fewer.input_tokens("m", 1000) == pytest.approx(125)


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


def test_the_kind_of_a_request_is_two_words_of_its_routing_key() -> None:
    assert task_of("critical.support.chat.eu.7") == "support.chat"
    assert task_of("batch.crm") == "crm"
    assert task_of("batch") == ""
