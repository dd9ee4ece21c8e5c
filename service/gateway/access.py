"""Who may call the gateway: callers with a key; if no keys are set, all programs on this machine.

A key is 256 random bits, so its SHA-256 without salt is safe to store, and the settings contain only this hash.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from urllib.parse import urlsplit

import structlog
from aiohttp import web
from multidict import MultiMapping

from consumers.flows.pipelines import PipelineSpec
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import RequestProblem, invalid_request
from lanekeeper.telemetry import signals
from service.config.settings import GatewayKey
from service.gateway.problems import ApiError, api_error_of
from topology.lanes import LaneSpec, usual

PREFIX = "lane-"
JSON = "application/json"
_LONGEST = 256
log = structlog.get_logger()


def random_key() -> str:
    """A random API key. Only its hash is stored, so it is shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """What the settings contain in place of an API key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can use the address or host name."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def require_operator(caller: GatewayKey, *, acts: bool) -> None:
    """Raise ApiError 403 unless the caller is an operator; `acts`: one that may also change things."""
    if caller.operator == "act" or (caller.operator == "look" and not acts):
        return
    needed = "act" if acts else "look"
    log.warning(signals.OPERATOR_REFUSED, tenant=caller.tenant, needed=needed, found=caller.operator)
    raise ApiError(
        403,
        f"this needs a key with the right operator {needed}, this one has operator {caller.operator}: "
        f"`lanekeeper key new … --operator {needed}` makes one",
    )


class Access:
    """Finds a call's caller. `local`: who calls if no keys are set; None: nobody may. `origins`: of other web pages."""

    def __init__(
        self, keys: Mapping[str, GatewayKey], *, local: GatewayKey | None, origins: Collection[str] = ()
    ) -> None:
        self._keys: Mapping[str, GatewayKey] = {}
        self._hashes: Sequence[tuple[bytes, GatewayKey]] = ()
        self._needs_key = False
        self._local = local
        self._origins = frozenset(origins)
        self._open: dict[asyncio.Timeout, GatewayKey] = {}
        self.use(keys)

    def use(self, keys: Mapping[str, GatewayKey]) -> None:
        """Replace the keys. Where there were keys, a key is needed also if none is left."""
        self._keys = {hashed: key if key != (old := self._keys.get(hashed)) else old for hashed, key in keys.items()}
        self._hashes = [(hashed.encode(), key) for hashed, key in self._keys.items()]
        self._needs_key = self._needs_key or bool(keys)
        self.end_invalid()

    @property
    def has_several_tenants(self) -> bool:
        return len({key.tenant for key in self._keys.values()}) > 1

    def caller(self, request: web.BaseRequest) -> GatewayKey:
        """Raises ApiError: 401 for the key; 403 for a call from elsewhere without keys, or by another web page."""
        if self._needs_key:
            found = self._by_key(request)
            self._require_known_page(request)
            return found
        if self._local is None:
            raise ApiError(
                403,
                "no keys are set, so the gateway answers on loopback alone: set LANEKEEPER_GATEWAY__KEYS "
                "(lanekeeper key new makes one), or LANEKEEPER_GATEWAY__HOST to 127.0.0.1",
            )
        _require_local_call(request)
        self._require_known_page(request)
        if request.method == "POST" and "origin" in request.headers and request.content_type != JSON:
            # what a page can send to another origin without being asked for permission is never JSON
            raise ApiError(
                415, f"header Content-Type: a web page has to send {JSON}, found {request.content_type[:80]!r}"
            )
        return self._local

    @asynccontextmanager
    async def while_valid(self, caller: GatewayKey) -> AsyncIterator[None]:
        """Run the block until the caller's key is revoked or expires. Raises ApiError 401 then."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._open[scope] = caller
                try:
                    yield
                finally:
                    del self._open[scope]
        except TimeoutError:
            if scope.expired():
                raise ApiError(401, "this API key was revoked, or has expired") from None
            raise

    def end_invalid(self) -> None:
        for scope, caller in self._open.items():
            if not self._is_valid(caller) and scope.when() is None:
                scope.reschedule(asyncio.get_running_loop().time())

    def _is_valid(self, caller: GatewayKey) -> bool:
        if caller is self._local:
            return not self._needs_key
        return not _has_expired(caller) and any(caller is key for key in self._keys.values())

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
        for hashed, caller in self._hashes:  # no early end, so that the duration does not show which key matched
            if hmac.compare_digest(hashed, given):
                found = caller
        if found is None:
            raise ApiError(401, "invalid x-api-key")
        if _has_expired(found):
            raise ApiError(401, "this API key has expired")
        return found

    def _require_known_page(self, request: web.BaseRequest) -> None:
        """Browsers let any page call, also those of other ports of this machine, and with what a proxy adds to its
        calls, such as a key: so refuse pages of others."""
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
        if origin is None:
            if request.method not in ("GET", "HEAD") and site not in (None, "same-origin", "none"):
                raise ApiError(403, f"header Sec-Fetch-Site: {site[:40]!r}: web pages of others may not call")
            return
        if origin in self._origins:
            return
        try:
            own = urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower() != ""
        except ValueError:
            own = False
        if not own:
            raise ApiError(403, f"header Origin: {origin[:100]!r} is not among LANEKEEPER_GATEWAY__ORIGINS")


def _has_expired(key: GatewayKey) -> bool:
    return key.expires_at is not None and key.expires_at <= time.time()


def _require_local_call(request: web.BaseRequest) -> None:
    """A page whose own name leads to this machine is refused too, by the name in its Host."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not peer or not is_loopback(str(peer[0])):
        raise ApiError(403, "no keys are set: only calls from this machine are answered")
    if not is_loopback(_host_of(f"//{request.headers.get('host', '')}")):
        raise ApiError(403, "no keys are set: header Host has to name this machine, such as localhost")


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def only_value(headers: MultiMapping[str], name: str) -> str | None:
    """Raises RequestProblem if there are several: a proxy before the gateway could have read another one."""
    values = set(headers.getall(name, ()))
    if len(values) > 1:
        raise invalid_request(f"header {name}: there are {len(values)} different values; send one")
    return values.pop() if values else None


def lane_of(caller: GatewayKey, named: str | None, lanes: Mapping[str, LaneSpec]) -> LaneSpec:
    """`named`, else the key's first, else the usual one. Raises ApiError 403, RequestProblem."""
    if named is None:
        return usual(tuple(lanes.values())) if caller.lanes is None else lanes[caller.lanes[0]]
    allowed = ", ".join(caller.lanes or lanes)
    if named in (caller.lanes or lanes):
        return lanes[named]
    if named in lanes:
        raise ApiError(403, f"header x-lane-name: found {named!r}, this key allows {allowed}")
    raise invalid_request(f"header x-lane-name: found {named[:40]!r}, allowed is one of {allowed}")


def require_allowed_model(models: Collection[str] | None, model: str) -> None:
    """Raise RequestProblem if `model` is not among `models` (None: all are allowed)."""
    if models is not None and model not in models:
        allowed = ", ".join(models)
        raise RequestProblem(
            "forbidden_model", f"model {model[:80]!r} is not allowed for this caller; allowed: {allowed}"
        )


def require_allowed_pipeline(
    caller: GatewayKey, pipeline: PipelineSpec, lane: LaneSpec, lanes: Mapping[str, LaneSpec]
) -> None:
    """Raise ApiError 403 unless the key allows the lane and the model of every step, or the pipeline by its name."""
    if pipeline.name in caller.pipelines:
        return
    for of, model in pipeline.uses(lane, lanes):
        if caller.lanes is not None and of.name not in caller.lanes:
            wrong = f"lane {of.name}"
        elif model and caller.models is not None and model not in caller.models:
            wrong = f"model {model!r}"
        else:
            continue
        raise ApiError(
            403,
            f"header {n.PIPELINE}: {pipeline.name} uses {wrong}, which this key does not allow; the key may name the "
            "pipeline itself (pipelines)",
        )
