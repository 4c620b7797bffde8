"""Compiling a grammar by llguidance, within limits: a matcher tells which tokens may come next.

A grammar is a string in llguidance's own JSON form, or in its dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specserve.models.tokenizer import Tokenizer

if TYPE_CHECKING:  # its import takes 70 ms
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


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
    """A matcher at the beginning of the text. It may take a second, without the GIL."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits())
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher
