"""Error responses in OpenAI's shape, and the request errors that only HTTP has."""

from typing import Any

import msgspec
from starlette.responses import Response

from specserve.errors import DamagedModel, EndsEngines, Overloaded, RequestError, SpecserveError

MAX_ECHO = 200  # characters of the input that a refusal may repeat


class NotFound(RequestError):
    status = 404


class NoRoute(RequestError):
    status = 404


class Foreign(RequestError):
    status, code = 403, "origin_not_allowed"


class NotAllowed(RequestError):
    status, code = 403, "admin_key_needed"


class Unauthorized(RequestError):
    status, code = 401, "invalid_api_key"


class NoTunnel(RequestError):
    status = 405


class TooLarge(RequestError):
    status, code = 413, "request_too_large"


class HeadersTooLarge(RequestError):
    status, code = 431, "headers_too_large"


class TimedOut(RequestError):
    status, code = 408, "request_timeout"


class DeadlineExceeded(RequestError):
    status, code = 408, "deadline_exceeded"


class RateLimited(SpecserveError):
    """An API key has a limit, which is reached. `kind` is OpenAI's type of the error: what there
    are too many of. `retry_after` is in seconds.
    """

    status, code = 429, "rate_limit_exceeded"

    def __init__(self, message: str, kind: str, retry_after: int) -> None:
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after


def cut(text: str) -> str:
    """Shorten text from a request: an error must not be larger than its request."""
    return text if len(text) <= MAX_ECHO // 2 else f"{text[: MAX_ECHO // 2]}..."


def error_body(error: BaseException) -> dict[str, Any]:
    """OpenAI's shape: four fields, `code` a string or null."""
    message, param, code = str(error), None, None
    match error:
        case RequestError():
            kind, param, code = "invalid_request_error", error.param, error.code
        case Overloaded():
            kind, code = "service_unavailable", error.code
        case RateLimited():
            kind, code = error.kind, error.code
        case SpecserveError():
            kind, code = "server_error", getattr(error, "code", None)
        case _:
            # A bug: its message may hold anything, and goes to the log only.
            message, kind, code = "the server failed; its log says why", "server_error", "internal"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_headers(error: BaseException) -> dict[str, str]:
    """Headers that tell a client what to do: retry, authenticate, or use another method."""
    match error:
        case Overloaded(retry_after=None):
            return {"Retry-After": "30", "x-should-retry": "false"}
        case DeadlineExceeded():  # OpenAI's clients would ask again after a 408
            return {"x-should-retry": "false"}
        case Overloaded() | RateLimited():
            return {"Retry-After": str(error.retry_after)}
        case EndsEngines() | DamagedModel():
            return {"x-should-retry": "false"}
        case Unauthorized():
            return {"WWW-Authenticate": "Bearer"}
        case NoTunnel():
            return {"Allow": "GET, HEAD, POST"}
    return {}


def error_response(error: BaseException) -> Response:
    body = msgspec.json.encode(error_body(error))
    status = getattr(error, "status", 500)
    return Response(body, status, error_headers(error), "application/json")
