"""What is observed of a request that has ended, and its line in the log."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.logs import ACCESS
from specserve.server.live_completion import ASKED, TENANT, LiveCompletion, at_end

LONGEST_PATH = 200  # characters of it in the log
LONGEST_TEXT = 2000  # .. of a prompt or an answer

TOLD = (
    "type",
    "method",
    "path",
    "headers",
    "server",
    TENANT,
)  # of the ASGI scope: all else is dropped

log = logging.getLogger(ACCESS)


class Ended(msgspec.Struct):
    """A request that has ended, once observers are told of it."""

    scope: Scope
    asked: list[LiveCompletion]
    begun: float  # seconds, perf_counter
    status: int = 500  # of an error that is answered outside of `Observed`


class Observed:
    """Tells observers of each request that has ended."""

    def __init__(self, app: ASGIApp, observers: Sequence[Callable[[Ended], None]]) -> None:
        self.app, self.observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ASKED] = []
        ended = Ended({}, scope[ASKED], perf_counter())

        async def send_noted(message: Message) -> None:
            ended.status = message.get("status", ended.status)
            await send(message)

        with at_end(scope, partial(self.tell, ended)):
            try:
                await self.app(scope, receive, send_noted)
            finally:
                ended.scope = {key: scope[key] for key in TOLD if key in scope}

    def tell(self, ended: Ended) -> None:
        for observe in self.observers:
            observe(ended)
        ended.asked.clear()  # the connection keeps the scope until its next request


class AccessLog:
    """Logs a line for a request that has ended; for what is polled, only if it failed. While the
    model loads, clients poll any route: each has one line for its first 503 then.
    """

    def __init__(
        self, polled: Collection[str], has_texts: bool, is_loading: Callable[[], bool]
    ) -> None:
        self.polled, self.has_texts, self.is_loading = polled, has_texts, is_loading
        self.waiting: set[tuple[str, str]] = set()  # methods and paths that had their line

    def __call__(self, ended: Ended) -> None:
        path, status = ended.scope["path"], ended.status
        if path in self.polled and status in (200, 304):
            return
        if status == 503 and self.is_loading():
            route = ended.scope["method"], path
            if route in self.waiting:
                return
            self.waiting.add(route)
        tenant = ended.scope.get(TENANT)  # unset without keys, and without a valid one
        told: dict[str, Any] = {} if tenant is None else {"key": tenant + 1}
        for completion in ended.asked:
            told |= completion.told | (texts(completion) if self.has_texts else {})
        write(ended.scope["method"], path, status, perf_counter() - ended.begun, told)


def write(
    method: str,
    path: str,
    status: int,
    seconds: float,
    told: dict[str, Any],
    request_id: str = "",
) -> None:
    """A request's line; without `request_id`, with that of the current task.

    No query, which may hold a secret; quoted, as a path may hold what moves the cursor.
    """
    path, ms = quote(path[:LONGEST_PATH], safe="/:"), 1e3 * seconds
    fields = {"method": method, "path": path, "status": status, "duration_ms": round(ms, 1)}
    line = ", ".join([f"{method} {path} {status} {ms:.0f} ms", *words(told)])
    log.info("%s", line, extra={"fields": fields | told, "request_id": request_id})


def words(told: dict[str, Any]) -> Iterable[str]:
    """The number of the API key; of a completion tokens, milliseconds to the first, and the end."""
    if "key" in told:
        yield f"key {told['key']}"
    if "prompt_tokens" not in told:
        return
    yield f"{told['prompt_tokens']} prompt tokens, {told['completion_tokens']} completed"
    if "ttft_ms" in told:
        yield f"TTFT {told['ttft_ms']:.0f} ms"
    yield "client left" if told["client_left"] else told["finish_reason"]


def texts(completion: LiveCompletion) -> dict[str, str]:
    """The beginnings of its prompts and of its choices' texts, a line for each."""
    # A token has a byte at least, and a character at most four.
    prompts = [g.stream.tokenizer.decode(g.prompt[: 4 * LONGEST_TEXT]) for g in completion.firsts]
    answers = [g.text for g in completion.generations]
    return {"prompt": joined(prompts), "text": joined(answers)}


def joined(texts: Iterable[str]) -> str:
    return "\n".join(texts)[:LONGEST_TEXT]
