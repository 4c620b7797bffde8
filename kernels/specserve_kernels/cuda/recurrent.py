"""Heads with a matrix as state: the gated delta rule and Mamba-2, in three launches.

The first computes the inputs of all updates. In the second, a program updates some columns of one
matrix by the rows of a lane, in order. The third normalizes and gates the outputs. Prompts, single
rows, trees and replays run the second as one compiled kernel, so the bits of a state do not depend
on how rows are cut into steps.
"""

import triton
import triton.language as tl
from torch import Tensor, float32

from specserve_kernels.cuda.causal_conv import _piece
from specserve_kernels.cuda.gated import _sigmoid
from specserve_kernels.cuda.state_work import LANE, ROW, StateWork
from specserve_kernels.states import DeltaParams, MambaParams, StateLayer

COLUMNS = 8  # of a program: so that one warp has a matrix of 128 rows in its registers
ROW_WIDTH, LANE_WIDTH = tl.constexpr(ROW), tl.constexpr(LANE)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also where exp(x) is small next to 1."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1 + e
    small = tl.where(u == 1, e, tl.log(u) * (e / tl.where(u == 1, 1.0, u - 1)))
    return tl.where(x > 20, x, small)


@triton.jit
def _head(x, d, D, at):
    """D numbers of a row as floats."""
    return tl.load(x + at + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def _store_kept(kept, place, width, at, v, inside):
    tl.store(kept + place.to(tl.int64) * width + at, v, mask=inside & (place >= 0))


@triton.jit
def _delta_inputs(
    qkv,
    x,
    x_stride,
    rate,
    dt_bias,
    beta_factor,
    q_out,
    inputs,
    kept,
    rows,
    H,
    K,  # key heads
    Dk,
    Dv,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    row, h = tl.program_id(0), tl.program_id(1)
    place = tl.load(rows + row * ROW_WIDTH + 1)
    group, width = H // K, H * (Dk + Dv + 2)
    key, inner = h // group, 2 * K * Dk + H * Dv
    i, j = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    own = qkv + row.to(tl.int64) * inner
    q, k = _head(own, i, Dk, key * Dk), _head(own, i, Dk, (K + key) * Dk)
    q *= 1 / (tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * tl.sqrt(Dk * 1.0))
    k *= 1 / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
    v = _head(own, j, Dv, 2 * K * Dk + h * Dv)
    gates = x + row.to(tl.int64) * x_stride + inner + H * Dv + h
    beta = beta_factor * _sigmoid(tl.load(gates).to(tl.float32))
    dt = tl.load(gates + H).to(tl.float32) + tl.load(dt_bias + h)
    decay = tl.exp(tl.load(rate + h) * _softplus(dt))
    is_first = h % group == 0
    tl.store(q_out + (row.to(tl.int64) * K + key) * Dk + i, q, mask=(i < Dk) & is_first)
    to = inputs + row.to(tl.int64) * width
    tl.store(to + h * Dk + i, k, mask=i < Dk)
    tl.store(to + H * Dk + h * Dv + j, v, mask=j < Dv)
    tl.store(to + H * (Dk + Dv) + h, decay)
    tl.store(to + H * (Dk + Dv + 1) + h, beta)
    _store_kept(kept, place, width, h * Dk + i, k, i < Dk)
    _store_kept(kept, place, width, H * Dk + h * Dv + j, v, j < Dv)
    _store_kept(kept, place, width, H * (Dk + Dv) + h, decay, True)
    _store_kept(kept, place, width, H * (Dk + Dv + 1) + h, beta, True)


@triton.jit
def _mamba_inputs(
    xbc,
    x,
    x_stride,
    rate,
    dt_bias,
    dt_factor,
    q_out,
    inputs,
    kept,
    rows,
    H,
    K,  # groups of heads, which share keys and queries
    Dk,
    Dv,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    row, h = tl.program_id(0), tl.program_id(1)
    place = tl.load(rows + row * ROW_WIDTH + 1)
    group, width = H // K, K * Dk + H * (Dv + 1)
    key, inner = h // group, 2 * K * Dk + H * Dv
    i, j = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    own = xbc + row.to(tl.int64) * inner
    k, q = _head(own, i, Dk, H * Dv + key * Dk), _head(own, i, Dk, H * Dv + (K + key) * Dk)
    dt = tl.load(x + row.to(tl.int64) * x_stride + inner + H * Dv + h).to(tl.float32)
    step = _softplus(dt * dt_factor + tl.load(dt_bias + h))
    v = _head(own, j, Dv, h * Dv) * step
    decay = tl.exp(tl.load(rate + h) * step)
    of_group = (i < Dk) & (h % group == 0)
    tl.store(q_out + (row.to(tl.int64) * K + key) * Dk + i, q, mask=of_group)
    to = inputs + row.to(tl.int64) * width
    tl.store(to + key * Dk + i, k, mask=of_group)
    tl.store(to + K * Dk + h * Dv + j, v, mask=j < Dv)
    tl.store(to + K * Dk + H * Dv + h, decay)
    _store_kept(kept, place, width, key * Dk + i, k, of_group)
    _store_kept(kept, place, width, K * Dk + h * Dv + j, v, j < Dv)
    _store_kept(kept, place, width, K * Dk + H * Dv + h, decay, True)


@triton.jit
def _update(
    inputs, width, q, q_width, row, h, K, sharing, H, Dk, Dv, i, j, is_row, IS_DELTA: tl.constexpr
):
    """The inputs of an update of some columns: query, key, values, decay and beta."""
    at = inputs + row.to(tl.int64) * width
    key = tl.load(at + h // (H // K) * Dk + i, mask=is_row & (i < Dk), other=0.0)
    of_q = q + row.to(tl.int64) * q_width + h // sharing * Dk
    query = tl.load(of_q + i, mask=is_row & (i < Dk), other=0.0)
    v = tl.load(at + K * Dk + h * Dv + j, mask=is_row & (j < Dv), other=0.0)
    decay = tl.load(at + K * Dk + H * Dv + h, mask=is_row, other=0.0)
    beta = decay
    if IS_DELTA:
        beta = tl.load(at + K * Dk + H * Dv + H + h, mask=is_row, other=0.0)
    return query, key, v, decay, beta


@triton.jit(do_not_specialize=["layer_stride", "block_size", "is_read", "q_width", "sharing"])
def _scan(
    inputs,
    width,
    layer_stride,  # of inputs
    q,
    q_width,
    out,
    is_read,  # whether outputs are stored
    memory,
    block_size,
    places,
    lanes,
    order,
    tables,
    H,
    K,  # keys
    sharing,  # heads that share a query
    Dk,
    Dv,
    IS_DELTA: tl.constexpr,
    K_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    own, piece = lanes + tl.program_id(0) * LANE_WIDTH, tl.program_id(1)
    h = piece % H
    inputs += (piece // H).to(tl.int64) * layer_stride
    i, j = tl.arange(0, K_BLOCK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i < Dk)[:, None] & (j < Dv)[None]
    each = i[:, None] * Dv + j[None]
    place, start = tl.load(places + 2 * piece), tl.load(places + 2 * piece + 1)
    begin, end, read = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    write, snapshot, snapshot_at = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    at = memory + _piece(tables, read, place, start, block_size) + each
    S = tl.load(at, mask=inside & (read >= 0), other=0.0)
    copy = memory + _piece(tables, snapshot, place, start, block_size) + each
    copy_after = tl.where(snapshot >= 0, begin + snapshot_at, -2)
    if copy_after == begin:
        tl.store(copy, S, mask=inside)
    row = tl.load(order + begin, mask=begin < end, other=0)
    query, key, v, decay, beta = _update(
        inputs, width, q, q_width, row, h, K, sharing, H, Dk, Dv, i, j, begin < end, IS_DELTA
    )
    for n in range(begin, end):
        # Loads of the next row take their time while this one is computed.
        more = n + 1 < end
        next_row = tl.load(order + n + 1, mask=more, other=0)
        next_query, next_key, next_v, next_decay, next_beta = _update(
            inputs, width, q, q_width, next_row, h, K, sharing, H, Dk, Dv, i, j, more, IS_DELTA
        )
        S *= decay
        if IS_DELTA:
            v = (v - tl.sum(S * key[:, None], axis=0)) * beta
        S += key[:, None] * v[None]
        found = tl.sum(S * query[:, None], axis=0)
        to = out + row.to(tl.int64) * (H * Dv) + h * Dv + j
        tl.store(to, found, mask=(j < Dv) & (is_read != 0))
        if n + 1 == copy_after:
            tl.store(copy, S, mask=inside)
        row, query, key, v = next_row, next_query, next_key, next_v
        decay, beta = next_decay, next_beta
    at = memory + _piece(tables, write, place, start, block_size) + each
    tl.store(at, S, mask=inside & (write >= 0))


@triton.jit
def _delta_outputs(found, x, x_stride, begin, norm, out, H, Dv, eps, V_BLOCK: tl.constexpr):
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, V_BLOCK)
    y = _head(found, j, Dv, (row * H + h) * Dv)
    z = _head(x, j, Dv, row * x_stride + begin + h * Dv)
    y *= 1 / tl.sqrt(tl.sum(y * y, axis=0) / Dv + eps)
    y = y * _head(norm, j, Dv, 0) * (z * _sigmoid(z))
    tl.store(out + (row * H + h) * Dv + j, y.to(out.dtype.element_ty), mask=j < Dv)


@triton.jit
def _mamba_outputs(
    found,
    xbc,
    inner,
    x,
    x_stride,
    D,
    norm,
    out,
    H,
    Dv,
    groups,
    eps,
    z_factor,
    HAS_NORM: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, size = tl.program_id(0).to(tl.int64), H * Dv // groups
    i = tl.arange(0, BLOCK)
    c, inside = tl.program_id(1) * size + i, i < size
    y = tl.load(found + row * (H * Dv) + c, mask=inside, other=0.0)
    own = tl.load(xbc + row * inner + c, mask=inside, other=0.0).to(tl.float32)
    y = tl.fma(own, tl.load(D + c // Dv, mask=inside, other=0.0), y)
    y = y.to(out.dtype.element_ty).to(tl.float32)
    z = tl.load(x + row * x_stride + inner + c, mask=inside, other=0.0).to(tl.float32) * z_factor
    gate = z * _sigmoid(z)
    if GATES_FIRST or not HAS_NORM:
        y *= gate
    if HAS_NORM:
        y *= 1 / tl.sqrt(tl.sum(y * y, axis=0) / size + eps)
        y *= tl.load(norm + c, mask=inside, other=0.0)
        if not GATES_FIRST:
            y *= gate
    tl.store(out + row * (H * Dv) + c, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(x, gate, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)
    by = _sigmoid(tl.load(gate + i, mask=i < size, other=0.0).to(tl.float32))
    tl.store(x + i, (v * by).to(x.dtype.element_ty), mask=i < size)


def gate(x: Tensor, gate: Tensor) -> Tensor:
    """Same as the reference op."""
    assert x.is_contiguous() and gate.is_contiguous(), "rows with gaps"
    if size := x.numel():
        _gate[(triton.cdiv(size, 1024),)](x, gate, size, BLOCK=1024, num_warps=4)
    return x


def delta_rule(
    qkv: Tensor,
    x: Tensor,
    params: DeltaParams,
    state: StateLayer,
    memory: Tensor,
    places: Tensor,
    work: StateWork,
) -> Tensor:
    """Same as the reference op. `memory` and `places` as in `scan`."""
    assert qkv.is_contiguous() and x.stride(1) == 1, "rows with gaps"
    (Dk, Dv), H, K, R = state.shape, len(places), params.num_k_heads, len(qkv)
    blocks = {"K_BLOCK": padded(Dk), "V_BLOCK": padded(Dv)}
    q, inputs = floats(qkv, K * Dk), floats(qkv, state.kept.shape[1])
    _delta_inputs[(R, H)](
        *(qkv, x, x.stride(0), params.rate, params.dt_bias, params.beta_factor, q, inputs),
        *(state.kept, work.rows, H, K, Dk, Dv),
        **blocks,
        num_warps=1,
    )
    found = scan(inputs, q, state, memory, places, work)
    out = qkv.new_empty(R, H * Dv)
    begin = 2 * K * Dk + H * Dv
    _delta_outputs[(R, H)](
        *(found, x, x.stride(0), begin, params.norm, out, H, Dv, params.eps),
        V_BLOCK=blocks["V_BLOCK"],
        num_warps=1,
    )
    return out


def selective_state_update(
    xbc: Tensor,
    x: Tensor,
    params: MambaParams,
    state: StateLayer,
    memory: Tensor,
    places: Tensor,
    work: StateWork,
) -> Tensor:
    """Same as the reference op. `memory` and `places` as in `scan`."""
    assert xbc.is_contiguous() and x.stride(1) == 1, "rows with gaps"
    (Dk, Dv), H, K, R = state.shape, len(places), params.num_groups, len(xbc)
    q, inputs = floats(xbc, K * Dk), floats(xbc, state.kept.shape[1])
    _mamba_inputs[(R, H)](
        *(xbc, x, x.stride(0), params.rate, params.dt_bias, params.dt_factor, q, inputs),
        *(state.kept, work.rows, H, K, Dk, Dv),
        K_BLOCK=padded(Dk),
        V_BLOCK=padded(Dv),
        num_warps=1,
    )
    found = scan(inputs, q, state, memory, places, work)
    out = xbc.new_empty(R, H * Dv)
    block = triton.next_power_of_2(H * Dv // K)
    norm = params.D if params.norm is None else params.norm
    _mamba_outputs[(R, K)](
        *(found, xbc, xbc.shape[1], x, x.stride(0), params.D, norm, out, H, Dv, K),
        *(params.eps, params.z_factor),
        HAS_NORM=params.norm is not None,
        GATES_FIRST=params.gates_first,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


def scan(
    inputs: Tensor,
    q: Tensor,
    state: StateLayer,
    memory: Tensor,
    places: Tensor,
    work: StateWork,
) -> Tensor:
    """Update states by the rows of all lanes; return the outputs of the heads, [R, H Dv] float32.

    inputs  [R, W]                float32  as the op keeps them
    q       [R, Q Dk]             float32  queries
    memory  [num_blocks, floats]  float32  the arena
    places  [H, 2]                int64    of each piece: its block, and the first element in it
    """
    (Dk, Dv), H = state.shape, len(state.places)
    out = floats(inputs, H * Dv)
    for lanes in (work.lanes, work.drafts):  # these begin with the states that the first ones store
        own = work._replace(lanes=lanes)
        launch(inputs, 0, q, H // (q.shape[1] // Dk), out, state, memory, places, own)
    return out


def replay(
    state: StateLayer, memory: Tensor, places: Tensor, work: StateWork, layer_stride: int
) -> None:
    """Update the states of equal ops, whose kept inputs are `layer_stride` elements apart.

    places  [layers H, 2]  int64  as in `scan`
    """
    kept = state.kept
    launch(kept, layer_stride, kept, 0, None, state, memory, places, work)


def launch(
    inputs: Tensor,
    layer_stride: int,
    q: Tensor,
    sharing: int,
    out: Tensor | None,
    state: StateLayer,
    memory: Tensor,
    places: Tensor,
    work: StateWork,
) -> None:
    """Run `_scan`. Without outputs, it reads the first numbers of `q` as all queries.

    All calls for an op have arguments of one compiled kernel.
    """
    if len(work.lanes) == 0:
        return
    (Dk, Dv), H = state.shape, len(state.places)
    _scan[(len(work.lanes), len(places), triton.cdiv(Dv, COLUMNS))](
        *(inputs, inputs.shape[1], layer_stride, q, 0 if out is None else q.shape[1]),
        *(q if out is None else out, int(out is not None), memory, memory.stride(0), places),
        *(work.lanes, work.order, work.tables, H, state.num_groups or H, sharing or H, Dk, Dv),
        IS_DELTA=state.num_groups == 0,
        K_BLOCK=padded(Dk),
        COLUMNS=COLUMNS,
        num_warps=1,
    )


def padded(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def floats(x: Tensor, width: int) -> Tensor:
    return x.new_empty(len(x), width, dtype=float32)
