"""Settings of bodies beside the broker: what is too large for a message."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from lanekeeper.bodies import IN_ALL_BYTES, KEEP_S, MOST_BYTES, OVER_BYTES
from service.config.sections import YEAR_S, Section
from service.config.value_types import Number, words, wrong
from topology.lanes import GIB, MIB

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
    """Bodies that are too large for a message lie in a store, and the message has their address."""

    url: BodyStoreUrl | None = None
    """Where the gateway keeps large bodies, and workers fetch and remove them: a folder (`file:///…`), or another URL
    of fsspec (`s3://…`, with its driver installed). None: a folder beside the SQLite store; with Redis none, and large
    bodies are refused. Example: s3://lanekeeper/bodies"""
    over_bytes: Number[int] = Field(default=OVER_BYTES, ge=4096, le=MIB)
    """Larger bodies are kept in the store."""
    most_bytes: Number[int] = Field(default=MOST_BYTES, ge=MIB, le=512 * MIB)
    """The largest body. Anthropic takes 32 MiB."""
    in_all_bytes: Number[int] = Field(default=IN_ALL_BYTES, ge=MIB, le=1024 * GIB)
    """The most bytes that the store holds. When it is full, large bodies are refused for a while."""
    keep_s: Number[float] = Field(default=KEEP_S, ge=60, le=10 * YEAR_S)
    """How long a body stays at most. It is removed when its request has ended; that of a dead letter stays, for a
    replay."""
    allow: Annotated[tuple[FolderUrl, ...], BeforeValidator(words)] = ()
    """Further places from which bodies are fetched (`x-lane-body`): what is below these URLs, of fsspec or https.
    Example: s3://crm-bodies/lane,https://files.example.com/prompts"""
    allow_private: bool = False
    """Whether hosts of `allow` may have private, loopback or link-local addresses. Example: true"""
