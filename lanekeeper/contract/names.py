"""The names of all exchanges, queues, routing keys and message headers. No other file spells them out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one installation: exchanges and queues begin with its namespace."""

    namespace: str = "lane"

    @property
    def requests(self) -> str:
        return f"{self.namespace}.requests"

    def intake(self, lane: str) -> str:
        """The queue to which applications publish."""
        return f"{self.namespace}.{lane}"

    def due(self, lane: str) -> str:
        """The queue of requests that return after a delay or a retry pause."""
        return f"{self.namespace}.{lane}.due"

    def side(self, lane: str, number: int) -> str:
        """To side queues, workers move requests of tenants with many waiting requests (docs/fairness.md)."""
        return f"{self.namespace}.{lane}.side.{number:02d}"

    def side_exchange(self, number: int) -> str:
        """All lanes' side queues with this number are bound to it."""
        return f"{self.side_prefix}{number:02d}"

    @property
    def side_prefix(self) -> str:
        return f"{self.namespace}.side."

    def lane_behind(self, queue: str) -> str | None:
        """The lane of a due or side queue, to which only workers publish; None for any other queue."""
        lane, _, rest = queue.removeprefix(f"{self.namespace}.").partition(".")
        is_ours = queue.startswith(f"{self.namespace}.") and (rest == "due" or rest.startswith("side."))
        return lane if is_ours else None

    @property
    def due_exchange(self) -> str:
        """Internal: gets delayed messages at the end of their delay."""
        return f"{self.namespace}.due"

    def delay(self, level: int) -> str:
        """Exchange and wait queue of one level of the delay cascade: 100 ms, 200 ms, 400 ms and so on, which add up."""
        return f"{self.namespace}.delay.{level:02d}"

    @property
    def delay_prefix(self) -> str:
        return f"{self.namespace}.delay."

    def delay_bit(self, level: int) -> str:
        return f"{self.namespace}-d{level:02d}"

    @property
    def strays(self) -> str:
        """Exchange and queue of what the broker dead-lettered or could not route."""
        return f"{self.namespace}.fallen"

    @property
    def dead(self) -> str:
        return f"{self.namespace}.dead"

    @property
    def events(self) -> str:
        return f"{self.namespace}.events"

    @property
    def control(self) -> str:
        return f"{self.namespace}.control"

    @property
    def webhooks(self) -> str:
        """Exchange and queue of the final outcomes that are posted to webhooks."""
        return f"{self.namespace}.webhooks"

    @property
    def batches(self) -> str:
        """Queue of the requests that are gathered for a provider's batches."""
        return f"{self.namespace}.batches"

    @property
    def tickets(self) -> str:
        """Queue of the tickets, each of which is one batch of a provider, and has the requests in it."""
        return f"{self.namespace}.tickets"

    @property
    def reply_prefix(self) -> str:
        return f"{self.namespace}.reply."

    def reply_queue(self, user: str) -> str:
        return f"{self.reply_prefix}{user}"

    def lane_pattern(self, lane: str) -> str:
        return f"{lane}.#"

    def webhook_key(self, lane: str) -> str:
        """The routing key of a webhook's message; its first word is no lane's name. `lane`: what a request's key
        begins with, which may be no lane's name, and too long for a key that has another word before it."""
        return f"{WEBHOOKS_KEY}.{lane[:LANE_SHOWN]}"

    @property
    def ticket_key(self) -> str:
        """The routing key of a ticket that comes back from a delay; its first word is no lane's name."""
        return f"{TICKETS_KEY}.batch"

    def event_key(self, lane: str, app: str, event: str, message_id: str) -> str:
        return f"{lane}.{app}.{event}.{message_id}"


LANE_SHOWN = 60
"""Characters of UTF-8; no lane's name is longer."""

# Headers of a request. The requester may set those in PUBLIC, the trace context, and `anthropic-*`. Headers that
# only workers set (OURS) are removed from a request; any other x-lane-* header is refused, by an error that names it.
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"
TRACE_CONTEXT = frozenset({TRACEPARENT, TRACESTATE, BAGGAGE})
DEADLINE_MS = "x-lane-deadline-ms"
LONG_CALL = "x-lane-long-call"
STREAM = "x-lane-stream"
DIALECT = "x-lane-dialect"
"""Whose format the body is in: one of DIALECTS."""
PARTS_TOGETHER = "x-lane-parts-together"
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
PARK_INVALID = "x-lane-park-invalid"
GROUP = "x-lane-group"
GROUP_SIZE = "x-lane-group-size"
KEY = "x-lane-key"
SENT_MS = "x-lane-sent-ms"
ANTHROPIC = "anthropic-"
"""Headers that begin with it are the provider's: they are passed on as they came."""
ANTHROPIC_BETA = "anthropic-beta"
ANTHROPIC_VERSION = "anthropic-version"
PUBLIC = frozenset({
    DEADLINE_MS, LONG_CALL, STREAM, DELAY_MS, AT, DEBOUNCE, WEBHOOK, PIPELINE, TENANT, NO_BATCH, PARK_INVALID, SENT_MS,
    DIALECT, BODY, BODY_SHA256, KEY, PARTS_TOGETHER, GROUP, GROUP_SIZE,
})  # fmt: skip

# What DIALECT may say.
ANTHROPIC_MESSAGES = "anthropic.messages"
OPENAI_CHAT = "openai.chat"
OPENAI_RESPONSES = "openai.responses"
OPENAI_EMBEDDINGS = "openai.embeddings"
OPENAI_DIALECTS = frozenset({OPENAI_CHAT, OPENAI_RESPONSES, OPENAI_EMBEDDINGS})
DIALECTS = (ANTHROPIC_MESSAGES, *sorted(OPENAI_DIALECTS))
"""The first is that of requests without the header."""

STATUS = "x-lane-status"
PART = "x-lane-part"
SEVERAL = "several"
"""PART of a message with the parts of several streams, or of one."""
SEQ = "x-lane-seq"
REQUEST_ID = "x-lane-request-id"
LANE_NAME = "x-lane-name"
MODEL = "x-lane-model"
PROVIDER = "x-lane-provider"
PROVIDER_REQUEST_ID = "x-lane-provider-request-id"
STOP_REASON = "x-lane-stop-reason"
ATTEMPT = "x-lane-attempt"
WAIT_MS = "x-lane-wait-ms"
RUN_MS = "x-lane-run-ms"
WAIT_FROM = "x-lane-wait-from"
REPLAYED = "x-lane-replayed"
WEBHOOK_LOG = "x-lane-webhook-log"
CONTROL = "x-lane-control"
"""On answers to control messages, never beside STATUS: `accepted`, `pending` or `error`."""
CODE = "x-lane-code"
BATCHED = "x-lane-batched"
"""On answers about Message Batches: `live` if their requests go into no provider's batch."""
TYPE = "x-lane-type"
"""On calls of a gateway: the property `type` of the message, which names a handler."""

DEAD_CODE = "x-lane-dead-code"
DEAD_DETAIL = "x-lane-dead-detail"
DEAD_AT = "x-lane-dead-at"
ROUTING_KEY = "x-lane-routing-key"
ERRORS = "x-lane-errors"
REPLAYS = "x-lane-replays"
REPLAYED_AT = "x-lane-replayed-at"

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
RAN_MS = "x-lane-ran-ms"
DEATHS = "x-lane-deaths"
FLOW = "x-lane-flow"
BATCH = "x-lane-batch"
REPLY_TRY = "x-lane-reply-try"
REPLY_ERROR = "x-lane-reply-error"

OURS = frozenset(
    {
        STATUS, PART, SEQ, REQUEST_ID, LANE_NAME, MODEL, PROVIDER, PROVIDER_REQUEST_ID, STOP_REASON, ATTEMPT, WAIT_MS,
        RUN_MS, WAIT_FROM, REPLAYED, CONTROL, WEBHOOK_LOG,
        DEAD_CODE, DEAD_DETAIL, DEAD_AT, ROUTING_KEY, ERRORS, REPLAYS, REPLAYED_AT,
        FIRST_SEEN_MS, DUE_MS, USER_ID, EXPIRATION, REDELIVERED, HOP_MS, BACK_MS, FRESH, RAN_MS,
        FLOW, BATCH, DEATHS, REPLY_TRY, REPLY_ERROR,
    }
)  # fmt: skip
"""Only workers set these; a requester's are removed."""

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
RESULTS_KEY = "results"
GROUP_KEY = "group"
CANCEL_GROUP_KEY = "cancel-group"
CONTROL_KEYS = (CANCEL_KEY, RESULT_KEY, CHANGE_KEY, RESULTS_KEY, GROUP_KEY, CANCEL_GROUP_KEY)
"""One worker answers each. `change` is reserved: this version answers it with an error."""
PAUSE_KEY = "pause"
RESUME_KEY = "resume"
PAUSES_KEY = "pauses"
BRAKE_KEYS = (PAUSE_KEY, RESUME_KEY, PAUSES_KEY)
"""For operators alone (docs/brake.md). One worker answers each."""
STATUS_KEY = "status"
PROBE_KEY = "probe"
"""For operators alone: probe a paused provider now."""
ASKED_OF_ALL = (STATUS_KEY, PROBE_KEY)
"""Every worker binds a queue of its own with these keys, and answers."""
WEBHOOKS_KEY = "webhooks"
REDELIVER_KEY = "redeliver"
TICKETS_KEY = "tickets"
WEBHOOK_COMMANDS = (WEBHOOKS_KEY, REDELIVER_KEY)
"""For operators alone (docs/webhooks.md). One worker answers each."""
CONTROL_BINDING_KEYS = (CANCEL_KEY, RESULT_KEY, "#")
"""`#` alone would do, so that a message with an unknown key gets an error; the others would be undeclared bindings on
brokers that earlier versions set up."""
