"""Sampling: logit edits, masks, filters, counter-based Gumbel noise, argmax."""

import torch
from torch import Tensor

from specserve_kernels.types import NO_TOKEN, NOT_FINITE, Edits, Logprobs, Masks, SampleParams

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def sample(logits: Tensor, rows: Tensor, params: SampleParams) -> Tensor:
    """Return argmax(transform(logits) + noise) of some rows. Ties go to the lowest id.

    logits  [R, V]  float32
    rows    [n]     int64  the row of the logits for each token
    ->      [n]     int64  NO_TOKEN or NOT_FINITE if a row's maximum is not finite

    The order is: edits, mask, temperature, min_p, top_k, top_p, noise. At temperature 0, only edits
    and mask apply.
    """
    out = []
    for i, r in enumerate(rows.tolist()):
        z = allowed(edited(logits[r], params.edits, i), params.masks, i)
        z = transform(z, *(float(x[i]) for x in params[:4]))
        if params.temperature[i] > 0:
            z = z + gumbel(int(params.seeds[i]), int(params.token_index[i]), len(z))
        most = z.max()  # NaN if any value is NaN
        if most.isfinite():
            out.append(int((z == most).nonzero()[0]))
        else:
            out.append(NO_TOKEN if most < 0 else NOT_FINITE)
    return torch.tensor(out, dtype=torch.int64)


def logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Return log-probabilities of the unmodified logits: no edits, mask, temperature or filters.

    logits  [R, V]  float32
    rows    [n]     int64  the row of the logits for each token
    tokens  [n]     int64  sampled or given tokens
    k       number of most probable tokens to return, 0 to V
    """
    x = logits[rows].double()
    order = x.sort(dim=1, descending=True, stable=True).indices  # ties: the lowest id first
    law = x.log_softmax(1).float()
    at, ids = tokens[:, None], order[:, :k].contiguous()
    rank = 1 + (order == at).long().argmax(1)
    return Logprobs(law.gather(1, at)[:, 0], rank, ids, law.gather(1, ids))


def edited(x: Tensor, edits: Edits | None, i: int) -> Tensor:
    """Return a row's logits after its edits.

    Each edit reads the unedited logits, so only the last edit of an id takes effect.

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
    """Return a row's logits, with -inf for each id that its mask forbids.

    z  [V]  float32
    """
    if masks is None or masks.number[i] == 0:
        return z
    words, id = masks.words[int(masks.number[i]) - 1], torch.arange(len(z))
    return z.masked_fill((words[id // 32] >> id % 32) & 1 == 0, -torch.inf)


def transform(z: Tensor, temperature: float, top_k: float, top_p: float, min_p: float) -> Tensor:
    """Return logits / temperature, with -inf for ids that min_p, top_k or top_p exclude, in this
    order.

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
        z = z.index_fill(0, order[1:][out[1:]], -torch.inf)  # keep the most probable
    return z


def gumbel(seed: int, index: int, V: int) -> Tensor:
    """Return Gumbel(0, 1) noise G of every token id: a function of seed, index and id only.

    ->  [V]  float32

    The generator is Philox4x32-10 (Salmon et al., SC'11). Its key is the 64-bit seed, its counter
    (id // 4, index, 0, 0); an id uses the word id % 4. The noise is G = -log(-log1p(-u)) <= 22.9,
    with u in (0, 1 - 2^-24]. Large noise comes from u near 0; float32 is dense there, so u never
    rounds to 0.
    """
    quad = torch.arange((V + 3) // 4, dtype=torch.int64)
    zero = torch.zeros_like(quad)
    words = philox((quad, zero + index, zero, zero), (seed & _WORD, seed >> 32 & _WORD))
    r = torch.stack(words, dim=1).flatten()[:V].float()
    u = torch.clamp((r + 0.5) * 2.0**-32, max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four random 32-bit words for each counter, as int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(_MULTIPLIERS[0], c0)
        hi1, lo1 = _mul_hi_lo(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _mul_hi_lo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a 32 x 32 bit product, without int64 overflow."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def top_children(logits: Tensor, params: SampleParams, k: int, tau: float) -> tuple[Tensor, Tensor]:
    """Return the k most probable draws of the target model, estimated from draft-model logits.

    logits  [R, V]  float32  the draft model's
    params  of R rows; only temperature, seeds and token_index are used

    ->      [R, k]  int64    ids, the most probable first
    ->      [R, k]  float32  log softmax(z / tau), with z = logits / temperature + noise

    The noise equals the noise of the target model's draw, which couples the two draws (Daliri et
    al. 2408.07978). The parameter tau is the expected difference between the models. Towards 0 the
    first id gets all of the weight; at tau 1 and T = 0 the weights are the draft model's
    probabilities.
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
