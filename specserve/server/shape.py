"""An answer in the JSON of its route, as chunks or whole."""

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from specserve.generation import Generation
from specserve.models.folder import Scaled
from specserve.server.answer import Answer, Said
from specserve.server.protocol import Body
from specserve.server.statistics import metrics, timings, usage


class Form(NamedTuple):
    """Where two routes differ."""

    prefix: str  # of ids
    chunk: str  # names of objects
    whole: str
    piece: Callable[[str, bool], dict[str, Any]]  # text, and whether it is the first of its choice
    all: Callable[[str], dict[str, Any]]


class Served(NamedTuple):
    """What every answer of a server says of it."""

    model: str
    fingerprint: str  # equal ones, with equal seeds, say equal texts
    drafter: str
    max_nodes: int
    scaled: list[Scaled]  # those of its models that are demos at another model's cost


class Shape:
    def __init__(self, form: Form, served: Served, asked: Body, answer: Answer) -> None:
        self.form, self.served, self.answer = form, served, answer
        options = asked.stream_options
        self.has_usage = bool(options and options.include_usage)
        self.has_running_usage = bool(options and options.continuous_usage_stats)
        self.begun: set[int] = set()
        self.num_ended = 0
        self.head = {
            "id": f"{form.prefix}-{secrets.token_hex(12)}",
            "object": form.chunk,
            "created": int(time.time()),
            "model": served.model,
            "system_fingerprint": served.fingerprint,
        }

    def chunks(self, said: Said) -> Iterator[dict[str, Any]]:
        """A step of one choice; none where it adds nothing that could be shown.

        Its first always does: clients take it for the first token, whose text may be still held.
        """
        is_first = said.choice not in self.begun
        if said.text or (is_first and not said.is_last):
            yield self.chunk(self.choice(said.choice, said.text))
        if said.is_last:
            generation = self.answer.generations[said.choice]
            self.num_ended += 1
            choice = self.choice(said.choice, "", generation.finish_reason)
            chunk = self.chunk(choice | {"seed": generation.sampling.seed})
            is_final = self.num_ended == len(self.answer.generations) and not self.has_usage
            yield chunk | self.statistics() if is_final else chunk

    def choice(self, index: int, text: str, reason: str | None = None) -> dict[str, Any]:
        piece = self.form.piece(text, index not in self.begun)
        self.begun.add(index)
        return {"index": index, **piece, "logprobs": None, "finish_reason": reason}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self.head | {"choices": [choice]}
        if self.has_running_usage:
            chunk["usage"] = usage(self.answer)
        elif self.has_usage:
            chunk["usage"] = None
        return chunk

    def last_chunk(self) -> dict[str, Any] | None:
        """The usage chunk, where it was asked for."""
        if not self.has_usage:
            return None
        count = {"choices": [], "usage": usage(self.answer)}
        return self.head | count | self.statistics()

    def whole(self) -> dict[str, Any]:
        generations = self.answer.generations
        choices = [self.whole_choice(i, g) for i, g in enumerate(generations)]
        said = {"object": self.form.whole, "choices": choices, "usage": usage(self.answer)}
        return self.head | said | self.statistics()

    def whole_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        return {
            "index": index,
            **self.form.all(generation.text),
            "logprobs": None,
            "finish_reason": generation.finish_reason,
            "seed": generation.sampling.seed,
        }

    def statistics(self) -> dict[str, Any]:
        generations, served = self.answer.generations, self.served
        return {
            "metrics": metrics(generations, served.drafter, served.max_nodes),
            "timings": timings(self.answer),
        }
