"""Compiles requests' grammars in threads during steps."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, NamedTuple

from specserve.exchange.fair_queue import FairThreads
from specserve.scheduling import Request
from specserve.scheduling.grammar_state import GrammarState
from specserve.text.grammars.compiled import Compiled, GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("specserve")

KEPT = 64  # most compiled grammars kept for requests with the same grammar
# Usual priority: a niced thread would delay steps while it holds the GIL without a CPU.
NUM_THREADS = 2  # threads that compile; one tenant's grammars take one of them


class Vocabulary(NamedTuple):
    """The tokens of a model's texts.

    size      number of logits
    end_ids   ids that end a complete text
    """

    tokens: "LLTokenizer"
    size: int
    end_ids: Sequence[int]


class Grammars:
    """Requests wait here until their grammar is compiled."""

    def __init__(self, read: Callable[[], Vocabulary]) -> None:
        """`read` is called with the first grammar, or in `prepare`."""
        self.read = read
        self.threads = FairThreads(NUM_THREADS, "grammars")
        self.vocabulary: Future[Vocabulary] | None = None
        # Keys: tenant, salt and grammar.
        self.compiled: OrderedDict[tuple[int, str, str], Future[Compiled]] = OrderedDict()
        # Requests of one prompt, by the first request's id.
        self.waiting: dict[int, tuple[Future[Compiled], list[Request]]] = {}

    def prepare(self) -> Future[Vocabulary]:
        """Read the vocabulary in a thread."""
        if self.vocabulary is None:
            self.vocabulary = self.threads.submit(None, self.read)
        return self.vocabulary

    def wait_until_prepared(self) -> None:
        wait([self.prepare()])

    def close(self) -> None:
        self.threads.close()

    def ask(self, choices: list[Request]) -> None:
        """Compile the grammar of the requests of one prompt."""
        asked, tenant = choices[0].sampling, choices[0].caller.tenant
        # Separate entries: times must not reveal other tenants' grammars
        key = tenant, asked.cache_salt, asked.grammar
        if key not in self.compiled:
            vocabulary = self.prepare()
            self.compiled[key] = self.threads.submit(
                tenant, lambda: Compiled(vocabulary.result().tokens, asked.grammar)
            )
            self.drop_one_beyond_limit()
        self.compiled.move_to_end(key)
        self.waiting[choices[0].id] = self.compiled[key], choices

    def drop_one_beyond_limit(self) -> None:
        """Drop the oldest grammar of the tenant with the most grammars."""
        if len(self.compiled) > KEPT:
            [(largest, _)] = Counter(tenant for tenant, _, _ in self.compiled).most_common(1)
            del self.compiled[next(key for key in self.compiled if key[0] == largest)]

    def ready(self) -> Iterator[tuple[list[Request], GrammarState | str]]:
        """Yield requests that no longer wait, with the first's grammar state or an error
        message.
        """
        done = [id for id, (future, _) in self.waiting.items() if future.done()]
        for id in done:
            future, choices = self.waiting.pop(id)
            try:
                compiled = future.result()
            except Exception as e:  # for example no memory for a thread: only this request fails
                if not isinstance(e, GrammarError):
                    details = {"request_id": choices[0].caller.request_id}
                    log.exception("Grammar cannot be compiled", extra=details)
                yield choices, str(e) or type(e).__name__
                continue
            _, size, end_ids = self.prepare().result()
            yield choices, GrammarState(compiled, end_ids, size)

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is ready, at most `seconds`."""
        wait([future for future, _ in self.waiting.values()], seconds, FIRST_COMPLETED)

    def drop(self, request: Request) -> None:
        """Drop a request that has ended."""
        for id, (future, choices) in [*self.waiting.items()]:
            if request in choices:
                choices.remove(request)
                if not choices:
                    del self.waiting[id]
                    self.drop_if_unwanted(future)

    def drop_if_unwanted(self, future: Future[Compiled]) -> None:
        """Drop a grammar that no request waits for and that is not being compiled."""
        if not any(future is other for other, _ in self.waiting.values()) and future.cancel():
            self.compiled = OrderedDict(
                (key, kept) for key, kept in self.compiled.items() if kept is not future
            )
