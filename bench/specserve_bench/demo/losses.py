"""Next-token and distillation loss, over the positions of a batch that have a label."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve_bench.demo.batches import IGNORED, Batch

PART = 512  # rows of logits at a time

Loss = Callable[[Batch], float]  # in nats a label; adds its gradients


def next_token_loss(model: Any) -> Loss:
    def loss(b: Batch) -> float:
        labels = b.labels[b.labels != IGNORED]
        labels = F.pad(labels, (0, -len(labels) % PART), value=IGNORED)

        def entropy(logits: Tensor, part: slice) -> Tensor:
            return F.cross_entropy(logits, labels[part], reduction="sum", ignore_index=IGNORED)

        return by_parts(model, b, entropy)

    return loss


def distillation_loss(draft: Any, target: Any) -> Loss:
    """KL(target || draft) over the positions that have a label (Hinton et al. 2015, T = 1)."""

    def loss(b: Batch) -> float:
        with torch.no_grad():
            wanted = hidden_of_labels(target, b)

        def divergence(logits: Tensor, part: slice) -> Tensor:
            with torch.no_grad():
                want = target.lm_head(wanted[part]).float().log_softmax(-1)
            return F.kl_div(logits.log_softmax(-1), want, reduction="sum", log_target=True)

        return by_parts(draft, b, divergence)

    return loss


def by_parts(model: Any, b: Batch, sum_of: Callable[[Tensor, slice], Tensor]) -> float:
    """The mean loss of the labels; adds its gradients. `sum_of` sums over [PART, V] float32 logits.

    All logits at once would take gigabytes. Zeros fill the last part to PART rows: libraries cache
    buffers by shape, and many shapes fragment the heap.
    """
    hidden = hidden_of_labels(model, b)
    leaf, total = hidden.detach().requires_grad_(), 0.0
    num_labels = int((b.labels != IGNORED).sum())
    for start in range(0, len(leaf), PART):
        part = slice(start, start + PART)
        value = sum_of(model.lm_head(leaf[part]).float(), part) / num_labels
        torch.autograd.backward(value)
        total += value.item()
    torch.autograd.backward(hidden, leaf.grad)
    return total


def hidden_of_labels(model: Any, b: Batch) -> Tensor:
    """[n, hidden] of the positions that have a label, filled up to a multiple of PART with zeros.

    Zeros make uniform logits of any model, so they add nothing to a divergence.
    """
    hidden: Tensor = model.model(b.token_ids).last_hidden_state[b.labels != IGNORED]
    return F.pad(hidden, (0, 0, 0, -len(hidden) % PART))
