"""Settings of the store for bodies that are too large for a message."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from lanekeeper.bodies import IN_ALL_BYTES, KEEP_S, MOST_BYTES, OVER_BYTES, BodyStore
from service.config.sections import YEAR_S, Section
from service.config.value_types import Number, words, wrong
from topology.lanes import GIB, MIB

WEB = ("https://", "http://")
_URL = re.compile(r"[a-z][a-z0-9+.-]{1,19}://[!-~]{1,1000}")


def _folder(value: str) -> str:
    if _URL.fullmatch(value) is None or "::" in value or {"?", "#"} & set(value) or "@" in urlsplit(value).netloc:
        raise wrong("a URL such as file:///var/lib/lanekeeper/bodies or s3://bucket/bodies, without password")
    return value.rstrip("/")


def _store(value: str) -> str:
    if urlsplit(_folder(value)).scheme in ("http", "https"):
        raise wrong("the URL of a folder or bucket that can be written, such as file:///… or s3://…")
    return _folder(value)


FolderUrl = Annotated[str, AfterValidator(_folder)]
BodyStoreUrl = Annotated[str, AfterValidator(_store)]


class BodiesSettings(Section):
    """Bodies that are too large for a message are kept in a store, and the message has only their address."""

    url: BodyStoreUrl | None = None
    """The store in which the gateway keeps large bodies, until workers have processed them, and in which workers keep
    large answers: a folder (`file:///…`), or another URL of fsspec (`s3://…`, with its driver installed). None: a
    folder beside the SQLite store; with Redis none, and large bodies are refused. Example: s3://lanekeeper/bodies"""
    over_bytes: Number[int] = Field(default=OVER_BYTES, ge=4096, le=MIB)
    """A body larger than this is kept in the store, and the message has only its address."""
    answers_over_bytes: Number[int] = Field(default=OVER_BYTES, ge=4096, le=512 * MIB)
    """An answer larger than this is kept in the store, and the reply has only its address. Raise this setting if
    requesters over AMQP cannot reach the store: smaller answers are sent in the reply itself, up to the broker's limit
    for a message (16 MiB on RabbitMQ 4)."""
    most_bytes: Number[int] = Field(default=MOST_BYTES, ge=MIB, le=512 * MIB)
    """The most bytes that a request's body may have. Anthropic accepts 32 MiB."""
    in_all_bytes: Number[int] = Field(default=IN_ALL_BYTES, ge=MIB, le=1024 * GIB)
    """The most bytes that all bodies in the store may have together. While the store is full, large bodies are
    refused."""
    keep_s: Number[float] = Field(default=KEEP_S, ge=60, le=10 * YEAR_S)
    """The longest time that a request's body stays in the store. It is removed as soon as its request has ended, unless
    the request became a dead letter, which can be replayed. An answer stays as long as its result
    (LANEKEEPER_RESULTS__KEEP_S)."""
    allow: Annotated[tuple[FolderUrl, ...], BeforeValidator(words)] = ()
    """Further places from which bodies named in `x-lane-body` may be fetched: everything below these URLs (https, or
    any that fsspec reads). Gateways also fetch stored answers from those that fsspec reads: if you change
    LANEKEEPER_BODIES__URL, list the old one here. Example: s3://crm-bodies/lane,https://files.example.com/prompts"""
    allow_private: bool = False
    """Whether the hosts in `allow` may have private, loopback or link-local addresses. Example: true"""

    def allowed_stores(self) -> list[BodyStore]:
        """The stores of `allow`, which make and open nothing before they are used."""
        return [BodyStore(url) for url in self.allow if not url.startswith(WEB)]
