"""Next-token and distillation loss, over the positions of a batch that have a label."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve_bench.demo.batches import IGNORED, Batch

PART = {"cpu": 512, "cuda": 8192}  # rows of logits at a time: caches, and launches, are few
CAUSAL = {"full_attention": None}  # to look whether a mask is needed would wait for the device

Loss = Callable[[Batch], Tensor]  # in nats a label, on the model's device; adds its gradients


def next_token_loss(model: Any) -> Loss:
    def loss(b: Batch) -> Tensor:
        drawn = labelled(b, model.device)
        padding = -len(drawn.labels) % PART[model.device.type]
        labels = F.pad(drawn.labels, (0, padding), value=IGNORED)

        def entropy(logits: Tensor, part: slice) -> Tensor:
            return F.cross_entropy(logits, labels[part], reduction="sum", ignore_index=IGNORED)

        return by_parts(model, drawn, entropy)

    return loss


def distillation_loss(draft: Any, target: Any) -> Loss:
    """KL(target || draft) over the positions that have a label (Hinton et al. 2015, T = 1)."""

    def loss(b: Batch) -> Tensor:
        drawn = labelled(b, draft.device)
        with torch.no_grad():
            wanted = hidden_of_labels(target, drawn)

        def divergence(logits: Tensor, part: slice) -> Tensor:
            with torch.no_grad():
                want = target.lm_head(wanted[part]).float().log_softmax(-1)
            return F.kl_div(logits.log_softmax(-1), want, reduction="sum", log_target=True)

        return by_parts(draft, drawn, divergence)

    return loss


class Labelled(NamedTuple):
    """A batch on a device. Its labels are counted on the host: no step waits for the device."""

    token_ids: Tensor  # [B, L]
    places: Tensor  # [n] indices of the flat token_ids with a label
    labels: Tensor  # [n]


def labelled(b: Batch, device: torch.device) -> Labelled:
    is_marked = b.labels != IGNORED
    columns = [b.token_ids, is_marked.flatten().nonzero()[:, 0], b.labels[is_marked]]
    if device.type == "cuda":
        columns = [column.pin_memory() for column in columns]  # so that copies do not wait
    return Labelled(*(column.to(device, non_blocking=True) for column in columns))


def by_parts(model: Any, drawn: Labelled, sum_of: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """The mean loss of the labels; adds its gradients. `sum_of` sums over [PART, V] float32 logits.

    All logits at once would take gigabytes. Zeros fill the last part to PART rows: libraries cache
    buffers by shape, and many shapes fragment the heap.
    """
    if not len(drawn.labels):  # short rows may lie within questions
        return torch.zeros((), device=model.device)
    hidden = hidden_of_labels(model, drawn)
    total, gradient = of_parts(hidden, model.lm_head, len(drawn.labels), sum_of)
    torch.autograd.backward(hidden, gradient)
    return total


def of_parts(
    hidden: Tensor, head: Any, count: float, sum_of: Callable[[Tensor, slice], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The sums over `count`, and the gradients of `hidden`; adds those of the head."""
    total = torch.zeros((), device=hidden.device)
    leaf = hidden.detach().requires_grad_()
    rows = PART[hidden.device.type]
    for start in range(0, len(leaf), rows):
        part = slice(start, start + rows)
        value = sum_of(head(leaf[part]).float(), part) / count
        torch.autograd.backward(value)
        total += value.detach()
    return total, leaf.grad


def hidden_of_labels(model: Any, drawn: Labelled) -> Tensor:
    """[n, hidden] of the positions that have a label, filled up.

    Zeros make uniform logits of any model, so they add nothing to a divergence.
    """
    out = model.model(drawn.token_ids, attention_mask=CAUSAL)
    return filled(out.last_hidden_state.flatten(0, 1).index_select(0, drawn.places))


def filled(rows: Tensor) -> Tensor:
    """Up to a multiple of PART, with rows of zeros."""
    return F.pad(rows, (0, 0, 0, -len(rows) % PART[rows.device.type]))
