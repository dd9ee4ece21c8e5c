"""How much of a body is text: the input tokens of a request are estimated from it."""

import json

import pytest

from lanekeeper.contract.problems import RequestProblem
from topology.codec import body
from topology.codec.body import MEDIA_AS_TEXT_BYTES


def image(size: int) -> dict[str, object]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x" * size}}


def media_bytes(content: object) -> int:
    return body.media_bytes(body.check(json.loads(json.dumps({"messages": [{"role": "user", "content": content}]}))))


def test_each_image_counts_as_a_fixed_number_of_bytes_of_text_at_most() -> None:
    text = {"type": "text", "text": "What is this?"}

    assert media_bytes([text, image(MEDIA_AS_TEXT_BYTES + 1000), image(MEDIA_AS_TEXT_BYTES + 20), image(10)]) == 1020


def test_a_body_without_images_is_text() -> None:
    address = {"type": "image", "source": {"type": "url", "url": "https://images.test/one.png"}}

    assert media_bytes("What is this?") == media_bytes([address]) == 0
    assert body.media_bytes(body.check({"prompt": "What is this?"})) == 0


def problem_of(found: object) -> str:
    with pytest.raises(RequestProblem) as refused:
        body.check(found)
    return refused.value.detail


def test_an_error_names_up_to_five_wrong_fields() -> None:
    problem = problem_of({"prompt": "x", **{f"f{number}": 1 for number in range(8)}})

    assert [name for name in ("f0", "f1", "f2", "f3", "f4", "f5") if f"{name}: " in problem] == [
        *("f0", "f1", "f2", "f3", "f4")
    ]


def test_an_error_quotes_at_most_40_characters_of_a_name_or_a_number() -> None:
    assert problem_of({"prompt": "x", "k" * 41: 1}).startswith(f"body: {'k' * 40}: Extra")
    assert problem_of({"prompt": "x", "max_tokens": 10**60}).endswith(f"(found 1{'0' * 39})")


def test_a_short_form_with_more_than_a_thousand_fields_is_refused_before_each_is_checked() -> None:
    def with_fields(count: int) -> str:
        return problem_of({"prompt": "x", **{f"f{number}": 1 for number in range(count - 1)}})

    assert "Extra inputs" in with_fields(1000)
    assert with_fields(1001) == "body: 1001 fields; prompt, system, model, max_tokens, stream are known"
