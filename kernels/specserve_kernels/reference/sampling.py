"""Choosing tokens: edits, masks, filters, counter-based Gumbel noise, argmax."""

import torch
from torch import Tensor

from specserve_kernels.types import NO_TOKEN, NOT_FINITE, Edits, Logprobs, Masks, SampleParams

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def sample(logits: Tensor, rows: Tensor, params: SampleParams) -> Tensor:
    """argmax(transform(logits) + noise) of some rows; ties go to the lowest id.

    logits  [R, V]  float32
    rows    [n]     int64  which row of the logits each token is chosen from
    ->      [n]     int64  NO_TOKEN or NOT_FINITE if the greatest number of a row is not finite

    The order: edits, mask, temperature, min_p, top_k, top_p, noise. At T = 0 edits and mask alone.
    """
    out = []
    for i, r in enumerate(rows.tolist()):
        z = allowed(edited(logits[r], params.edits, i), params.masks, i)
        z = transform(z, *(float(x[i]) for x in params[:4]))
        if params.temperature[i] > 0:
            z = z + gumbel(int(params.seeds[i]), int(params.token_index[i]), len(z))
        most = z.max()  # NaN if any number is
        if most.isfinite():
            out.append(int((z == most).nonzero()[0]))
        else:
            out.append(NO_TOKEN if most < 0 else NOT_FINITE)
    return torch.tensor(out, dtype=torch.int64)


def logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Log-probabilities by the model's own logits: no edit, mask, temperature or filter counts.

    logits  [R, V]  float32
    rows    [n]     int64  the row of the logits in which each token stands
    tokens  [n]     int64  drawn from there, or given
    k       0 to V
    """
    x = logits[rows].double()
    order = x.sort(dim=1, descending=True, stable=True).indices  # ties: the lowest id first
    law = x.log_softmax(1).float()
    at, ids = tokens[:, None], order[:, :k].contiguous()
    rank = 1 + (order == at).long().argmax(1)
    return Logprobs(law.gather(1, at)[:, 0], rank, ids, law.gather(1, ids))


def edited(x: Tensor, edits: Edits | None, i: int) -> Tensor:
    """A row's logits after its edits. An edit reads the row as it was, so that the last one of an
    id is the only one.

    x  [V]  float32
    """
    if edits is None:
        return x
    z = x.clone()
    for begin, end in (edits.base[i].tolist(), edits.own[i].tolist()):
        ids, bias, factor, penalty = (list_[begin:end] for list_ in edits[2:])
        y = x[ids] + bias
        z[ids] = torch.where(y > 0, y / factor, y * factor) - penalty
    return z


def allowed(z: Tensor, masks: Masks | None, i: int) -> Tensor:
    """A row's logits, -inf where its mask forbids the id.

    z  [V]  float32
    """
    if masks is None or masks.number[i] == 0:
        return z
    words, id = masks.words[int(masks.number[i]) - 1], torch.arange(len(z))
    return z.masked_fill((words[id // 32] >> id % 32) & 1 == 0, -torch.inf)


def transform(z: Tensor, temperature: float, top_k: float, top_p: float, min_p: float) -> Tensor:
    """Logits over temperature, with -inf where min_p, top_k and top_p, in this order, rule out.

    z  [V]  float32
    """
    if temperature == 0:
        return z
    z = z / temperature
    if min_p > 0:
        z = z.masked_fill(z < z.max() + torch.tensor(min_p).log(), -torch.inf)
    order = z.sort(descending=True, stable=True).indices  # ties: the lowest id first
    if top_k > 0:
        z = z.index_fill(0, order[int(top_k) :], -torch.inf)
    if top_p < 1:
        p = z[order].double().sub(z.max().double()).exp()
        before = p.cumsum(0) - p
        out = before >= top_p * p.sum()
        z = z.index_fill(0, order[1:][out[1:]], -torch.inf)  # the likeliest stays at any top_p
    return z


def gumbel(seed: int, index: int, V: int) -> Tensor:
    """G of every token id at one position; Gumbel(0, 1), a function of seed, index and id only.

    ->  [V]  float32

    Philox4x32-10 (Salmon et al., SC'11) with the 64 bits of the seed as key and
    counter = (id // 4, index, 0, 0); id takes the word id % 4. Large noise comes from u near 0,
    where float32 is dense, so that rounding never gives 0: u in (0, 1 - 2^-24], and
    G = -log(-log1p(-u)) <= 22.9.
    """
    quad = torch.arange((V + 3) // 4, dtype=torch.int64)
    zero = torch.zeros_like(quad)
    words = philox((quad, zero + index, zero, zero), (seed & _WORD, seed >> 32 & _WORD))
    r = torch.stack(words, dim=1).flatten()[:V].float()
    u = torch.clamp((r + 0.5) * 2.0**-32, max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four random 32-bit words for each counter, as int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(_MULTIPLIERS[0], c0)
        hi1, lo1 = _mul_hi_lo(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _mul_hi_lo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of a 32 x 32 bit product, in halves that int64 can hold."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def top_children(logits: Tensor, params: SampleParams, k: int, tau: float) -> tuple[Tensor, Tensor]:
    """The k likeliest draws of the target, according to a draft model with the same noise.

    logits  [R, V]  float32  the draft model's
    params  of R rows; temperature, seeds and token_index only
    ->      [R, k]  int64    ids, the likeliest first
    ->      [R, k]  float32  log softmax(z / tau), with z = logits / temperature + noise

    With the noise of the target's own draw the ranking is coupled to it (Daliri et al.
    2408.07978). tau is how far the target is expected to differ: towards 0 the first id gets all of
    the weight; at 1 and T = 0 the weights are the draft model's probabilities.
    """
    rows = []
    for i, row in enumerate(logits):
        z, t = row, float(params.temperature[i])
        if t > 0:
            z = row / t + gumbel(int(params.seeds[i]), int(params.token_index[i]), len(row))
        rows.append((z / tau).log_softmax(-1))
    weight = torch.stack(rows)
    order = weight.sort(dim=1, descending=True, stable=True)
    return order.indices[:, :k].contiguous(), order.values[:, :k].contiguous()
