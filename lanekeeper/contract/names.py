"""Every name on the broker and in a message header is built here; no other file contains its text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """The exchanges, queues and routing keys of one installation; all begin with its namespace."""

    namespace: str = "lane"

    @property
    def requests(self) -> str:
        """Topic exchange that applications publish to."""
        return f"{self.namespace}.requests"

    def intake(self, lane: str) -> str:
        """Queue of the requests published to a lane."""
        return f"{self.namespace}.{lane}"

    def due(self, lane: str) -> str:
        """Queue of the requests that return to a lane after a delay."""
        return f"{self.namespace}.{lane}.due"

    def side(self, lane: str, number: int) -> str:
        """Queue of the requests that a lane's workers set aside."""
        return f"{self.namespace}.{lane}.side.{number:02d}"

    def side_exchange(self, number: int) -> str:
        """Topic exchange through which workers set requests aside; one for each number of side queues."""
        return f"{self.side_prefix}{number:02d}"

    @property
    def side_prefix(self) -> str:
        return f"{self.namespace}.side."

    @property
    def due_exchange(self) -> str:
        """Internal topic exchange at the end of the delay cascade."""
        return f"{self.namespace}.due"

    def delay(self, level: int) -> str:
        """Headers exchange and wait queue of one level of the delay cascade."""
        return f"{self.namespace}.delay.{level:02d}"

    @property
    def delay_prefix(self) -> str:
        return f"{self.namespace}.delay."

    def delay_bit(self, level: int) -> str:
        """Header that says whether a message waits at a level (1) or skips it (0)."""
        return f"{self.namespace}-d{level:02d}"

    @property
    def fallen(self) -> str:
        """Exchange and queue of messages that the broker itself removed from a queue or could not route."""
        return f"{self.namespace}.fallen"

    @property
    def dead(self) -> str:
        """Exchange and queue of dead letters."""
        return f"{self.namespace}.dead"

    @property
    def events(self) -> str:
        """Topic exchange of life-cycle events."""
        return f"{self.namespace}.events"

    @property
    def control(self) -> str:
        """Exchange and queue of control messages (cancel and result: answered by one worker; status: by every one)."""
        return f"{self.namespace}.control"

    @property
    def reply_prefix(self) -> str:
        """Prefix of our own reply queues."""
        return f"{self.namespace}.reply."

    def reply_queue(self, user: str) -> str:
        """Queue for the replies of one user; the user's further reply queues add a dot and a suffix."""
        return f"{self.reply_prefix}{user}"

    def lane_pattern(self, lane: str) -> str:
        """Binding key of a lane. It matches `<lane>.<app>.<task>` and any further words."""
        return f"{lane}.#"

    def event_key(self, lane: str, app: str, event: str, message_id: str) -> str:
        return f"{lane}.{app}.{event}.{message_id}"


# Headers that a requester may set. Every other x-lane-* header is either ours (stripped) or refused by name.
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

# On replies.
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
"""The header of answers to control messages: `accepted`, `pending` or `error`. Never together with STATUS."""
CODE = "x-lane-code"
"""The header of HTTP errors that holds the code of the problem document."""

# On dead letters.
DEAD_CODE = "x-lane-dead-code"
DEAD_DETAIL = "x-lane-dead-detail"
DEAD_AT = "x-lane-dead-at"
ROUTING_KEY = "x-lane-routing-key"
ERRORS = "x-lane-errors"

# Between workers. Trusted only on messages from the delay cascade or a side queue (as are ATTEMPT and ERRORS).
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

# Set by the broker; docs/facts.md, sections 3 and 7.
BROKER_TIMESTAMP_MS = "timestamp_in_ms"
DELIVERY_COUNT = "x-delivery-count"
ACQUIRED_COUNT = "x-acquired-count"
DEATH = "x-death"
STRIPPED_ON_REPUBLISH = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")
CC = "CC"
BCC = "BCC"
DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"

# Routing keys of the control exchange; a message's type must be the same.
CANCEL_KEY = "cancel"
RESULT_KEY = "result"
CHANGE_KEY = "change"
CONTROL_KEYS = (CANCEL_KEY, RESULT_KEY, CHANGE_KEY)
"""Control messages of applications, each answered by one worker. Cancellations are kept until a worker has recorded
them; questions for results expire."""
STATUS_KEY = "status"
"""Answered by every worker; each binds a queue of its own for it."""
KEPT_KEYS = (CANCEL_KEY, RESULT_KEY, "#")
"""Binding keys of the queue `lane.control`. `#` also catches wrong keys, so that they are answered too. The first two
exist on brokers that an earlier version set up, and would be reported there as extra if they were left out."""
