"""Settings of the store for the bodies of requests and answers that are too large for an AMQP message."""

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
    """Bodies of requests and answers that are too large for an AMQP message are kept in a store, and the message
    contains only their address."""

    url: BodyStoreUrl | None = None
    """The store in which the gateway keeps large bodies, until workers have processed them, and in which workers keep
    large answers: a folder (`file:///…`), or any other URL that the Python library fsspec supports (`s3://…`, if its
    driver is installed). None: a folder beside the file of the SQLite store; if results are stored in Redis, there is
    no store for bodies, and large bodies are refused. Example: s3://lanekeeper/bodies"""
    over_bytes: Number[int] = Field(default=OVER_BYTES, ge=4096, le=MIB)
    """If a request's body is larger than this, it is kept in the store, and the message contains only its address."""
    answers_over_bytes: Number[int] = Field(default=OVER_BYTES, ge=4096, le=512 * MIB)
    """If an answer is larger than this, it is kept in the store, and the reply contains only its address. Raise this
    setting if requesters over AMQP cannot reach the store: smaller answers are sent in the reply itself, up to the
    broker's limit for a message (16 MiB on RabbitMQ 4)."""
    most_bytes: Number[int] = Field(default=MOST_BYTES, ge=MIB, le=512 * MIB)
    """The maximum size of a request's body. Anthropic accepts 32 MiB."""
    in_all_bytes: Number[int] = Field(default=IN_ALL_BYTES, ge=MIB, le=1024 * GIB)
    """The maximum size of all bodies in the store together. While the store is full, large bodies are refused."""
    keep_s: Number[float] = Field(default=KEEP_S, ge=60, le=10 * YEAR_S)
    """The longest time that a request's body stays in the store. The body is removed earlier, as soon as its request
    has ended, unless the request became a dead letter, which can be published again and then needs the body. An answer
    stays in the store as long as the request's result is kept (LANEKEEPER_RESULTS__KEEP_S)."""
    allow: Annotated[tuple[FolderUrl, ...], BeforeValidator(words)] = ()
    """URLs of further places from which workers may fetch the body of a request that gives the body's URL in its header
    `x-lane-body`. Everything below these URLs is allowed (https, or any URL that the Python library fsspec reads).
    Gateways also fetch stored answers from these places, except over https. So if you change LANEKEEPER_BODIES__URL,
    list the old URL here. Example: s3://crm-bodies/lane,https://files.example.com/prompts"""
    allow_private: bool = False
    """Whether the hosts in `allow` may have private, loopback or link-local addresses. Example: true"""

    def allowed_stores(self) -> list[BodyStore]:
        """A `BodyStore` for each URL in `allow` that is not an http(s) URL. It creates and opens nothing before it is
        used."""
        return [BodyStore(url) for url in self.allow if not url.startswith(WEB)]
