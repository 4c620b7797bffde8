"""A process that compiles grammars, to see whether they can be."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from specserve.models.source import open_source
from specserve.server.bounded_process import (
    Do,
    Done,
    Refused,
    address_space,
    bound_memory,
    bounded_time,
    main,
)
from specserve.text.grammars.compiled import (
    GrammarError,
    compile_grammar,
    on_deep_stack,
    vocabulary_of,
)

SECONDS = 0.8  # of CPU time to compile one, of the second within which it is refused
TOO_MUCH = "it needs too much memory"


class GrammarSetup(msgspec.Struct, frozen=True):
    """The model's folder or file, the size of its logits, and the ids that end texts."""

    model: str
    size: int
    end_ids: tuple[int, ...]


def prepare(first: bytes, start: Callable[[], None]) -> Do:
    """The first frame is `GrammarSetup`; each other one is a grammar."""
    with suppress(OSError):
        os.nice(10)  # the steps of streams come first
    setup = msgspec.msgpack.decode(first, type=GrammarSetup)
    tokenizer = open_source(Path(setup.model)).tokenizer()
    vocabulary = vocabulary_of(tokenizer, setup.size, setup.end_ids)
    del tokenizer
    bound_memory(address_space() + (1 << 28))
    start()

    def compiled(grammar: bytes) -> Done | Refused:
        try:
            with bounded_time(SECONDS):
                compile_grammar(vocabulary, grammar.decode())
        except GrammarError as e:
            return Refused(str(e))
        return Done("")

    return compiled


if __name__ == "__main__":
    main(prepare, TOO_MUCH, on_deep_stack)  # one stack, within the bound of memory
