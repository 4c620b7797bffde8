"""A model that transformers' modules run, with specserve's attention, linear maps and norms."""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from specserve.memory.arena import KVLayout, StateLayout
from specserve.models.decoder_config import Shape
from specserve.models.weight_forms import WeightForms
from specserve_kernels import KVCache, Ops, Rotary, Rows
from specserve_kernels.ops import EagerProgram

NAME = "specserve"  # of specserve's attention in transformers' registry


class AttentionCall(NamedTuple):
    """A layer's call of attention.

    query         [1, H, R, D]  rotated
    key, value    [1, Hk, R, D]  keys are rotated, too
    scale, window, soft_cap, sinks  arguments of `Ops.attention`
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None


class Hook:
    """State of a running model that all its modules can access.

    attend   the attention function. Modules find it in an attribute, because some models drop
             unknown keyword arguments
    threads  of specserve's ops, while torch's ops have one; None: torch's setting for both
    """

    def __init__(self) -> None:
        self.attend: Callable[[AttentionCall], Tensor] | None = None
        self.threads: int | None = None

    @contextmanager
    def sparing_torch(self) -> Iterator[None]:
        """Limit torch's ops to one thread within the block. More threads gain little on a step's
        small tensors, and OpenMP's threads spin for milliseconds after each op by default.
        """
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self.threads)
            self.threads = None

    def run(self, op: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call an op of specserve with the step's threads."""
        if self.threads is None:
            return op(*args)
        torch.set_num_threads(self.threads)  # takes 0.5 us
        try:
            return op(*args)
        finally:
            torch.set_num_threads(1)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; the plan defines the mask."""
    hook: Hook = module.specserve_hook
    assert hook.attend is not None, "attention is called outside of a forward pass"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(module.layer_idx, query, key, value, scale, sliding_window, softcap, s_aux)
    H, R = query.shape[1:3]
    return hook.attend(call).view(1, R, H, -1), None


AttentionInterface.register(NAME, attention)


class LinearMaps:
    """Fused linear maps that read the same tensor. The first call computes all maps; the calls of
    the other maps return their parts.
    """

    def __init__(
        self, hook: Hook, ops: Ops, packed: Any, bias: Tensor | None, widths: list[int]
    ) -> None:
        self.hook, self.ops, self.packed, self.bias, self.widths = hook, ops, packed, bias, widths
        self.x: Tensor | None = None
        self.parts: dict[int, Tensor] = {}  # by map: results for x that were not returned yet

    def part(self, x: Tensor, i: int) -> Tensor:
        """The result of map `i` for x."""
        if x is not self.x or i not in self.parts:
            flat = x.reshape(-1, x.shape[-1]).contiguous()
            out = self.hook.run(self.ops.linear, flat, self.packed, self.bias)
            parts = torch.split_with_sizes(out.view(*x.shape[:-1], -1), self.widths, -1)
            self.x, self.parts = x, dict(enumerate(parts))
        part = self.parts.pop(i)
        if not self.parts:
            self.x = None
        return part.contiguous()  # torch's results and a module's views may depend on strides


class PackedLinear(torch.nn.Module):
    """One map of `LinearMaps`."""

    def __init__(self, maps: LinearMaps, i: int) -> None:
        super().__init__()
        self.maps, self.i = maps, i

    def forward(self, x: Tensor) -> Tensor:
        return self.maps.part(x, self.i)


class PackedHead(torch.nn.Module):
    """The LM head; its logits are float32."""

    def __init__(self, hook: Hook, ops: Ops, packed: Any, bias: Tensor | None) -> None:
        super().__init__()
        self.specserve_hook, self.ops, self.packed = hook, ops, packed
        self.bias = None if bias is None else bias.float()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        logits = self.specserve_hook.run(self.ops.lm_head, flat, self.packed)
        if self.bias is not None:
            logits += self.bias
        return logits.view(*x.shape[:-1], -1)


class Norm:
    """An RMSNorm module that runs specserve's op: `weight` [D] float32, rows of `dtype`."""

    def __init__(self, hook: Hook, ops: Ops, module: Any, weight: Tensor, eps: float) -> None:
        self.hook, self.ops, self.module, self.weight, self.eps = hook, ops, module, weight, eps
        self.dtype = module.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self.dtype:
            usual: Tensor = type(self.module).forward(self.module, x)
            return usual
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return self.hook.run(self.ops.rms_norm, flat, self.weight, self.eps).view(x.shape)


@dataclass
class BodyOutput(MoeModelOutputWithPast):
    """The output of a model's body, with all fields that heads of models copy."""

    cross_attentions: Any = None


class Given(torch.nn.Module):
    """Replaces a model's body: returns given hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BodyOutput:
        return BodyOutput(last_hidden_state=inputs_embeds)


class StepPlan(NamedTuple):
    """The plan of a step.

    positions  [1, R]  int64  on the ops' device
    """

    of_ops: Any
    positions: Tensor
    also: Sequence[Tensor]


class TransformersModel:
    """A `LoadedModel`. Its residual after the last layer includes the final norm, which belongs to
    the body of transformers' model.
    """

    def __init__(
        self,
        shape: Shape,
        ops: Ops,
        causal: Any,
        layers: Sequence[AttentionCall],
        hook: Hook,
        still: Rotary,
        forms: WeightForms,
    ) -> None:
        """`layers` has one recorded call per layer; `still` is a RoPE table without rotation."""
        # Experts that torch multiplies need all threads.
        self.spares_torch = all(
            parameter.dim() == 1
            for module in causal.modules()
            if not isinstance(module, torch.nn.Embedding)
            for parameter in module.parameters(recurse=False)
        )
        self.config, self.ops, self.causal, self.still = shape, ops, causal, still
        self.hook, self.forms = hook, forms
        self.has_head, self.score = True, None
        # The head is a copy of the model without its body, so that its code computes the logits.
        self.body, self.head = causal.base_model, copy.copy(causal)
        self.head._modules = {**causal._modules, causal.base_model_prefix: Given()}
        self.dtype: torch.dtype = causal.dtype
        self.windows = tuple(dict.fromkeys(call.window for call in layers))
        self.has_plain_scores = all(call.soft_cap is None and call.sinks is None for call in layers)
        self.kv_shapes = [(call.key.shape[1], call.key.shape[3]) for call in layers]
        self.num_heads = int(layers[0].query.shape[1])
        self.lock = Lock()  # several engines may share the model, and run it in several threads

    @property
    def num_positions(self) -> int:
        return len(self.still.cos)

    def on(self, ops: Ops) -> "TransformersModel":
        """Return the model itself: only its own ops are supported, and nothing records it."""
        assert ops is self.ops, "transformers' modules cannot be recorded"
        return self

    def kv_layouts(self, dtype: torch.dtype | None = None) -> tuple[KVLayout, ...]:
        return tuple(KVLayout(heads, D, dtype or self.dtype) for heads, D in self.kv_shapes)

    def state_layouts(self) -> tuple[StateLayout, ...]:
        return ()

    def program(
        self, kv: KVCache, max_rows: int, max_read: int, aux_layer_ids: Collection[int] = ()
    ) -> EagerProgram:
        return EagerProgram(self, kv, aux_layer_ids, "transformers' modules, run eagerly")

    def plan(self, rows: Rows, kv: KVCache, also: Sequence[Tensor] = ()) -> StepPlan:
        # Only tree nodes that cannot be accepted have later positions. Tables of learned positions
        # end at the last position.
        positions = rows.positions.long().clamp(max=self.config.max_positions - 1)
        asked = self.windows, [*also, positions], self.has_plain_scores
        plan = self.ops.plan(rows, kv, self.num_heads, *asked)
        *others, placed = plan.also
        return StepPlan(plan, placed[None], others)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Lock the model, and limit torch's threads, while modules compute."""
        with self.lock, self.hook.sparing_torch() if self.spares_torch else nullcontext():
            yield

    def embed(self, token_ids: Tensor) -> Tensor:
        with self.computing():
            embedded: Tensor = self.causal.get_input_embeddings()(token_ids)
        return embedded

    def forward(
        self, residual: Tensor, kv: KVCache, plan: StepPlan, aux_layer_ids: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if aux_layer_ids:
            raise ValueError("models that transformers runs have no auxiliary hidden states")
        with self.computing():
            self.hook.attend = partial(self.attend, kv, plan.of_ops)
            out = self.body(
                inputs_embeds=residual[None], position_ids=plan.positions, use_cache=False
            )
        return out.last_hidden_state[0], {}

    def attend(self, kv: KVCache, plan: Any, call: AttentionCall) -> Tensor:
        """Write the KV of a layer's rows, and compute their attention: [R, H D]."""
        layer = kv.layers[call.layer]
        heads = call.query, call.key, call.value
        qkv = torch.cat([x[0].transpose(0, 1).flatten(1) for x in heads], dim=1)
        run = self.hook.run
        q = run(self.ops.rope_write_kv, qkv, self.still, None, layer, plan)
        sinks = None if call.sinks is None else call.sinks.float()
        asked = call.scale, call.window, call.soft_cap, sinks
        return run(self.ops.attention, q, layer, plan, *asked)

    def hidden(self, residual: Tensor, rows: Tensor) -> Tensor:
        return residual.index_select(0, rows).float()

    def logits(self, residual: Tensor, rows: Tensor) -> Tensor:
        hidden = residual.index_select(0, rows)
        with self.computing():
            found: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
            return found.float().contiguous()
