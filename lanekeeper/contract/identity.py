"""What may be the id of a request, its `message_id`; and what is shown of a provider's words."""

import re

REQUEST_ID = "allowed are 1 to 128 of A-Z a-z 0-9 . _ : -"
"""As it is told."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_WORD = re.compile(r"[A-Za-z0-9._:/@-]{1,100}")


def is_request_id(text: str) -> bool:
    """Whether a request can have it."""
    return _ID.fullmatch(text) is not None


def is_word(text: str) -> bool:
    """Whether a provider's word (a model, an id, a type of error) may stand in logs, events and spans."""
    return _WORD.fullmatch(text) is not None


def shown(text: str) -> str:
    """A provider's word as it stands there."""
    return text if is_word(text) else "?"
