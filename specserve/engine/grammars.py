"""Compiles requests' grammars beside the steps."""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

from specserve.engine.grammar_state import GrammarState
from specserve.grammars.compiled import Compiled, GrammarError
from specserve.scheduling import Request

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("specserve")

KEPT = 64  # compiled grammars, for requests that bring the same again
YIELDING = 10  # niceness of the thread: steps come first


class Vocabulary(NamedTuple):
    """The tokens that texts are made of.

    size      of the logits
    end_ids   those that end a complete text
    """

    tokens: "LLTokenizer"
    size: int
    end_ids: Sequence[int]


class Grammars:
    """Requests wait here until their grammar is compiled."""

    def __init__(self, read: Callable[[], Vocabulary]) -> None:
        """`read` is called when the first grammar comes, unless `prepare` was."""
        self.read = read
        self.thread = ThreadPoolExecutor(1, "grammars", be_nice)
        self.vocabulary: Future[Vocabulary] | None = None
        self.compiled: OrderedDict[tuple[int, str, str], Future[Compiled]] = OrderedDict()
        self.waiting: dict[int, tuple[Future[Compiled], list[Request]]] = {}  # by the first's id

    def prepare(self) -> Future[Vocabulary]:
        """Read the vocabulary, in the thread."""
        if self.vocabulary is None:
            self.vocabulary = self.thread.submit(self.read)
        return self.vocabulary

    def wait_until_prepared(self) -> None:
        wait([self.prepare()])

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)

    def ask(self, choices: list[Request]) -> None:
        """Compile the grammar of a prompt's choices."""
        asked = choices[0].sampling
        # The time that a grammar takes shows no tenant what another tenant has sent.
        key = choices[0].caller.tenant, asked.cache_salt, asked.grammar
        if key not in self.compiled:
            vocabulary = self.prepare()
            self.compiled[key] = self.thread.submit(
                lambda: Compiled(vocabulary.result().tokens, asked.grammar)
            )
            if len(self.compiled) > KEPT:
                self.compiled.popitem(last=False)
        self.compiled.move_to_end(key)
        self.waiting[choices[0].id] = self.compiled[key], choices

    def ready(self) -> Iterator[tuple[list[Request], GrammarState | str]]:
        """Choices that need not wait any more, and the state of the first or what is wrong."""
        done = [id for id, (future, _) in self.waiting.items() if future.done()]
        for id in done:
            future, choices = self.waiting.pop(id)
            try:
                compiled = future.result()
            except Exception as e:  # as there is no memory for a thread: it is this request's alone
                if not isinstance(e, GrammarError):
                    told = {"request_id": choices[0].caller.request_id}
                    log.exception("a grammar could not be compiled", extra=told)
                yield choices, str(e) or type(e).__name__
                continue
            _, size, end_ids = self.prepare().result()
            yield choices, GrammarState(compiled, end_ids, size)

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
