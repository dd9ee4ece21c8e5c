"""The errors of the contract, and the problem documents (RFC 9457) that describe them to a requester.

LanekeeperError                 base of all errors that a caller may catch
├── RequestProblem              a request's final error; its `code` is one of `PROBLEMS`
├── BrokerError                 the broker, or the connection to it
│   ├── BrokerUnreachable       no connection, or none in time
│   ├── BrokerBlocked           a memory or disk alarm: the broker accepts nothing, and nothing was published
│   ├── MessageTooLarge         larger than the broker's limit for one message: not sent
│   ├── PublishRefused          the broker answered nack: a queue it routes to is full
│   ├── Unroutable              no queue is bound for the key (mandatory publish)
│   ├── ConfirmUnknown          no confirm in time: it may or may not be published; publish again under the same id
│   ├── AccessRefused           the user's permissions do not allow it
│   └── TopologyMismatch        the broker's exchanges, queues or bindings differ from the declaration
└── SettingsError               a setting is wrong (raised by the service only)
"""

import json
import re
from dataclasses import dataclass


class LanekeeperError(Exception):
    """Base of all errors that Lanekeeper raises on purpose."""


class BrokerError(LanekeeperError):
    """The broker, or the connection to it, failed or refused an operation."""

    maybe_published = False
    """Whether the message may have been published despite the error, by this try or an earlier one of the same call."""


class BrokerUnreachable(BrokerError):
    """There is no connection to the broker, or none could be opened in time."""


class BrokerBlocked(BrokerError):
    """The broker accepts nothing from this connection because of an alarm; this try published nothing."""


class MessageTooLarge(BrokerError):
    """The broker accepts no message of this size. It was not sent, because that would have closed the channel."""

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(
            f"a message of {size} bytes: the broker takes {limit} (`max_message_size` in rabbitmq.conf); send less"
        )


class PublishRefused(BrokerError):
    """The broker refused a publish (nack): a queue that it routes to is full."""

    retry_after_s = 2.0
    """How long to wait before the next try. A lane seldom has room sooner."""


class Unroutable(BrokerError):
    """A mandatory message was returned: no queue is bound for its key."""


class ConfirmUnknown(BrokerError):
    """No confirm came: the message may or may not be published. Publish it again under the same id."""

    maybe_published = True


class AccessRefused(BrokerError):
    """This user's permissions on the broker do not allow the operation."""


class TopologyMismatch(BrokerError):
    """The broker's exchanges, queues or bindings differ from the declaration."""


class SettingsError(LanekeeperError):
    """One or more settings are wrong; the text names all of them."""


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One row of the table of errors in docs/contract.md."""

    code: str
    status: int
    title: str
    parked: bool
    """Whether the request is also kept in `lane.dead`, because it can be corrected or tried again."""
    retryable: bool
    """Whether sending the same request again could help. It needs a new id, because the outcome is kept under this one
    (unless `kept` is false)."""
    answered: bool = True
    kept: bool = True
    """Whether the outcome is stored under the request's id. If not, the same message may be sent again unchanged."""

    @property
    def advice(self) -> str:
        """Text after the detail in a problem document; empty if the request cannot be retried under a new id."""
        if not self.retryable or not self.kept:
            return ""
        other = ", or its dead letter as it is" if self.parked else ""
        return f"; to try again, publish it with a new message_id{other}: under this one this error is kept"


PROBLEMS = {
    each.code: each
    for each in (
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
}


DETAIL_CHARACTERS = 1000
"""The longest detail. It is put in a dead letter's headers, and headers that are too large make the broker close the
connection (501 FRAME_ERROR)."""


_QUOTES = re.compile(r"[:;,'\"(`]")
"""A detail names what is wrong before the first of these characters. After it comes the value found, which may be
content."""


class RequestProblem(LanekeeperError):
    """A request's final error. `code` is one of `PROBLEMS`; `detail` says what was wrong and may quote content.

    `brief` is the detail without content, for logs. Left out, it is the beginning of `detail`: the field's name.
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
    """The problem for an answer that is too large to be sent back."""
    return RequestProblem(
        "answer_too_large",
        f"the provider's answer has {size} bytes, and {limit} is the most that can be sent back: ask for less "
        "(a smaller max_tokens, fewer or smaller results of tools)",
    )
