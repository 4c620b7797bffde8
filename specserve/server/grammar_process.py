"""The process that checks whether grammars compile."""

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

SECONDS = 0.8  # maximum CPU time to compile a grammar
TOO_MUCH = "the grammar needs too much memory"


class GrammarSetup(msgspec.Struct, frozen=True):
    """The model's folder or file, the size of its logits, and the ids of its end tokens."""

    model: str
    size: int
    end_ids: tuple[int, ...]


def prepare(first: bytes, start: Callable[[], None]) -> Do:
    """Return the function that compiles a grammar.

    The first frame is a `GrammarSetup`. Each later frame is a grammar.
    """
    with suppress(OSError):
        os.nice(10)  # engine steps have priority
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
    main(prepare, TOO_MUCH, on_deep_stack)  # one deep stack, within the limit of memory
