"""A model's forward prepared for its steps: run op by op here, recorded where a build can."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from specserve_kernels.types import KVCache, Rows

if TYPE_CHECKING:
    from specserve_kernels import Ops


class Model(Protocol):
    """A forward written against the ops alone. With a recorder's ops it gets handles as tensors."""

    @property
    def num_heads(self) -> int: ...

    @property
    def windows(self) -> Sequence[int | None]:
        """The windows of its layers, each once; None is full attention."""
        ...

    def on(self, ops: "Ops") -> "Model": ...

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def plan(self, rows: Rows, kv: KVCache, also: Sequence[Tensor] = ()) -> Any: ...

    def forward(
        self, residual: Tensor, kv: KVCache, plan: Any, taps: Collection[int] = ()
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """`plan.also` begins with the token ids, where a run has any, so that a forward can read
        them beside the residual.
        """
        ...

    def logits(self, residual: Tensor, rows: Tensor) -> Tensor: ...


class Outputs(NamedTuple):
    """What a forward gave. The tensors may be overwritten by the program's next run.

    residual  [R, hidden]  after the last layer
    logits    [n, V]       of the rows that are read; None where none is
    taps      [R, hidden]  by layer: the residual that came into it, for the layers that are tapped
    also      other tensors of the step, on the ops' device
    """

    residual: Tensor
    logits: Tensor | None
    taps: Mapping[int, Tensor]
    also: Sequence[Tensor]


class Program(Protocol):
    """Computes the KV, the residual stream and the logits of a step's rows."""

    @property
    def words(self) -> str:
        """How it runs, for the start-up's table."""
        ...

    def run(
        self,
        rows: Rows,
        token_ids: Tensor | None,
        read: Tensor,
        also: Sequence[Tensor] = (),
        residual: Tensor | None = None,
    ) -> Outputs:
        """One forward, from token ids or from a residual.

        token_ids  [R]          int64            host tensor; beside a residual they are for a model
                                                 whose forward reads them, too
        read       [n]          int64            host tensor: the rows whose logits are wanted
        also       host tensors that later ops of the step take
        residual   [R, hidden]  the model's dtype  on the ops' device, in the embeddings' place
        """
        ...

    def logits(self, read: Tensor) -> Tensor:
        """The logits of other rows of the last run, [n, V]; `read` as for `run`."""
        ...


class EagerProgram:
    """Calls the forward at every run: for builds that record nothing, and the oracle of others."""

    def __init__(
        self, model: Model, kv: KVCache, taps: Collection[int] = (), words: str = "op by op"
    ) -> None:
        self.model, self.kv, self.taps, self.words = model, kv, taps, words
        self.residual: Tensor | None = None

    def run(
        self,
        rows: Rows,
        token_ids: Tensor | None,
        read: Tensor,
        also: Sequence[Tensor] = (),
        residual: Tensor | None = None,
    ) -> Outputs:
        ids = [] if token_ids is None else [token_ids]
        plan = self.model.plan(rows, self.kv, [*ids, read, *also])
        ids, (read, *also) = plan.also[: len(ids)], plan.also[len(ids) :]
        # The layers add to it in place.
        entry = self.model.embed(*ids) if residual is None else residual.clone()
        self.residual, taps = self.model.forward(entry, self.kv, plan, self.taps)
        logits = self.model.logits(self.residual, read) if len(read) else None
        return Outputs(self.residual, logits, taps, also)

    def logits(self, read: Tensor) -> Tensor:
        assert self.residual is not None, "no step has been run"
        return self.model.logits(self.residual, read.to(self.residual.device))
