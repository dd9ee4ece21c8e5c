"""A connection of the HTTP server. It answers calls that aiohttp's parser cannot read with an error in Anthropic's
format; aiohttp itself answers them with plain text, and logs them with a part of the call, which may be a key."""

import uuid

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import ContentEncodingError, InvalidURLError, LineTooLong

from service.gateway.bodies import unknown_encoding
from service.gateway.problems import ApiError


class Connection(web.RequestHandler):
    """aiohttp's handler of one HTTP connection, changed to answer calls that cannot be parsed with our error format.
    aiohttp creates one for each connection."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a call without a handler. aiohttp does not tell the path of a call that it could not parse, so
        the format is the same for all paths."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = _error_of(exc).response(uuid.uuid4().hex)
        response.force_close()  # the parser cannot find the next call
        return response


def _error_of(error: HttpProcessingError) -> ApiError:
    match error:
        case ContentEncodingError():
            return unknown_encoding()
        case LineTooLong():
            return ApiError(400, "not valid HTTP: the first line or a header is too long (at most 8190 bytes)")
        case InvalidURLError():
            return ApiError(400, "not valid HTTP: the target is not a URL")
    # The message quotes the call after a colon.
    return ApiError(400, f"not valid HTTP: {error.message.partition(':')[0].rstrip('.')}")
