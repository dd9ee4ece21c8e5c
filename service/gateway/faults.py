"""Calls that no path answers, and answers that fail by a fault of ours: in the shape that the path's clients read.

Below `/v1/messages` and `/v1/models` that is Anthropic's error, elsewhere a problem document (RFC 9457).
"""

import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from lanekeeper.telemetry import signals
from lanekeeper.telemetry.logs import logger
from service.gateway import documents
from service.gateway.problems import ApiError

LATER = ("/v1/", "/metrics")
_ANTHROPICS = ("/v1/messages", "/v1/models")
_HAS_BEGUN = web.RequestKey("has_begun", bool)
log = logger()


def refusal(request: web.BaseRequest, status: int, detail: str, *, request_id: str | None = None) -> web.Response:
    """An error that concerns no request in a lane."""
    error = ApiError(status, detail)
    if request.path.startswith(_ANTHROPICS):
        return error.response(request_id or uuid.uuid4().hex)
    return documents.refusal(error)


async def absent(request: web.Request) -> web.Response:
    """404, or 405 for a path that answers other methods. For the route of everything that has none."""
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource is not request.match_info.route.resource:
            allowed |= (await resource.resolve(request))[1]
    if allowed:
        told = refusal(request, 405, f"{request.method} {request.path}: allowed is {', '.join(sorted(allowed))}")
        told.headers["Allow"] = ", ".join(sorted(allowed))
        return told
    is_later = request.path == "/" or request.path.startswith(LATER)
    why = "is not available in this version" if is_later else "is not a path of Lanekeeper's"
    if request.path == "/v1/messages":
        why = "is served by `lanekeeper gateway` and `lanekeeper serve`, not by this process"
    return refusal(request, 404, f"{request.path} {why}")


async def note_beginning(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: after it, an error has no status of its own any more."""
    request[_HAS_BEGUN] = True


@web.middleware
async def unforeseen(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a fault of ours with 500, and log it, without what the call holds."""
    try:
        return await handler(request)
    except (web.HTTPException, ConnectionError):  # aiohttp's own answers; the client has gone
        raise
    except Exception:
        id, resource = uuid.uuid4().hex, request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        log.exception(signals.HANDLER_FAILED, where=f"gateway {path}", request=id)
        if request.get(_HAS_BEGUN) and request.transport is not None:
            request.transport.abort()  # the client must not take what it has for the whole answer
        return refusal(request, 500, f"a fault of Lanekeeper; its log tells of {id}", request_id=id)
