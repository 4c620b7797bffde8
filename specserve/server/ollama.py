"""Ollama's routes: chats, prompts and embeddings as lines of JSON, and the served model."""

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.models.decoder_config import Shape
from specserve.models.folder import is_gguf
from specserve.models.selection import resolve_model
from specserve.models.source import open_source
from specserve.server.body import Body, warning
from specserve.server.chat import begin, fit_strict, fit_thinking, fit_to_template
from specserve.server.completion import (
    Arrival,
    ChoiceDelta,
    LiveCompletion,
    Service,
    arrival,
)
from specserve.server.completions import begin as begin_completion
from specserve.server.embeddings import EmbeddingInputs, EmbeddingsBody, embed
from specserve.server.logprobs import Namer, ScoredTokens, chat_logprobs, sealed
from specserve.server.ollama_body import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_GENERATE,
    OLLAMA_PROMPT,
    OllamaAsked,
    OllamaBody,
    read_ollama_model,
)
from specserve.server.ollama_types import (
    PATHS,
    CalledTool,
    OllamaCall,
    OllamaCard,
    OllamaChat,
    OllamaDetails,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaGeneration,
    OllamaLine,
    OllamaMessage,
    OllamaModel,
    OllamaModels,
    OllamaVersion,
)
from specserve.server.pooling import Pooled
from specserve.server.refusal import json_response, ollama_error
from specserve.server.stream import EventStream, escaped, watched
from specserve.text.answer.events import (
    Answer,
    CallArguments,
    CallBegin,
    Content,
    Event,
    ParsedCall,
    Reasoning,
    answer_of,
)
from specserve.text.answer.formats import AnswerReader, PlainParser
from specserve.text.infill import find_format
from specserve.text.tokenizer import Tokenizer

API_VERSION = "0.13.0"  # of Ollama; some clients require a minimum
LATEST = ":latest"
NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded


class LineStream(EventStream):
    """Streams JSON, one object per line."""

    content_type = b"application/x-ndjson"


class OllamaFormatter:
    """A `Formatter` for lines of a chat or of a prompt's continuation."""

    keep_alive = b""  # lines have no comments

    def __init__(
        self,
        model: str,
        completion: LiveCompletion,
        reader: AnswerReader | None,
        is_chat: bool,
        num_top: int | None = None,
    ) -> None:
        """`num_top` is the number of most likely tokens with logprobs; None: no logprobs."""
        self.model, self.completion, self.is_chat = model, completion, is_chat
        self.parser = PlainParser() if reader is None else reader.parser()
        [self.generation] = completion.generations
        self.namer = None if num_top is None else Namer(self.tokenizer, num_top, False)
        self.is_long = self.namer is not None
        self.unsent = list[Any]()  # logprobs for the next line
        self.call: tuple[CallBegin, list[str]] | None = None  # whose arguments are incomplete

    @property
    def tokenizer(self) -> Tokenizer:
        return self.generation.stream.tokenizer

    def num_logprobs(self, deltas: Sequence[ChoiceDelta]) -> int:
        if self.namer is None:
            return 0
        return sum(len(delta.token_ids) for delta in deltas) * (1 + self.namer.num_top)

    def beginning(self) -> list[bytes]:
        return []

    def step(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        events = list[Event]()
        for delta in deltas:
            self.unsent += self.logprobs(delta.begin, delta.begin + len(delta.token_ids))
            events += self.parser.push(delta.text) if delta.text else []
            events += self.parser.finish() if delta.is_last else []
        lines = [line for each in events for line in self.lines_of(each)]
        is_over = any(delta.is_last for delta in deltas)
        return [*lines, *self.finished_call()] if is_over else lines

    def logprobs(self, begin: int, end: int) -> list[Any]:
        """Return the logprobs of the tokens [begin, end), if the request has logprobs."""
        if self.namer is None:
            return []
        g, new = self.generation, slice(begin, end)
        scored = ScoredTokens(g.token_ids[new], g.logprobs[new], g.starts[new])
        return sealed(chat_logprobs(scored, self.namer))

    def lines_of(self, event: Event) -> list[bytes]:
        """Return the lines of an event. A call is one line, once it is complete."""
        match event:
            case CallArguments(_, text):
                assert self.call is not None, "arguments follow the beginning of their call"
                self.call[1].append(text)
                return []
            case CallBegin():
                lines, self.call = self.finished_call(), (event, [])
                return lines
            case Content(text):
                answer = Answer(text)
            case Reasoning(text):
                answer = Answer(reasoning=text)
        return [*self.finished_call(), line(self.formatted(answer))] if event.text else []

    def finished_call(self) -> list[bytes]:
        if self.call is None:
            return []
        (begin, texts), self.call = self.call, None
        call = ParsedCall(begin.id, begin.name, "".join(texts))
        return [line(self.formatted(Answer(calls=[call]), first_index=begin.index))]

    def idle(self, choice: int) -> bytes:
        return line(self.formatted(Answer()))

    def ending(self, error: Exception | None) -> list[bytes]:
        if error is not None:
            return [line(ollama_error(error))]
        return [line(self.formatted(Answer(), **self.counts()))]

    def whole(self) -> OllamaLine:
        events = [*self.parser.push(self.generation.text), *self.parser.finish()]
        self.unsent = self.logprobs(0, len(self.generation.token_ids))
        return self.formatted(answer_of(events), **self.counts())

    def counts(self) -> dict[str, Any]:
        """Return the fields of the end."""
        g, arrived = self.generation, self.completion.arrived.at
        return {
            "done": True,
            "done_reason": g.finish_reason or "stop",
            "total_duration": nanoseconds(g.last_token_at - arrived),
            "load_duration": 0,
            "prompt_eval_count": len(g.prompt),
            "prompt_eval_duration": nanoseconds(g.first_token_at - g.admitted_at),
            "eval_count": len(g.token_ids),
            "eval_duration": nanoseconds(g.last_token_at - g.first_token_at),
        }

    def formatted(self, answer: Answer, first_index: int = 0, **fields: Any) -> OllamaLine:
        head = {"model": self.model, "created_at": now(), **fields}
        if self.unsent:
            head["logprobs"], self.unsent = self.unsent, []
        thinking = answer.reasoning or UNSET
        if not self.is_chat:
            return OllamaGeneration(response=answer.content, thinking=thinking, **head)
        calls = [
            OllamaCall(call.id, CalledTool(call.name, arguments_of(call), first_index + i))
            for i, call in enumerate(answer.calls)
        ]
        message = OllamaMessage(content=answer.content, thinking=thinking)
        message.tool_calls = calls or UNSET
        return OllamaChat(message=message, **head)


def line(data: msgspec.Struct) -> bytes:
    return escaped(msgspec.json.encode(data)) + b"\n"


def arguments_of(call: ParsedCall) -> Any:
    """Return a call's arguments as an object; as text if max_tokens has cut them."""
    try:
        return msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return call.arguments


def nanoseconds(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


def now() -> str:
    return instant(datetime.now(UTC))


def instant(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


async def ollama_chat(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = arrival(request)
    service.check_open()
    asked = await service.prompts.parse(await service.bodies.read(request), OLLAMA_CHAT)
    return await answered(request, asked, arrived)


async def ollama_generate(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = arrival(request)
    service.check_open()
    asked = await service.prompts.parse(await service.bodies.read(request), OLLAMA_GENERATE)
    return await answered(request, asked, arrived)


async def answered(request: Request, asked: OllamaAsked, arrived: Arrival) -> Response:
    service: Service = request.app.state.service
    name = model_of(service, asked.model)
    service.check_model(name)
    if asked.chat is not None:
        body, tools = asked.chat
        body = msgspec.structs.replace(body, model=name, read_past=(*body.read_past, *asked.past))
        body = await fit_thinking(service, body, "think")
        body = await fit_to_template(service, body, body.chat_template_kwargs)
        body, tools = fit_strict(service, body, tools)
        named = tuple(PATHS.get(name, name) for name in body.read_past)
        body = msgspec.structs.replace(body, read_past=named)
        async with service.timed(arrived, None) as arrived:
            completion, reader = await begin(request, body, body.conversation(tools), arrived)
        return await respond(request, completion, reader, body, asked.is_chat)
    if asked.completion is not None:
        past = (*asked.completion.read_past, *asked.past, *service.ignored_fields(name))
        plain = msgspec.structs.replace(asked.completion, model=name, read_past=past)
        prompt = plain.prompt if isinstance(plain.prompt, str) else ""
        async with service.timed(arrived, None) as arrived:
            completion, _ = await begin_completion(request, plain, [prompt], arrived)
        return await respond(request, completion, None, plain, False)
    head: dict[str, Any] = {"model": name or service.name, "created_at": now()}
    ended: dict[str, Any] = {"done": True, "done_reason": "load"}
    empty: OllamaLine = OllamaGeneration(response="", **head, **ended)
    if asked.is_chat:
        empty = OllamaChat(message=OllamaMessage(content=""), **head, **ended)
    past = (*asked.past, *service.ignored_fields(name))
    return json_response(empty, headers=warning(past))


async def respond(
    request: Request,
    completion: LiveCompletion,
    reader: AnswerReader | None,
    asked: Body,
    is_chat: bool,
) -> Response:
    """Return the response of a queued completion: lines, or one JSON object after its end."""
    service: Service = request.app.state.service
    served = service.served_to(completion.arrived)
    formatter = OllamaFormatter(served.model, completion, reader, is_chat, asked.params.num_top)
    if asked.stream:
        return LineStream(completion, formatter, service, asked)
    async with watched(completion, request.receive):
        await completion.over()
    if completion.has_left:
        raise ClientDisconnect
    if completion.error is not None:
        raise completion.error
    return json_response(formatter.whole(), headers=asked.headers)


async def ollama_embed(request: Request) -> Response:
    service: Service = request.app.state.service
    begun = perf_counter()
    service.check_open()
    raw = await service.bodies.read(request)
    body, asked, inputs = await service.prompts.parse(raw, OLLAMA_EMBED)
    vectors, found = await embedded(request, body, asked, inputs)
    took = nanoseconds(perf_counter() - begun)
    answer = OllamaEmbeddings(found.model, vectors, took, 0, found.usage.prompt_tokens)
    return await asyncio.to_thread(json_response, answer, headers=past_of(service, body))


async def ollama_embeddings(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    raw = await service.bodies.read(request)
    body, asked, inputs = await service.prompts.parse(raw, OLLAMA_PROMPT)
    [vector], _ = await embedded(request, body, asked, inputs)
    return json_response(OllamaEmbedding(vector), headers=past_of(service, body))


async def embedded(
    request: Request, body: OllamaBody, asked: EmbeddingsBody, inputs: EmbeddingInputs
) -> tuple[list[list[float]], Pooled]:
    service: Service = request.app.state.service
    asked = msgspec.structs.replace(asked, model=model_of(service, body.model))
    found = await embed(request, asked, inputs)
    return [each.tolist() for each in found.vectors], found


def past_of(service: Service, body: OllamaBody) -> dict[str, str]:
    """Return the header that lists ignored fields of a body for embeddings."""
    past = [*service.ignored_fields(model_of(service, body.model))]
    past += [f"options.{name}" for name in body.options]
    return warning(past + ["keep_alive"] * (body.keep_alive is not None))


def model_of(service: Service, name: str | None) -> str | None:
    """Return the name of a model without Ollama's default tag."""
    if name is None or name == service.name or name in service.adapters.known:
        return name
    return name.removesuffix(LATEST)


async def ollama_version(request: Request) -> Response:
    return json_response(OllamaVersion(API_VERSION))


async def ollama_models(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_loaded()
    entry = await described(service)
    entry.modified_at = instant(datetime.fromtimestamp(service.started_at, UTC))
    return json_response(OllamaModels([entry]))


async def ollama_running(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_loaded()
    if service.is_asleep:
        return json_response(OllamaModels([]))
    entry = await described(service)
    entry.expires_at, entry.size_vram = NEVER, 0
    if service.config.model.device.startswith("cuda"):
        entry.size_vram = entry.size
    entry.context_length = service.prompts.processor.max_model_len
    return json_response(OllamaModels([entry]))


async def ollama_show(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_loaded()
    asked = read_ollama_model(await service.bodies.read(request))
    name = asked.name if asked.model is None else asked.model
    if name is None:
        raise RequestError("model: missing. Send the name of a model", "model")
    service.check_model(model_of(service, name))
    details, shape = await asyncio.to_thread(details_of, service)
    processor, served = service.prompts.processor, service.served
    template = processor.tokenizer.chat_template
    able = {
        "completion": served.has_head,
        "tools": served.formats.tools != "none",
        "thinking": served.formats.reasoning != "none",
        "insert": find_format(processor.tokenizer) is not None,
        "embedding": service.poolers.embedder is not None,
    }
    family = details.family
    defaults = msgspec.structs.asdict(processor.defaults)
    defaults.pop("eos_token_ids")
    card = OllamaCard(
        modelfile=f"FROM {service.name}",
        parameters="\n".join(f"{k} {v}" for k, v in defaults.items() if v is not None),
        template="" if template is None else template.source,
        details=details,
        model_info={
            "general.architecture": family,
            "general.parameter_count": num_parameters(shape),
            f"{family}.context_length": processor.max_model_len,
            f"{family}.embedding_length": shape.hidden_size,
            f"{family}.block_count": shape.num_layers,
        },
        capabilities=[name for name, is_able in able.items() if is_able],
        modified_at=instant(datetime.fromtimestamp(service.started_at, UTC)),
    )
    return json_response(card)


async def described(service: Service) -> OllamaModel:
    details, _ = await asyncio.to_thread(details_of, service)
    served = service.served
    return OllamaModel(
        name=service.name,
        model=service.name,
        size=served.weights.num_bytes,
        digest=hashlib.sha256(served.fingerprint.encode()).hexdigest(),
        details=details,
    )


def details_of(service: Service) -> tuple[OllamaDetails, Shape]:
    """Read the model's config."""
    path = resolve_model(service.config)
    shape = open_source(path).shape(service.config.model.implementation)
    family = shape.architecture.removesuffix("ForCausalLM").lower()
    bits = [form.bits for form in service.served.weights.maps if not form.is_head]
    levels = {4: "Q4", 8: "Q8", 16: "BF16", 32: "F32"}
    details = OllamaDetails(
        parent_model="",
        format="gguf" if path.is_file() and is_gguf(path) else "safetensors",
        family=family,
        families=[family],
        parameter_size=in_words(num_parameters(shape)),
        quantization_level=levels.get(min(bits, default=16), "unknown"),
    )
    return details, shape


def num_parameters(shape: Shape) -> int:
    """Return about how many parameters a row uses; other experts are left out."""
    return shape.num_layer_weights + shape.vocab_size * shape.hidden_size


def in_words(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"
