"""Changes the few fields of a request's body that a worker decides on. All other bytes stay as they are."""

import jiter

from topology.codec.fields import with_field


def set_stream(body: bytes, streamed: bool, *, is_stated: bool = True) -> bytes:
    """The request's body with the field `stream` set to `streamed`, because the worker decides whether the answer is
    streamed. Unchanged if the field has that value, or is missing and `streamed` is false."""
    if is_stated and (b'"stream"' in body or b"\\u" in body):  # a key may be written with \u escapes
        found = jiter.from_json(body, cache_mode="none")  # for large bodies four times as fast as json
        if "stream" in found:
            return body if found["stream"] is streamed else with_field(body, "stream", streamed)
    return body.replace(b"{", b'{"stream":true,', 1) if streamed else body
