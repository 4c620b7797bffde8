"""The corpus as token ids, and batches of it, each a function of the seed and the step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve_bench.demo.corpus import Turn
from specserve_bench.demo.tokenizer import END_OF_TEXT

IGNORED = -100  # the label of a token that is not learnt; torch's default


class Batch(NamedTuple):
    """token_ids, labels [B, L] int64: a label is the token that follows, or IGNORED."""

    token_ids: Tensor
    labels: Tensor


class Corpus(NamedTuple):
    """All source and all conversations, concatenated; conversation n starts at starts[n]."""

    source: NDArray[np.uint16]
    talk: NDArray[np.uint16]
    is_answer: NDArray[np.bool_]  # of each token of `talk`
    starts: NDArray[np.int64]  # [conversations + 1]

    @property
    def num_tokens(self) -> int:
        return len(self.source) + len(self.talk)


def encode(tokenizer: Any, sources: Sequence[str], turns: Sequence[Turn]) -> Corpus:
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    files = tokenizer(list(sources), add_special_tokens=False)["input_ids"]
    questions = [[{"role": "user", "content": turn.question}] for turn in turns]
    heads = tokenizer.apply_chat_template(questions, add_generation_prompt=True, tokenize=False)
    asked = tokenizer(heads, add_special_tokens=False)["input_ids"]
    tails = [f"{turn.answer}{tokenizer.eos_token}" for turn in turns]
    answers = tokenizer(tails, add_special_tokens=False)["input_ids"]
    lengths = [len(q) + len(a) for q, a in zip(asked, answers, strict=True)]
    whole = [q + a for q, a in zip(asked, answers, strict=True)]
    marks = [[False] * len(q) + [True] * len(a) for q, a in zip(asked, answers, strict=True)]
    return Corpus(
        source=np.array([t for f in files for t in [*f, end]], dtype=np.uint16),
        talk=np.array([t for w in whole for t in w], dtype=np.uint16),
        is_answer=np.array([m for w in marks for m in w], dtype=np.bool_),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def batch(corpus: Corpus, seed: int, step: int, size: int, length: int, talk_share: float) -> Batch:
    """Each row is conversations with probability `talk_share`, else a window of source."""
    random = np.random.default_rng((seed, step))
    rows = [
        talk_row(corpus, random, length)
        if random.random() < talk_share
        else source_row(corpus, random, length)
        for _ in range(size)
    ]
    tokens, labels = (np.stack(column) for column in zip(*rows, strict=True))
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))


Row = tuple[NDArray[np.int64], NDArray[np.int64]]


def source_row(corpus: Corpus, random: np.random.Generator, length: int) -> Row:
    start = int(random.integers(len(corpus.source) - length))
    window = corpus.source[start : start + length + 1].astype(np.int64)
    return window[:-1], window[1:]


def talk_row(corpus: Corpus, random: np.random.Generator, length: int) -> Row:
    """Random conversations one after the other; labels are those of answers only."""
    tokens: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.int64]] = []
    room = length + 1
    while room > 0:
        n = int(random.integers(len(corpus.starts) - 1))
        part = slice(corpus.starts[n], corpus.starts[n + 1])
        ids = corpus.talk[part].astype(np.int64)[:room]
        tokens.append(ids)
        labels.append(np.where(corpus.is_answer[part][:room], ids, IGNORED))
        room -= len(ids)
    return np.concatenate(tokens)[:-1], np.concatenate(labels)[1:]
