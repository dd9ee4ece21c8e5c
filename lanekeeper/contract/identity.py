"""Checks the ids of requests (`message_id`). Also checks words from a provider's answer, such as the model's name,
before they are written to logs and spans."""

import re

REQUEST_ID = "allowed are 1 to 128 of A-Z a-z 0-9 . _ : -"
"""The rule for ids of requests, as the text that error messages contain."""
ID_PATTERN = r"[A-Za-z0-9._:-]{1,128}"
_ID = re.compile(ID_PATTERN)
_WORD = re.compile(r"[A-Za-z0-9._:/@-]{1,100}")


def is_request_id(text: str) -> bool:
    """Whether `text` is allowed as the id of a request (`message_id`)."""
    return _ID.fullmatch(text) is not None


def is_word(text: str) -> bool:
    """Whether a word from a provider (a model, an id, a type of error) may be written to logs, events and spans."""
    return _WORD.fullmatch(text) is not None


def shown(text: str) -> str:
    """A word from a provider (a model, an id, a type of error) as logs, events and spans show it: unchanged if
    `is_word` allows it, else `?`."""
    return text if is_word(text) else "?"
