"""One broker URL or several: the nodes of a cluster, as `amqp://…@a/,amqp://…@b/`, or as `amqp://…@a/ , …`.

What is written differently for each is taken as it is: user, password, port. The virtual host is everybody's.
"""

import re

_BETWEEN = re.compile(r"\s*,\s*(?=amqps?://)")


def urls_of(text: str) -> tuple[str, ...]:
    """The URLs in `text`. A comma that no URL follows belongs to the one before: a password may have it."""
    return tuple(_BETWEEN.split(text.strip()))
