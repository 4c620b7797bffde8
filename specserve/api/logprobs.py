"""What the model says of tokens, as vLLM tells it: by token id."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from specserve.exchange.step_output import TokenLogprobs
from specserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specserve.api.generation import Generation


class Logprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float  # natural logarithm of the probability
    rank: int  # 1 for the likeliest
    decoded_token: str  # U+FFFD stands for bytes that are no text by themselves


def tables(
    tokens: Iterable[int], logprobs: Iterable[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[int, Logprob]]:
    """A table of each token and the likeliest ones in its place; it comes first."""

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.token_bytes(token).decode(errors="replace"))

    told = list[dict[int, Logprob]]()
    for token, its in zip(tokens, logprobs, strict=True):
        table = {token: entry(token, its.logprob, its.rank)}
        for rank, (id, logprob) in enumerate(zip(its.ids, its.top, strict=True), 1):
            table.setdefault(id, entry(id, logprob, rank))
        told.append(table)
    return told


def prompt_tables(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[int, Logprob] | None]:
    """The same of a prompt, of whose first token nothing is known."""
    return [None, *tables(prompt[1:], logprobs, tokenizer)]


def best(choices: Sequence["Generation"], number: int) -> list["Generation"]:
    """Those whose tokens have the largest mean logprob, the best first; the earlier of equals."""
    return sorted(choices, key=mean_logprob, reverse=True)[:number]


def mean_logprob(choice: "Generation") -> float:
    each = [its.logprob for its in choice.logprobs]
    return sum(each) / len(each) if each else float("-inf")
