"""Makes the bodies of requests: of a given size, with the request's number and the duration of its call in the
prompt."""

import json
import re
from typing import Final

MODEL: Final = "claude-haiku-5-5"
BODY_BYTES: Final = 1024
_MARK: Final = re.compile(rb"#(\d{8})@(\d{6}) ")


def body(number: int, *, size: int = BODY_BYTES, call_ms: int = 0, stream: bool = False) -> bytes:
    """The body of `POST /v1/messages`, about `size` bytes long."""
    fields = {"model": MODEL, "max_tokens": 100, "stream": stream} if stream else {"model": MODEL, "max_tokens": 100}
    start = json.dumps(fields)[:-1] + ', "messages": [{"role": "user", "content": "'
    mark = f"#{number:08d}@{call_ms:06d} "
    end = '"}]}'
    words = "Tell me what a lane is. "
    filling = max(0, size - len(start) - len(mark) - len(end))
    return (start + mark + (words * (filling // len(words) + 1))[:filling] + end).encode()


def read_mark(body: bytes) -> tuple[int, int]:
    """Read a request's number and the duration of its call in ms from its body."""
    found = _MARK.search(body, 0, 512)
    assert found is not None
    return int(found[1]), int(found[2])
