"""Compiling a grammar by llguidance, within limits: a matcher returns which tokens may come next.

A grammar is a string in llguidance's own JSON form (`structured_outputs.py` writes it):
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

if TYPE_CHECKING:  # its import takes 70 ms
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")
DEEP_STACK = 1 << 28  # bytes of address space; what is not used takes no memory
STACK_SIZE = threading.Lock()  # it is the process's, and set while a thread starts
AHEAD = 8  # tokens
AGAIN = 2  # times the usual limits of a step, of a matcher that is made anew in the midst of a text
LONG = 0.1  # seconds: a grammar that takes longer is compiled once, as steps wait
MAX_VERDICTS = 256  # grammars whose verdicts are kept
SLOW_MS = 30  # of CPU time: a step of streams takes about as long
ONE_OF = (
    "oneOf: more than one of its schemas may fit the same value: use anyOf, or let each require a "
    "property that has strings of its own"
)
NO_TEXT = "it allows no text, not even an empty one"
TOO_COMPLEX = re.compile(r"\b(fuel|too (big|large|many|deeply)|max is|limits?)\b", re.IGNORECASE)
LISTING = re.compile(r"\n *\d+ \| ")  # lines of the grammar, which are not the caller's text
UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")


class GrammarError(ValueError):
    """A grammar that is wrong, or needs more than the limits allow; the message says which."""


def limits(room: int = 1) -> "LLParserLimits":
    """What compiling a grammar, and finding the next tokens, may take at most; a matcher that has
    followed no text yet needs more `room`, as it has nothing of the text's looks any more.

    llguidance's own limits let a step of an ambiguous grammar take a second, and the automaton of a
    regex like (x{1000}){1000} much memory: tests/text/grammars/hostile.py has such grammars. With
    these an object may have 240 optional properties. What still takes long ends its own request,
    see engine/grammar_state.py.
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
    """The tokens' bytes as llguidance needs them; any of `end_ids` ends a complete text.

    `size` is that of the model's logits, and may be more than the tokenizer has tokens.
    """
    from llguidance import LLTokenizer

    if not end_ids:
        raise GrammarError("the model has no token that ends a text: none would be complete")
    return LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=[*end_ids])


def compile_grammar(vocabulary: "LLTokenizer", grammar: str) -> "LLMatcher":
    """A matcher at the beginning of the text. It may take a second, without the GIL; some grammars
    take far longer, which no limit of llguidance ends: a server checks them in another process.
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
    """A grammar's matcher at the beginning of a text, for all requests that bring the grammar.

    Copies of a matcher share its automaton, which grows by what any of them looks at, up to a limit
    that ends all of them. Then there is a new one, so that no text depends on others, or on
    draft tokens.
    """

    def __init__(self, vocabulary: "LLTokenizer", grammar: str) -> None:
        """GrammarError for a grammar that is wrong or too much; see `compile_grammar`."""
        self.vocabulary, self.grammar = vocabulary, grammar
        start = time.perf_counter()
        self.first, self.number = compile_grammar(vocabulary, grammar), 0
        self.is_long = time.perf_counter() - start > LONG

    def copy(self) -> tuple["LLMatcher", int]:
        """A matcher at the beginning, and the number of its automaton."""
        return self.first.deep_copy(), self.number

    def renew(self, number: int) -> bool:
        """Compile anew, unless another automaton has taken the place of that one already, or it
        takes too long beside steps; whether it was done.
        """
        if number != self.number or self.is_long:
            return False
        self.first = on_deep_stack(lambda: new_matcher(self.vocabulary, self.grammar, AGAIN))
        self.number += 1
        return True


def look_ahead(matcher: "LLMatcher", end_ids: Sequence[int]) -> None:
    """Follow a text's first tokens, for limits that they run into: llguidance builds its lexer when
    it is first asked for a mask.
    """
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
    """The lowest id that is allowed."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1 if bits else None


def in_words(error: str) -> str:
    """llguidance's message, without what only its developers can use."""
    text = error.removesuffix("<non-verbose/>").strip()[:500]
    text = LISTING.split(text)[0].rstrip()
    if unsupported := UNSUPPORTED.search(text):
        names = unsupported[1].replace('"', "")
        return f"these keywords are not supported: {names}"
    if "oneOf constraints are not supported" in text:
        return ONE_OF
    if "NoExtension" in text:
        return NO_TEXT
    return f"it is too complex: {text}" if TOO_COMPLEX.search(text) else text


def on_deep_stack(do: Callable[[], T]) -> T:
    """Call a function in a thread with a stack of its own: llguidance calls itself for each rule
    and each schema within another, as deep as the largest grammar has them.
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
    """What is wrong with each of the last grammars; "" is nothing.

    Who has sent one is a part of the key (`salt`): nobody learns what others have sent.
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
