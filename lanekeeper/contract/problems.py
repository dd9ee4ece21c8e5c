"""The errors of the contract, and the problem documents (RFC 9457) that describe them to a requester.

LanekeeperError                 base of all errors that a caller may catch
├── RequestProblem              a request's final error; its `code` is one of `PROBLEMS`
├── BrokerError                 the broker, or the connection to it
│   ├── BrokerUnreachable       no connection, or none in time
│   ├── BrokerBlocked           the broker accepts no publishes (memory or disk alarm); nothing was published
│   ├── MessageTooLarge         the message exceeds the broker's size limit, and was not sent
│   ├── PublishRefused          the broker answered nack: a queue that the message is routed to is full
│   ├── Unroutable              no queue is bound for the key (mandatory publish)
│   ├── ConfirmUnknown          no confirm came: the message may be published or not; publish it again with its id
│   ├── AccessRefused           the user's permissions do not allow the operation
│   ├── TopologyMismatch        the broker's exchanges, queues or bindings differ from the declaration
│   └── ReplyLost               the reply to a request cannot be delivered; the request itself continues
└── SettingsError               a setting is wrong (raised by the service only)
"""

import json
import re
from dataclasses import dataclass


class LanekeeperError(Exception):
    """Base class of all errors that Lanekeeper raises on purpose."""


class BrokerError(LanekeeperError):
    """The broker, or the connection to it, failed or refused an operation."""

    maybe_published = False
    """Whether the broker may have got the message although the publish failed with this error. This is possible because
    a publish is tried several times, and the broker's confirm of one of the tries may be lost."""


class BrokerUnreachable(BrokerError):
    """There is no connection to the broker, or none could be opened in time."""


class BrokerBlocked(BrokerError):
    """The broker accepts no publishes from this connection, because it is low on memory or disk (an alarm). The message
    was not published."""


class MessageTooLarge(BrokerError):
    """The broker accepts no message of this size. The message was not sent, because the broker would have closed the
    channel."""

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(
            f"a message of {size} bytes: the broker takes {limit} (`max_message_size` in rabbitmq.conf); send less"
        )


class PublishRefused(BrokerError):
    """The broker refused a publish (nack): a queue that the message is routed to is full."""

    retry_after_s = 2.0
    """How many seconds to wait before publishing again, because a full queue seldom has room sooner."""


class Unroutable(BrokerError):
    """The broker returned a message that was published as `mandatory`: no queue is bound for its routing key."""


class ConfirmUnknown(BrokerError):
    """The broker has not confirmed the message in time, so it is unknown whether it was published. Publish it again
    under the same id."""

    maybe_published = True


class AccessRefused(BrokerError):
    """The client's AMQP user has no permission for the operation, or its credentials are refused; over HTTP, the
    gateway refuses the API key."""


class TopologyMismatch(BrokerError):
    """The broker's exchanges, queues or bindings are missing or differ from those that Lanekeeper declares."""


class ReplyLost(BrokerError):
    """The reply to a request cannot be delivered: the connection was lost, or parts came faster than the caller read
    them. The request itself continues."""


class SettingsError(LanekeeperError):
    """One or more settings are wrong; the error's text names all of them."""


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One kind of error with which a request can end: a row of the table of errors in docs/contract.md."""

    code: str
    status: int
    title: str
    parked: bool
    """Whether the request also becomes a dead letter: a message in the queue `lane.dead`, from where it can be
    published again, corrected or unchanged."""
    retryable: bool
    """Whether sending the same request again could help. The new request then needs another id, unless `kept` is
    false."""
    answered: bool = True
    """Whether the requester gets the problem document as a reply."""
    kept: bool = True
    """Whether this error is stored as the outcome of the request's id, so that a later message with the same id gets
    the same reply."""

    @property
    def advice(self) -> str:
        """How to try again: a text that is added to the detail in a problem document. Empty if trying again could not
        help, or if the same message can be sent again unchanged."""
        if not self.retryable or not self.kept:
            return ""
        other = ", or its dead letter as it is" if self.parked else ""
        return f"; to try again, publish it with a new message_id{other}: under this one this error is kept"


PROBLEMS = {
    row.code: row
    for row in (
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
"""The maximum length, in characters, of a problem's detail. There is a limit because the detail becomes a header of a
dead letter, and RabbitMQ closes a connection that publishes headers larger than a frame (501 FRAME_ERROR)."""


_QUOTES = re.compile(r"[:;,'\"(`]")
"""The characters at which the first part of a problem's detail ends. This part only names the wrong field, so it may be
logged; the rest may quote the request's content, so it is not logged."""


class RequestProblem(LanekeeperError):
    """A request's final error. `code` is one of `PROBLEMS`; `detail` says what was wrong, and may quote the request's
    content.

    `brief` is the detail without such quotes, for logs. By default it is the beginning of `detail`, up to the first
    character in `_QUOTES`.
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
        """The problem document as JSON in UTF-8; docs/contract.md shows an example."""
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


def invalid_request(detail: str) -> RequestProblem:
    """Make the error `invalid_request`, for a request that does not follow docs/contract.md."""
    return RequestProblem("invalid_request", detail)


def answer_too_large(size: int, limit: int, *, setting: str = "", is_away: bool = False) -> RequestProblem:
    """Make the error for a provider's answer that is too large to be sent back to the requester.

    `size` and `limit` are in bytes. `setting` is the name of a setting that allows larger answers. `is_away`: True
    if the store for large answers could not be used, so that the answer would have had to fit into one message, and
    `limit` is the largest message that the broker accepts.
    """
    here = " in a message, and the store for larger ones could not be used" if is_away else ""
    more = f", or set {setting} for the workers" if setting else ""
    return RequestProblem(
        "answer_too_large",
        f"the provider's answer has {size} bytes, and {limit} is the most that can be sent back{here}: ask for less "
        f"(a smaller max_tokens, fewer or smaller results of tools){more}",
    )
