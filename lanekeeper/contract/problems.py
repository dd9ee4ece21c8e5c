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
├── ClientMisused               the client is used while it is not open, or in the wrong event loop
├── InvalidUrl                  the URL names neither a broker nor a gateway
├── InvalidArgument             an argument of a wrong type or value; nothing was sent
├── Rejected                    raised by a handler: no retry can answer its input
└── SettingsError               a setting is wrong (raised by the service only)
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lanekeeper.contract.identity import encodable


class LanekeeperError(Exception):
    """Base class of all errors that Lanekeeper raises on purpose."""


class BrokerError(LanekeeperError):
    """The broker, or the connection to it, failed or refused an operation."""

    maybe_published = False
    """Whether the broker may have got the message all the same: the confirm of one of several tries may be lost."""
    message_id: str | None = None
    """The request's id. Published again under it (the option `message_id`), it is still the same request."""


class BrokerUnreachable(BrokerError):
    """No connection, or none in time."""


class BrokerBlocked(BrokerError):
    """The broker is low on memory or disk (an alarm). The message was not published."""


class MessageTooLarge(BrokerError):
    """Not sent, because the broker would have closed the channel."""

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(
            f"a message of {size} bytes: the broker takes {limit} (`max_message_size` in rabbitmq.conf); send less"
        )


class PublishRefused(BrokerError):
    """The broker answered nack: a queue that the message is routed to is full."""

    retry_after_s = 2.0


class Unroutable(BrokerError):
    """Returned: no queue is bound for the routing key."""


class ConfirmUnknown(BrokerError):
    """No confirm came: publish again under the same id."""

    maybe_published = True


class AccessRefused(BrokerError):
    """Permissions or credentials do not allow the operation; over HTTP, the API key."""


class TopologyMismatch(BrokerError):
    """Exchanges, queues or bindings are missing or differ from the declaration."""


class ReplyLost(BrokerError):
    """The connection was lost, or parts came faster than they were read. The request itself continues."""


class ClientMisused(LanekeeperError):
    """The client is not open, or open in another event loop, or would block one. The text says what to do."""

    maybe_published = False
    message_id: str | None = None
    """As those of `BrokerError`, if the client was closed during the call."""


class InvalidArgument(LanekeeperError, TypeError, ValueError):
    """An argument of a wrong type or value, such as a body that cannot be written as JSON. Nothing was sent."""


class Rejected(LanekeeperError):
    """Raise it in a handler: its input can never be answered, so it is not tried again. The requester gets the text."""


class InvalidUrl(LanekeeperError, ValueError):
    """A URL that names neither a broker (`amqp://`, `amqps://`) nor a gateway (`http://`, `https://`)."""


class SettingsError(LanekeeperError):
    """One or more settings are wrong; the error's text names all of them."""


@dataclass(frozen=True, slots=True)
class ProblemType:
    """A row of the table of errors in docs/contract.md."""

    code: str
    status: int
    title: str
    parked: bool = True
    """Whether the request also becomes a dead letter."""
    retryable: bool = False
    """Whether the same request, under a new id unless `kept` is false, could succeed."""
    answered: bool = True
    kept: bool = True
    """Whether this is the outcome of the request's id, so that a later message with it gets the same reply; else it
    concerns one message."""

    @property
    def is_the_callers(self) -> bool:
        """Whether the request itself is wrong, and its requester is told so."""
        return self.status < 500 and self.answered

    @property
    def advice(self) -> str:
        if not self.retryable or not self.kept:
            return ""
        other = ", or its dead letter as it is" if self.parked else ""
        return f"; to try again, publish it with a new message_id{other}: under this one this error is kept"


PROBLEMS = {
    row.code: row
    for row in (
        ProblemType("invalid_request", 400, "Invalid request", kept=False),
        ProblemType("unsupported_media", 415, "Unsupported media", kept=False),
        ProblemType("too_large", 413, "Too large", kept=False),
        ProblemType("forbidden_reply_to", 403, "Reply address not allowed", answered=False, kept=False),
        ProblemType("forbidden_webhook", 403, "Webhook not allowed", kept=False),
        ProblemType("webhook_undelivered", 502, "Webhook not delivered", answered=False, kept=False),
        ProblemType("forbidden_model", 403, "Model not allowed", kept=False),
        ProblemType("unroutable", 404, "No lane for the routing key", kept=False),
        ProblemType("superseded", 409, "Superseded", parked=False),
        ProblemType("idempotency_conflict", 409, "Idempotency conflict", parked=False, kept=False),
        ProblemType("cancelled", 499, "Cancelled", parked=False),
        ProblemType("too_many_waiting", 429, "Too many requests waiting", parked=False, retryable=True, kept=False),
        ProblemType("deadline_exceeded", 504, "Deadline exceeded", parked=False, retryable=True),
        ProblemType("provider_rejected", 400, "Rejected by the provider"),
        ProblemType("provider_unavailable", 503, "Provider unavailable", parked=False, retryable=True),
        ProblemType("answer_too_large", 502, "Answer too large"),
        ProblemType("attempts_exhausted", 502, "All attempts failed", retryable=True),
        ProblemType("poison", 500, "Its worker died under it"),
        ProblemType("internal", 500, "Internal error", retryable=True),
        ProblemType("forbidden_control", 403, "Control message not allowed", parked=False, kept=False),
        ProblemType(
            "too_many_control_messages", 429, "Too many control messages", parked=False, retryable=True, kept=False
        ),
    )
}


PROVIDER_ERROR_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderFailure:
    """What the provider answered to a request's last call in place of a Message. `status`: that of HTTP, or the one
    that belongs to the type of an error in the middle of a stream. `error`: the body as it came, of at most
    `PROVIDER_ERROR_BYTES`. `retry_after_ms`: when another call may help."""

    status: int
    type: str = ""
    error: str = ""
    request_id: str | None = None
    retry_after_ms: int | None = None

    @property
    def members(self) -> dict[str, str | int]:
        """For the problem document."""
        found = {
            "provider_status": self.status,
            "provider_type": self.type,
            "provider_error": self.error,
            "provider_request_id": self.request_id,
        }
        return {name: value for name, value in found.items() if value not in (None, "")}  # type: ignore[misc]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "ProviderFailure | None":
        """Of a problem document; None if no provider is to blame."""
        status, wait_ms = document.get("provider_status"), document.get("retry_after_ms")
        if type(status) is not int:
            return None
        type_, error, id = (document.get(f"provider_{name}") for name in ("type", "error", "request_id"))
        return cls(
            status=status,
            type=type_ if isinstance(type_, str) else "",
            error=error if isinstance(error, str) else "",
            request_id=id if isinstance(id, str) else None,
            retry_after_ms=wait_ms if type(wait_ms) is int else None,
        )


DETAIL_CHARACTERS = 1000
"""It becomes a header of a dead letter, and RabbitMQ closes a connection that publishes headers larger than a frame
(501 FRAME_ERROR)."""


_QUOTES = re.compile(r"[:;,'\"(`]")
"""Up to the first of these, a detail only names the wrong field, so it may be logged; the rest may quote content."""


class RequestProblem(LanekeeperError):
    """A request's final error. `detail` may quote the request's content; `brief` is it without, for logs. `provider`:
    what the provider answered, if that is why the request ended. `retry_after_ms`: when another request may be
    answered, if that is known; by default what the provider said."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        status: int | None = None,
        brief: str | None = None,
        provider: ProviderFailure | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        self.type = PROBLEMS[code]
        self.provider = provider
        if retry_after_ms is None and provider is not None:
            retry_after_ms = provider.retry_after_ms
        self.retry_after_ms = retry_after_ms
        detail = encodable(detail)
        self.detail = detail if len(detail) <= DETAIL_CHARACTERS else f"{detail[: DETAIL_CHARACTERS - 1]}…"
        self.status = self.type.status if status is None else status
        self._brief = None if brief is None else encodable(brief)
        super().__init__(f"{code}: {self.detail}")

    @property
    def code(self) -> str:
        return self.type.code

    @property
    def brief(self) -> str:
        return _QUOTES.split(self.detail, 1)[0].strip() if self._brief is None else self._brief

    def document(self, *, request: str, attempts: int, trace: str | None = None) -> bytes:
        """The problem document. `trace`: the id of the request's trace, if there is one."""
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
                **({} if self.provider is None else self.provider.members),
                **({} if self.retry_after_ms is None else {"retry_after_ms": self.retry_after_ms}),
                **({} if trace is None else {"trace": trace}),
            },
            ensure_ascii=False,
        ).encode()


def invalid_request(detail: str) -> RequestProblem:
    """The request does not follow docs/contract.md."""
    return RequestProblem("invalid_request", detail)


def answer_too_large(size: int, limit: int, *, setting: str = "", is_away: bool = False) -> RequestProblem:
    """`setting` allows larger answers; `is_away`: the store for large answers could not be used, and `limit` is the
    largest message."""
    here = " in a message, and the store for larger ones could not be used" if is_away else ""
    more = f", or set {setting} for the workers" if setting else ""
    return RequestProblem(
        "answer_too_large",
        f"the provider's answer has {size} bytes, and {limit} is the most that can be sent back{here}: ask for less "
        f"(a smaller max_tokens, fewer or smaller results of tools){more}",
    )
