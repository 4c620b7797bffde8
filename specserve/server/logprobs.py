"""Logprobs as the completion routes send them."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from specserve.api.outputs import Logprob, prompt_tables
from specserve.exchange.messages import TokenLogprobs
from specserve.server.protocol import (
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from specserve.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for -inf, which JSON lacks; vLLM's number
encode = msgspec.json.Encoder().encode
NEAR = 8  # characters in which a token's text is searched for where the text is another


class ScoredTokens(NamedTuple):
    """Tokens of a choice or of its prompt, and their logprobs."""

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


def chat_logprobs(scored: ScoredTokens, namer: Namer) -> list[TokenLogprob]:
    def entry(token: int, logprob: float) -> tuple[str, float, list[int]]:
        return namer.name(token), finite(logprob), [*namer.tokenizer.token_bytes(token)]

    content = []
    for token, its in zip(scored.tokens, scored.logprobs, strict=True):
        assert its is not None, "a chat does not echo its prompt"
        top = [TopLogprob(*entry(*one)) for one in namer.top(its)]
        content.append(TokenLogprob(*entry(token, its.logprob), top))
    return content


def completion_logprobs(scored: ScoredTokens, namer: Namer) -> CompletionLogprobs:
    def table(token: int, its: TokenLogprobs) -> dict[str, float]:
        """By name; of tokens with one name, the likelier."""
        found = dict[str, float]()
        for id, logprob in (*namer.top(its), (token, its.logprob)):
            name = namer.name(id)
            found[name] = max(finite(logprob), found.get(name, LEAST))
        return found

    both = [*zip(scored.tokens, scored.logprobs, strict=True)]
    return CompletionLogprobs(
        tokens=[namer.name(token) for token in scored.tokens],
        token_logprobs=[None if its is None else finite(its.logprob) for _, its in both],
        top_logprobs=[None if its is None else table(token, its) for token, its in both],
        text_offset=[*scored.starts],
    )


def prompt_logprobs(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`."""

    def sendable(entry: Logprob) -> Logprob:
        return msgspec.structs.replace(entry, logprob=finite(entry.logprob))

    most = [
        msgspec.structs.replace(its, ids=its.ids[:num_top], top=its.top[:num_top])
        for its in logprobs
    ]
    told = prompt_tables(prompt, most, tokenizer)
    return [table and {id: sendable(entry) for id, entry in table.items()} for table in told]


def sealed(tables: Iterable[Any]) -> list[Any]:
    """Tables as JSON, each by itself: an encoder that is given all of them lets no other thread run
    until it is done.
    """
    return [None if table is None else msgspec.Raw(encode(table)) for table in tables]


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
