"""Logprobs in the JSON of the completion routes."""

from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from specserve.api.outputs import Logprob, prompt_tables
from specserve.exchange.messages import TokenLogprobs
from specserve.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for -inf, which JSON lacks; vLLM's number
encode = msgspec.json.Encoder().encode
NEAR = 8  # characters in which a token's text is searched for where the text is another


class Told(NamedTuple):
    """Tokens of a choice and, where it is told, of its prompt."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]  # None of a prompt's first token
    starts: Sequence[int]  # characters of the choice's text before each


class Namer:
    """How tokens are written, and how many of the likeliest ones are told."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, has_ids: bool) -> None:
        self.tokenizer, self.num_top, self.has_ids = tokenizer, num_top, has_ids

    def name(self, token: int) -> str:
        """Its text; its bytes as \\xAB where they are no text by themselves."""
        if self.has_ids:
            return f"token_id:{token}"
        text = self.tokenizer.token_bytes(token)
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in text)

    def top(self, its: TokenLogprobs) -> Iterator[tuple[int, float]]:
        """The likeliest tokens, the likeliest first."""
        return zip(its.ids[: self.num_top], its.top, strict=False)


def chat_form(told: Told, namer: Namer) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        written = [*namer.tokenizer.token_bytes(token)]
        return {"token": namer.name(token), "logprob": finite(logprob), "bytes": written}

    content = []
    for token, its in zip(told.tokens, told.logprobs, strict=True):
        assert its is not None, "a chat does not tell its prompt"
        top = [entry(*one) for one in namer.top(its)]
        content.append(entry(token, its.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_form(told: Told, namer: Namer) -> dict[str, Any]:
    def table(token: int, its: TokenLogprobs) -> dict[str, float]:
        """By name; of tokens with one name, the likelier."""
        found = dict[str, float]()
        for id, logprob in (*namer.top(its), (token, its.logprob)):
            name = namer.name(id)
            found[name] = max(finite(logprob), found.get(name, LEAST))
        return found

    both = [*zip(told.tokens, told.logprobs, strict=True)]
    return {
        "tokens": [namer.name(token) for token in told.tokens],
        "token_logprobs": [its and finite(its.logprob) for its in told.logprobs],
        "top_logprobs": [its and table(token, its) for token, its in both],
        "text_offset": told.starts,
    }


def prompt_form(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> list[dict[int, Logprob] | None]:
    """vLLM's `prompt_logprobs`."""

    def sendable(entry: Logprob) -> Logprob:
        return msgspec.structs.replace(entry, logprob=finite(entry.logprob))

    most = [
        msgspec.structs.replace(its, ids=its.ids[:num_top], top=its.top[:num_top])
        for its in logprobs
    ]
    told = prompt_tables(prompt, most, tokenizer)
    return [table and {id: sendable(entry) for id, entry in table.items()} for table in told]


def sealed(form: Any) -> Any:
    """A form whose tables are JSON already, each by itself: an encoder that is given all of them
    lets no other thread run until it is done.
    """
    if isinstance(form, dict):
        return {name: sealed(column) for name, column in form.items()}
    if not isinstance(form, list):
        return form
    return [msgspec.Raw(encode(x)) if isinstance(x, dict) else x for x in form]


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def prompt_starts(prompt: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Where a prompt's tokens begin in its text. Those that are not in it, as a tokenizer added
    them or the text leaves them out, begin where the next ones do.
    """
    decoder = getincrementaldecoder("utf-8")("replace")
    starts, at = list[int](), 0
    for token in prompt:
        starts.append(at)
        piece = decoder.decode(tokenizer.token_bytes(token))
        if not text.startswith(piece, at) and text.startswith(piece.removeprefix(" "), at):
            piece = piece.removeprefix(" ")  # of a text's beginning, which some decoders leave out
        found = text.find(piece, at, at + len(piece) + NEAR)
        at = at if found < 0 else found + len(piece)
    return starts
