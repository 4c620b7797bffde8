"""Compiling a grammar by llguidance, within limits: a matcher tells which tokens may come next.

A grammar is a string in llguidance's own JSON form (`specserve.grammars.forms` writes it):
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specserve.models.tokenizer import Tokenizer

if TYPE_CHECKING:  # its import takes 70 ms
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")


class GrammarError(ValueError):
    """A grammar that is wrong, or needs more than the limits allow; the message says which."""


def limits() -> "LLParserLimits":
    """What compiling a grammar, and finding the next tokens, may take at most."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def vocabulary_of(tokenizer: Tokenizer, size: int, end_ids: Sequence[int]) -> "LLTokenizer":
    """The tokens' bytes as llguidance needs them; any of `end_ids` ends a complete text.

    `size` is that of the model's logits, and may be more than the tokenizer has tokens.
    """
    from llguidance import LLTokenizer

    if not end_ids:
        raise GrammarError("the model has no token that ends a text: none would be complete")
    return LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=[*end_ids])


def compile_grammar(vocabulary: "LLTokenizer", grammar: str) -> "LLMatcher":
    """A matcher at the beginning of the text. It may take a second, without the GIL.

    The first mask is a part of it: llguidance builds its lexer then, within limits of its own.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits())
    first = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(in_words(matcher.get_error()))
    if not any(first):
        raise GrammarError("it allows no text, not even an empty one")
    return matcher


def in_words(error: str) -> str:
    """llguidance's message, without what only its developers can use."""
    told = error.removesuffix("<non-verbose/>").strip()
    if unsupported := UNSUPPORTED.search(told):
        names = unsupported[1].replace('"', "")
        return f"these keywords are not supported: {names}"
    if "oneOf constraints are not supported" in told:
        return "oneOf: more than one of its schemas may fit the same value: use anyOf"
    return told[:500]
