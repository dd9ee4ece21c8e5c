"""Which texts may be a request's id (`message_id`), and which names from a provider may appear in logs and spans."""

import re

REQUEST_ID = "allowed are 1 to 128 of A-Z a-z 0-9 . _ : -"
"""The rule for ids, as error messages state it."""
ID_PATTERN = r"[A-Za-z0-9._:-]{1,128}"
_ID = re.compile(ID_PATTERN)
_WORD = re.compile(r"[A-Za-z0-9._:/@-]{1,100}")


def is_request_id(text: str) -> bool:
    """Whether `text` may be a request's id."""
    return _ID.fullmatch(text) is not None


def is_word(text: str) -> bool:
    """Whether a provider's word (a model, an id, a type of error) may stand in logs, events and spans."""
    return _WORD.fullmatch(text) is not None


def shown(text: str) -> str:
    """A provider's word as shown in logs, events and spans; `?` if it may not be shown."""
    return text if is_word(text) else "?"
