"""Beginnings of source, each continued by the target: text that the draft model has to predict.

Only such text has the target's own patterns, such as loops (on-policy distillation, Agarwal et al.
2023).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from specserve_bench.demo.batches import Corpus
from specserve_bench.demo.training_config import OWN_LENGTH, Course

BEGINNING = 160  # tokens of source that the target continues, at most
ROWS = {"cpu": 64, "cuda": 4096}  # continued together: caches, and launches, are few


def own_text(file: Path, config: Course, corpus: Corpus, target: Any) -> NDArray[np.uint16]:
    if not file.exists():
        half = file.with_suffix(".part")
        with half.open("wb") as opened:
            np.save(opened, continue_source(target, config, corpus))
        half.replace(file)
    own: NDArray[np.uint16] = np.load(file)
    return own


def continue_source(target: Any, config: Course, corpus: Corpus) -> NDArray[np.uint16]:
    """Beginnings and continuations in turn. Rows that are continued together begin equally long."""
    random = np.random.default_rng(config.seed)
    noise = torch.Generator(target.device).manual_seed(config.seed)
    starts = random.integers(len(corpus.source) - BEGINNING, size=config.own_tokens // OWN_LENGTH)
    batches = np.array_split(starts, -(-len(starts) // ROWS[target.device.type]))
    lengths = np.linspace(1, BEGINNING, len(batches) + 2, dtype=int)[1:-1]
    texts = []
    for begins, length in zip(batches, lengths, strict=True):
        prompts = corpus.source[begins[:, None] + np.arange(length)].astype(np.int64)
        more = continued(target, torch.from_numpy(prompts).to(target.device), noise)
        texts.append(np.concatenate([prompts, more.numpy(force=True)], axis=1).ravel())
    return np.concatenate(texts).astype(np.uint16)


@torch.inference_mode()
def continued(target: Any, prompts: Tensor, noise: torch.Generator) -> Tensor:
    """[B, OWN_LENGTH]: every other row greedy, the rest at temperature 1 (Gumbel's way)."""
    cache, ids, said = DynamicCache(), prompts, []
    for _ in range(OWN_LENGTH):
        out = target(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = out.logits[:, -1].float()
        bonus = -torch.empty_like(logits).exponential_(generator=noise).log()
        bonus[::2] = 0.0
        ids = (logits + bonus).argmax(-1, keepdim=True)
        said.append(ids)
    return torch.cat(said, dim=1)
