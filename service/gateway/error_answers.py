"""Error answers that belong to no request: unknown paths, wrong methods, and unexpected errors of the gateway itself.

Below `/v1/messages` and `/v1/models` they are errors in Anthropic's format, elsewhere problem documents (RFC 9457).
"""

import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from lanekeeper.telemetry import signals
from lanekeeper.telemetry.logs import logger
from service.gateway import documents
from service.gateway.problems import ApiError

LATER = ("/v1/", "/metrics")
"""URL paths that begin with one of these are reserved for later versions of Lanekeeper; the gateway answers 404 and
says so."""
_ANTHROPICS = ("/v1/messages", "/v1/models")
_HAS_BEGUN = web.RequestKey("has_begun", bool)
log = logger()


def refusal(request: web.BaseRequest, status: int, detail: str, *, request_id: str | None = None) -> web.Response:
    """An HTTP error answer in the format that the call's path uses: Anthropic's, or a problem document (RFC 9457)."""
    error = ApiError(status, detail)
    if request.path.startswith(_ANTHROPICS):
        return error.response(request_id or uuid.uuid4().hex)
    return documents.refusal(error)


async def not_found(request: web.Request) -> web.Response:
    """Handle all paths and methods that have no handler: answer 405 if the path has other methods, else 404."""
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource is not request.match_info.route.resource:
            allowed |= (await resource.resolve(request))[1]
    if allowed:
        answer = refusal(request, 405, f"{request.method} {request.path}: allowed is {', '.join(sorted(allowed))}")
        answer.headers["Allow"] = ", ".join(sorted(allowed))
        return answer
    is_later = request.path == "/" or request.path.startswith(LATER)
    why = "is not available in this version" if is_later else "is not a path of Lanekeeper's"
    if request.path == "/v1/messages":
        why = "is served by `lanekeeper gateway` and `lanekeeper serve`, not by this process"
    return refusal(request, 404, f"{request.path} {why}")


async def note_beginning(request: web.Request, response: web.StreamResponse) -> None:
    """A handler for aiohttp's signal `on_response_prepare`. It notes that the HTTP status of a call is being sent, so
    that a later error cannot change it."""
    request[_HAS_BEGUN] = True


@web.middleware
async def answer_unforeseen(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer an unexpected error with 500, and log it without the call's content."""
    try:
        return await handler(request)
    except ConnectionError:  # the client has disconnected
        raise
    except web.HTTPException as error:  # by aiohttp's router, such as for CONNECT
        return refusal(request, error.status, error.text or error.reason)
    except Exception:
        id, resource = uuid.uuid4().hex, request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        log.exception(signals.HANDLER_FAILED, where=f"gateway {path}", request=id)
        if request.get(_HAS_BEGUN) and request.transport is not None:
            request.transport.abort()  # otherwise the client would take the part that it has for the whole answer
        return refusal(request, 500, f"a fault of Lanekeeper; its log tells of {id}", request_id=id)
