"""Text from outside: ids of requests (`message_id`), tenants, words of providers, URLs of brokers."""

import re

GROUP_AT_MOST = 100_000
"""So many requests a group may have, as a Message Batch of Anthropic's API."""
REQUEST_ID = "allowed are 1 to 128 of A-Z a-z 0-9 . _ : -"
ID_PATTERN = r"[A-Za-z0-9._:-]{1,128}"
_ID = re.compile(ID_PATTERN)
TENANT = "allowed are 1 to 128 letters, digits and . _ : @ / -"
_TENANT = re.compile(r"[\w.:@/-]{1,128}")
_WORD = re.compile(r"[A-Za-z0-9._:/@-]{1,100}")
_BETWEEN_URLS = re.compile(r"\s*,\s*(?=amqps?://)")


def is_request_id(text: str) -> bool:
    """Whether a `message_id` is allowed."""
    return _ID.fullmatch(text) is not None


def is_tenant(text: str) -> bool:
    """Whether a tenant (`user_id`, `x-lane-tenant`, the tenant of a key) may have this name."""
    return _TENANT.fullmatch(text) is not None


def is_word(text: str) -> bool:
    """Whether a provider's word may be written to logs, events and spans."""
    return _WORD.fullmatch(text) is not None


def shown(text: str) -> str:
    """A provider's word in logs, events and spans."""
    return text if is_word(text) else "?"


def encodable(text: str) -> str:
    """U+FFFD in place of lone surrogates, which JSON can contain (`"\\ud83d"`) and UTF-8 cannot."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def is_host(name: str) -> bool:
    """Whether it can be looked up: Python raises UnicodeError for a label that is empty or too long."""
    try:
        return name.encode("idna") != b"" and "\0" not in name
    except UnicodeError:
        return False


def urls_of(text: str) -> tuple[str, ...]:
    """The URLs of a cluster's nodes. Only a comma before `amqp(s)://` separates: a password may contain one."""
    return tuple(_BETWEEN_URLS.split(text.strip()))
