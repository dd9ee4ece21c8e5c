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
        """Queue that takes what is published to a lane."""
        return f"{self.namespace}.{lane}"

    def due(self, lane: str) -> str:
        """Queue that takes what comes back to a lane from a delay."""
        return f"{self.namespace}.{lane}.due"

    def side(self, lane: str, number: int) -> str:
        """Queue that takes what a lane's workers set aside."""
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
        """Header that says whether a message waits at a level (1) or passes it by (0)."""
        return f"{self.namespace}-d{level:02d}"

    @property
    def fallen(self) -> str:
        """Exchange and queue of what the broker itself took out of a queue or could not route."""
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
        """Exchange and queue of control messages (cancel and result, answered by one worker; status, by every one)."""
        return f"{self.namespace}.control"

    @property
    def reply_prefix(self) -> str:
        """Queues of ours that replies may go to begin with this."""
        return f"{self.namespace}.reply."

    def reply_queue(self, user: str) -> str:
        """Queue for the replies of one user; more of them begin with it and a dot."""
        return f"{self.reply_prefix}{user}"

    def lane_pattern(self, lane: str) -> str:
        """Binding key of a lane: `<lane>.<app>.<task>` and further words of the application's own."""
        return f"{lane}.#"

    def event_key(self, lane: str, app: str, event: str, message_id: str) -> str:
        return f"{lane}.{app}.{event}.{message_id}"


# What a requester may say. Every other x-lane-* header is either ours (stripped) or refused by name.
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
PUBLIC = frozenset({DEADLINE_MS, STREAM, DELAY_MS, AT, TENANT, NO_BATCH, SENT_MS})

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
"""On answers to control messages, and never beside STATUS: `accepted`, `pending` or `error`."""

# On dead letters.
DEAD_CODE = "x-lane-dead-code"
DEAD_DETAIL = "x-lane-dead-detail"
DEAD_AT = "x-lane-dead-at"
ROUTING_KEY = "x-lane-routing-key"
ERRORS = "x-lane-errors"

# Between workers; believed only on what came through the delay cascade or a side queue (ATTEMPT, ERRORS too).
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

# The broker's own; docs/facts.md, sections 3 and 7.
BROKER_TIMESTAMP_MS = "timestamp_in_ms"
DELIVERY_COUNT = "x-delivery-count"
ACQUIRED_COUNT = "x-acquired-count"
DEATH = "x-death"
STRIPPED_ON_REPUBLISH = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")
CC = "CC"
BCC = "BCC"
DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"

# Keys on the control exchange; a message's type says the same.
CANCEL_KEY = "cancel"
RESULT_KEY = "result"
CHANGE_KEY = "change"
CONTROL_KEYS = (CANCEL_KEY, RESULT_KEY, CHANGE_KEY)
"""What applications may say, and any one worker answers: cancellations are kept until they are recorded, questions for
results expire."""
STATUS_KEY = "status"
"""What every worker answers, each from a queue that it binds."""
KEPT_KEYS = (CANCEL_KEY, RESULT_KEY, "#")
"""Of the bindings of `lane.control`: what has a wrong key is answered too. The first two are what brokers of earlier
versions have: left out here they would be reported there as extra."""
