"""Compiling grammars with llguidance, within limits. A matcher returns the allowed next tokens.

A grammar is a string in llguidance's JSON form, which `structured_outputs.py` writes:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from specserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # importing it takes 70 ms
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")
DEEP_STACK = 1 << 28  # bytes of address space; unused pages take no memory
STACK_SIZE = threading.Lock()  # guards the process's stack size, which is set while a thread starts
AHEAD = 8  # tokens that are tried after compiling
AGAIN = 2  # factor of the step limits for matchers that are rebuilt within a text
LONG = 0.1  # seconds; a grammar with a longer compile time is not compiled again
MAX_VERDICTS = 256  # maximum stored verdicts
SLOW_MS = 30  # maximum CPU time per token, about the time of a step
ONE_OF = (
    "oneOf: several of its schemas may match the same value. Use anyOf, or require a property with "
    "different strings in each schema."
)
NO_TEXT = "it allows no text, not even an empty text"
TOO_COMPLEX = re.compile(r"\b(fuel|too (big|large|many|deeply)|max is|limits?)\b", re.IGNORECASE)
# The place of a schema in a grammar of tool calls, which the client has not written
IN_GRAMMAR = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
LISTING = re.compile(r"\n *\d+ \| ")  # listed lines of the grammar
UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")


class GrammarError(ValueError):
    """A grammar is invalid, or exceeds the limits. The message states which."""


def limits(room: int = 1) -> "LLParserLimits":
    """Return the limits of compiling a grammar and of computing masks.

    A matcher that is rebuilt within a text needs more `room`, because it has cached nothing.

    The default limits of llguidance allow a step of a second for an ambiguous grammar, and much
    memory for a regex like (x{1000}){1000}. Examples are in tests/text/grammars/hostile.py. These
    limits allow objects of 240 optional properties. Grammars that are still slow fail only their
    own request, see engine/grammar_state.py.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=room * 200_000,
        step_lexer_fuel=room * 40_000,
        step_max_items=room * 4000,
        max_items_in_row=1000,
        max_lexer_states=25_000,
        verbose_errors=False,
    )


def vocabulary_of(tokenizer: Tokenizer, size: int, end_ids: Sequence[int]) -> "LLTokenizer":
    """Create llguidance's vocabulary; any of `end_ids` ends a complete text.

    `size` is the width of the model's logits, which may exceed the tokenizer's size.
    """
    from llguidance import LLTokenizer

    if not end_ids:
        raise GrammarError("the model has no end token, so no text could be complete")
    return LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=[*end_ids])


def compile_grammar(vocabulary: "LLTokenizer", grammar: str) -> "LLMatcher":
    """Compile a grammar to a matcher at the beginning of the text.

    This may take a second, without the GIL. Some grammars take far longer despite llguidance's
    limits, so the server checks grammars in another process.
    """

    def made() -> "LLMatcher":
        matcher = new_matcher(vocabulary, grammar)
        check(matcher)
        look_ahead(matcher.deep_copy(), vocabulary.eos_tokens)
        check(matcher)
        return matcher

    return on_deep_stack(made)


def new_matcher(vocabulary: "LLTokenizer", grammar: str, room: int = 1) -> "LLMatcher":
    from llguidance import LLMatcher

    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits(room))


class Compiled:
    """A grammar's matcher at the beginning of a text, shared by all requests with the grammar.

    Copies of a matcher share its automaton. It grows with each copy's lookups, up to a limit that
    stops all copies. A new automaton then replaces it, so that no text depends on other requests or
    on draft tokens.
    """

    def __init__(self, vocabulary: "LLTokenizer", grammar: str) -> None:
        """GrammarError if the grammar is invalid or exceeds the limits; see `compile_grammar`."""
        self.vocabulary, self.grammar = vocabulary, grammar
        start = time.perf_counter()
        self.first, self.number = compile_grammar(vocabulary, grammar), 0
        self.is_long = time.perf_counter() - start > LONG

    def copy(self) -> tuple["LLMatcher", int]:
        """Return a matcher at the beginning, and the number of its automaton."""
        return self.first.deep_copy(), self.number

    def renew(self, number: int) -> bool:
        """Replace the automaton `number`; return whether this was done.

        It is not done if the automaton is already replaced, or if compiling would delay steps.
        """
        if number != self.number or self.is_long:
            return False
        self.first = on_deep_stack(lambda: new_matcher(self.vocabulary, self.grammar, AGAIN))
        self.number += 1
        return True


def look_ahead(matcher: "LLMatcher", end_ids: Sequence[int]) -> None:
    """Check the limits on a text's first tokens, because llguidance builds its lexer lazily."""
    token = first_of(matcher.compute_bitmask())
    check(matcher)
    if token is None:
        raise GrammarError(NO_TEXT)
    for _ in range(AHEAD):
        if token is None or token in end_ids:
            return
        start = time.thread_time()
        matcher.consume_token(token)
        token = first_of(matcher.compute_bitmask())
        check(matcher)
        if (ms := 1000 * (time.thread_time() - start)) > SLOW_MS:
            raise GrammarError(f"it is too complex: a token takes {ms:.0f} ms")


def check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise GrammarError(in_words(matcher.get_error()))


def first_of(mask: bytes) -> int | None:
    """Return the lowest allowed id."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1 if bits else None


def in_words(error: str) -> str:
    """Return llguidance's message without details for its developers."""
    text = error.removesuffix("<non-verbose/>").strip()[:500]
    text = IN_GRAMMAR.sub("", LISTING.split(text)[0].rstrip())
    if unsupported := UNSUPPORTED.search(text):
        names = unsupported[1].replace('"', "")
        return f"these keywords are not supported: {names}"
    if "oneOf constraints are not supported" in text:
        return ONE_OF
    if "NoExtension" in text:
        return NO_TEXT
    return f"it is too complex: {text}" if TOO_COMPLEX.search(text) else text


def on_deep_stack(do: Callable[[], T]) -> T:
    """Call a function in a thread with a large stack.

    llguidance recurses for each nested rule and schema, as deep as the largest grammar.
    """
    if threading.current_thread().name == "deep stack":
        return do()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except BaseException as e:
            future.set_exception(e)

    with STACK_SIZE:
        usual = threading.stack_size(DEEP_STACK)
        try:
            thread = threading.Thread(target=run, name="deep stack")
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return future.result()


class Verdicts:
    """The errors of the last grammars; "" is a valid grammar.

    The key includes the sender (`salt`), so that senders cannot detect each other's grammars.
    """

    def __init__(self) -> None:
        self.known: OrderedDict[bytes, str] = OrderedDict()

    def find(self, grammar: str, salt: str = "") -> str | None:
        key = key_of(grammar, salt)
        if key in self.known:
            self.known.move_to_end(key)
        return self.known.get(key)

    def keep(self, grammar: str, wrong: str, salt: str = "") -> None:
        self.known[key_of(grammar, salt)] = wrong
        if len(self.known) > MAX_VERDICTS:
            self.known.popitem(last=False)


def key_of(grammar: str, salt: str) -> bytes:
    return sha256(f"{len(salt)} {salt}{grammar}".encode()).digest()
