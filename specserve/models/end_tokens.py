"""Finds the tokens that end a text, and the files or keys of a model that name them."""

import re
from collections.abc import Sequence

from specserve.models.end_of_turn import text_after_answer
from specserve.models.source import ModelDescription
from specserve.text.defaults import CONFIG
from specserve.text.tokenizer import Tokenizer

BRACKETS = re.compile(r"<.+>|\[.+\]")
EndTokens = dict[int, list[str]]  # id -> where it is named: a file, a key or the chat template


def find_end_tokens(source: ModelDescription, tokenizer: Tokenizer) -> EndTokens:
    """The end tokens of a model. If generation_config.json names some, config.json adds only
    special tokens, because it is often out of date.
    """
    named: list[tuple[str, Sequence[int]]] = [*source.ends().items()]
    if (token := tokenizer.eos_token_id) is not None:
        named.append(("eos_token", [token]))
    if (token := end_of_turn(tokenizer)) is not None:
        named.append(("chat template", [token]))
    found = EndTokens()
    for name, ids in named:
        known = {*found, *tokenizer.special_ids} if found and name == CONFIG else {*ids}
        for token in ids:
            if token in known and name not in found.setdefault(token, []):
                found[token].append(name)
    return found


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The token that the chat template writes after an assistant's message. It must be a special
    token, or an added token in brackets, e.g. <|im_end|> in some models.
    """
    if tokenizer.chat_template is None:
        return None
    after = text_after_answer(tokenizer.chat_template)
    added = tokenizer.backend.get_added_tokens_decoder().items()
    fitting = [
        (len(token.content), id)
        for id, token in added
        if (token.special or BRACKETS.fullmatch(token.content)) and after.startswith(token.content)
    ]
    return max(fitting)[1] if fitting else None


def report(ends: EndTokens, tokenizer: Tokenizer) -> str:
    """One line with each end token, its id and where it is named."""
    each = (f"{tokenizer.id_to_token(id)} {id} ({', '.join(names)})" for id, names in ends.items())
    return f"end tokens: {', '.join(each) or 'none'}"
