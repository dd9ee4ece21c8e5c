"""Why what the SDKs and Claude Code get through the gateway differs from what they get from the API."""

_ATTEMPTS = "A lost connection or a proxy's page: Lanekeeper tries again, then answers 502 in the API's format"
_BROKEN = "An answer that is not whole is not passed on; Lanekeeper retries, then answers 502"
_BEGUN = "A stream that has begun cannot be retried unnoticed: it ends with an error event of Lanekeeper's"
_CHECKED = "The gateway checks the body itself; its message also has the value that was found"

REASONS: tuple[tuple[str, str], ...] = (
    ("api_resources.*test_batches*results*", "Mocked at the API is a batch that the gateway has not created: 404"),
    ("recorded unknown_events_response, *", "The answer ends with `message_stop`; later events are not passed on"),
    ("*test_unknown_events_are_passed_through*", "The answer ends with `message_stop`; later events are not passed on"),
    ("*test_context_manager", "`request-id` is the request's id in Lanekeeper, not the provider's"),
    ("error page of a proxy, *", _ATTEMPTS),
    ("error connection reset, create", _ATTEMPTS),
    ("error connection closed in the middle, create", _ATTEMPTS),
    ("error transfer ends in the middle, create", _BROKEN),
    ("error broken JSON, *", _BROKEN),
    ("error not a message, *", _BROKEN),
    ("error unfinished, create", _BROKEN),
    ("error connection reset, events", _BEGUN),
    ("error connection closed in the middle, events", _BEGUN),
    ("error transfer ends in the middle, events", _BEGUN),
    ("error unfinished, events", _BEGUN),
    ("error 529, *", "The gateway adds a `retry-after` to an overload, which the API lacks"),
    ("error error in the middle, create", "The gateway adds a `retry-after` to an overload, which the API lacks"),
    ("retry 529 for ever, *", "The gateway adds a `retry-after` to an overload, which the API lacks"),
    ("error parameter, *", _CHECKED),
    ("chat*: error page of a proxy", _ATTEMPTS),
    ("chat: error connection *", _ATTEMPTS),
    ("chat: error transfer ends in the middle", _BROKEN),
    ("chat*: error broken JSON", _BROKEN),
    ("chat events: error connection *", _BEGUN),
    ("chat events: error transfer ends in the middle", _BEGUN),
    ("retrieve: not in the background", "A response that was not in the background lies at the provider alone: 404"),
    ("moderations", "A 404 of Lanekeeper's own says what it serves"),
    (
        "calls of: retry 529 for ever, *",
        "Each of the SDK's three calls is retried by Lanekeeper too (here: two attempts)",
    ),
    ("calls of: retry the same Idempotency-Key, *", "Calls with the same `Idempotency-Key` are one request, paid once"),
    ("error 40[12], *", "That the provider refuses the service's key or account is 503, never the caller's 401 or 402"),
)
"""(pattern of names, reason): the first that fits counts."""
