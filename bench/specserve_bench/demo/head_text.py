"""The text that a head learns from, and beginnings of it that are held out."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.errors import ConfigError
from specserve_bench.demo.batches import Corpus, Ids
from specserve_bench.demo.training_config import HeadConfig

CONVERSATIONS = ".jsonl"
BEGINNING, GAP = 64, 512  # tokens of a beginning that is held out, and from one to the next
MAX_HELD_OUT = 64  # beginnings of each kind

Marked = list[tuple[str, bool]]  # parts of a conversation, and whether the model says them


def read_files(files: Sequence[Path], tokenizer: Any) -> Corpus:
    """Plain texts, and conversations by the model's chat template; ConfigError names a mistake."""
    source, talk, is_answer, starts = list[Ids](), list[Ids](), list[NDArray[np.bool_]](), [0]
    end = encoded(tokenizer, tokenizer.eos_token or "")
    for file in files:
        text = read_file(file)
        if file.suffix != CONVERSATIONS:
            source += [encoded(tokenizer, text), end]
            continue
        for parts in conversations(file, text, tokenizer):
            ids = [encoded(tokenizer, part) for part, _ in parts]
            talk += ids
            is_answer += [np.full(len(i), said) for i, (_, said) in zip(ids, parts, strict=True)]
            starts.append(starts[-1] + sum(map(len, ids)))
    return Corpus(
        source=np.concatenate([end[:0], *source]),
        talk=np.concatenate([end[:0], *talk]),
        is_answer=np.concatenate([np.zeros(0, np.bool_), *is_answer]),
        starts=np.array(starts, dtype=np.int64),
        python="",
    )


def encoded(tokenizer: Any, text: str) -> Ids:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array(ids, dtype=np.min_scalar_type(len(tokenizer)))


def read_file(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--text {file}: {e}; name a file of UTF-8 text") from e
    if not text.strip():
        raise ConfigError(f"--text {file}: it is empty; name a file of text")
    return text


def conversations(file: Path, text: str, tokenizer: Any) -> Iterator[Marked]:
    if not tokenizer.chat_template:
        raise ConfigError(f"--text {file}: the target has no chat template; give plain text")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            yield marked(json.loads(line)["messages"], tokenizer)
        except Exception as e:  # a template raises whatever it likes
            raise ConfigError(
                f"--text {file}, line {number}: {type(e).__name__}: {e}; a line is "
                '{"messages": [{"role": ..., "content": ...}, ...]} that the chat template takes'
            ) from e


def marked(messages: list[dict[str, Any]], tokenizer: Any) -> Marked:
    """The parts of the rendered template. If it rewrites earlier turns, all parts are learned."""
    if not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise ValueError("messages is no list of objects")

    def written(count: int, asks: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=asks
        )
        return text

    whole, parts, end = written(len(messages), False), Marked(), 0
    for n, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = written(n, True), written(n + 1, False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= end):
            return [(whole, True)]
        parts += [(whole[end : len(before)], False), (whole[len(before) : len(after)], True)]
        end = len(after)
    if not parts:
        raise ValueError("no message is the assistant's")
    return parts


def check_length(corpus: Corpus, config: HeadConfig) -> None:
    """ConfigError where a row of a step would be longer than the text."""
    longest = max(config.length, config.long_length)
    for kind, ids in (("plain text", corpus.source), ("conversations", corpus.talk)):
        if 0 < len(ids) <= longest:
            raise ConfigError(
                f"--text: {len(ids)} tokens of {kind} to learn from, and a row has up to "
                f"{longest}: give more text, or a smaller length and long_length in --config"
            )


def held_out(corpus: Corpus, share: float) -> tuple[Corpus, dict[str, list[Ids]]]:
    """The corpus without its end, and by kind the beginnings of texts in that end."""
    kept = len(corpus.source) - int(share * len(corpus.source))
    ends = corpus.source[kept:]
    texts = [ends[n : n + BEGINNING] for n in range(0, len(ends) - BEGINNING + 1, GAP)]
    talks = len(corpus.starts) - 1
    first = talks - -int(-share * talks // 1) if talks > 1 else talks
    questions = [
        corpus.talk[start : start + int(corpus.is_answer[start:].argmax())]
        for start in corpus.starts[first:-1]
    ]
    end = int(corpus.starts[first])
    rest = corpus._replace(
        source=corpus.source[:kept],
        talk=corpus.talk[:end],
        is_answer=corpus.is_answer[:end],
        starts=corpus.starts[: first + 1],
    )
    kinds = {"text": texts, "conversations": [q for q in questions if len(q)]}
    # MAX_HELD_OUT of each kind at most, evenly from all.
    return rest, {
        kind: each[:: -(-len(each) // MAX_HELD_OUT)] for kind, each in kinds.items() if each
    }


def draft_vocabulary(corpus: Corpus, vocab_size: int, size: int) -> Tensor:
    """The ids of the most frequent tokens, ascending; of equally frequent ones the lower."""
    counts = sum(np.bincount(ids, minlength=vocab_size) for ids in (corpus.source, corpus.talk))
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))
