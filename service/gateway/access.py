"""Who may call: by key, or, where no keys are set, whoever is on this machine.

A key is 256 random bits, so its plain SHA-256 cannot be guessed back; settings hold only that.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from lanekeeper.contract.problems import RequestProblem
from service.config.gateway_section import GatewayKey
from service.gateway.problems import ApiError

PREFIX = "lane-"
_LONGEST = 256


def new_key() -> str:
    """A new key, shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, is this machine itself."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Access:
    """Decides for each call whose it is, and where it may go.

    `local`: the caller without a key. None: a key is needed.
    """

    def __init__(self, keys: Mapping[str, GatewayKey], *, local: GatewayKey | None) -> None:
        self._keys = [(hashed.encode(), key) for hashed, key in keys.items()]
        self._local = local

    def caller(self, request: web.BaseRequest) -> GatewayKey:
        """Whose call it is. Raises ApiError: 401 without a valid key, 403 without keys from elsewhere."""
        if self._keys:
            return self._by_key(request)
        if self._local is None:
            raise ApiError(
                403,
                "no keys are set, so the gateway answers on loopback alone: set LANEKEEPER_GATEWAY__KEYS "
                "(lanekeeper key new makes one), or LANEKEEPER_GATEWAY__HOST to 127.0.0.1",
            )
        _see_that_it_is_local(request)
        return self._local

    def _by_key(self, request: web.BaseRequest) -> GatewayKey:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            key = request.headers.get("x-api-key", "")
        if not key:
            raise ApiError(401, "x-api-key header is required")
        given = hash_of(key[:_LONGEST].strip()).encode()
        found = None
        for hashed, caller in self._keys:  # all of them, always
            if hmac.compare_digest(hashed, given):
                found = caller
        if found is None:
            raise ApiError(401, "invalid x-api-key")
        return found


def _see_that_it_is_local(request: web.BaseRequest) -> None:
    """A page in a browser on this machine must not call: neither from another site (Origin), nor by a name of its
    own that leads here (Host). Raises ApiError."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not peer or not is_loopback(str(peer[0])):
        raise ApiError(403, "no keys are set: only calls from this machine are answered")
    for header, url in (("Host", f"//{request.headers.get('host', '')}"), ("Origin", request.headers.get("origin"))):
        if url is not None and not is_loopback(_host_of(url)):
            raise ApiError(403, f"no keys are set: header {header} has to name this machine, such as localhost")


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def lane_of(caller: GatewayKey, named: str | None) -> str:
    """The lane of a call: the one it names, else the caller's first. Raises ApiError for one that is not allowed."""
    if named is None:
        return caller.lanes[0]
    if named not in caller.lanes:
        raise ApiError(403, f"header x-lane-name: found {named[:40]!r}, this key allows {', '.join(caller.lanes)}")
    return named


def see_that_model_is_allowed(caller: GatewayKey, model: str) -> None:
    """Raises RequestProblem."""
    if caller.models is not None and model not in caller.models:
        allowed = ", ".join(caller.models)
        raise RequestProblem("forbidden_model", f"model {model[:80]!r}: this key allows {allowed}")
