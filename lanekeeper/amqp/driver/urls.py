"""One broker URL or several, for the nodes of a cluster: `amqp://…@a/,amqp://…@b/`, also with spaces around the comma.

User, password and port may differ between the URLs. The virtual host must be the same.
"""

import re

_BETWEEN = re.compile(r"\s*,\s*(?=amqps?://)")


def urls_of(text: str) -> tuple[str, ...]:
    """The URLs in `text`. A comma that no URL follows is part of the URL before it: a password may contain one."""
    return tuple(_BETWEEN.split(text.strip()))
