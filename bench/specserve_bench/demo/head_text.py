"""The text that a head learns from, and beginnings of it that are held out."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve_bench.demo.batches import Corpus, Ids
from specserve_bench.demo.head_config import HeadConfig

CONVERSATIONS = ".jsonl"
BEGINNING, GAP = 64, 512  # tokens of a beginning that is held out, and from one to the next
MAX_HELD_OUT = 64  # beginnings of each kind

Marked = list[tuple[str, bool]]  # parts of a conversation, and whether the model says them


def read_files(files: Sequence[Path], tokenizer: Any) -> Corpus:
    """Plain texts, and conversations by the model's chat template; ConfigError names a mistake."""
    talks, ids, dtype = list[Marked](), list[int](), np.min_scalar_type(len(tokenizer))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for file in files:
        text = read_file(file)
        if file.suffix == CONVERSATIONS:
            talks += conversations(file, text, tokenizer)
        else:
            ids += [*encoded(tokenizer, text), *end]
    parts = [[(encoded(tokenizer, part), is_said) for part, is_said in talk] for talk in talks]
    lengths = [sum(len(part) for part, _ in talk) for talk in parts]
    return Corpus(
        source=np.array(ids, dtype=dtype),
        talk=np.array([t for talk in parts for part, _ in talk for t in part], dtype=dtype),
        is_answer=np.array([said for talk in parts for p, said in talk for _ in p], dtype=np.bool_),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        python="",
    )


def encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


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
    """What the template makes of it, in parts. Where it rewrites earlier turns, all is learnt."""

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
    return rest, {kind: drawn(each) for kind, each in kinds.items() if each}


def drawn(beginnings: list[Ids]) -> list[Ids]:
    """Evenly from all."""
    return beginnings[:: -(-len(beginnings) // MAX_HELD_OUT)]


def draft_vocabulary(corpus: Corpus, vocab_size: int, size: int) -> Tensor:
    """The ids of the most frequent tokens, ascending; of equally frequent ones the lower."""
    counts = sum(np.bincount(ids, minlength=vocab_size) for ids in (corpus.source, corpus.talk))
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))
