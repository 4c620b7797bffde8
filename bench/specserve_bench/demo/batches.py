"""The corpus as token ids, and batches of it, each a function of the seed and the step."""

import platform
from collections.abc import Sequence
from pathlib import Path
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


Ids = NDArray[np.unsignedinteger[Any]]


class Corpus(NamedTuple):
    """All source and all conversations, concatenated; conversation n starts at starts[n]."""

    source: Ids
    talk: Ids
    is_answer: NDArray[np.bool_]  # of each token of `talk`
    starts: NDArray[np.int64]  # [conversations + 1]
    python: str  # the version whose library it is

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
        python=platform.python_version(),
    )


def save_corpus(file: Path, corpus: Corpus) -> None:
    half = file.with_suffix(".part")
    with half.open("wb") as opened:
        np.savez_compressed(opened, **corpus._asdict())
    half.replace(file)


def load_corpus(file: Path) -> Corpus:
    with np.load(file) as saved:
        return Corpus(**{**saved, "python": str(saved["python"])})


def batch(corpus: Corpus, seed: int, step: int, size: int, length: int, talk_share: float) -> Batch:
    """Each row is conversations with probability `talk_share`, else a window of source."""
    random = np.random.default_rng((seed, step))
    num_talks = int(random.binomial(size, talk_share))
    kinds = [(talk_rows, num_talks), (source_rows, size - num_talks)]
    rows = [draw(corpus, random, count, length) for draw, count in kinds if count]
    tokens, labels = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))


Rows = tuple[NDArray[np.int64], NDArray[np.int64]]  # tokens and labels [B, L]


def source_rows(corpus: Corpus, random: np.random.Generator, size: int, length: int) -> Rows:
    starts = random.integers(len(corpus.source) - length, size=(size, 1))
    windows = corpus.source[starts + np.arange(length + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


def talk_rows(corpus: Corpus, random: np.random.Generator, size: int, length: int) -> Rows:
    """Random conversations one after the other; labels are those of answers only."""
    positions, lengths = np.arange(length + 1), np.diff(corpus.starts)
    drawn = random.integers(len(lengths), size=(size, 1 + length // lengths.min()))
    taken = lengths[drawn]
    shifts = corpus.starts[drawn] - (taken.cumsum(1) - taken)  # from places in a row to the corpus
    ends = taken.sum(1).cumsum()
    firsts = (ends - taken.sum(1))[:, None]
    places = np.repeat(shifts.ravel(), taken.ravel())[firsts + positions] + positions
    ids = corpus.talk[places].astype(np.int64)
    return ids[:, :-1], np.where(corpus.is_answer[places], ids, IGNORED)[:, 1:]
