"""How often a head predicts the target's tokens in texts that training left out."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from specserve_bench.demo.batches import Ids
from specserve_bench.demo.head_loss import Teacher
from specserve_bench.demo.head_model import Head

LENGTH = 96  # tokens that the target says after a beginning, unless it ends before


class Rightness(msgspec.Struct, frozen=True):
    """Accuracy of a chain of draft tokens, for a greedy target model."""

    texts: int
    chains: int  # one begins at each token that the target said
    right: list[float]  # by draft step, of the chains that were right before

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step of such chains; the target's own token is the 1."""
        return 1 + float(np.cumprod(self.right).sum())


def measure(
    head: Head, teacher: Teacher, kinds: Mapping[str, Sequence[Ids]], num_steps: int
) -> dict[str, Rightness]:
    told = teacher.model.generation_config.eos_token_id
    ends = told if isinstance(told, list) else [] if told is None else [told]
    return {
        kind: rightness([hits(head, teacher, ids, ends, num_steps) for ids in beginnings])
        for kind, beginnings in kinds.items()
    }


def rightness(hits: list[Tensor]) -> Rightness:
    reached = torch.cat(hits, dim=1).long().cumprod(0).sum(1)
    chains = sum(each.shape[1] for each in hits)
    of = [chains, *reached.tolist()]
    shares = [round(n / max(before, 1), 4) for before, n in pairwise(of)]
    return Rightness(len(hits), chains, shares)


@torch.no_grad()
def hits(
    head: Head, teacher: Teacher, beginning: Ids, ends: Sequence[int], num_steps: int
) -> Tensor:
    """[steps, chains] of one text: whether a chain's draft token is the target's."""
    start = torch.from_numpy(beginning.astype(np.int64)).to(teacher.model.device)
    ids = torch.cat([start, greedy(teacher.model, start, ends)])
    aux_hidden_states, _ = teacher.read(ids)
    steps = head(aux_hidden_states[None, :-1], teacher.embed(ids[None, 1:]), num_steps)
    said = [teacher.vocabulary[head.logits(rows)[0].argmax(-1)] for rows in steps]
    is_right = torch.stack([drafts[:-1] == ids[2:] for drafts in said])
    # The first chain begins after the target's first token: row i predicts token i + 2.
    first, last = len(beginning) - 1, len(ids) - 2 - num_steps
    columns = torch.arange(first, max(first, last + 1), device=ids.device)
    return torch.stack([row[columns + step] for step, row in enumerate(is_right)])


def greedy(model: Any, ids: Tensor, ends: Sequence[int]) -> Tensor:
    """At most LENGTH tokens."""
    cache, said = DynamicCache(), list[Tensor]()
    while len(said) < LENGTH and not (said and int(said[-1]) in ends):
        out = model(ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = out.logits[0, -1].argmax(-1, keepdim=True)
        said.append(ids)
    return torch.cat(said)
