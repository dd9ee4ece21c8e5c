"""Splits the setting for the broker's URL, which may name the nodes of a cluster: `amqp://…@a/,amqp://…@b/`.

There may be spaces around the comma. User, password and port may differ between the URLs; the virtual host must not.
"""

import re

_BETWEEN = re.compile(r"\s*,\s*(?=amqps?://)")


def urls_of(text: str) -> tuple[str, ...]:
    """Split text with one or several AMQP URLs at its commas. A comma that is not followed by `amqp://` or `amqps://`
    does not separate URLs: a password may contain one."""
    return tuple(_BETWEEN.split(text.strip()))
