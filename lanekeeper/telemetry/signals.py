"""The one list of log events, spans and span attributes; the comment beside each names its fields or its meaning.

Events are fixed names, the rest are fields (`log.info(signals.REQUEST_ANSWERED, lane=…, wait_ms=…)`), never sentences.
No event, span or attribute holds a prompt, an answer, a key or a URL's password.

Attribute names are our own constants, because the packages lag behind the conventions or deprecate them (docs/facts.md,
section 11). Sources: `messaging.*` and RabbitMQ from open-telemetry/semantic-conventions, docs/messaging/
(messaging-spans.md, rabbitmq.md; schema 1.44.0, status Development); `gen_ai.*` from open-telemetry/
semantic-conventions-genai, docs/gen-ai/ (gen-ai-spans.md, anthropic.md, status Development), with `cache_write` as that
repository and the Anthropic SDK's own spans have it since September 2026 (it was `cache_creation`); `error.*` and
`server.*` from the general conventions (stable). `lane.*` are ours.
"""

from typing import Final

# Log events: the service as a whole.
SERVICE_READY: Final = "service.ready"  # version, lanes, broker, providers: all parts work, requests are taken
SERVICE_STOPPING: Final = "service.stopping"  # reason, running: no more is taken, what runs may finish
SERVICE_STOPPED: Final = "service.stopped"  # orphaned: deliveries left unacknowledged, which come back elsewhere
HEALTH_ABSENT: Final = "health.absent"  # reason: another worker has the address; /healthz and /readyz are not served
TRACES_EXPORTED_TO: Final = "traces.exported_to"  # endpoint: spans are sent there
TRACES_LOST: Final = "traces.lost"  # endpoint, error, suppressed: spans could not be sent; requests are not affected
LIBRARY_WARNED: Final = "library.warned"  # library, message: what another package wrote with `logging`, from WARNING up

# Log events: the broker and the way to it.
BROKER_CONNECTED: Final = "broker.connected"  # connection, broker, version
BROKER_LOST: Final = "broker.lost"  # connection, broker, reason: it was open; it is opened again
BROKER_UNREACHABLE: Final = "broker.unreachable"  # connection, reason, retry_in_s
PLAIN_TEXT: Final = "transport.plain"  # what, reason: passwords and prompts go to another machine in plain text
BROKER_BLOCKED: Final = "broker.blocked"  # connection, reason: memory or disk alarm, publishes wait
BROKER_UNBLOCKED: Final = "broker.unblocked"  # connection, blocked_s
TOPOLOGY_APPLIED: Final = "topology.applied"  # exchanges, queues, bindings: how many were declared
TOPOLOGY_DIFFERS: Final = "topology.differs"  # difference, command: one event a difference
NOTICE_DROPPED: Final = "notice.dropped"  # error: a life-cycle event could not be published, which is allowed
STORE_VOLATILE: Final = "store.volatile"  # store, reason: what it has acknowledged could be lost, by its settings

# Log events: lanes.
LANE_STARTED: Final = "lane.started"  # lane, slots, due_slots
LANE_SUMMARY: Final = "lane.summary"  # every minute: lane, depth, consumers, running, wait_p50_ms, wait_p95_ms, per_s
SLOTS_CHANGED: Final = "slots.changed"  # lane, queue, slots, lent, grown: its own, and those added to them
SLOTS_LIMITED: Final = "slots.limited"  # lane, queue, limit, wait_s: it waits too long, and more slots are of no use
CONSUME_FAILED: Final = "consume.failed"  # queue, reason: it is tried again
QUEUE_DELETED: Final = "queue.deleted"  # queues, command: they were there; what was in them is lost
TAKING_PAUSED: Final = "taking.paused"  # reasons: no request is taken, and none that is in hand goes to the provider
TAKING_RESUMED: Final = "taking.resumed"  # paused_s
CONSUMER_CANCELLED: Final = "consumer.cancelled"  # queue: the broker ended it (queue deleted, leader moved)
CONTROL_REFUSED: Final = (
    "control.refused"  # reason, refused (how many so far): a control message that is not understood
)
CANCELLATION_DISPLACED: Final = "cancellation.displaced"  # tenant, count, displaced: its oldest of unseen ids go first
CANCELLATION_UNSENT: Final = "cancellation.unsent"  # request, error: nobody waits for it any more, and it runs on
CONTROL_BEHIND: Final = (
    "control.behind"  # waiting, waited_s: requests are taken, and cancellations recorded beside them
)
CONTROL_POSTPONED: Final = "control.postponed"  # type, reason: the store is away; the message is read again
CONTROL_UNANSWERED: Final = (
    "control.unanswered"  # reply_to, unanswered (how many so far): nobody can be told what came of a control message
)

# Log events: one request. `request` is its message id; most tell its `lane` as well.
DEAD_LETTERS_REMOVED: Final = "dead_letters.removed"  # removed, exported_to: the oldest, beyond what is kept
DEAD_LETTERS_UNKEPT: Final = "dead_letters.unkept"  # error: they could not be looked after; it is tried again
INVALID_UNPARKED: Final = "invalid.unparked"  # tenant, code, count, unparked: its share of the dead letters is used up
REQUEST_ANSWERED: Final = "request.answered"  # model, provider, wait_ms, run_ms, input_tokens, output_tokens
REQUEST_DEFERRED: Final = "request.deferred"  # delay_ms, reason: held back by a limit or a wish; not an error
REQUEST_RETRIED: Final = "request.retried"  # delay_ms, error, status, provider_request: the attempt failed
REQUEST_REFUSED: Final = "request.refused"  # code, detail: final error, nothing kept
REQUEST_BURIED: Final = "request.buried"  # code, detail: final error, parked in the dead letters
REQUEST_REPLAYED: Final = "request.replayed"  # code: it had ended before, and was answered from the store
REQUEST_STOPPED: Final = "request.stopped"  # reason: cancelled, or taken over by another delivery; its call is ended
COMPLETION_LOST: Final = "completion.lost"  # request, error: an ending could not be kept; its provider is called again
DEFERRAL_UNKEPT: Final = "deferral.unkept"  # error: until when it waits could not be kept; `result` cannot tell of it
RENEWAL_FAILED: Final = "renewal.failed"  # error: claims could not be renewed; nobody else can take them either
STORE_AWAY: Final = "store.away"  # reason: nothing is taken, and nothing acknowledged, until it is well again
STORE_WELL: Final = "store.well"  # the store can be written again
SWEEP_FAILED: Final = "store.sweep_failed"  # error: what was kept long enough stays for now
STORE_SWEPT: Final = "store.swept"  # removed: results that were kept long enough, or were beyond the bound
STREAM_RESTARTED: Final = "stream.restarted"  # error: the requester was told to forget the parts so far
REPLY_UNROUTABLE: Final = "reply.unroutable"  # reply_to: the requester has gone
REPLY_REFUSED: Final = "reply.refused"  # tries, delay_ms: the reply queue is full; it is tried again after that
REPLY_GIVEN_UP: Final = (
    "reply.given_up"  # tries, given_up (so far): never sent, kept under its id; once a second at most
)
DEAD_LETTER_CUT: Final = (
    "dead_letter.cut"  # size, limit: the broker takes no such message any more; parked without body
)
ANSWER_UNSENT: Final = (
    "answer.unsent"  # size, limit: it was kept, and the broker takes no such message; told as an error
)
PART_LOST: Final = (
    "part.lost"  # reason: events of a stream could not be sent on, the first of them; the final reply still is
)
DELIVERY_LOST: Final = "delivery.lost"  # queue, error: its acknowledgement failed; the broker delivers it again
HANDLER_FAILED: Final = "handler.failed"  # error, where: a fault of ours; the request is buried as `internal`

# Log events: the budget.
SPEND_LIMIT_MET: Final = "account.spend_limit"  # account, pauses_after, error: for the first time since it answered
ACCOUNT_PAUSED: Final = "account.paused"  # account, for_s: its spend limit is reached; a person has to act
LEARNED_UNREADABLE: Final = (
    "limits.unreadable"  # account, error: another version of Lanekeeper wrote what was learned; this process ignores it
)
LIMITS_LEARNED: Final = (
    "limits.learned"  # account, kind, requests, input_tokens, output_tokens: a minute's, from now on
)

# Log events: providers and spending.
BREAKER_CHANGED: Final = "breaker.changed"  # provider, model, state, error, retry_in_s: open pauses its calls
FAILED_OVER: Final = "failed.over"  # provider, model, to_provider, to_model, error: and another is asked
CAP_REACHED: Final = "cap.reached"  # cap, percent (50, 80, 100), used, limit: of what a lane or tenant may use a day
CAP_UNCORRECTED: Final = "cap.uncorrected"  # cap, error: it stays counted by its estimate

# Spans: `<operation> <destination>`, the destination being of few values (an exchange, a queue of ours, a model).
# docs/tracing.md tells what they mean.
ASK: Final = "ask"  # CLIENT: `lanekeeper send`, from before it publishes until it has its answer
SEND: Final = "send"  # PRODUCER
PROCESS: Final = "process"  # CONSUMER
CHAT: Final = "chat"  # CLIENT
ACK: Final = "ack"  # CLIENT, as is REJECT
REJECT: Final = "reject"
WAIT: Final = "wait"  # INTERNAL, as is DELAY: told by the worker that ended it, when it had passed
DELAY: Final = "delay"
SETTLE: Final = "settle"  # only as messaging.operation.type
REPLY_TEMPLATE: Final = "(reply)"  # stands for every queue that a requester named: there are as many as requesters
TURN: Final = "(turn)"  # what a worker holds waits for its claim, and for room in the budget
DEAD_LETTER: Final = "(dead letter)"  # until somebody publishes it again
DEFAULT_EXCHANGE: Final = "amq.default"  # messaging.destination.name where exchange and key are empty

# Attributes: general.
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"

# Attributes: messaging.
MESSAGING_SYSTEM: Final = "messaging.system"
RABBITMQ: Final = "rabbitmq"  # its value
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"  # exchange:routing key[:queue]
MESSAGING_DESTINATION_TEMPLATE: Final = "messaging.destination.template"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_CONVERSATION_ID: Final = "messaging.message.conversation_id"  # the correlation_id
MESSAGING_BODY_SIZE: Final = "messaging.message.body.size"  # bytes
MESSAGING_ROUTING_KEY: Final = "messaging.rabbitmq.destination.routing_key"
MESSAGING_DELIVERY_TAG: Final = "messaging.rabbitmq.message.delivery_tag"

# Attributes: the model's call.
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"  # "chat"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"  # only where it is true
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"  # string[]
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"  # the cached ones included
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_CACHE_WRITE_TOKENS: Final = "gen_ai.usage.cache_write.input_tokens"
PROVIDER_REQUEST_ID: Final = "anthropic.request.id"  # the SDK's own name for it

# Attributes: ours, on process spans.
LANE_NAME: Final = "lane.name"
LANE_APP: Final = "lane.app"
LANE_ATTEMPT: Final = "lane.attempt"  # from 1
LANE_WAIT_MS: Final = "lane.wait_ms"  # from publishing, or the due time, to the start of this attempt
LANE_REDELIVERED: Final = "lane.redelivered"  # only where it is true
LANE_OUTCOME: Final = "lane.outcome"  # answered, deferred, retried, refused, buried, dropped, replayed
LANE_DELAY_MS: Final = "lane.delay_ms"  # how long it was put off
LANE_COST_USD: Final = "lane.cost_usd"  # on chat spans: by the table of prices
