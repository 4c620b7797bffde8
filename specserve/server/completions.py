"""POST /v1/completions: one or several prompts, as text or as token ids."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.server.body import Body, convert, read
from specserve.server.live_completion import arrival
from specserve.server.response import RouteSchema, respond
from specserve.server.service import Service

Prompt = str | list[int]


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[Any] | None = None


SCHEMA = RouteSchema(
    "cmpl",
    "text_completion",
    "text_completion",
    lambda text, is_first: {"text": text},
    lambda text: {"text": text},
    choices_have_prompts=True,
)


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = arrival(request)
    service.check_open()
    raw = await service.bodies.read(request)
    asked, prompts = await service.parse(raw, partial(read_completion, service.limits.max_prompts))
    service.check_model(asked.model)
    await service.check_asked(asked.params, len(prompts), "prompt")
    ids = await service.read_all(prompts, service.input_processor.num_kept(asked.params))
    completion = await service.ask(ids, asked.params, arrived, "prompt")
    return await respond(request, SCHEMA, asked, completion)


def read_completion(max_prompts: int, raw: bytes) -> tuple[CompletionBody, list[Prompt]]:
    body = read(raw, CompletionBody)
    return body, read_prompts(body.prompt, max_prompts)


def read_prompts(prompt: str | list[Any] | None, most: int) -> list[Prompt]:
    """The prompts, from any of the four forms that the field may have."""
    if prompt is None or prompt == []:
        raise RequestError(
            "prompt: give a string, a list of token ids, or a list of those", "prompt"
        )
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [convert(prompt, list[int], "prompt")]
    if len(prompt) > most:
        raise RequestError(f"prompt: {len(prompt)} prompts, and {most} are allowed", "prompt")
    kind = list[str] if isinstance(prompt[0], str) else list[list[int]]
    prompts: list[Prompt] = convert(prompt, kind, "prompt")
    return prompts
