"""JSON responses, errors in the formats of each API, and errors that only HTTP has."""

import re
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from specserve.errors import DamagedModel, EndsEngines, Overloaded, RequestError, SpecserveError
from specserve.server.ollama_types import PATHS, OllamaError
from specserve.server.protocol import (
    Error,
    ErrorDetails,
    MessageError,
    MessageErrorDetails,
    UnsupportedFeatures,
)

MESSAGES, OLLAMA = "/v1/messages", "/api/"  # beginnings of the paths of other APIs than OpenAI's
MESSAGE_KINDS = {  # status -> Anthropic's type of the error; else by the class of the status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
THREAD = "thread"  # field of a request for storing the conversation
MAX_ECHO = 200  # maximum characters of the input that an error repeats


class StatusError(RequestError):
    """A request error with a status other than 400."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, param)
        self.status, self.code = status, code


class DeadlineExceeded(RequestError):
    status, code = 408, "deadline_exceeded"


class RateLimited(SpecserveError):
    """An API key has reached a limit.

    `kind` is OpenAI's type of the error, "requests" or "tokens". `retry_after` is in seconds.
    """

    status, code = 429, "rate_limit_exceeded"

    def __init__(self, message: str, kind: str, retry_after: int) -> None:
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after


def cut(text: str) -> str:
    """Shorten text from a request, so that an error is not larger than its request."""
    return text if len(text) <= MAX_ECHO // 2 else f"{text[: MAX_ECHO // 2]}..."


def error_body(error: BaseException) -> Error:
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
            # A bug: its message can contain secrets, so only the log has it.
            message = "the server failed. Its log has the reason"
            kind, code = "server_error", "internal"
    return Error(ErrorDetails(message, kind, param, code))


def error_headers(error: BaseException) -> dict[str, str]:
    """Return headers with the client's next action: retry, authenticate, or use another method."""
    match error:
        case Overloaded(retry_after=None):
            return {"Retry-After": "30", "x-should-retry": "false"}
        case DeadlineExceeded():  # OpenAI's clients would retry after a 408
            return {"x-should-retry": "false"}
        case Overloaded() | RateLimited():
            return {"Retry-After": str(error.retry_after)}
        case EndsEngines() | DamagedModel():
            return {"x-should-retry": "false"}
        case StatusError(status=401):
            return {"WWW-Authenticate": "Bearer"}
        case StatusError(status=405):
            return {"Allow": "GET, HEAD, POST"}
    return {}


def status_of(error: BaseException) -> int:
    status: int = getattr(error, "status", 500)
    return status


def message_error(error: BaseException) -> MessageError:
    """Return the error in Anthropic's format."""
    status = status_of(error)
    usual = "invalid_request_error" if status < 500 else "api_error"
    its, kind = error_body(error).error, MESSAGE_KINDS.get(status, usual)
    told = MessageError(MessageErrorDetails(kind, its.message))
    if its.param == THREAD:  # clients then send the whole conversation
        told.error.details = UnsupportedFeatures("thread_unsupported_request", [THREAD])
    return told


def ollama_error(error: BaseException) -> OllamaError:
    """Return the error in Ollama's format, with Ollama's name of the field."""
    its = error_body(error).error
    path = re.sub(r"\[.*", "", its.param or "")
    if path in PATHS and its.message.startswith(path):
        return OllamaError(PATHS[path] + its.message.removeprefix(path))
    return OllamaError(
        re.sub(r"^(messages\[\d+\])\.reasoning_content", r"\1.thinking", its.message)
    )


def error_response(error: BaseException, path: str = "") -> Response:
    """Return the error in the format of the API that the path belongs to."""
    formats = {MESSAGES: message_error, OLLAMA: ollama_error}
    form = next((f for prefix, f in formats.items() if path.startswith(prefix)), error_body)
    return json_response(form(error), status_of(error), error_headers(error))


def json_response(
    content: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status, headers=headers, media_type="application/json")
