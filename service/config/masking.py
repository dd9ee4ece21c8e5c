"""How a setting's value may be shown when it is wrong, or in passing: briefly, and without what it may hide."""

import re
from typing import Any

from service.telemetry import redaction

SHOWN = 60  # characters
_PLAIN_URL = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?(/[A-Za-z0-9._%/-]*)?")


def mask_url(url: str) -> str:
    """A URL without its user, password and query; `(hidden)` where it is too odd to tell which part is which."""
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
    """`repr` of a value on one short line, without what looks like a key or a URL's password."""
    if isinstance(value, str) and "://" in value:
        return mask_url(value.strip())
    shown = redaction.text(repr(value))
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "…"
