"""Answers the calls whose handlers raise an error, and calls of unknown paths and methods.

Calls of paths below `/v1/messages` and `/v1/models` get errors in Anthropic's format, all others get problem documents
(RFC 9457).
"""

import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.logs import logger
from service.gateway.documents import PROBLEM, answer, problem_of
from service.gateway.problems import ApiError, api_error_of

LATER = ("/v1/", "/metrics")
"""Beginnings of URL paths that are reserved for later versions of Lanekeeper: the gateway answers calls of such paths
with a 404 that says so."""
ABOUT_REQUEST = web.RequestKey("request_id", str)
"""The key under which a handler stores the id of the request that an HTTP call is about, as soon as the handler knows
it. An error answer then contains the id."""
_ANTHROPICS = ("/v1/messages", "/v1/models")
_HAS_BEGUN = web.RequestKey("has_begun", bool)
log = logger()


def refusal(
    call: web.BaseRequest, error: ApiError | LanekeeperError, *, anthropic_id: str | None = None
) -> web.Response:
    """An HTTP error answer in the format that the call's path uses. `anthropic_id`: the `request-id` of an answer in
    Anthropic's format; by default the request's id, or a random one."""
    request_id, api_error = call.get(ABOUT_REQUEST), api_error_of(error)
    if call.path.startswith(_ANTHROPICS):
        return api_error.response(anthropic_id or request_id or uuid.uuid4().hex)
    document = problem_of(error, request_id)
    return answer(document, status=api_error.status, **{**api_error.headers, "content-type": PROBLEM})


def _without_handler(request: web.Request, error: web.HTTPException) -> ApiError:
    """The error for a call that aiohttp's router refuses: of a path or method that has no handler."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        names = ", ".join(sorted(error.allowed_methods))
        return ApiError(405, f"{request.method} {request.path}: allowed is {names}", headers={"Allow": names})
    if error.status != 404 or not request.path:  # CONNECT has no path
        return ApiError(error.status, error.text or error.reason)
    is_later = request.path == "/" or request.path.startswith(LATER)
    why = "is not available in this version" if is_later else "is not a path of Lanekeeper's"
    if request.path == "/v1/messages":
        why = "is served by `lanekeeper gateway` and `lanekeeper serve`, not by this process"
    return ApiError(404, f"{request.path} {why}")


async def note_beginning(request: web.Request, response: web.StreamResponse) -> None:
    """A handler for aiohttp's signal `on_response_prepare`. It notes that the HTTP status of a call is being sent, so
    that a later error cannot change it."""
    request[_HAS_BEGUN] = True


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer the errors that handlers raise. An unexpected one is answered with 500, and logged without the call's
    content."""
    try:
        return await handler(request)
    except (ApiError, LanekeeperError) as error:
        return refusal(request, error)
    except ConnectionError:  # the client has disconnected
        raise
    except web.HTTPException as error:
        return refusal(request, _without_handler(request, error))
    except Exception:
        id, resource = uuid.uuid4().hex, request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        log.exception(signals.HANDLER_FAILED, where=f"gateway {path}", request=id)
        if request.get(_HAS_BEGUN) and request.transport is not None:
            request.transport.abort()  # otherwise the client would take the part that it has for the whole answer
        return refusal(request, ApiError(500, f"a fault of Lanekeeper; its log tells of {id}"), anthropic_id=id)
