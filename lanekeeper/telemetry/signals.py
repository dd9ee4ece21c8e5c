"""The one list of log events, spans and span attributes. docs/logs.md and docs/tracing.md explain them; metrics are
listed in `service/metrics.py`.

Events are fixed names, never sentences; details are fields (`log.info(signals.REQUEST_ANSWERED, wait_ms=…)`).
No event, span or attribute holds a prompt, an answer, a key or a URL's password.

Attribute names are our own constants, because OpenTelemetry's packages lag behind the conventions or deprecate them
(docs/facts.md, section 11). Sources: the semantic conventions for messaging (schema
1.44.0, RabbitMQ), GenAI (semantic-conventions-genai), and the general ones. Names that begin with `lane.` are our own.
"""

from typing import Final

# Log events; docs/logs.md explains those that need it. First the service as a whole.
SERVICE_READY: Final = "service.ready"
MEMORY_KILLED: Final = "service.memory_killed"
SERVICE_STOPPING: Final = "service.stopping"
SERVICE_STOPPED: Final = "service.stopped"
GATEWAY_READY: Final = "gateway.ready"
OTHER_STORE: Final = "gateway.other_store"
KEYS_READ: Final = "gateway.keys_read"
KEYS_UNREAD: Final = "gateway.keys_unread"
OPERATOR_REFUSED: Final = "gateway.operator_refused"
HEALTH_ABSENT: Final = "health.absent"
TRACES_EXPORTED_TO: Final = "traces.exported_to"
TRACES_LOST: Final = "traces.lost"
LIBRARY_WARNED: Final = "library.warned"

BROKER_CONNECTED: Final = "broker.connected"
BROKER_LOST: Final = "broker.lost"
BROKER_UNREACHABLE: Final = "broker.unreachable"
PLAIN_TEXT: Final = "transport.plain"
BROKER_BLOCKED: Final = "broker.blocked"
BROKER_UNBLOCKED: Final = "broker.unblocked"
TOPOLOGY_APPLIED: Final = "topology.applied"
TOPOLOGY_DIFFERS: Final = "topology.differs"
DEAD_LETTERS_REMOVED: Final = "dead_letters.removed"
DEAD_LETTERS_UNKEPT: Final = "dead_letters.unkept"
DEAD_LETTER_REPLAYED: Final = "dead_letter.replayed"
DEAD_LETTER_DROPPED: Final = "dead_letter.dropped"
INVALID_UNPARKED: Final = "invalid.unparked"
NOTICE_DROPPED: Final = "notice.dropped"
STORE_VOLATILE: Final = "store.volatile"

LANE_STARTED: Final = "lane.started"
LANE_SUMMARY: Final = "lane.summary"
LANE_STUCK: Final = "lane.stuck"
SLOTS_CHANGED: Final = "slots.changed"
SLOTS_LIMITED: Final = "slots.limited"
CONSUME_FAILED: Final = "consume.failed"
QUEUE_DELETED: Final = "queue.deleted"
TAKING_PAUSED: Final = "taking.paused"
TAKING_RESUMED: Final = "taking.resumed"
CONSUMER_CANCELLED: Final = "consumer.cancelled"

BRAKE_PULLED: Final = "brake.pulled"
BRAKE_RELEASED: Final = "brake.released"
REQUESTS_CANCELLED: Final = "requests.cancelled"
BRAKE_ASKED: Final = "brake.asked"
PAUSES_UNREAD: Final = "pauses.unread"

SCHEDULE_FIRED: Final = "schedule.fired"
SCHEDULE_MISSED: Final = "schedule.missed"
SCHEDULE_UNPUBLISHED: Final = "schedule.unpublished"
SCHEDULE_AHEAD: Final = "schedule.ahead"
SCHEDULE_FAILED: Final = "schedule.failed"

CONTROL_REFUSED: Final = "control.refused"
CANCELLATION_DISPLACED: Final = "cancellation.displaced"
CANCELLATION_UNSENT: Final = "cancellation.unsent"
CONTROL_BEHIND: Final = "control.behind"
CONTROL_POSTPONED: Final = "control.postponed"
CONTROL_UNANSWERED: Final = "control.unanswered"

REQUEST_ANSWERED: Final = "request.answered"
BODY_UNAVAILABLE: Final = "body.unavailable"
ANSWER_UNKEPT: Final = "answer.unkept"
REQUEST_DEFERRED: Final = "request.deferred"
REQUEST_STEPPED: Final = "request.stepped"
REQUEST_RETRIED: Final = "request.retried"
REQUEST_REFUSED: Final = "request.refused"
REQUEST_BURIED: Final = "request.buried"
REQUEST_REPLAYED: Final = "request.replayed"
REQUEST_STOPPED: Final = "request.stopped"
CLAIM_UNRELEASED: Final = "claim.unreleased"
FILE_UNKEPT: Final = "file.unkept"
COMPLETION_LOST: Final = "completion.lost"
DEFERRAL_UNKEPT: Final = "deferral.unkept"
GROUP_UNCANCELLED: Final = "group.uncancelled"
GROUP_END_UNTOLD: Final = "group.end_untold"
RENEWAL_FAILED: Final = "renewal.failed"
STORE_AWAY: Final = "store.away"
STORE_WELL: Final = "store.well"
SWEEP_FAILED: Final = "store.sweep_failed"
STORE_SWEPT: Final = "store.swept"
STREAM_RESTARTED: Final = "stream.restarted"
REPLY_UNROUTABLE: Final = "reply.unroutable"
REPLY_REFUSED: Final = "reply.refused"
REPLY_GIVEN_UP: Final = "reply.given_up"
DEAD_LETTER_CUT: Final = "dead_letter.cut"
ANSWER_UNSENT: Final = "answer.unsent"
WEBHOOK_POSTED: Final = "webhook.posted"
PART_LOST: Final = "part.lost"
DELIVERY_LOST: Final = "delivery.lost"
HANDLER_FAILED: Final = "handler.failed"
HANDLER_STUCK: Final = "handler.stuck"
HANDLER_NARROW: Final = "handler.narrow"

BATCH_CHANGED: Final = "batch.changed"
BATCH_UNSUBMITTED: Final = "batch.unsubmitted"
BATCH_UNREAD: Final = "batch.unread"

LIMITS_LEARNED: Final = "limits.learned"
LIMITS_UNREAD: Final = "limits.unread"

BREAKER_CHANGED: Final = "breaker.changed"
PROVIDER_PAUSED: Final = "provider.paused"
PROVIDER_RESUMED: Final = "provider.resumed"
PROBE_ASKED: Final = "provider.probe_asked"
FAILED_OVER: Final = "failed.over"
ANSWER_REFUSAL: Final = "answer.refusal"
FALLBACK_ASKED: Final = "fallback.asked"
CAPS_READ: Final = "caps.read"
CAPS_UNREAD: Final = "caps.unread"
CAP_REACHED: Final = "cap.reached"
MODEL_UNPRICED: Final = "model.unpriced"
CAP_UNCORRECTED: Final = "cap.uncorrected"

# Names of spans have the form `<operation> <destination>`. A destination has few values: an exchange, one of our
# queues, a model, or a handler. docs/tracing.md explains the spans.
ASK: Final = "ask"  # CLIENT: `lanekeeper send`, from publishing the request to its answer
SEND: Final = "send"  # PRODUCER
PROCESS: Final = "process"  # CONSUMER
CHAT: Final = "chat"  # CLIENT
EMBEDDINGS: Final = "embeddings"  # CLIENT
ACK: Final = "ack"  # CLIENT; REJECT too
REJECT: Final = "reject"
POST: Final = "POST"  # CLIENT: a webhook
HANDLER: Final = "handler"  # INTERNAL
BATCH: Final = "batch"  # CLIENT: the work on a batch, linked to its requests
WAIT: Final = "wait"  # INTERNAL; DELAY too: written by the worker that gets the request, after the wait
DELAY: Final = "delay"
SETTLE: Final = "settle"  # only as messaging.operation.type
REPLY_TEMPLATE: Final = "(reply)"  # in place of the name of a reply queue, because every requester has another one
TURN: Final = "(turn)"  # a request that a worker has received waits there until it may start
DEAD_LETTER: Final = "(dead letter)"  # a dead letter waits until somebody publishes it again
DEFAULT_EXCHANGE: Final = "amq.default"  # messaging.destination.name where exchange and key are empty

# Attributes: general.
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
HTTP_METHOD: Final = "http.request.method"
HTTP_STATUS: Final = "http.response.status_code"

MESSAGING_SYSTEM: Final = "messaging.system"
RABBITMQ: Final = "rabbitmq"  # the value of MESSAGING_SYSTEM
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"  # exchange:routing key[:queue]
MESSAGING_DESTINATION_TEMPLATE: Final = "messaging.destination.template"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_CONVERSATION_ID: Final = "messaging.message.conversation_id"  # the correlation_id
MESSAGING_BODY_SIZE: Final = "messaging.message.body.size"  # bytes
MESSAGING_ROUTING_KEY: Final = "messaging.rabbitmq.destination.routing_key"
MESSAGING_DELIVERY_TAG: Final = "messaging.rabbitmq.message.delivery_tag"

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"  # "chat"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"  # only if true
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"  # string[]
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"  # cached tokens included
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_CACHE_WRITE_TOKENS: Final = "gen_ai.usage.cache_write.input_tokens"
PROVIDER_REQUEST_ID: Final = "anthropic.request.id"  # the name that the Anthropic SDK's own spans use

# Attributes: ours, on process and batch spans.
LANE_BATCH_REQUESTS: Final = "lane.batch_requests"
LANE_NAME: Final = "lane.name"
LANE_APP: Final = "lane.app"
LANE_ATTEMPT: Final = "lane.attempt"  # from 1
LANE_WAIT_MS: Final = "lane.wait_ms"  # from publishing, or the due time, to the start of this attempt
LANE_REDELIVERED: Final = "lane.redelivered"  # only if true
LANE_OUTCOME: Final = "lane.outcome"  # answered, deferred, retried, refused, buried, dropped, replayed
LANE_STEP: Final = "lane.step"  # of a pipeline, and of the items of its fan-outs
LANE_DELAY_MS: Final = "lane.delay_ms"  # how long the request is delayed
LANE_COST_USD: Final = "lane.cost_usd"  # on chat spans, by the table of prices
