"""The names of all exchanges, queues, routing keys and message headers. No other file spells them out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Builds the names of the exchanges, queues and routing keys of one installation of Lanekeeper. The names of
    exchanges and queues begin with the installation's namespace, `lane` by default."""

    namespace: str = "lane"

    @property
    def requests(self) -> str:
        """Name of the topic exchange to which applications publish requests."""
        return f"{self.namespace}.requests"

    def intake(self, lane: str) -> str:
        """Name of a lane's intake: the queue of the requests that applications publish to the lane."""
        return f"{self.namespace}.{lane}"

    def due(self, lane: str) -> str:
        """Name of a lane's due queue: the queue of the requests that return to the lane after a delay or a retry
        pause."""
        return f"{self.namespace}.{lane}.due"

    def side(self, lane: str, number: int) -> str:
        """Name of a side queue: workers move requests of tenants that have many waiting requests from the lane's intake
        to such queues (docs/fairness.md)."""
        return f"{self.namespace}.{lane}.side.{number:02d}"

    def side_exchange(self, number: int) -> str:
        """Name of the topic exchange through which workers move requests to side queues. Each lane's side queue with
        this number is bound to the exchange."""
        return f"{self.side_prefix}{number:02d}"

    @property
    def side_prefix(self) -> str:
        return f"{self.namespace}.side."

    @property
    def due_exchange(self) -> str:
        """Name of the internal topic exchange that gets delayed messages at the end of their delay, and routes them to
        their lane's due queue."""
        return f"{self.namespace}.due"

    def delay(self, level: int) -> str:
        """Name of the headers exchange and of the wait queue of one level of the delay cascade: a chain of queues that
        hold a message for 100 ms, 200 ms, 400 ms and so on, whose waits add up to the message's delay."""
        return f"{self.namespace}.delay.{level:02d}"

    @property
    def delay_prefix(self) -> str:
        return f"{self.namespace}.delay."

    def delay_bit(self, level: int) -> str:
        """Name of the boolean header that says whether a message waits at one level of the delay cascade (the chain of
        queues that hold delayed messages), or skips this level."""
        return f"{self.namespace}-d{level:02d}"

    @property
    def fallen(self) -> str:
        """Name of the exchange and the queue for messages that the broker dead-lettered (expired, or delivered too
        often) or could not route. Workers consume the queue."""
        return f"{self.namespace}.fallen"

    @property
    def dead(self) -> str:
        """Name of the exchange and the queue for dead letters: requests that failed for good, which operators
        inspect."""
        return f"{self.namespace}.dead"

    @property
    def events(self) -> str:
        """Name of the topic exchange for requests' life-cycle events (`started`, `completed`, …)."""
        return f"{self.namespace}.events"

    @property
    def control(self) -> str:
        """Name of the exchange and the queue for control messages: `cancel` and `result`, which one worker answers, and
        `status`, which every worker answers."""
        return f"{self.namespace}.control"

    @property
    def reply_prefix(self) -> str:
        """Prefix of the names of the reply queues that are declared for broker users."""
        return f"{self.namespace}.reply."

    def reply_queue(self, user: str) -> str:
        """Name of the queue for replies to a broker user; if the user has further reply queues, their names are this
        name, a dot and a suffix."""
        return f"{self.reply_prefix}{user}"

    def lane_pattern(self, lane: str) -> str:
        """Binding key between a topic exchange and a lane's queue. It matches routing keys that begin with the lane's
        name: `<lane>.<app>.<task>` and any further words."""
        return f"{lane}.#"

    def event_key(self, lane: str, app: str, event: str, message_id: str) -> str:
        return f"{lane}.{app}.{event}.{message_id}"


# Headers of a request. The requester may set those in PUBLIC, the trace context, and `anthropic-beta`. Headers that
# only workers set (OURS) are removed from a request; any other x-lane-* header is refused, by an error that names it.
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"
TRACE_CONTEXT = frozenset({TRACEPARENT, TRACESTATE, BAGGAGE})
DEADLINE_MS = "x-lane-deadline-ms"
STREAM = "x-lane-stream"
DELAY_MS = "x-lane-delay-ms"
AT = "x-lane-at"
DEBOUNCE = "x-lane-debounce"
WEBHOOK = "x-lane-webhook"
PIPELINE = "x-lane-pipeline"
ORDER = "x-lane-order"
BODY = "x-lane-body"
BODY_SHA256 = "x-lane-body-sha256"
TENANT = "x-lane-tenant"
NO_BATCH = "x-lane-no-batch"
SENT_MS = "x-lane-sent-ms"
ANTHROPIC_BETA = "anthropic-beta"
PUBLIC = frozenset({DEADLINE_MS, STREAM, DELAY_MS, AT, TENANT, NO_BATCH, SENT_MS, BODY, BODY_SHA256})

# Headers of replies.
STATUS = "x-lane-status"
PART = "x-lane-part"
SEQ = "x-lane-seq"
REQUEST_ID = "x-lane-request-id"
LANE_NAME = "x-lane-name"
MODEL = "x-lane-model"
PROVIDER = "x-lane-provider"
ATTEMPT = "x-lane-attempt"
WAIT_MS = "x-lane-wait-ms"
RUN_MS = "x-lane-run-ms"
WAIT_FROM = "x-lane-wait-from"
REPLAYED = "x-lane-replayed"
CONTROL = "x-lane-control"
"""The header of answers to control messages: `accepted`, `pending` or `error`. A message never has both this header and
`x-lane-status` (STATUS)."""
CODE = "x-lane-code"
"""The header of a gateway's HTTP error answers that contains the `code` of the problem document."""

# Headers of dead letters.
DEAD_CODE = "x-lane-dead-code"
DEAD_DETAIL = "x-lane-dead-detail"
DEAD_AT = "x-lane-dead-at"
ROUTING_KEY = "x-lane-routing-key"
ERRORS = "x-lane-errors"

# Headers that a worker writes for the next worker when it publishes a request again; `HopHeaders`
# (topology/codec/headers.py) explains each. These headers, ATTEMPT and ERRORS are read only from messages that come
# through the wait queues of a delay or through a side queue, where only workers can publish.
FIRST_SEEN_MS = "x-lane-first-seen-ms"
DUE_MS = "x-lane-due-ms"
USER_ID = "x-lane-user-id"
EXPIRATION = "x-lane-expiration"
REDELIVERED = "x-lane-redelivered"
HOP_MS = "x-lane-hop-ms"
BACK_MS = "x-lane-back-ms"
FRESH = "x-lane-fresh"
REPLY_TRY = "x-lane-reply-try"
REPLY_ERROR = "x-lane-reply-error"

OURS = frozenset(
    {
        STATUS, PART, SEQ, REQUEST_ID, LANE_NAME, MODEL, PROVIDER, ATTEMPT, WAIT_MS, RUN_MS, WAIT_FROM,
        REPLAYED, CONTROL,
        DEAD_CODE, DEAD_DETAIL, DEAD_AT, ROUTING_KEY, ERRORS,
        FIRST_SEEN_MS, DUE_MS, USER_ID, EXPIRATION, REDELIVERED, HOP_MS, BACK_MS, FRESH,
        REPLY_TRY, REPLY_ERROR,
    }
)  # fmt: skip
"""The headers that only workers set. If a requester sends one of them, it is removed."""

# RabbitMQ's own headers and names; docs/facts.md, sections 3 and 7.
BROKER_TIMESTAMP_MS = "timestamp_in_ms"
DELIVERY_COUNT = "x-delivery-count"
ACQUIRED_COUNT = "x-acquired-count"
DEATH = "x-death"
STRIPPED_ON_REPUBLISH = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")
CC = "CC"
BCC = "BCC"
DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"

# Routing keys of the control exchange. The property `type` of a control message must equal its routing key.
CANCEL_KEY = "cancel"
RESULT_KEY = "result"
CHANGE_KEY = "change"
CONTROL_KEYS = (CANCEL_KEY, RESULT_KEY, CHANGE_KEY)
"""The routing keys of the control messages that applications may send; one worker answers each message. A cancellation
(`cancel`) stays in the queue until a worker has recorded it. A question for a result (`result`) expires after some
seconds, when the client no longer waits for the answer. `change` is reserved: this version answers it with an error."""
STATUS_KEY = "status"
"""The routing key of the control message that asks all workers for their status. Each worker binds a queue of its own
with this key, so that each gets the message and answers it."""
CONTROL_BINDING_KEYS = (CANCEL_KEY, RESULT_KEY, "#")
"""Binding keys of the queue `lane.control`. The key `#` alone would do: it matches every key, so that a message with an
unknown key is answered with an error. The other two keys are kept because earlier versions declared them: on a broker
that an earlier version set up, the bindings with these two keys would otherwise be reported as undeclared."""
