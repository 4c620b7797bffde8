"""POST /v1/completions: continues one or several prompts of text or token ids."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.exchange.sampling_params import SamplingParams
from specserve.server.body import REFUSED, BodyKind, FormattedBody, convert, read
from specserve.server.completion import Arrival, LiveCompletion, Service, arrival
from specserve.server.formatter import CompletionFormatter, RouteSchema
from specserve.server.logprobs import Namer, ScoredTokens, completion_logprobs, sealed
from specserve.server.prompt import blaming
from specserve.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
)
from specserve.server.stream import respond, while_connected
from specserve.text.answer.events import Content, Event
from specserve.text.infill import infill_prompt

MAX_PROMPT_LOGPROBS = 1 << 20  # maximum logprobs of prompts in a response, of up to 70 bytes each


IDS = {"type": "array", "items": {"type": "integer"}}
PROMPTS = Meta(
    extra_json_schema={
        "minItems": 1,
        "anyOf": [{"items": {"type": kind}} for kind in ("string", "integer")] + [{"items": IDS}],
    }
)


class CompletionBody(FormattedBody, frozen=True, kw_only=True):
    """One or several prompts to continue.

    prompt          a string, a list of token ids, or a list of either
    add_special_tokens  the tokenizer adds special tokens to a string, e.g. a beginning of text
    echo            the text begins with the prompt
    suffix          text after the response, for models with tokens to fill in text
    """

    refused: ClassVar[Mapping[str, str]] = REFUSED | {
        "messages": "a completion has a prompt; send messages to /v1/chat/completions"
    }

    prompt: str | Annotated[list[Any], PROMPTS] | None = None
    add_special_tokens: bool = True
    echo: bool = False
    suffix: str | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None  # 0: only with echo

    @property
    def params(self) -> SamplingParams:
        """Parameters for the engine, which generates at least one token.

        An echo with logprobs also needs the logprobs of the prompt.
        """
        given = super().params
        most = 1 if given.max_tokens == 0 else given.max_tokens
        numbers = [given.prompt_logprobs, given.num_top if self.echo else None]
        top = max((number for number in numbers if number is not None), default=None)
        return msgspec.structs.replace(given, max_tokens=most, prompt_logprobs=top)


def chunk_choice(event: Event, is_first: bool, **fields: Any) -> CompletionChunkChoice:
    text = event.text if isinstance(event, Content) else ""
    return CompletionChunkChoice(text=text, **fields)


def logprobs(scored: ScoredTokens, namer: Namer) -> CompletionLogprobs:
    form = completion_logprobs(scored, namer)
    form.top_logprobs = sealed(form.top_logprobs)
    return form


SCHEMA = RouteSchema(
    "cmpl",
    CompletionChunk,
    Completion,
    chunk_choice,
    lambda answer, **fields: CompletionChoice(text=answer.content, **fields),
    logprobs,
    choices_have_prompts=True,
)


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = arrival(request)
    service.check_open()
    raw = await service.bodies.read(request)
    asked, prompts = await service.prompts.parse(raw, COMPLETION)
    check_prompts(prompts, service.limits.max_prompts)
    past = service.ignored_fields(asked.model)
    if asked.reasoning_effort not in (None, "none"):  # only templates read it
        past = (*past, "reasoning_effort")
    asked = msgspec.structs.replace(asked, read_past=(*asked.read_past, *past))
    async with service.timed(arrived, asked.timeout_ms) as arrived:
        completion, echoed = await begin(request, asked, prompts, arrived)
    served = service.served_to(completion.arrived)
    formatter = CompletionFormatter(SCHEMA, served, asked, completion, echoed)
    return await respond(request, completion, formatter, asked)


async def begin(
    request: Request, asked: CompletionBody, prompts: list[str | list[int]], arrived: Arrival
) -> tuple[LiveCompletion, Sequence[str]]:
    """Queue the prompts. Also return the echoed texts, which the choices begin with."""
    service: Service = request.app.state.service
    adapter, session = service.check_model(asked.model), asked.prompt_cache_key or ""
    arrived = arrived._replace(adapter=adapter, session=session)
    params = asked.params
    checking = service.check_params(params, len(prompts), "prompt", asked.form_field)
    sampling = await while_connected(request, checking)
    kept = service.prompts.processor.num_kept(params)
    if asked.suffix:
        ids = await fill_in(service, asked, prompts)
    else:
        ids = await service.prompts.read_all(prompts, kept, asked.add_special_tokens)
    check_reported(params, ids)
    echoed = (
        await service.prompts.in_thread(echo, service, asked, prompts, ids) if asked.echo else ()
    )
    completion = await service.admit(ids, params, sampling, arrived, "prompt")
    if asked.max_tokens == 0:
        for generation in completion.generations:  # before any token has come
            generation.sampling = msgspec.structs.replace(generation.sampling, max_tokens=0)
    return completion, echoed


async def fill_in(
    service: Service, asked: CompletionBody, prompts: Sequence[str | list[int]]
) -> list[list[int]]:
    """Return the tokens of prompts that a text before the suffix continues."""
    processor, in_thread = service.prompts.processor, service.prompts.in_thread
    if asked.truncate_prompt_tokens is not None:
        message = "truncate_prompt_tokens: not with suffix, whose prompt has a beginning. Omit it"
        raise RequestError(message, "truncate_prompt_tokens")
    found = list[list[int]]()
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise RequestError("prompt: with suffix, it must be a text. Send a text", "prompt")
        with blaming("prompt"):
            for text in (prompt, asked.suffix or ""):
                processor.check_size(text)
        given = processor.tokenizer, prompt, asked.suffix or "", asked.add_special_tokens
        found.append(await in_thread(infill_prompt, *given))
        with blaming("prompt"):
            processor.check_ids(found[-1], "prompt")
            processor.check_length(found[-1])
    return found


def echo(
    service: Service, asked: CompletionBody, prompts: list[str | list[int]], ids: list[list[int]]
) -> list[str]:
    """Return the prompts' texts; ids and cut prompts are decoded."""
    decode = service.prompts.processor.tokenizer.decode
    is_cut = asked.truncate_prompt_tokens is not None
    return [
        given if isinstance(given, str) and not is_cut else decode(its, asked.skip_special_tokens)
        for given, its in zip(prompts, ids, strict=True)
    ]


def check_reported(params: SamplingParams, prompts: Sequence[list[int]]) -> None:
    """Refuse too many logprobs of prompts, which every choice repeats.

    A single choice of a single prompt is always allowed.
    """
    if params.prompt_logprobs is None or len(prompts) * params.n == 1:
        return
    number = sum(map(len, prompts)) * (1 + params.prompt_logprobs) * params.n
    if number > MAX_PROMPT_LOGPROBS:
        field = "n" if params.n > 1 else "prompt"
        raise RequestError(
            f"{field}: the response would have {number} logprobs of prompts. At most "
            f"{MAX_PROMPT_LOGPROBS} are allowed, so request fewer logprobs, or fewer "
            f"{'choices' if params.n > 1 else 'prompts'}",
            field,
        )


def read_completion(raw: bytes) -> tuple[CompletionBody, list[str | list[int]]]:
    body = read(raw, CompletionBody)
    if body.logprobs is True:
        raise RequestError(
            "logprobs: not a boolean in completions. Send a number of most likely tokens, 0 to 20",
            "logprobs",
        )
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens = 0 is only allowed with echo. Increase it", "max_tokens")
    if body.max_tokens == 0 and body.min_tokens:
        raise RequestError(
            f"min_tokens = {body.min_tokens} is more than max_tokens = 0. Reduce min_tokens",
            "min_tokens",
        )
    return body, read_prompts(body.prompt)


COMPLETION = BodyKind("completion", read_completion, tuple[CompletionBody, list[str | list[int]]])


def read_prompts(prompt: str | list[Any] | None, field: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a string, of ids, or of a list of either. Errors name `field`."""
    if prompt is None or prompt == []:
        raise RequestError(
            f"{field}: missing. Send a string, a list of token ids, or a list of either", field
        )
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [convert(prompt, list[int], field)]
    kind = list[str] if isinstance(prompt[0], str) else list[list[int]]
    prompts: list[str | list[int]] = convert(prompt, kind, field)
    return prompts


def check_prompts(prompts: Sequence[str | list[int]], most: int) -> None:
    if len(prompts) > most:
        message = f"prompt: {len(prompts)} prompts. At most {most} are allowed (server.max_prompts)"
        raise RequestError(message, "prompt")
