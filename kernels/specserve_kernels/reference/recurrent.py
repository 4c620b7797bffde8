"""Recurrent ops, token by token: a causal convolution, the gated delta rule, Mamba-2, and replays.

Draft tokens read the state of their parent and do not change the committed state. A replay applies
the accepted ones later, with the same operations in the same order.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from specserve_kernels.reference.attention import RowsPlan
from specserve_kernels.states import DeltaParams, MambaParams, Replays, StateLayer


class RequestRows(NamedTuple):
    """One request's rows in a step; row i of it is row `first` + i of the step."""

    number: int
    first: int
    parents: list[int]  # by row; -1: the committed state
    committed: int


def gate(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x by sigmoid(gate) in place, and return it.

    x, gate  [R, N]  bfloat16 | float32
    """
    return x.copy_(x.float() * gate.float().sigmoid())


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: StateLayer, plan: RowsPlan, form: str
) -> Tensor:
    """Convolve each channel with the inputs of its row and of the rows before it.

    x       [R, W]  bfloat16 | float32
    weight  [C, L]  float32             the last column is the factor of the row's own input
    bias    [C]     float32             or None
    form    gated: x begins with b, c and v, [R, C] each. Inputs are b * v, rounded to the dtype of
            x, and c multiplies the sum. silu: x begins with the inputs, and SiLU bends the sum
    ->      [R, C]  as x
    """
    C, L = weight.shape
    inputs = x[:, :C]
    if form == "gated":
        inputs = (inputs.float() * x[:, 2 * C : 3 * C].float()).to(x.dtype)
    out = torch.empty(len(x), C, dtype=x.dtype)
    for request in _requests(plan):
        tail = _before(state, plan, request, 0)
        rows = [*tail.unbind(), *inputs[request.first :][: len(request.parents)].unbind()]
        for i in range(len(request.parents)):
            seen = [rows[L - 1 + at] for at in _path(request.parents, i, L)]
            total = sum(s.float() * weight[:, j] for j, s in enumerate(seen))
            assert isinstance(total, Tensor)
            total = total if bias is None else total + bias
            row = request.first + i
            gated = total * x[row, C : 2 * C].float() if form == "gated" else silu(total)
            out[row] = gated.to(x.dtype)
        states = [torch.stack(rows[n : n + L - 1]) for n in range(request.committed + 1)]
        _store(state, plan, request, 0, states)
        _keep(state, plan, request, torch.stack(rows[L - 1 :]))
    return out


def delta_rule(
    qkv: Tensor, x: Tensor, params: DeltaParams, state: StateLayer, plan: RowsPlan
) -> Tensor:
    """Update a matrix per head by the gated delta rule (Yang et al. 2412.06464), and read it.

    qkv  [R, 2 Hk Dk + Hv Dv]  queries, keys and values; value head h reads key head h // (Hv / Hk)
    x    [R, ..]               after as many columns as qkv has: z [R, Hv Dv], b [R, Hv], a [R, Hv]
    ->   [R, Hv Dv]            the normalized outputs of the heads, multiplied by silu(z)

    Queries and keys are normalized, and queries divided by sqrt(Dk). A head's matrix S decays by
    exp(rate * softplus(a + dt_bias)). Then S += k (v - k S)^T beta, and the output is q S.
    beta is beta_factor * sigmoid(b).
    """
    (Dk, Dv), Hv = state.shape, len(state.places)
    inputs = [_head_inputs(qkv[row], x[row], params, state) for row in range(len(qkv))]
    out = torch.empty(len(qkv), Hv * Dv, dtype=qkv.dtype)
    for request in _requests(plan):
        rows = range(request.first, request.first + len(request.parents))
        found = torch.empty(len(rows), Hv, Dv)
        for h in range(Hv):
            states = [_before(state, plan, request, h)]
            for i, parent in enumerate(request.parents):
                q, kept, _ = inputs[rows[i]]
                states.append(_updated(states[parent + 1], kept, h, Hv))
                found[i, h] = (q[h] * Dk**-0.5) @ states[-1]
            _store(state, plan, request, h, states[: request.committed + 1])
        for row, each in zip(rows, found, strict=True):
            scale = torch.rsqrt(each.square().mean(-1, keepdim=True) + params.eps)
            out[row] = (each * scale * params.norm).flatten() * silu(inputs[row].z)
        _keep(state, plan, request, torch.stack([inputs[row].kept for row in rows]))
    return out


class HeadInputs(NamedTuple):
    """The inputs of all heads for one row, float32.

    q     [Hv, Dk]
    kept  [Hv (Dk + Dv + 2)]  everything that an update of the state needs: keys, values, decays and
                              betas of all heads
    z     [Hv Dv]
    """

    q: Tensor
    kept: Tensor
    z: Tensor


def _head_inputs(qkv: Tensor, x: Tensor, params: DeltaParams, state: StateLayer) -> HeadInputs:
    """Each row is computed alone, so that its bits depend on no other row."""
    (Dk, Dv), Hv, Hk = state.shape, len(state.places), params.num_k_heads
    q, k, v = torch.split(qkv.float(), [Hk * Dk, Hk * Dk, Hv * Dv])
    z, b, a = torch.split(x[len(qkv) :].float(), [Hv * Dv, Hv, Hv])
    q, k = (_unit(each.view(Hk, Dk)).repeat_interleave(Hv // Hk, 0) for each in (q, k))
    decay = (params.rate * softplus(a + params.dt_bias)).exp()
    return HeadInputs(q, torch.cat([k.flatten(), v, decay, b.sigmoid() * params.beta_factor]), z)


def selective_state_update(
    xbc: Tensor, x: Tensor, params: MambaParams, state: StateLayer, plan: RowsPlan
) -> Tensor:
    """Update a matrix per head by Mamba-2's selective update (Dao, Gu 2405.21060), and read it.

    xbc  [R, H P + 2 G N]  inputs, keys B and queries C; head h reads group h // (H / G)
    x    [R, ..]           after as many columns as xbc has: z [R, H P], dt [R, H]
    ->   [R, H P]          the outputs of the heads, gated by silu(z), and normalized per group

    A time step is softplus(dt + dt_bias). A head's matrix S [N, P] decays by exp(rate * step). Then
    S += B (step * input)^T, and the output is C S + D * input. Outputs are rounded to the dtype of
    x before they are gated and normalized.
    """
    (_, P), H, G = state.shape, len(state.places), params.num_groups
    inputs = [_mamba_inputs(xbc[row], x[row], params, state) for row in range(len(xbc))]
    out = torch.empty(len(xbc), H * P, dtype=xbc.dtype)
    for request in _requests(plan):
        rows = range(request.first, request.first + len(request.parents))
        for h in range(H):
            states = [_before(state, plan, request, h)]
            for i, parent in enumerate(request.parents):
                own = inputs[rows[i]]
                states.append(_selected(states[parent + 1], own.kept, h, H, G))
                found = own.q[h // (H // G)] @ states[-1] + params.D[h] * own.x[h]
                out[rows[i], h * P : (h + 1) * P] = found.to(out.dtype)
            _store(state, plan, request, h, states[: request.committed + 1])
        _keep(state, plan, request, torch.stack([inputs[row].kept for row in rows]))
        for row in rows:
            out[row] = _gated_norm(out[row].float(), silu(inputs[row].z), params)
    return out


class MambaInputs(NamedTuple):
    """The inputs of all heads for one row, float32.

    x     [H, P]
    q     [G, N]
    kept  [G N + H P + H]  everything that an update of the state needs: keys, inputs multiplied by
                           their time steps, and decays
    z     [H P]
    """

    x: Tensor
    q: Tensor
    kept: Tensor
    z: Tensor


def _mamba_inputs(xbc: Tensor, x: Tensor, params: MambaParams, state: StateLayer) -> MambaInputs:
    (N, P), H, G = state.shape, len(state.places), params.num_groups
    v, k, q = torch.split(xbc.float(), [H * P, G * N, G * N])
    z, dt = torch.split(x[len(xbc) :].float(), [H * P, H])
    step = softplus(dt * params.dt_factor + params.dt_bias)
    scaled = v.view(H, P) * step[:, None]
    kept = torch.cat([k, scaled.flatten(), (params.rate * step).exp()])
    return MambaInputs(v.view(H, P), q.view(G, N), kept, z * params.z_factor)


def _gated_norm(y: Tensor, gate: Tensor, params: MambaParams) -> Tensor:
    if params.norm is None:
        return y * gate
    y = (y * gate if params.gates_first else y).view(params.num_groups, -1)
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + params.eps)
    y = (y * scale).flatten() * params.norm
    return y if params.gates_first else y * gate


def replay(states: tuple[StateLayer, ...], replays: Replays) -> None:
    """Advance committed states by the kept inputs of accepted draft tokens, one replay after the
    other. Copy the states to their snapshots on the way.
    """
    begins, places = replays.begins.tolist(), replays.places.tolist()
    for m, at in enumerate(replays.snapshot_at.tolist()):
        own, others = replays.blocks[m].tolist(), replays.snapshots[m].tolist()
        for state in states:
            for number in range(len(state.places)):
                piece = state.piece(number, own)
                if at == 0:
                    state.piece(number, others).copy_(piece)
                for done, place in enumerate(places[begins[m] : begins[m + 1]], 1):
                    piece.copy_(_advanced(state, piece, number, state.kept[place]))
                    if at == done:
                        state.piece(number, others).copy_(piece)


def _advanced(state: StateLayer, piece: Tensor, number: int, kept: Tensor) -> Tensor:
    if state.is_conv:
        return torch.cat([piece[1:], kept[None]])
    if state.num_groups:
        return _selected(piece, kept, number, len(state.places), state.num_groups)
    return _updated(piece, kept, number, len(state.places))


def _updated(S: Tensor, kept: Tensor, h: int, Hv: int) -> Tensor:
    Dk, Dv = S.shape
    k, v = kept[h * Dk :][:Dk], kept[Hv * Dk + h * Dv :][:Dv]
    decay, beta = kept[Hv * (Dk + Dv) :].view(2, Hv)[:, h]
    S = S * decay
    change: Tensor = k[:, None] * ((v - k @ S) * beta)
    return S + change


def _selected(S: Tensor, kept: Tensor, h: int, H: int, G: int) -> Tensor:
    N, P = S.shape
    k, v = kept[h // (H // G) * N :][:N], kept[G * N + h * P :][:P]
    return S * kept[G * N + H * P + h] + k[:, None] * v


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _requests(plan: RowsPlan) -> Iterator[RequestRows]:
    rows = plan.rows
    borders = rows.qo_indptr.tolist()
    for b, (first, end) in enumerate(pairwise(borders)):
        masks = rows.mask[first:end].tolist()
        parents = [
            (mask & ((1 << i) - 1)).bit_length() - 1 if mask else i - 1
            for i, mask in enumerate(masks)
        ]
        committed = end - first if rows.states is None else int(rows.states.committed[b])
        yield RequestRows(b, first, parents, committed)


def _path(parents: list[int], row: int, length: int) -> list[int]:
    """Return a row and the rows before it, the last one last; row -n is the n-th last input of the
    committed state.
    """
    path = [row]
    while len(path) < length:
        path.append(parents[path[-1]] if path[-1] >= 0 else path[-1] - 1)
    return path[::-1]


def _before(state: StateLayer, plan: RowsPlan, request: RequestRows, number: int) -> Tensor:
    """Return a copy of a piece before the step."""
    states = plan.rows.states
    if states is None or plan.rows.positions[request.first] == 0:
        return torch.zeros(state.shape, dtype=state.dtype)
    return state.piece(number, states.blocks[request.number].tolist()).clone()


def _store(
    state: StateLayer, plan: RowsPlan, request: RequestRows, number: int, after: list[Tensor]
) -> None:
    """Store a piece and its snapshot; `after` has the piece after 0, 1, ... committed rows."""
    states = plan.rows.states
    if states is None:
        return
    state.piece(number, states.blocks[request.number].tolist()).copy_(after[-1])
    if at := int(states.snapshot_at[request.number]):
        state.piece(number, states.snapshots[request.number].tolist()).copy_(after[at])


def _keep(state: StateLayer, plan: RowsPlan, request: RequestRows, inputs: Tensor) -> None:
    states = plan.rows.states
    if states is not None:
        inputs = inputs[request.committed :]
        first = int(states.kept[request.number])
        state.kept[first : first + len(inputs)] = inputs
