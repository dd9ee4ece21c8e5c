"""How much of a body is text: the input tokens of a request are estimated from it."""

import json

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
