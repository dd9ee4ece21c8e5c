"""The errors of the contract, and the problem documents (RFC 9457) that tell a requester of them.

LanekeeperError                 everything of ours that a caller may catch
├── RequestProblem              a request's final error; its `code` is one of `PROBLEMS`
├── BrokerError                 the broker, or the way to it
│   ├── BrokerUnreachable       no connection, or none in time
│   ├── BrokerBlocked           a memory or disk alarm: nothing is taken, and nothing was published
│   ├── MessageTooLarge         more bytes than the broker takes as one message: not sent
│   ├── PublishRefused          the broker answered nack: a queue on the way is full
│   ├── Unroutable              no queue is bound for the key (mandatory publish)
│   ├── ConfirmUnknown          no confirm in time: it may be published or not; publish again under the same id
│   ├── AccessRefused           the user's permissions do not allow it
│   └── TopologyMismatch        the broker's exchanges, queues or bindings differ from the declaration
└── SettingsError               a setting is wrong (raised by the service only)
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass


class LanekeeperError(Exception):
    """Base of every error that Lanekeeper raises on purpose."""


class BrokerError(LanekeeperError):
    """The broker, or the way to it, did not do what was asked."""

    maybe_published = False
    """Whether the message may be published all the same: by this try or an earlier one of the same call."""


class BrokerUnreachable(BrokerError):
    """There is no connection to the broker, or none came in time."""


class BrokerBlocked(BrokerError):
    """The broker takes nothing from this connection, by an alarm; this try published nothing."""


class MessageTooLarge(BrokerError):
    """The broker takes no message of this size; it was not sent, because that would have closed the channel."""

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(
            f"a message of {size} bytes: the broker takes {limit} (`max_message_size` in rabbitmq.conf); send less"
        )


class PublishRefused(BrokerError):
    """The broker refused a publish (nack): a queue that it routes to is full."""


class Unroutable(BrokerError):
    """A mandatory message was returned: no queue is bound for its key."""


class ConfirmUnknown(BrokerError):
    """No confirm came: the message may be published or not. Publish it again under the same identity."""

    maybe_published = True


class AccessRefused(BrokerError):
    """The broker's permissions do not allow this user what was asked."""


class TopologyMismatch(BrokerError):
    """What is on the broker differs from what is declared."""


class SettingsError(LanekeeperError):
    """One or more settings are wrong; the text names every one of them."""


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One row of the table of errors in docs/contract.md."""

    code: str
    status: int
    title: str
    parked: bool
    """Also kept in `lane.dead`, because it can be mended or tried again."""
    retryable: bool
    """Whether sending the same request again could help: under a new id, because this one's ending is kept."""
    answered: bool = True
    kept: bool = True
    """Under the request's id. Else it may be sent again as it is."""

    @property
    def advice(self) -> str:
        """What follows the detail in a problem document; empty where trying again is of no use."""
        if not self.retryable or not self.kept:
            return ""
        other = ", or its dead letter as it is" if self.parked else ""
        return f"; to try again, publish it with a new message_id{other}: under this one this error is kept"


def _by_code(types: Iterable[ProblemType]) -> dict[str, ProblemType]:
    return {each.code: each for each in types}


PROBLEMS = _by_code(
    (
        ProblemType("invalid_request", 400, "Invalid request", parked=True, retryable=False),
        ProblemType("unsupported_media", 415, "Unsupported media", parked=True, retryable=False),
        ProblemType("too_large", 413, "Too large", parked=True, retryable=False),
        ProblemType(
            "forbidden_reply_to", 403, "Reply address not allowed", parked=True, retryable=False, answered=False
        ),
        ProblemType("forbidden_webhook", 403, "Webhook not allowed", parked=True, retryable=False),
        ProblemType("forbidden_model", 403, "Model not allowed", parked=True, retryable=False),
        ProblemType("unroutable", 404, "No lane for the routing key", parked=True, retryable=False),
        ProblemType("superseded", 409, "Superseded", parked=False, retryable=False),
        ProblemType("idempotency_conflict", 409, "Idempotency conflict", parked=False, retryable=False),
        ProblemType("cancelled", 499, "Cancelled", parked=False, retryable=False),
        ProblemType("too_many_waiting", 429, "Too many requests waiting", parked=False, retryable=True),
        ProblemType("deadline_exceeded", 504, "Deadline exceeded", parked=False, retryable=True),
        ProblemType("provider_rejected", 400, "Rejected by the provider", parked=True, retryable=False),
        ProblemType("answer_too_large", 502, "Answer too large", parked=True, retryable=False),
        ProblemType("attempts_exhausted", 502, "All attempts failed", parked=True, retryable=True),
        ProblemType("poison", 500, "Its worker died under it", parked=True, retryable=False),
        ProblemType("internal", 500, "Internal error", parked=True, retryable=True),
        ProblemType(
            "too_many_control_messages", 429, "Too many control messages", parked=False, retryable=True, kept=False
        ),
    )
)


DETAIL_CHARACTERS = 1000
"""The longest detail: it stands in a dead letter's headers, and too large ones end the connection (501 FRAME_ERROR)."""


_QUOTES = re.compile(r"[:;,'\"(`]")
"""Before one of these a detail names what is wrong; after it comes what was found, and so could be content."""


class RequestProblem(LanekeeperError):
    """A request's final error. `code` is one of `PROBLEMS`; `detail` says what was wrong, and may quote content.

    `brief` says it without content, for logs; left out, it is what `detail` begins with: the field's name.
    """

    def __init__(self, code: str, detail: str, *, status: int | None = None, brief: str | None = None) -> None:
        self.type = PROBLEMS[code]
        self.detail = detail if len(detail) <= DETAIL_CHARACTERS else f"{detail[: DETAIL_CHARACTERS - 1]}…"
        self.status = self.type.status if status is None else status
        self._brief = brief
        super().__init__(f"{code}: {self.detail}")

    @property
    def code(self) -> str:
        return self.type.code

    @property
    def brief(self) -> str:
        return _QUOTES.split(self.detail, 1)[0].strip() if self._brief is None else self._brief

    def document(self, *, request: str, attempts: int) -> bytes:
        """The problem document: JSON, UTF-8, as docs/contract.md shows it."""
        return json.dumps(
            {
                "type": f"urn:lanekeeper:problem:{self.code.replace('_', '-')}",
                "title": self.type.title,
                "status": self.status,
                "detail": self.detail + self.type.advice,
                "code": self.code,
                "request": request,
                "attempts": attempts,
                "retryable": self.type.retryable,
            },
            ensure_ascii=False,
        ).encode()


def answer_too_large(size: int, limit: int) -> RequestProblem:
    """Of an answer that cannot be sent back, or may not be."""
    return RequestProblem(
        "answer_too_large",
        f"the provider's answer has {size} bytes, and {limit} is the most that can be sent back: ask for less "
        "(a smaller max_tokens, fewer or smaller results of tools)",
    )
