"""Sets the field `stream` in the body for the provider: the worker decides whether the answer is streamed."""

import json
from typing import Any

import jiter

from consumers.failures import RejectedError


def set_stream(body: bytes, streamed: bool, *, is_stated: bool = True) -> bytes:
    """The body with the field `stream` set to `streamed`; the same bytes if it has that value already. `is_stated`:
    False if the body certainly does not have the field."""
    if is_stated and (b'"stream"' in body or b"\\u" in body):  # a key may be written with \u escapes
        found = jiter.from_json(body, cache_mode="none")  # for large bodies four times as fast as json
        if "stream" in found:
            return body if found["stream"] is streamed else _rewritten({**json.loads(body), "stream": streamed})
    return body.replace(b"{", b'{"stream":true,', 1) if streamed else body


def _rewritten(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except ValueError as error:
        raise RejectedError("the body has a number that is too large (1e999)", type="unsendable") from error
