"""Compiles requests' grammars beside the steps."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from specserve.engine.grammar_state import GrammarState
from specserve.grammars.compiled import GrammarError, compile_grammar, vocabulary_of
from specserve.models.tokenizer import Tokenizer
from specserve.scheduling import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # compiled grammars, for requests that bring the same again
YIELDING = 10  # niceness of the thread: steps come first


class Vocabulary(NamedTuple):
    """Where the tokens come from that texts are made of.

    load  reads the model's tokenizer, and the ids that end a text
    size  of the logits
    """

    load: Callable[[], tuple[Tokenizer, Sequence[int]]]
    size: int


class Grammars:
    """Requests wait here until their grammar is compiled."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.thread = ThreadPoolExecutor(1, "grammars", be_nice)
        self.tokens: Future[LLTokenizer] | None = None  # set when it is first needed
        self.end_ids: Sequence[int] = ()  # once these are there
        self.compiled: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        self.waiting: dict[int, tuple[Future[LLMatcher], list[Request]]] = {}  # by the first's id

    def prepare(self) -> None:
        """Read the tokenizer, in the thread."""
        if self.tokens is None:
            self.tokens = self.thread.submit(self.load)

    def load(self) -> "LLTokenizer":
        load, size = self.vocabulary
        tokenizer, self.end_ids = load()
        return vocabulary_of(tokenizer, size, self.end_ids)

    def ask(self, choices: list[Request]) -> None:
        """Compile the grammar of a prompt's choices."""
        asked = choices[0].sampling
        key = asked.cache_salt, asked.grammar  # nobody learns what others have sent
        if key not in self.compiled:
            self.prepare()
            self.compiled[key] = self.thread.submit(partial(self.compile, asked.grammar))
            if len(self.compiled) > KEPT:
                self.compiled.popitem(last=False)
        self.compiled.move_to_end(key)
        self.waiting[choices[0].id] = self.compiled[key], choices

    def compile(self, grammar: str) -> "LLMatcher":
        assert self.tokens is not None, "the tokenizer is read first, in the same thread"
        return compile_grammar(self.tokens.result(), grammar)

    def ready(self) -> Iterator[tuple[list[Request], GrammarState | str]]:
        """Choices that need not wait any more, and the state of the first or what is wrong."""
        done = [id for id, (future, _) in self.waiting.items() if future.done()]
        for id in done:
            future, choices = self.waiting.pop(id)
            try:
                matcher = future.result()
            except GrammarError as e:
                yield choices, str(e)
                continue
            yield choices, GrammarState(matcher, self.end_ids, self.vocabulary.size)

    def wait(self, seconds: float) -> None:
        """Until one is ready, but no longer."""
        wait([future for future, _ in self.waiting.values()], seconds, FIRST_COMPLETED)

    def drop(self, request: Request) -> None:
        """Of a request that has ended."""
        for id, (_, choices) in [*self.waiting.items()]:
            if request in choices:
                choices.remove(request)
                if not choices:
                    del self.waiting[id]


def be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), YIELDING)
