"""Replies as a requester reads them: the parts of a stream, the final answer, the problem if the request failed; and
what `Client` raises besides the broker's errors (contract/problems.py)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress, Message, body_address_in
from lanekeeper.contract.problems import PROBLEMS, LanekeeperError, ProviderFailure, RequestProblem


class Problem(RequestProblem):
    """The error of a request that failed or was refused. `fields`: the problem document."""

    webhook: Mapping[str, Any] | None = None
    """As `Final.webhook`."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        code = str(document.get("code"))
        detail = str(document.get("detail", "no detail"))
        # A newer service may send codes that this client does not know.
        known = code if code in PROBLEMS else "internal"
        super().__init__(
            known,
            detail if known == code else f"{code}: {detail}",
            status=_int(document.get("status")),
            provider=ProviderFailure.of(document),
            retry_after_ms=_int(document.get("retry_after_ms")),
        )
        self.fields = document

    @property
    def request(self) -> str:
        return str(self.fields.get("request", ""))

    @property
    def attempts(self) -> int:
        return _int(self.fields.get("attempts")) or 0

    @property
    def trace(self) -> str | None:
        found = self.fields.get("trace")
        return found if isinstance(found, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a streamed answer."""

    kind: Literal["event", "restart"]
    """`restart`: all earlier events must be discarded, because an attempt failed or another worker took over."""
    seq: int
    body: bytes
    """One event of the provider's stream. Of a restart, a JSON object: the provider's error, or empty."""

    @property
    def failure(self) -> ProviderFailure | None:
        """Of a restart: the provider's error, if it gave one."""
        return ProviderFailure.of(self.event) if self.kind == "restart" else None

    @property
    def event(self) -> Mapping[str, Any]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found

    @property
    def text(self) -> str:
        event = self.event
        if event.get("choices"):
            return (event["choices"][0].get("delta") or {}).get("content") or ""
        delta = event.get("delta")
        if event.get("type") == "response.output_text.delta":
            return str(delta)
        return str(delta.get("text", "")) if isinstance(delta, Mapping) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """The final reply to a request that succeeded."""

    body: bytes
    request_id: str
    lane: str
    model: str
    provider: str
    attempt: int
    wait_ms: int
    run_ms: int
    replayed: bool
    headers: Mapping[str, Any]

    @property
    def kept(self) -> BodyAddress | None:
        return body_address_in(self.headers)

    @property
    def webhook(self) -> Mapping[str, Any] | None:
        """How posting the outcome to its webhook went, in a result that was fetched: its `endpoint`, `state`,
        `attempts`, `errors`, when (`at`) and when again (`next_at`)."""
        return _webhook_in(self.headers)

    @property
    def value(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a JSON object. Raises NotAMessage if a handler or a pipeline has answered something else."""
        if not isinstance(found := self.value, dict):
            raise self._no_message()
        return found

    @property
    def text(self) -> str:
        """Of a Message, a response, or the first choice of a chat completion. Raises NotAMessage."""
        message = self.message
        try:
            if message.get("choices"):
                return message["choices"][0]["message"].get("content") or ""
            blocks = message.get("content", ())
            if "output" in message:
                blocks = [part for item in message["output"] for part in item.get("content") or ()]
            return "".join(block["text"] for block in blocks if block.get("type") in ("text", "output_text"))
        except (AttributeError, LookupError, TypeError):
            raise self._no_message() from None

    def _no_message(self) -> "NotAMessage":
        return NotAMessage(f"the answer of {self.model or 'a pipeline'} is no Message: read Final.value")


Cancelled: TypeAlias = Literal["recorded", "told", "ended", "unseen"]
"""`recorded`: it was waiting, and will end as cancelled. `told`: it runs, and its worker will stop it. `ended`: it had
ended before. `unseen`: no worker knows it; if one gets it within the longest deadline, it ends as cancelled."""


class NotAMessage(LanekeeperError):
    """The answer came from a handler or a pipeline, and is no Message of Anthropic's."""


class NoReply(LanekeeperError):
    """No final reply, or no worker's answer to a control message, came in time."""

    message_id: str | None = None


class ControlRefused(LanekeeperError):
    """A worker refused a control message. `fields`: the problem document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.fields = document
        super().__init__(f"refused by the worker: {document.get('detail', 'no detail')}")

    @property
    def is_passing(self) -> bool:
        return bool(self.fields.get("retryable"))


class NotEnded(LanekeeperError):
    """The request has no result yet: it is `running`, `waiting` or `unknown` to the workers."""

    def __init__(
        self, id: str, status: str, *, attempts: int = 0, due_at: str | None = None, step: str | None = None
    ) -> None:
        self.id = id
        self.status = status
        self.step = step
        """Where its pipeline stands, such as `summaries, 37 of 100`."""
        self.attempts = attempts
        self.due_at = None if due_at is None else datetime.fromisoformat(due_at)
        super().__init__(
            f"request {id} has no result yet: {status}, {self._hint()}; to wait: lanekeeper result --wait 20s {id}"
        )

    def _hint(self) -> str:
        if self.step is not None:
            return f"step: {self.step}"
        match self.status:
            case "running":
                return "a worker is at it"
            case "waiting":
                when = "" if self.due_at is None else f", due at {self.due_at.isoformat(timespec='seconds')}"
                made = f"attempt {self.attempts} was made, it waits for the next" if self.attempts else "not begun yet"
                return f"{made}{when}"
            case "unknown":
                where = "it waits in its lane, is another tenant's, was never published, or ended too long ago"
                return f"no worker has seen it: {where}"
            case _:
                return "ask again later"


def lost_answer(id: str, why: str) -> Problem:
    """The outcome of a request whose answer was too large for a message, and whose body is lost."""
    return Problem({"code": "internal", "status": 500, "request": id, "detail": f"the answer is lost: {why}"})


def no_answer(id: str, timeout_s: float | None) -> NoReply:
    """Not answered in time."""
    error = NoReply(
        f"no answer to {id} within {timeout_s:g} s; it may still come, and is kept: lanekeeper result {id}. "
        "Is a worker running? Ask: lanekeeper status"
    )
    error.message_id = id
    return error


def part_of(message: Message) -> Part:
    """A reply before the final one."""
    kind = message.headers.get(n.PART)
    return Part(
        kind="restart" if kind == "restart" else "event",
        seq=_int(message.headers.get(n.SEQ)) or 0,
        body=message.body,
    )


def _problem_in(message: Message) -> Problem:
    problem = Problem(json.loads(message.body))
    problem.webhook = _webhook_in(message.headers)
    return problem


def final_of(message: Message) -> Final:
    """Raises Problem if the request ended in an error."""
    headers = message.headers
    if headers.get(n.STATUS) != "ok":
        raise _problem_in(message)
    return Final(
        body=message.body,
        request_id=str(headers.get(n.REQUEST_ID, "")),
        lane=str(headers.get(n.LANE_NAME, "")),
        model=str(headers.get(n.MODEL, "")),
        provider=str(headers.get(n.PROVIDER, "")),
        attempt=_int(headers.get(n.ATTEMPT)) or 0,
        wait_ms=_int(headers.get(n.WAIT_MS)) or 0,
        run_ms=_int(headers.get(n.RUN_MS)) or 0,
        replayed=headers.get(n.REPLAYED) is True,
        headers=headers,
    )


def _webhook_in(headers: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = headers.get(n.WEBHOOK_LOG)
    found = json.loads(text) if isinstance(text, str) else None
    return found if isinstance(found, dict) else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None
