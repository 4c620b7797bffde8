"""Sampling: each row's filters are reduced to one bound, then an argmax runs in splits.

A program with top_k reads its row twice. The k-th greatest of the maxima of groups of ids is a
lower bound of the k-th greatest value. The values from this bound up usually fit into registers.

If rows of a step have edits or masks, all rows are first rewritten in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels import types
from specserve_kernels.types import Edits, Masks, SampleParams


@triton.jit
def gumbel(seed, index, first, BLOCK: tl.constexpr):
    """Return the noise of the ids [first, first + BLOCK); `first` and BLOCK are multiples of 4."""
    quad = first // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = tl.philox(seed, quad, index.to(tl.int32), 0, 0)  # 10 rounds by default
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # w0 w1 w2 w3 per quad
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    w = 1.0 - u
    # log1p(-u) = log(w) * u / (1 - w) undoes the rounding of w (Kahan). If w = 1, it is -u.
    is_one = w == 1.0
    e = tl.where(is_one, u, -tl.log(w) * (u / tl.where(is_one, 1.0, 1.0 - w)))
    return -tl.log(e)


NO_TOKEN, NOT_FINITE = tl.constexpr(types.NO_TOKEN), tl.constexpr(types.NOT_FINITE)
LOWEST = tl.constexpr(-(2**63))  # a rank below every candidate
_SPLIT = 1024  # ids per program; a single row of 152k ids then fills a GPU
_BLOCK = 8192  # ids of a row that one program loads at once
_FEW = tl.constexpr(1024)  # values that one program keeps in registers


def sample(logits: Tensor, rows: Tensor, params: SampleParams) -> Tensor:
    """Same as the reference op. All tensors are on the device, and the host does not wait.

    The launches depend only on shapes, because the device reads the parameters.
    """
    V, n = logits.shape[1], len(rows)
    if not params.is_plain:
        logits = edited(logits, rows, params)
        rows = torch.arange(n, device=logits.device)
    bound, last = bounds(logits, rows, params)
    block = min(_SPLIT, max(4, triton.next_power_of_2(V)))
    splits = triton.cdiv(V, block)
    best, out = rows.new_empty(n * splits), rows.new_empty(n)
    asked = params.temperature, params.seeds, params.token_index
    _best_of_split[(n, splits)](logits, rows, *asked, bound, last, best, V, BLOCK=block)
    _best_of_all[(n,)](best, out, splits, BLOCK=triton.next_power_of_2(splits))
    return out


def edited(logits: Tensor, rows: Tensor, params: SampleParams) -> Tensor:
    """Return the rows after their edits and masks, [n, V] float32."""
    for x in (logits, rows, *params.tensors()):
        assert x.is_contiguous(), "a tensor is not contiguous"
    V, n = logits.shape[1], len(rows)
    out = logits.new_empty(n, V, dtype=torch.float32)
    edits = params.edits or [None] * len(Edits._fields)
    masks = params.masks or [None] * len(Masks._fields)
    block = min(_BLOCK, triton.next_power_of_2(V))
    given = logits, rows, *edits, *masks, out
    # Without fusion, a penalized logit is rounded as in the reference.
    _edit[(n,)](*given, V, BLOCK=block, num_warps=32, enable_fp_fusion=False)
    return out


def bounds(logits: Tensor, rows: Tensor, params: SampleParams) -> tuple[Tensor, Tensor]:
    """Reduce each row's filters to a bound. Values above it pass; equal values pass up to an id.

    ->  [n]  float32  the bounds, on logits / temperature
    ->  [n]  int32    the last id that passes at the bound
    """
    for x in (logits, rows, *params.tensors()):
        assert x.is_contiguous(), "a tensor is not contiguous"
    V, n = logits.shape[1], len(rows)
    block = min(_BLOCK, triton.next_power_of_2(V))
    scaled = logits.new_empty(n, V, dtype=torch.float32)
    kept = scaled.new_empty(n, _FEW.value)
    ids = scaled.new_empty(n, _FEW.value + 1, dtype=torch.int32)
    bound, last = scaled.new_empty(n), scaled.new_empty(n, dtype=torch.int32)
    groups = min(_FEW.value, block)
    out = scaled, kept, ids, bound, last
    _bounds[(n,)](logits, rows, *params[:4], *out, V, BLOCK=block, GROUPS=groups, num_warps=32)
    return bound, last


@triton.jit
def _edit(
    logits,
    rows,
    base,
    own,
    ids,
    bias,
    factor,
    penalty,
    number,
    words,
    out,
    V,
    BLOCK: tl.constexpr,
):
    """Edit a row. Each edit reads the original logits, so only an id's last edit takes effect."""
    i, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x, z = logits + tl.load(rows + i) * V, out + i * V
    mask, has_mask = None, False
    if number is not None:
        place = tl.load(number + i).to(tl.int64)
        mask, has_mask = words + (place - 1) * ((V + 31) // 32), place > 0
    for start in range(0, V, BLOCK):
        id = start + lane
        value = tl.load(x + id, mask=id < V, other=0.0).to(tl.float32)
        tl.store(z + id, _allowed(value, id, mask, has_mask & (id < V)), mask=id < V)
    if base is not None:
        for edits in tl.static_range(2):
            at = (own if edits else base) + 2 * i
            end = tl.load(at + 1)
            tl.debug_barrier()  # other threads may write the same ids
            for start in range(tl.load(at), end, BLOCK):
                e = start + lane
                is_edit = e < end
                id = tl.load(ids + e, mask=is_edit, other=0)
                y = tl.load(x + id, mask=is_edit, other=0.0).to(tl.float32)
                y += tl.load(bias + e, mask=is_edit, other=0.0)
                f = tl.load(factor + e, mask=is_edit, other=1.0)
                y = tl.where(y > 0, tl.div_rn(y, f), y * f)
                y -= tl.load(penalty + e, mask=is_edit, other=0.0)
                tl.store(z + id, _allowed(y, id, mask, has_mask & is_edit), mask=is_edit)


@triton.jit
def _allowed(value, id, mask, is_masked):
    if mask is not None:
        word = tl.load(mask + id // 32, mask=is_masked, other=-1)
        value = tl.where((word >> (id % 32)) & 1 != 0, value, float("-inf"))
    return value


@triton.jit
def _bounds(
    logits,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    scaled,
    kept,
    ids,
    bounds,
    lasts,
    V,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    t, k = tl.load(temperature + i), tl.load(top_k + i)
    p, share = tl.load(top_p + i), tl.load(min_p + i)
    has_top_k, has_top_p = (k > 0) & (k < V), p < 1
    bound, last = float("-inf"), V
    if (t > 0) & (has_top_k | has_top_p | (share > 0)):
        z = scaled + i * V
        bound, most, mosts = _scale(logits + tl.load(rows + i) * V, z, t, V, BLOCK)
        if share > 0:
            bound = most + tl.log(share)
        if has_top_k | has_top_p:
            size = V + _FEW
            if has_top_k:
                of_groups = tl.max(tl.reshape(mosts, [BLOCK // GROUPS, GROUPS]), 0)
                cut = _least(of_groups, tl.full([GROUPS], 1, tl.int32), bound, most, k)
                size = _keep(z, kept + i * _FEW, ids + i * (_FEW + 1), V, cut, BLOCK)
            if size <= _FEW:
                place = tl.arange(0, _FEW)
                few = tl.load(kept + i * _FEW + place, mask=place < size, other=float("-inf"))
                bound, room, equal = _cut_few(few, bound, most, k, p, has_top_p)
                if room < equal:
                    id = tl.load(ids + i * (_FEW + 1) + place, mask=place < size, other=V)
                    last = _nth_id(tl.where(few == bound, id, V), V, room)
            else:
                bound, room, equal = _cut(z, V, bound, most, k, p, has_top_k, has_top_p, BLOCK)
                if room < equal:
                    last = _last_kept(z, V, bound, room, BLOCK)
    tl.store(bounds + i, bound)
    tl.store(lasts + i, last)


@triton.jit
def _scale(x, z, temperature, V, BLOCK: tl.constexpr):
    """Write z = x / temperature; return its least finite value, its maximum, and each lane's
    maximum.
    """
    lane = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        is_id = start + lane < V
        value = tl.load(x + start + lane, mask=is_id, other=float("-inf")).to(tl.float32)
        value = tl.div_rn(value, temperature)
        # The searches end only for finite numbers. Other rows give no token.
        value = tl.where(value < float("inf"), value, float("-inf"))
        tl.store(z + start + lane, value, mask=is_id)
        least = tl.minimum(least, tl.where(value > float("-inf"), value, float("inf")))
        most = tl.maximum(most, value)
    tl.debug_barrier()  # other threads read these values
    return tl.min(least, 0), tl.max(most, 0), most


@triton.jit
def _least(values, weights, low, high, enough):
    """Return the least value in [low, high] with less than `enough` weight above it.

    The rounds are the same as in `_search`.
    """
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle < high, middle, low)  # adjacent floats have no number between them
        is_above = values > middle
        if tl.sum(tl.where(is_above, weights, 0), 0) < enough:
            high = tl.max(tl.where(is_above, float("-inf"), values), 0)
        else:
            low = tl.min(tl.where(is_above, values, float("inf")), 0)
    return low


@triton.jit
def _keep(z, kept, ids, V, cut, BLOCK: tl.constexpr):
    """Store a row's values >= `cut` and their ids, in any order, up to _FEW; return their number.
    The element after the ids is the counter.
    """
    lane = tl.arange(0, BLOCK)
    counter = ids + _FEW
    tl.store(counter, 0)
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        value = tl.load(z + start + lane, mask=start + lane < V, other=float("-inf"))
        is_kept = (value >= cut) & (start + lane < V)
        place = tl.atomic_add(counter + 0 * lane, 1, mask=is_kept, sem="relaxed", scope="cta")
        has_room = is_kept & (place < _FEW)
        tl.store(kept + place, value, mask=has_room)
        tl.store(ids + place, start + lane, mask=has_room)
    tl.debug_barrier()
    return tl.load(counter)


@triton.jit
def _nth_id(ids, V, n):
    """Return the n-th lowest id; at least n ids are below V."""
    low, high = 0, V
    while low < high:
        middle = (low + high) // 2
        if tl.sum((ids <= middle).to(tl.int32), 0) < n:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _cut_few(few, bound, most, k, p, has_top_p):
    """Same as `_cut` with top_k, for a row whose k greatest values are in registers."""
    one = tl.full([_FEW], 1, tl.int32)
    bound = _least(few, one, bound, most, k)
    equal = tl.sum(tl.where(few == bound, one, 0), 0)
    room = k - tl.sum(tl.where(few > bound, one, 0), 0)
    if has_top_p:
        mass = tl.where(few > float("-inf"), _mass(few, most), 0.0)
        total = tl.sum(tl.where(few > bound, mass, 0.0), 0)
        total += tl.minimum(room, equal) * _mass(bound, most)
        enough = p.to(tl.float64) * total
        bound = _least(few, mass, bound, most, enough)
        equal = tl.sum(tl.where(few == bound, one, 0), 0)
        room = _fitting(bound, most, enough, tl.sum(tl.where(few > bound, mass, 0.0), 0))
    return bound, room, equal


@triton.jit
def _fitting(bound, most, enough, above):
    """Return how many values at the bound top_p keeps, given the mass above it."""
    fit = tl.ceil((enough - above) / _mass(bound, most))
    return tl.where(fit > 1, fit, 1.0).to(tl.int32)  # keep the most probable


@triton.jit
def _cut(z, V, bound, most, k, p, has_top_k, has_top_p, BLOCK: tl.constexpr):
    """Return the bound after top_k and top_p, and how many of the values at it pass and exist."""
    if has_top_k:
        bound = _search(z, V, bound, most, k, False, BLOCK)
    above, mass, equal, _, _ = _survey(z, V, bound, most, BLOCK)
    room = tl.where(has_top_k, k - above, equal)
    if has_top_p:
        mass += tl.minimum(room, equal) * _mass(bound, most)
        enough = p.to(tl.float64) * mass
        bound = _search(z, V, bound, most, enough, True, BLOCK)
        _, mass, equal, _, _ = _survey(z, V, bound, most, BLOCK)
        room = _fitting(bound, most, enough, mass)
    return bound, room, equal


@triton.jit
def _search(z, V, low, most, enough, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the least value in [low, most] with less than `enough` above it.

    `low` need not be a value of the row. A round halves [low, high], then moves the end to the next
    value of the row. Logits take about a dozen rounds, any finite floats fewer than 300.
    """
    high = most
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle < high, middle, low)  # adjacent floats have no number between them
        above, mass, _, upper, lower = _survey(z, V, middle, most, BLOCK)
        if (mass if BY_MASS else above) < enough:
            high = lower
        else:
            low = upper
    return low


@triton.jit
def _survey(z, V, cut, most, BLOCK: tl.constexpr):
    """Compare a row's values with `cut`.

    ->  number and mass of the values above it; number of equal values; least value above it, and
        greatest value not above it
    """
    lane = tl.arange(0, BLOCK)
    above, equal = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    upper = tl.full([BLOCK], float("inf"), tl.float32)
    lower = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        value = tl.load(z + start + lane, mask=start + lane < V, other=float("-inf"))
        is_above = value > cut
        above += is_above.to(tl.int32)
        equal += (value == cut).to(tl.int32)
        mass += tl.where(is_above, _mass(value, most), 0.0)
        upper = tl.minimum(upper, tl.where(is_above, value, float("inf")))
        lower = tl.maximum(lower, tl.where(is_above, float("-inf"), value))
    return tl.sum(above, 0), tl.sum(mass, 0), tl.sum(equal, 0), tl.min(upper, 0), tl.max(lower, 0)


@triton.jit
def _mass(z, most):
    return tl.exp(z - most).to(tl.float64)


@triton.jit
def _last_kept(z, V, bound, room, BLOCK: tl.constexpr):
    """Return the id of the `room`-th token at the bound, or of the last if there are fewer."""
    lane = tl.arange(0, BLOCK)
    seen, last = 0, -1
    for start in range(0, V, BLOCK):
        value = tl.load(z + start + lane, mask=start + lane < V, other=float("-inf"))
        is_equal = value == bound
        nth = seen + tl.cumsum(is_equal.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(is_equal & (nth <= room), start + lane, -1), 0))
        seen += tl.sum(is_equal.to(tl.int32), 0)
    return last


@triton.jit
def _best_of_split(
    logits, rows, temperature, seeds, index, bounds, lasts, best, V, BLOCK: tl.constexpr
):
    """Find the best candidate among the ids of a split."""
    i, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id = split * BLOCK + tl.arange(0, BLOCK)
    x = logits + tl.load(rows + i) * V + id
    z = tl.load(x, mask=id < V, other=float("-inf")).to(tl.float32)
    t = tl.load(temperature + i)
    if t > 0:
        z = tl.div_rn(z, t)
        bound, last = tl.load(bounds + i), tl.load(lasts + i)
        is_out = (z < bound) | ((z == bound) & (id > last))  # keeps NaN
        noise = gumbel(tl.load(seeds + i), tl.load(index + i), split * BLOCK, BLOCK)
        z = tl.where(is_out, float("-inf"), z + noise)
    tl.store(best + i * tl.num_programs(1) + split, tl.max(rank(z, id), 0))


@triton.jit
def _best_of_all(best, out, splits, BLOCK: tl.constexpr):
    """Write the id of the best candidate; NO_TOKEN or NOT_FINITE if its value is not finite."""
    i, split = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    candidate = tl.load(best + i * splits + split, mask=split < splits, other=LOWEST)
    first = tl.max(candidate, 0)
    value = ranked_value(first)
    neither = tl.where(value == float("-inf"), NO_TOKEN, NOT_FINITE)
    tl.store(out + i, tl.where(tl.abs(value) < float("inf"), ranked_id(first), neither))


@triton.jit
def rank(value, id):
    """Return a candidate's rank as one number: greater values rank first, then lower ids.

    NaN ranks before every other value, as id 0.
    """
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0 is 0
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    is_nan = value != value
    key, id = tl.where(is_nan, 0x7FFFFFFF, key), tl.where(is_nan, 0, id)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - id).to(tl.int64)


@triton.jit
def ranked_id(rank):
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF)


@triton.jit
def ranked_value(rank):
    key = (rank >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
