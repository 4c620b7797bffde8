"""Logprobs in the formats of the routes."""

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

LEAST = -9999.0  # replaces -inf, which JSON lacks; same as vLLM
encode = msgspec.json.Encoder().encode
NEAR = 8  # extra characters to search for a token's text if the prompt's text differs


class ScoredTokens(NamedTuple):
    """Tokens of a choice or of its prompt, and their logprobs."""

    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]  # None for a prompt's first token
    starts: Sequence[int]  # characters of the choice's text before each token


class Namer:
    """Names tokens in logprobs, and selects the most likely tokens."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, has_ids: bool) -> None:
        self.tokenizer, self.num_top, self.has_ids = tokenizer, num_top, has_ids

    def name(self, token: int) -> str:
        """Return a token's text; bytes that are not UTF-8 by themselves as \\xAB."""
        if self.has_ids:
            return f"token_id:{token}"
        text = self.tokenizer.token_bytes(token)
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in text)

    def top(self, its: TokenLogprobs) -> Iterator[tuple[int, float]]:
        """Return the most likely tokens and their logprobs, in order."""
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
        """Return logprobs by name; the largest, if several tokens have the same name."""
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
    """Return logprobs in the format of vLLM's `prompt_logprobs`."""

    def sendable(entry: Logprob) -> Logprob:
        return msgspec.structs.replace(entry, logprob=finite(entry.logprob))

    most = [
        msgspec.structs.replace(its, ids=its.ids[:num_top], top=its.top[:num_top])
        for its in logprobs
    ]
    tables = prompt_tables(prompt, most, tokenizer)
    return [table and {id: sendable(entry) for id, entry in table.items()} for table in tables]


def sealed(tables: Iterable[Any]) -> list[Any]:
    """Encode each table as JSON. Encoding all tables in one call would block other threads."""
    return [None if table is None else msgspec.Raw(encode(table)) for table in tables]


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def prompt_starts(prompt: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the starts of a prompt's tokens in its text.

    A token that is not in the text, e.g. one that the tokenizer added, starts where the next one
    starts.
    """
    decoder = getincrementaldecoder("utf-8")("replace")
    starts, at = list[int](), 0
    for token in prompt:
        starts.append(at)
        piece = decoder.decode(tokenizer.token_bytes(token))
        if not text.startswith(piece, at) and text.startswith(piece.removeprefix(" "), at):
            piece = piece.removeprefix(" ")  # some decoders drop a space at the start of a text
        found = text.find(piece, at, at + len(piece) + NEAR)
        at = at if found < 0 else found + len(piece)
    return starts
