"""Sets the field `stream` of a request's body: the worker decides whether the provider streams its answer."""

import json
from typing import Any

import jiter

from consumers.failures import RejectedError


def say_stream(body: bytes, streamed: bool, *, is_stated: bool = True) -> bytes:
    """The body with the right value of `stream`; the same bytes if it is right already."""
    if is_stated and (b'"stream"' in body or b"\\u" in body):  # a key may be written with escapes
        found = jiter.from_json(body, cache_mode="none")  # large bodies: four times as fast as json
        if "stream" in found:
            return body if found["stream"] is streamed else _rewritten({**json.loads(body), "stream": streamed})
    return body.replace(b"{", b'{"stream":true,', 1) if streamed else body


def _rewritten(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except ValueError as error:
        raise RejectedError("the body has a number that is too large (1e999)", type="unsendable") from error
