"""A model whose forward is that of transformers' own modules, with attention over our paged KV and
our linear maps in them.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from specserve.memory import KVLayout
from specserve.models.shape import Shape
from specserve.models.weight_forms import WeightForms
from specserve_kernels import KVCache, Ops, Rotary, Rows
from specserve_kernels.program import EagerProgram

NAME = "specserve"  # of our attention among those that transformers knows
WORDS = "transformers' modules, run eagerly"


class Call(NamedTuple):
    """What a layer asks of attention.

    query         [1, H, R, D]  rotated
    key, value    [1, Hk, R, D]  keys are rotated, too
    scale, window, soft_cap, sinks  as of `Ops.attention`
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
    """What the attention of all of a model's layers calls. A field of theirs leads to it: some
    models drop keyword arguments that they do not know.
    """

    def __init__(self) -> None:
        self.attend: Callable[[Call], Tensor] | None = None


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
    """As transformers calls it; the mask is the plan's."""
    hook: Hook = module.specserve_hook
    assert hook.attend is not None, "attention is called within a forward"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = Call(module.layer_idx, query, key, value, scale, sliding_window, softcap, s_aux)
    H, R = query.shape[1:3]
    return hook.attend(call).view(1, R, H, -1), None


AttentionInterface.register(NAME, attention)


class PackedLinear(torch.nn.Module):
    """A linear map that the ops compute."""

    def __init__(self, ops: Ops, packed: Any, bias: Tensor | None) -> None:
        super().__init__()
        self.ops, self.packed, self.bias = ops, packed, bias

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return self.ops.linear(flat, self.packed, self.bias).view(*x.shape[:-1], -1)


@dataclass
class BodyOutput(MoeModelOutputWithPast):
    """With every field that some model's head copies."""

    cross_attentions: Any = None


class Given(torch.nn.Module):
    """In the place of a model's body: hidden states that are there already."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BodyOutput:
        return BodyOutput(last_hidden_state=inputs_embeds)


def head_of(causal: Any) -> Any:
    """The same model without its body: from what comes out of that, its own code makes logits."""
    head = copy.copy(causal)
    head._modules = {**causal._modules, causal.base_model_prefix: Given()}
    return head


class StepPlan(NamedTuple):
    """positions  [1, R]  int64  on the ops' device"""

    of_ops: Any
    positions: Tensor
    also: Sequence[Tensor]


class TransformersModel:
    """A `LoadedModel`. Its residual after the last layer is behind the final norm, where the body
    of transformers' model ends.
    """

    def __init__(
        self,
        shape: Shape,
        ops: Ops,
        causal: Any,
        layers: Sequence[Call],
        hook: Hook,
        still: Rotary,
        forms: WeightForms,
    ) -> None:
        """`layers` are examples of what each layer asks; `still` rotates nothing."""
        self.config, self.ops, self.causal, self.still = shape, ops, causal, still
        self.hook, self.forms = hook, forms
        self.body, self.head = causal.base_model, head_of(causal)
        self.dtype: torch.dtype = causal.dtype
        self.windows = tuple(dict.fromkeys(call.window for call in layers))
        self.has_plain_scores = all(call.soft_cap is None and call.sinks is None for call in layers)
        self.kv_shapes = [(call.key.shape[1], call.key.shape[3]) for call in layers]
        self.num_heads = int(layers[0].query.shape[1])
        self.lock = Lock()  # engines that share it may run it in several threads

    @property
    def num_positions(self) -> int:
        return len(self.still.cos)

    def on(self, ops: Ops) -> "TransformersModel":
        """Only with its own: its weights are packed for them, and nothing records it."""
        assert ops is self.ops, "transformers' modules are not recorded"
        return self

    def kv_layouts(self, dtype: torch.dtype | None = None) -> tuple[KVLayout, ...]:
        return tuple(KVLayout(heads, D, dtype or self.dtype) for heads, D in self.kv_shapes)

    def program(self, kv: KVCache, max_rows: int, max_read: int) -> EagerProgram:
        return EagerProgram(self, kv, words=WORDS)

    def plan(self, rows: Rows, kv: KVCache, also: Sequence[Tensor] = ()) -> StepPlan:
        # Only nodes of a tree stand behind the last position, and no text depends on those. A
        # table of learned positions ends there.
        positions = rows.positions.long().clamp(max=self.config.max_positions - 1)
        asked = self.windows, [*also, positions], self.has_plain_scores
        plan = self.ops.plan(rows, kv, self.num_heads, *asked)
        *others, placed = plan.also
        return StepPlan(plan, placed[None], others)

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.causal.get_input_embeddings()(token_ids)
        return embedded

    def forward(
        self, residual: Tensor, kv: KVCache, plan: StepPlan, taps: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if taps:
            raise ValueError(f"no layers {sorted(taps)} to tap: transformers' modules have no taps")
        with self.lock:
            self.hook.attend = partial(self.attend, kv, plan.of_ops)
            out = self.body(
                inputs_embeds=residual[None], position_ids=plan.positions, use_cache=False
            )
        return out.last_hidden_state[0], {}

    def attend(self, kv: KVCache, plan: Any, call: Call) -> Tensor:
        """Write the KV of a layer's rows, and attend to all that each may see: [R, H D]."""
        layer = kv.layers[call.layer]
        heads = call.query, call.key, call.value
        qkv = torch.cat([x[0].transpose(0, 1).flatten(1) for x in heads], dim=1)
        q = self.ops.rope_write_kv(qkv, self.still, None, layer, plan)
        sinks = None if call.sinks is None else call.sinks.float()
        asked = call.scale, call.window, call.soft_cap, sinks
        return self.ops.attention(q, layer, plan, *asked)

    def logits(self, residual: Tensor, rows: Tensor) -> Tensor:
        hidden = residual.index_select(0, rows)
        found: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return found.to(self.dtype).contiguous()
