"""Mixtures of experts: their description in config.json, and their tensors in a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec


class StackedNames(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors that all experts of a layer share: their names within the module, and their form.

    `gate_up` is [E, 2 F, hidden], and `down` [E, hidden, F].
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    is_transposed: bool | None = True  # the last two dimensions are swapped; None: see the shape
    has_pairs: bool = False  # rows of gate and up alternate; else gate has the first half


class ExpertStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a family's mixtures of experts."""

    module: str = "mlp"  # of a layer
    router_module: str | None = None  # None: the same module
    router: str = "gate"
    maps: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    is_gated: bool = True  # else experts have no gate, and the activation function is relu2
    width: str  # field with an expert's width
    number: int  # default number of experts
    number_keys: tuple[str, ...] = ("num_local_experts", "num_experts")
    active_key: str = "num_experts_per_tok"
    normalizes: bool | None = None  # None: norm_topk_prob
    is_sigmoid: bool = False  # scores are sigmoids of the router's logits, else a softmax
    weighs_input: bool = False  # a row has one expert, whose input `Ops.weigh_rows` returns
    correction: str | None = None  # tensor with the router's correction, within the module
    corrects: str | None = None  # field that is false without the correction; None: no such field
    correction_rank: int = 1  # its dimensions: [E], or [1, E]
    factor: str | None = None  # field with a factor of the weights; None: no factor
    has_biases: bool = False  # router and experts
    limit: str | None = None  # field with the limit of clamped gates; None: not clamped
    shared_width: str | None = None  # field with the shared expert's width; None: no such expert
    shared_count: str | None = None  # field with a factor of this width
    shared_name: str = "shared_expert"
    shared_path: str | None = None  # its module in a layer; None: shared_name in `module`
    fuses_shared: bool = False  # the shared expert has gate and up in one map
    has_shared_gate: bool = True  # the shared expert's output is weighted
    stacked: StackedNames | None = None  # None: each expert has its own tensors
    enabled: str | None = None  # field that must be true; None: layers have experts in any case
    beside: "BesideNames | None" = None  # None: experts replace the MLP


class BesideNames(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of experts whose output is added to the output of the layer's MLP."""

    router_scale: str = "router.scale"  # weight of the norm of the router's input
    factors: str = "router.per_expert_scale"  # of the weights of experts
    before: str = "pre_feedforward_layernorm_2"  # norms: of the experts' input,
    after: str = "post_feedforward_layernorm_2"  # of their output,
    after_mlp: str = "post_feedforward_layernorm_1"  # and of the MLP's output

    @property
    def norms(self) -> tuple[str, str, str]:
        return self.before, self.after, self.after_mlp


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """A model's mixtures of experts."""

    num_experts: int
    num_active: int  # experts per row
    width: int  # intermediate size of an expert
    normalizes: bool  # the weights of a row's experts sum to 1
    layers: tuple[bool, ...]  # by layer: whether experts replace the MLP
    style: ExpertStyle
    limit: float | None = None  # `limit` of `Ops.experts`
    shared_width: int = 0  # intermediate size of the shared expert; 0: no such expert
    factor: float = 1.0  # of the weights of a row's experts

    @property
    def router(self) -> str:
        return f"{self.style.router_module or self.style.module}.{self.style.router}"

    @property
    def correction(self) -> str | None:
        """The tensor of `correction` of `Ops.route`; None: no correction."""
        return self.style.correction and f"{self.style.module}.{self.style.correction}"

    @property
    def correction_shape(self) -> tuple[int, ...]:
        return (1,) * (self.style.correction_rank - 1) + (self.num_experts,)

    def replaces_mlp(self, layer: int) -> bool:
        return self.layers[layer] and self.style.beside is None

    def other_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's tensors that are not of linear maps."""
        beside, shapes = self.style.beside, dict[str, tuple[int, ...]]()
        if self.correction:
            shapes[self.correction] = self.correction_shape
        if beside is not None:
            shapes |= {f"{name}.weight": (hidden,) for name in beside.norms}
            shapes |= {beside.router_scale: (hidden,), beside.factors: (self.num_experts,)}
        return shapes

    @property
    def shared(self) -> str:
        """The module of the shared expert, which all rows use."""
        return self.style.shared_path or f"{self.style.module}.{self.style.shared_name}"

    @property
    def shared_gate_up_names(self) -> list[str]:
        parts = ["gate_up"] if self.style.fuses_shared else ["gate", "up"]
        parts = parts if self.style.is_gated else ["up"]
        return [f"{self.shared}.{part}_proj" for part in parts]

    @property
    def shared_gate(self) -> str:
        return f"{self.shared}_gate"

    def gate_up_names(self, expert: int) -> list[str]:
        names = self.style.maps[:2] if self.style.is_gated else self.style.maps[1:2]
        return [f"{self.style.module}.experts.{expert}.{name}" for name in names]

    def down_name(self, expert: int) -> str:
        return f"{self.style.module}.experts.{expert}.{self.style.maps[2]}"

    @property
    def row_width(self) -> int:
        """The weights that multiply a row, divided by hidden_size."""
        has_gate = self.shared_width > 0 and self.style.has_shared_gate
        num_maps = 3 if self.style.is_gated else 2
        shared = num_maps * self.shared_width + has_gate
        return self.num_experts + num_maps * self.num_active * self.width + shared

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        """Yield a layer's linear maps: name, (output width, input width, whether it has a bias)."""
        has_bias = self.style.has_biases
        yield self.router, (self.num_experts, hidden, has_bias)
        for expert in range(self.num_experts):
            for name in self.gate_up_names(expert):
                yield name, (self.width, hidden, has_bias)
            yield self.down_name(expert), (hidden, self.width, has_bias)
        if self.shared_width:
            names = self.shared_gate_up_names
            width = (2 if self.style.is_gated else 1) * self.shared_width
            for name in names:
                yield name, (width // len(names), hidden, False)
            yield f"{self.shared}.down_proj", (hidden, self.shared_width, False)
        if self.shared_width and self.style.has_shared_gate:
            yield self.shared_gate, (1, hidden, False)


ROUTERS = (
    *(".mlp.gate", ".mlp.router", ".mlp.shared_expert_gate"),
    *(".block_sparse_moe.gate", ".block_sparse_moe.router.layer", ".router.proj"),
    *(".altup.modality_router", ".altup.prediction_coefs", ".altup.correction_coefs"),
    ".feed_forward.router",
)


def is_router(module: str) -> bool:
    """Whether a linear map selects or weights experts or residual streams. These maps are not
    quantized, because this would change the selection.
    """
    return module.endswith(ROUTERS)


def number_field(fields: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The name of the field with the number of experts."""
    named = [(name, fields[name]) for name in keys if fields.get(name) is not None]
    for (name, number), (other, its) in pairwise(named):
        if number != its:
            raise ValueError(f"{name} = {number!r:.50} and {other} = {its!r:.50} must be equal")
    return next((name for name in keys if name in fields), keys[-1])
