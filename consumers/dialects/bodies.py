"""Changes the few fields of a request's body that a worker decides on. All other bytes stay as they are."""

import json
from typing import Any

import jiter

from consumers.failures import RejectedError


def set_stream(body: bytes, streamed: bool, *, is_stated: bool = True) -> bytes:
    """The request's body with the field `stream` set to `streamed`, because the worker decides whether the answer is
    streamed. Unchanged if the field has that value, or is missing and `streamed` is false."""
    if is_stated and (b'"stream"' in body or b"\\u" in body):  # a key may be written with \u escapes
        found = jiter.from_json(body, cache_mode="none")  # for large bodies four times as fast as json
        if "stream" in found:
            return body if found["stream"] is streamed else rewritten({**json.loads(body), "stream": streamed})
    return body.replace(b"{", b'{"stream":true,', 1) if streamed else body


def rewritten(fields: dict[str, Any]) -> bytes:
    """The fields as JSON."""
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except ValueError as error:
        raise RejectedError("the body has a number that is too large (1e999)", type="unsendable") from error
