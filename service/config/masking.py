"""How a setting's value is shown in messages: short, and without secrets."""

import re
from typing import Any

from service.telemetry import redaction

SHOWN = 60
"""The maximum number of characters of a wrong value that an error message about settings quotes."""
_PLAIN_URL = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?(/[A-Za-z0-9._%/-]*)?")


def mask_url(url: str) -> str:
    """A URL as messages show it: `***` in place of user and password, and no query. If user and password cannot be
    recognised in a text, it becomes `(hidden, … characters)`."""
    head, _, rest = url.partition("://")
    address, credentials = rest, ""
    if "@" in rest:
        _, _, address = rest.rpartition("@")
        credentials = "***@"
    address = address.partition("?")[0].partition("#")[0]
    if _PLAIN_URL.fullmatch(f"{head}://{address}") is None:
        return f"(hidden, {len(url)} characters)"
    return f"{head}://{credentials}{address}"


def mask(value: Any) -> str:
    """A setting's value as error messages show it: its `repr` on one short line, without anything that looks like a key
    or a URL's password."""
    if isinstance(value, str) and "://" in value:
        return mask_url(value.strip())
    shown = redaction.text(repr(value))
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "…"
