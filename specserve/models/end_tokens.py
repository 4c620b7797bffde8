"""The tokens that end a text, and what of a model names each of them."""

import re
from collections.abc import Sequence

from specserve.models.end_of_turn import text_after_answer
from specserve.models.source import ModelDescription
from specserve.text.defaults import CONFIG
from specserve.text.tokenizer import Tokenizer

BRACKETS = re.compile(r"<.+>|\[.+\]")
EndTokens = dict[int, list[str]]  # id -> what names it: a file, a key or the chat template


def find_end_tokens(source: ModelDescription, tokenizer: Tokenizer) -> EndTokens:
    """config.json is often older than generation_config.json: next to that file it counts only if
    it names special tokens.
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
    """The token that the chat template writes after an assistant's message: a special one, or one
    that was added in brackets, as some models have <|im_end|>.
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
    """One line: each end token, its id and what names it."""
    each = (f"{tokenizer.id_to_token(id)} {id} ({', '.join(names)})" for id, names in ends.items())
    return f"end tokens: {', '.join(each) or 'none'}"
