"""Prompts of models that fill in text between a prefix and a suffix (fill in the middle)."""

from typing import NamedTuple

from specserve.errors import RequestError
from specserve.text.tokenizer import Tokenizer


class InfillFormat(NamedTuple):
    """The tokens of a format; the text to generate follows the last part.

    prefix, suffix  tokens before the prefix and before the suffix
    middle          token after both; empty: none
    is_reversed     the suffix comes first
    """

    prefix: str
    suffix: str
    middle: str
    is_reversed: bool = False


FORMATS = (
    InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    InfillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillFormat(  # DeepSeek
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),
    InfillFormat("[PREFIX]", "[SUFFIX]", "", is_reversed=True),  # Codestral
)


def find_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """Return the format whose tokens the vocabulary has."""
    known = tokenizer.backend.token_to_id
    has_all = (f for f in FORMATS if all(known(text) is not None for text in f[:3] if text))
    return next(has_all, None)


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str, starts: bool) -> list[int]:
    """Return the prompt for the text between prefix and suffix.

    `starts`: it begins with the tokens that the tokenizer puts before a text. RequestError for a
    model without tokens for this.
    """
    found = find_format(tokenizer)
    if found is None:
        raise RequestError(
            "suffix: the model has no tokens to fill in text. Omit it, or use a model with such "
            "tokens, for example Qwen2.5-Coder",
            "suffix",
        )

    def part(mark: str, text: str) -> list[int]:
        id = tokenizer.backend.token_to_id(mark)
        assert id is not None, "the format was found"
        return [id, *tokenizer.encode(text, add_special_tokens=False)]

    parts = [part(found.prefix, prefix), part(found.suffix, suffix)]
    if found.is_reversed:
        parts.reverse()
    end = [part(found.middle, "")] if found.middle else []
    first = beginning(tokenizer) if starts else []
    return [*first, *(id for each in (*parts, *end) for id in each)]


def beginning(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text."""
    text = "a"
    plain = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.encode(text)
    return whole[: next((i for i in range(len(whole)) if whole[i:][: len(plain)] == plain), 0)]
