"""Who may call the gateway: callers with a key; if no keys are set, all programs on this machine.

A key is 256 random bits, so its SHA-256 without salt is safe to store, and the settings contain only this hash.
"""

import hashlib
import hmac
import secrets
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from multidict import MultiMapping

from lanekeeper.contract.problems import RequestProblem, invalid_request
from service.config.gateway_section import LANES, GatewayKey
from service.gateway.problems import ApiError, api_error_of

PREFIX = "lane-"
_LONGEST = 256
"""How many characters of a caller's key are hashed at most, to be compared with the hashes in the settings."""


def new_key() -> str:
    """Make a random API key for a caller of the gateway. Only its hash is stored, so the key is shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """The SHA-256 of an API key, which the settings contain in place of the key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether an address or host name is a loopback address: only programs on this machine can use it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Access:
    """Finds out which caller makes an HTTP call, by its API key, and what that caller may do (`GatewayKey`). `local`:
    what callers may do if no keys are set; None: their calls are then refused."""

    def __init__(self, keys: Mapping[str, GatewayKey], *, local: GatewayKey | None) -> None:
        self._keys = [(hashed.encode(), key) for hashed, key in keys.items()]
        self._local = local

    def caller(self, request: web.BaseRequest) -> GatewayKey:
        """The caller of this HTTP call. Raises ApiError: 401 if the key is missing or unknown; 403 if no keys are set
        and the call does not come from this machine."""
        if self._keys:
            return self._by_key(request)
        if self._local is None:
            raise ApiError(
                403,
                "no keys are set, so the gateway answers on loopback alone: set LANEKEEPER_GATEWAY__KEYS "
                "(lanekeeper key new makes one), or LANEKEEPER_GATEWAY__HOST to 127.0.0.1",
            )
        _require_local_call(request)
        return self._local

    def _by_key(self, request: web.BaseRequest) -> GatewayKey:
        try:
            scheme, _, key = (only_value(request.headers, "authorization") or "").partition(" ")
            if scheme.lower() != "bearer" or not key:
                key = only_value(request.headers, "x-api-key") or ""
        except RequestProblem as problem:
            raise api_error_of(problem) from None
        if not key:
            raise ApiError(401, "x-api-key header is required")
        given = hash_of(key[:_LONGEST].strip()).encode()
        found = None
        for hashed, caller in self._keys:  # no early end, so that the duration does not show which key matched
            if hmac.compare_digest(hashed, given):
                found = caller
        if found is None:
            raise ApiError(401, "invalid x-api-key")
        return found


def _require_local_call(request: web.BaseRequest) -> None:
    """Raise ApiError unless a program on this machine makes the call. A web page in a browser on this machine is
    refused too: its call names another site in the header Origin, or another host in the header Host."""
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


def only_value(headers: MultiMapping[str], name: str) -> str | None:
    """The value of a header that may have only one; None if it is absent. Raises RequestProblem if the header occurs
    with different values, because a proxy in front of the gateway could have read another value than the gateway."""
    values = set(headers.getall(name, ()))
    if len(values) > 1:
        raise invalid_request(f"header {name}: there are {len(values)} different values; send one")
    return values.pop() if values else None


def lane_of(caller: GatewayKey, named: str | None) -> str:
    """The lane for a call: `named`, if the call names a lane in its header `x-lane-name`, else the first lane that the
    caller may use. Raises ApiError 403 for a lane that the caller's key does not allow, and RequestProblem if there is
    no such lane."""
    if named is None:
        return caller.lanes[0]
    if named in caller.lanes:
        return named
    if named in LANES:
        raise ApiError(403, f"header x-lane-name: found {named!r}, this key allows {', '.join(caller.lanes)}")
    allowed = ", ".join(caller.lanes)
    raise invalid_request(f"header x-lane-name: found {named[:40]!r}, allowed is one of {allowed}")


def require_allowed_model(models: Collection[str] | None, model: str) -> None:
    """Raise RequestProblem if `model` is not among the `models` that a caller may use (None: it may use all)."""
    if models is not None and model not in models:
        allowed = ", ".join(models)
        raise RequestProblem(
            "forbidden_model", f"model {model[:80]!r} is not allowed for this caller; allowed: {allowed}"
        )
