"""The training-time test of EAGLE-3 (Li et al. 2503.01840).

A head learns from features that it computed itself, because it drafts from such features.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve_bench.demo.batches import IGNORED, Batch
from specserve_bench.demo.head_model import Head
from specserve_bench.demo.losses import Loss, filled, labelled, of_parts


class Teacher(NamedTuple):
    """A frozen target, its layers that a head reads, and the tokens that the head knows."""

    model: Any
    aux_layer_ids: tuple[int, ...]
    vocabulary: Tensor  # [draft V] int64, ascending

    def embed(self, token_ids: Tensor) -> Tensor:
        """As stored: some families scale them, which the head's norm undoes."""
        return F.embedding(token_ids, self.model.get_input_embeddings().weight).float()

    @torch.no_grad()
    def read(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Aux hidden states [L, n * hidden] and logits [L, V] of one text, float32."""
        out = self.model(token_ids[None], output_hidden_states=True, use_cache=False)
        aux_hidden_states = [out.hidden_states[layer][0] for layer in self.aux_layer_ids]
        return torch.cat(aux_hidden_states, dim=-1).float(), out.logits[0].float()

    def known(self, logits: Tensor) -> Tensor:
        """The target's probabilities of the head's tokens: where these are few, their sum is small,
        and such a row counts little.
        """
        return logits.softmax(-1)[:, self.vocabulary]


def head_loss(head: Head, teacher: Teacher, draft_steps: int, step_weight: float) -> Loss:
    """Cross-entropy, in nats a label, mean over the draft steps; only of response tokens."""
    weights = [step_weight**step for step in range(draft_steps)]

    def loss(b: Batch) -> Tensor:
        drawn = labelled(head_inputs(b, draft_steps), teacher.model.device)
        total = torch.zeros((), device=teacher.model.device)
        if not len(drawn.labels):
            return total
        aux_hidden_states, wanted = lesson(teacher, b, drawn.places)

        def entropy(logits: Tensor, part: slice) -> Tensor:
            return F.cross_entropy(logits, wanted[part], reduction="sum")

        rows, gradients = head(aux_hidden_states, teacher.embed(drawn.token_ids), draft_steps), []
        chosen = [filled(row.flatten(0, 1)[drawn.places]) for row in rows]
        normed = [head.norm(row) for row in chosen]
        for row, weight in zip(normed, weights, strict=True):
            count = len(drawn.labels) * sum(weights) / weight
            value, gradient = of_parts(row, head.lm_head, count, entropy)
            gradients.append(gradient)
            total += value
        torch.autograd.backward(normed, gradients)
        return total

    return loss


def head_inputs(b: Batch, draft_steps: int) -> Batch:
    """Row i has token i + 1, and predicts token i + 2. The first rows are left out, as the last
    draft step has no features for them.
    """
    labels = b.labels[:, 1:].clone()
    labels[:, : draft_steps - 1] = IGNORED
    return Batch(b.token_ids[:, 1:], labels)


def lesson(teacher: Teacher, b: Batch, places: Tensor) -> tuple[Tensor, Tensor]:
    """Aux hidden states [B, L - 1, n * hidden], and the target's probabilities [n, draft V],
    padded. One text at a time: all logits would take gigabytes.
    """
    features, likely = [], []
    length = b.token_ids.shape[1] - 1
    for i, token_ids in enumerate(b.token_ids.to(teacher.model.device)):
        aux_hidden_states, logits = teacher.read(token_ids)
        features.append(aux_hidden_states[:-1])
        own = places[(places >= i * length) & (places < (i + 1) * length)] - i * length
        likely.append(teacher.known(logits[1:][own]))
    return torch.stack(features), filled(torch.cat(likely))
