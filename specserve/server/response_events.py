"""Writes an answer as OpenAI's response object, and as the events that build it up."""

import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specserve.server.flush import COMMENT
from specserve.server.live_completion import ChoiceDelta, LiveCompletion
from specserve.server.logprobs import Namer, Told, chat_form, sealed
from specserve.server.refusal import error_body
from specserve.server.response import event
from specserve.server.service import ServedModel
from specserve.text.answer.events import CallArguments, CallBegin, Content, Event, Reasoning
from specserve.text.answer.formats import AnswerReader, PlainParser

if TYPE_CHECKING:
    from specserve.server.responses import ResponsesBody

Chunk = dict[str, Any]


class OpenItem:
    """The last item of the output, while text is added to it.

    item    what it is, without its text
    part    the type of its one part; None of a call, whose text is its arguments
    """

    def __init__(self, index: int, item: dict[str, Any], part: str | None) -> None:
        self.index, self.item, self.part = index, item, part
        self.texts, self.logprobs = list[str](), list[Any]()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def place(self) -> dict[str, Any]:
        """Where its text is, in the events of a part."""
        within = {} if self.part is None else {"content_index": 0}
        return {"item_id": self.item["id"], "output_index": self.index} | within

    @property
    def whole_part(self) -> dict[str, Any]:
        part = {"type": self.part, "text": self.text}
        if self.part != "output_text":
            return part
        return part | {"annotations": [], "logprobs": self.logprobs}

    def finished(self, status: str) -> dict[str, Any]:
        text = {"arguments": self.text} if self.part is None else {"content": [self.whole_part]}
        return self.item | text | {"status": status}


class ResponseWriter:
    """Writes the events of an answer, or all of it: the state that all of its events lead to."""

    def __init__(
        self,
        served: ServedModel,
        asked: "ResponsesBody",
        completion: LiveCompletion,
        reader: AnswerReader | None,
    ) -> None:
        self.served, self.completion = served, completion
        self.parser = PlainParser() if reader is None else reader.parser()
        self.has_reasoning = reader is not None and reader.has_reasoning
        [self.generation] = completion.generations
        self.num_top = asked.params.num_top
        self.namer = Namer(self.generation.stream.tokenizer, self.num_top or 0, has_ids=False)
        self.output = list[dict[str, Any]]()  # items that are finished
        self.open: OpenItem | None = None
        self.num_chars = 0  # of the text so far
        self.num_told = 0  # tokens whose logprobs are told, or are not of a message
        self.untold = list[Any]()  # logprobs for the next text
        self.number = 0  # of events so far
        self.head = self.echo(asked)
        completion.response_id = self.head["id"]

    def echo(self, asked: "ResponsesBody") -> dict[str, Any]:
        """What a response tells before its first token: what was asked for, as it is done."""
        sampling = self.generation.sampling
        return {
            "id": identifier("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": self.served.model,
            "system_fingerprint": self.served.fingerprint,
            "background": False,
            "conversation": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "seed": sampling.seed,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {
                "format": asked.text.format.told,
                "verbosity": asked.text.verbosity or "medium",
            },
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": asked.user,
        }

    @property
    def is_long(self) -> bool:
        return self.num_top is not None

    def num_logprobs(self, deltas: Sequence[ChoiceDelta]) -> int:
        if self.num_top is None:
            return 0
        return sum(len(d.token_ids) for d in deltas) * (1 + self.num_top)

    def response(self, status: str, **changes: Any) -> dict[str, Any]:
        unset = {"error": None, "incomplete_details": None, "usage": None, "stop_reason": None}
        state = {"status": status, "output": [*self.output]}
        return self.head | unset | state | changes

    def chunk(self, type: str, **fields: Any) -> Chunk:
        self.number += 1
        return {"type": type, "sequence_number": self.number - 1, **fields}

    def beginning(self) -> list[bytes]:
        names = "created", "in_progress"
        state = self.response("in_progress")
        return named(self.chunk(f"response.{name}", response=state) for name in names)

    def step(self, deltas: Sequence[ChoiceDelta]) -> list[bytes]:
        return named(chunk for delta in deltas for chunk in self.chunks(delta))

    def idle(self, choice: int) -> bytes:
        its = self.open
        if its is None:  # there is no item yet that anything could be added to
            return COMMENT
        told = {"logprobs": list[Any]()} if its.part == "output_text" else {}
        chunk = self.chunk(f"response.{name_of(its)}.delta", **its.place, delta="", **told)
        return event(chunk, chunk["type"])

    def ending(self, error: Exception | None) -> list[bytes]:
        return named(self.last_chunks() if error is None else self.failing(error))

    def chunks(self, delta: ChoiceDelta) -> Iterator[Chunk]:
        for text in self.cut(delta.text):
            yield from self.chunks_of(self.parser.push(text))
        if delta.is_last:
            self.tell(len(self.generation.token_ids))
            yield from self.chunks_of(self.parser.finish())

    def cut(self, text: str) -> Iterator[str]:
        """A step's text, cut where tokens begin if their logprobs are told."""
        before, end = self.num_chars, self.num_chars + len(text)
        starts = self.generation.starts if self.num_top is not None else []
        while self.num_chars < end:
            number = bisect_right(starts, self.num_chars)
            self.tell(number)
            begin = self.num_chars
            self.num_chars = min(end, starts[number]) if number < len(starts) else end
            yield text[begin - before : self.num_chars - before]

    def tell(self, number: int) -> None:
        """Have the logprobs of tokens up to a number told with the next text of a message."""
        if self.num_top is not None:
            self.untold += self.told(slice(self.num_told, number))
            self.num_told = max(self.num_told, number)

    def told(self, tokens: slice) -> list[Any]:
        its = self.generation
        told = Told(its.token_ids[tokens], its.logprobs[tokens], its.starts[tokens])
        content: list[Any] = sealed(chat_form(told, self.namer)["content"])
        return content

    def chunks_of(self, pieces: Sequence[Event]) -> Iterator[Chunk]:
        if pieces and not any(isinstance(piece, Content) for piece in pieces):
            self.untold = []  # logprobs are told of messages only
        for piece in pieces:
            match piece:
                case Content(text):
                    yield from self.say(text, "message", "output_text")
                case Reasoning(text):
                    yield from self.say(text, "reasoning", "reasoning_text")
                case CallBegin(_, id, name):
                    yield from self.close("completed")
                    item = {"type": "function_call", "call_id": id, "name": name}
                    yield from self.begin("fc", item | {"arguments": ""}, None)
                case CallArguments(_, text):
                    yield from self.add(text)

    def say(self, text: str, type: str, part: str) -> Iterator[Chunk]:
        """Add text to an item of a type, which is begun if the last item has another one."""
        if self.open is None or self.open.part != part:
            yield from self.close("completed")
            is_message = type == "message"
            more = {"role": "assistant"} if is_message else {"summary": list[Any]()}
            item = {"type": type, "content": list[Any]()} | more
            yield from self.begin("msg" if is_message else "rs", item, part)
        yield from self.add(text)

    def begin(self, prefix: str, item: dict[str, Any], part: str | None) -> Iterator[Chunk]:
        item = {"id": identifier(prefix), "status": "in_progress"} | item
        self.open = its = OpenItem(len(self.output), item, part)
        yield self.chunk("response.output_item.added", output_index=its.index, item=item)
        if part is not None:
            yield self.chunk("response.content_part.added", **its.place, part=its.whole_part)

    def add(self, text: str) -> Iterator[Chunk]:
        its = self.open
        assert its is not None, "text is added to an item that has begun"
        its.texts.append(text)
        told = {}
        if its.part == "output_text":
            told, self.untold = {"logprobs": self.untold}, []
            its.logprobs += told["logprobs"]
        yield self.chunk(f"response.{name_of(its)}.delta", **its.place, delta=text, **told)

    def close(self, status: str) -> Iterator[Chunk]:
        its, self.open = self.open, None
        if its is None:
            return
        told: dict[str, Any] = {"arguments" if its.part is None else "text": its.text}
        if its.part == "output_text":
            its.logprobs += self.untold  # of tokens without text
            self.untold = []
            told["logprobs"] = its.logprobs
        yield self.chunk(f"response.{name_of(its)}.done", **its.place, **told)
        if its.part is not None:
            yield self.chunk("response.content_part.done", **its.place, part=its.whole_part)
        item = its.finished(status)
        self.output.append(item)
        yield self.chunk("response.output_item.done", output_index=its.index, item=item)

    def last_chunks(self) -> Iterator[Chunk]:
        """After the last text."""
        if self.open is None and not self.output:  # an answer without any text
            yield from self.say("", "message", "output_text")
        is_cut = self.generation.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self.close(status)
        reason = {"reason": "max_output_tokens"} if is_cut else None
        known = {"usage": self.usage(), "stop_reason": self.generation.stop_reason}
        known |= self.statistics()
        state = self.response(status, incomplete_details=reason, **known)
        yield self.chunk(f"response.{status}", response=state)

    def failing(self, error: Exception) -> Iterator[Chunk]:
        """Of an answer that fails; clients raise the second one."""
        told = error_body(error)["error"]
        failed = {"code": "server_error", "message": told["message"]}
        yield self.chunk("response.failed", response=self.response("failed", error=failed))
        yield self.chunk("error", **{n: told[n] for n in ("code", "message", "param")}, error=told)

    def whole(self) -> dict[str, Any]:
        its = self.generation
        everything = ChoiceDelta(0, its.text, 0, its.token_ids, is_last=True)
        *_, last = *self.chunks(everything), *self.last_chunks()
        response: dict[str, Any] = last["response"]
        return response

    def usage(self) -> dict[str, Any]:
        """The Responses API has other names for what chats count."""
        counts = self.completion.usage()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": counts["total_tokens"],
        }

    @property
    def num_reasoning(self) -> int:
        """Tokens of the reasoning, those of its markers included."""
        if not self.has_reasoning:
            return 0
        return bisect_left(self.generation.starts, self.parser.num_reasoning)

    def statistics(self) -> dict[str, Any]:
        completion, served = self.completion, self.served
        return {
            "metrics": completion.statistics(
                served.drafter, served.max_nodes, served.row_invariant
            ),
            "timings": completion.timings(),
        }


def named(chunks: Iterator[Chunk]) -> list[bytes]:
    return [event(chunk, chunk["type"]) for chunk in chunks]


def name_of(its: OpenItem) -> str:
    """Of what its text is, in the types of events."""
    return its.part or "function_call_arguments"


def identifier(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
