"""What a call asks of the lanes (`POST /v1/messages`, `/v1/requests`): read by the rules that a worker reads by.

A wrong body or header is refused here, so that it costs no place in a lane and no dead letter.
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
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.options import ANSWER_LATE_S, Options
from service.config.gateway_section import GatewayKey
from service.gateway.access import lane_of, see_that_model_is_allowed
from topology.codec import bounds
from topology.codec.decoding import decode, too_large
from topology.codec.request import Request
from topology.lanes import LaneSpec

IDEMPOTENCY_KEY = "Idempotency-Key"
PREFIX = "x-lane-"
_PASSED = (n.TRACEPARENT, n.TRACESTATE, n.BAGGAGE, n.ANTHROPIC_BETA)
NOT_HERE = {
    n.STREAM: "the body's `stream` says it",
    n.TENANT: "the tenant follows from the key",
    n.BODY: "the body comes with the call",
    n.BODY_SHA256: "the body comes with the call",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call, valid."""

    body: bytes | BinaryIO
    """A file, where it is large."""
    key: str
    """The routing key."""
    stream: bool
    timeout_s: float
    """After this no answer can come."""
    options: Options
    request: Request
    """As a worker will read it; the body of a large one is in its file alone."""
    sha256: str | None = None
    """Of a large body."""

    @property
    def body_hash(self) -> bytes:
        """As workers compare bodies (`Copy`)."""
        if self.sha256 is not None:
            return content_hash(self.sha256)
        assert isinstance(self.body, bytes)
        return content_hash(self.body)


def request_id_of(headers: MultiMapping[str]) -> tuple[str, bool]:
    """The request's id, and whether the caller chose it. Raises RequestProblem."""
    chosen = headers.get(IDEMPOTENCY_KEY)
    if chosen is None:
        return uuid.uuid4().hex, False
    if not is_request_id(chosen):
        raise RequestProblem("invalid_request", f"header {IDEMPOTENCY_KEY}: {REQUEST_ID}")
    return chosen, True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Reads calls. `app`: the second word of the routing key; the broker's user, as its topic permissions want it."""

    lanes: Mapping[str, LaneSpec]
    app: str
    values: int
    """Keys and values that a body may have."""
    cancel_abandoned: bool

    def read(
        self,
        said: MultiMapping[str],
        body: bytes,
        caller: GatewayKey,
        *,
        request_id: str,
        chose_id: bool,
        task: str = "messages",
    ) -> Asked:
        """`said`: the headers of the call; `task`: the third word of the routing key. Raises ApiError,
        RequestProblem."""
        lane = self.lanes[lane_of(caller, said.get(n.LANE_NAME))]
        headers = _headers(said)
        key = f"{lane.name}.{self.app}.{task}"
        if (excess := bounds.excess(body, values=self.values)) is not None:
            raise too_large(excess)
        if stream := _streams(body):
            headers[n.STREAM] = "true"
        now_ms = int(time.time() * 1000)
        message = Message(body=body, routing_key=key, headers=headers)
        found = decode(message, lane=lane, request_id=request_id, hop=None, now_ms=now_ms, raw=body)
        see_that_model_is_allowed(caller, found.model)
        headers.pop(n.STREAM, None)
        options = Options(message_id=request_id, headers=headers)
        if caller.tenant is not None:
            options["tenant"] = caller.tenant
        if chose_id or not self.cancel_abandoned:
            options["cancel_abandoned"] = False
        return Asked(
            body=body,
            key=key,
            stream=stream,
            timeout_s=(found.deadline_ms - now_ms) / 1000 + ANSWER_LATE_S,
            options=options,
            request=found,
        )


def _headers(said: MultiMapping[str]) -> dict[str, str]:
    """Those that go along with the message. Raises RequestProblem for one that has no place here."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(map(str.lower, said)):
        if name in NOT_HERE:
            raise RequestProblem("invalid_request", f"header {name}: not allowed here, {NOT_HERE[name]}")
        ours = name.startswith(PREFIX) and name not in n.OURS
        if ours or name in _PASSED:
            found[name] = ",".join(said.getall(name))
    return found


def _streams(body: bytes) -> bool:
    """Whether the body asks for a stream. What is wrong with it, `decode` tells."""
    if b'"stream"' not in body and b"\\u" not in body:
        return False
    try:
        found = jiter.from_json(body, cache_mode="none")
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("stream") is True
