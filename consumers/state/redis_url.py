"""The URL of a Redis: of one server, or of Sentinels that name it.

redis://user:password@host:6379/0
redis+sentinel://user:password@host:26379,host2:26379/service/0

`rediss` in place of `redis` is with TLS. User and password are those of Redis."""

import re
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import unquote, urlsplit

SINGLE: Final = ("redis", "rediss")
SENTINELS: Final = ("redis+sentinel", "rediss+sentinel")
SENTINEL_PORT: Final = 26379
_PLACE = re.compile(r"(?P<service>[A-Za-z0-9._-]{1,100})(/(?P<database>[0-9]{1,5}))?")


def is_redis(url: str) -> bool:
    """Whether a store's URL is that of a Redis."""
    return url.partition("://")[0] in (*SINGLE, *SENTINELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelUrl:
    """Where Sentinels are, and what they name."""

    hosts: tuple[tuple[str, int], ...]
    service: str
    database: int
    username: str | None
    password: str | None
    is_encrypted: bool

    @classmethod
    def of(cls, url: str) -> Self | None:
        """None: it names one server. Raises ValueError."""
        scheme, _, rest = url.partition("://")
        if scheme not in SENTINELS:
            return None
        authority, _, path = rest.partition("/")
        user, _, hosts = authority.rpartition("@")
        place, credentials = _PLACE.fullmatch(path), urlsplit(f"//{user}@")
        if place is None:
            raise ValueError(url)
        return cls(
            hosts=tuple(_host(text) for text in hosts.split(",")),
            service=place["service"],
            database=int(place["database"] or 0),
            username=unquote(credentials.username) if credentials.username else None,
            password=unquote(credentials.password) if credentials.password else None,
            is_encrypted=scheme == SENTINELS[1],
        )


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port == 0 or parts.path or parts.query or parts.fragment or "@" in text:
        raise ValueError(text)
    return parts.hostname, parts.port or SENTINEL_PORT
