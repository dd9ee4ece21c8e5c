"""What may be the id of a request: its `message_id`."""

import re

REQUEST_ID = "allowed are 1 to 128 of A-Z a-z 0-9 . _ : -"
"""As it is told."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def is_request_id(text: str) -> bool:
    """Whether a request can have it."""
    return _ID.fullmatch(text) is not None
