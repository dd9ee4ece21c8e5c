"""Turns a call (`POST /v1/messages`, `/v1/requests`) into a request for a lane, and checks it by the same rules as a
worker. A wrong body or header is refused here, so that the request neither waits in a lane's queue nor becomes a dead
letter.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import jiter
from multidict import MultiMapping

from consumers.job import content_hash
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import REQUEST_ID, is_request_id
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import invalid_request
from lanekeeper.options import ANSWER_LATE_S, Options
from service.config.gateway_section import GatewayKey
from service.gateway.access import lane_of, only_value, require_allowed_model
from topology.codec import bounds
from topology.codec.decoding import decode, too_large
from topology.codec.headers import UNSUPPORTED, unknown_header
from topology.codec.request import Request
from topology.lanes import LaneSpec

IDEMPOTENCY_KEY = "Idempotency-Key"
PREFIX = "x-lane-"
_FORWARDED = (n.TRACEPARENT, n.TRACESTATE, n.BAGGAGE, n.ANTHROPIC_BETA)
REFUSED_HEADERS = {
    n.STREAM: "the body's `stream` says it",
    n.TENANT: "the tenant follows from the key",
    n.BODY: "the body comes with the call",
    n.BODY_SHA256: "the body comes with the call",
}
"""The HTTP headers with which a call to the gateway is refused, each with the reason."""
_ACCEPTED = (n.PUBLIC | {n.LANE_NAME}) - REFUSED_HEADERS.keys()
"""The headers beginning with `x-lane-` that an HTTP call to the gateway may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """One HTTP call whose headers and body were checked, and what is needed to publish it as a request."""

    body: bytes | BinaryIO
    """The body of the call: bytes, or an open file if the body is large."""
    key: str
    """The routing key with which the request is published."""
    stream: bool
    timeout_s: float
    """How many seconds to wait for an answer. Workers answer earlier, because the request's deadline is shorter."""
    options: Options
    request: Request
    """The request as a worker will decode it. It does not contain a large body, which is in `body` alone."""
    sha256: str | None = None
    """The SHA-256 of a large body; None for other bodies."""

    @property
    def body_hash(self) -> bytes:
        """The hash by which workers recognise a repeated request (`Fingerprint`)."""
        if self.sha256 is not None:
            return content_hash(self.sha256)
        assert isinstance(self.body, bytes)
        return content_hash(self.body)


def request_id_of(headers: MultiMapping[str]) -> tuple[str, bool]:
    """The id for the request of an HTTP call, and whether the caller chose it, with the header `Idempotency-Key`.
    Raises RequestProblem for a key that is no valid id."""
    chosen = only_value(headers, IDEMPOTENCY_KEY)
    if chosen is None:
        return uuid.uuid4().hex, False
    if not is_request_id(chosen):
        raise invalid_request(f"header {IDEMPOTENCY_KEY}: {REQUEST_ID}")
    return chosen, True


def submitted_id_of(headers: MultiMapping[str]) -> tuple[str, bool]:
    """Like `request_id_of`, for a request whose status gets a URL path that ends in its id. The ids `.` and `..` are
    refused, because HTTP clients change a path that ends in them. Raises RequestProblem."""
    id, chose_id = request_id_of(headers)
    if id in (".", ".."):
        raise invalid_request(f"header {IDEMPOTENCY_KEY}: dots alone are no path: {REQUEST_ID}")
    return id, chose_id


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReader:
    """Checks HTTP calls and turns them into requests to publish. `app`: the second word of their routing keys. It is
    the name of the gateway's AMQP user, because that user's topic permissions require it."""

    lanes: Mapping[str, LaneSpec]
    app: str
    max_values: int
    """The most JSON keys and values that the body of a call may have."""
    cancel_abandoned: bool

    def read(
        self,
        call_headers: MultiMapping[str],
        body: bytes,
        caller: GatewayKey,
        *,
        request_id: str,
        chose_id: bool,
        task: str = "messages",
    ) -> CheckedCall:
        """Check one HTTP call. `caller`: what the caller's API key allows. `task`: the third word of the routing key.
        Raises ApiError, RequestProblem."""
        lane = self.lanes[lane_of(caller, only_value(call_headers, n.LANE_NAME))]
        headers = _headers(call_headers)
        key = f"{lane.name}.{self.app}.{task}"
        if (excess := bounds.excess(body, max_values=self.max_values)) is not None:
            raise too_large(excess)
        stream = _streams(body)
        now_ms = int(time.time() * 1000)
        message = Message(body=body, routing_key=key, headers={**headers, n.STREAM: "true"} if stream else headers)
        request = decode(message, lane=lane, request_id=request_id, hop=None, now_ms=now_ms, raw=body)
        require_allowed_model(caller.models, request.model)
        options = Options(message_id=request_id, headers=headers)
        if caller.tenant is not None:
            options["tenant"] = caller.tenant
        if chose_id or not self.cancel_abandoned:
            options["cancel_abandoned"] = False
        return CheckedCall(
            body=body,
            key=key,
            stream=stream,
            timeout_s=(request.deadline_ms - now_ms) / 1000 + ANSWER_LATE_S,
            options=options,
            request=request,
        )


def _headers(call_headers: MultiMapping[str]) -> dict[str, str]:
    """The HTTP headers of a call that become headers of the AMQP message. Raises RequestProblem for a header that HTTP
    calls may not have, or that has several values."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(map(str.lower, call_headers)):
        if name in REFUSED_HEADERS:
            raise invalid_request(f"header {name}: not allowed here, {REFUSED_HEADERS[name]}")
        if name.startswith(PREFIX) and name not in n.OURS:
            if name not in _ACCEPTED and name not in UNSUPPORTED:
                raise unknown_header(name, known=_ACCEPTED)
            found[name] = only_value(call_headers, name) or ""
        elif name in _FORWARDED:
            found[name] = ",".join(call_headers.getall(name))
    return found


def _streams(body: bytes) -> bool:
    """Whether a call's JSON body has `"stream": true`. Errors in the body are reported later, by `decode`."""
    if b'"stream"' not in body and b"\\u" not in body:
        return False
    try:
        found = jiter.from_json(body, cache_mode="none")
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("stream") is True
