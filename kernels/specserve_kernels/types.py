"""Arguments of the ops: rows of a step, a model's view of the KV arena, sampling parameters.

`Threads` sets the number of threads of a step.

Shapes: B requests, R rows, L layers, H and Hk query and KV heads, D head size, V vocabulary.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specserve_kernels.states import StateLayer, StateRows


class Chunks(NamedTuple):
    """A window that starts at a multiple of `size`: a row at position p sees the positions from
    p // size * size to p.
    """

    size: int


# An integer: a row at position p sees the positions (p - window, p]. None: all positions up to p.
Window = int | Chunks | None
NO_WINDOW: tuple[Window, ...] = (None,)
# Sampled instead of a token id if a row's maximum is not finite:
NO_TOKEN = -1  # the maximum is -inf: no token is allowed
NOT_FINITE = -2  # the maximum is +inf, or the row contains NaN


class AdapterRows(NamedTuple):
    """The rows of a step that have an adapter, by adapter slot (S slots); host tensors.

    order   [A]    int32  rows with an adapter, ordered by slot, then by row
    begins  [S+1]  int32  slot s has the rows order[begins[s]:begins[s+1]]
    places  [R]    int32  index of a row in `order`; -1: no adapter
    """

    order: Tensor
    begins: Tensor
    places: Tensor

    @classmethod
    def of(cls, slots: Sequence[int], num_slots: int) -> "AdapterRows":
        """Build from the slot of each row; -1: no adapter."""
        by_slot: list[list[int]] = [[] for _ in range(num_slots)]
        for row, slot in enumerate(slots):
            if slot >= 0:
                by_slot[slot].append(row)
        order = [row for rows in by_slot for row in rows]
        places = [-1] * len(slots)
        for place, row in enumerate(order):
            places[row] = place
        begins = [0, *accumulate(map(len, by_slot))]
        return cls._make(torch.tensor(x, dtype=torch.int32) for x in (order, begins, places))


class AdapterSums(NamedTuple):
    """Outputs of adapters. They are added to a linear map's output before any other op.

    sums    [.., N]  float32  the order of rows depends on the build
    places  [R]      int32    index of a row in `AdapterRows.order`; -1: no adapter
    """

    sums: Any
    places: Tensor


class PackedExperts(NamedTuple):
    """The weights of all experts, in one form that depends on the build.

    each            packed weights, by expert
    bias    [E, N]  in the dtype of the rows
    joined          one tensor for all experts, or on CPUs an array of their addresses [E] int64;
                    None if the build has no such form
    """

    each: Sequence[Any]
    bias: Tensor | None
    joined: Any = None


class Routing(NamedTuple):
    """The experts of each row, in the order of their choice: mostly of descending weight.

    weights  [R, k]  float32
    experts  [R, k]  int32
    """

    weights: Tensor
    experts: Tensor


class Rows(NamedTuple):
    """The position, KV slot and visible slots of each row of a step; host tensors.

    qo_indptr      [B+1]  int32  request b has the rows [qo_indptr[b], qo_indptr[b+1])
    indptr         [B+1]  int32  and the blocks indices[indptr[b]:indptr[b+1]], in logical order
    indices        [..]   int32  block numbers
    last_page_len  [B]    int32  slots in use of a request's last block, 1..block_size
    positions      [R]    int32  rotary position; for a tree row, prefix + its depth in the mask
    slots          [R]    int64  slot that receives the row's KV: block number * block_size + offset
    prefix         [R]    int32  the row attends to its request's slots [0, prefix) ...
    mask           [R]    int64  ... and to slot prefix + j for every bit j, including its own slot

    A causal row has prefix = position + 1 and no mask. Rows of one request that have a mask share
    one prefix, and a node's ancestors have lower bits than the node. Either all rows of a request
    have a mask, or none. Requests without masks come before requests with masks. `adapters` is
    None if no row has an adapter. `states` is None if no request has a recurrent state.
    """

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    positions: Tensor
    slots: Tensor
    prefix: Tensor
    mask: Tensor
    adapters: AdapterRows | None = None
    states: StateRows | None = None


class StepColumns(NamedTuple):
    """The token ids of a step, its rows, and the rows whose logits are read; as Python arrays.

    The arrays grow faster than NumPy's, and creating a tensor for each takes longer than to fill
    it. `mask` is unsigned, because bit 63 is a node. The other fields have the dtypes of Rows;
    `token_ids` and `read` are int64.
    """

    token_ids: "array[int]"
    qo_indptr: "array[int]"
    indptr: "array[int]"
    indices: "array[int]"
    last_page_len: "array[int]"
    positions: "array[int]"
    slots: "array[int]"
    prefix: "array[int]"
    mask: "array[int]"
    read: "array[int]"

    @classmethod
    def empty(cls) -> "StepColumns":
        return cls(
            token_ids=array("q"),
            qo_indptr=array("i", [0]),
            indptr=array("i", [0]),
            indices=array("i"),
            last_page_len=array("i"),
            positions=array("i"),
            slots=array("q"),
            prefix=array("i"),
            mask=array("Q"),
            read=array("q"),
        )

    def rows(self, adapters: AdapterRows | None, states: StateRows | None) -> Rows:
        """Return the rows as tensors that share the arrays' memory."""
        return Rows._make([*map(tensor_of, self[1:-1]), adapters, states])


def tensor_of(column: "array[int]") -> Tensor:
    """Return a host tensor that shares an array's memory."""
    dtype = np.int32 if column.typecode == "i" else np.int64
    return torch.from_numpy(np.frombuffer(column, dtype))


@dataclass(slots=True, eq=False)
class KVLayer:
    """One layer's keys and values in every block: strided views of the arena.

    k, v              [num_blocks, block_size, Hk, D]  the last three dimensions contiguous, equal
                                                       strides
    k_scale, v_scale  [num_blocks, block_size, Hk]     float32; in memory [Hk][block_size], equal
                                                       strides. None unless k and v are int8 or
                                                       float8_e4m3fn codes
    native            the same in a form of the build, created at first use
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    native: Any = None

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that hold a token's values, by block and offset."""
        return [x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None]


class AttentionKind(NamedTuple):
    """Layers whose attention has one plan. `head_dim` is their largest head size."""

    window: Window
    num_kv_heads: int
    head_dim: int


class KVCache(NamedTuple):
    """One model's view of the block arena, by layer.

    layers  KV of the attention layers, in order
    states  of the recurrent ops, in the order in which a forward calls them
    """

    layers: tuple[KVLayer, ...]
    states: tuple[StateLayer, ...] = ()

    @property
    def block_size(self) -> int:
        return self.layers[0].k.shape[1]

    def kinds(self, windows: Iterable[Window]) -> list[AttentionKind]:
        """Every window with every number of KV heads."""
        sizes = dict[int, int]()
        for layer in self.layers:
            _, _, heads, D = layer.k.shape
            sizes[heads] = max(D, sizes.get(heads, 0))
        return [AttentionKind(w, heads, D) for w in windows for heads, D in sizes.items()]


class Rotary(NamedTuple):
    """Cosine and sine by position.

    cos, sin     [P, D/2]  float32  scaled by the rope type's attention factor
    query_scale  [P]       float32  one more factor of rotated queries; None: no factor
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None


class QKNorm(NamedTuple):
    """Norm of every query and key head.

    q, k         [D], or [H, D] and [Hk, D]  float32
    is_centered  LayerNorm, else RMSNorm
    is_last      after the rotation, else before it
    has_values   value heads get an RMSNorm without a weight
    """

    q: Tensor
    k: Tensor
    eps: float
    is_centered: bool = False
    is_last: bool = False
    has_values: bool = False


class Edits(NamedTuple):
    """Changes of single logits, in lists that rows may share; host tensors.

    base, own  [n, 2]  int32    the row has the edits [base[0], base[1]), then [own[0], own[1])
    ids        [E]     int32    distinct within each of these ranges
    bias       [E]     float32  -inf excludes the id
    factor     [E]     float32  above 0; 1 is off
    penalty    [E]     float32  0 is off

    An edit changes its id's logit x to y = x + bias, then to y / factor if y > 0, else to
    y * factor. Then it subtracts the penalty. If an id is in `base` and in `own`, only the edit in
    `own` applies. Thus an id's logit has the same bits if its token is known and if it is a draft
    token on the row's path.
    """

    base: Tensor
    own: Tensor
    ids: Tensor
    bias: Tensor
    factor: Tensor
    penalty: Tensor


class Masks(NamedTuple):
    """The token ids that a row may sample, as masks that rows may share; host tensors.

    number  [n]                int32  0: all ids; else the row's mask is words[number - 1]
    words   [M, ceil(V / 32)]  int32  bit id % 32 of word id // 32 is set if the id is allowed
    """

    number: Tensor
    words: Tensor


class SampleParams(NamedTuple):
    """Sampling parameters of n tokens; host tensors.

    temperature  [n]  float32  0 is greedy (argmax)
    top_k        [n]  int32    0 is off
    top_p        [n]  float32  1 is off
    min_p        [n]  float32  0 is off
    seeds        [n]  int64    key of the random numbers
    token_index  [n]  int64    index of the token in its request's token_ids
    edits, masks               None if no row has any
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    token_index: Tensor
    edits: Edits | None = None
    masks: Masks | None = None

    @classmethod
    @cache
    def greedy(cls, n: int) -> "SampleParams":
        """Parameters for argmax of n tokens. Do not modify them: they are cached."""
        zeros, ints = torch.zeros(n), torch.zeros(n, dtype=torch.int64)
        return cls(zeros, ints.int(), torch.ones(n), zeros, ints, ints)

    @classmethod
    def of(
        cls, columns: Iterable[Tensor], edits: Edits | None = None, masks: Masks | None = None
    ) -> "SampleParams":
        """Build from `columns` (the first six fields, in order), edits and masks."""
        return cls._make([*columns, edits, masks])

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self[:6]

    @property
    def is_plain(self) -> bool:
        """Whether no row has edits or a mask."""
        return self.edits is None and self.masks is None

    def tensors(self) -> list[Tensor]:
        return [*self.columns, *(self.edits or ()), *(self.masks or ())]

    def with_tensors(self, tensors: Iterable[Tensor]) -> "SampleParams":
        """Replace the tensors of `tensors()` by others, in the same order."""
        some = iter(tensors)
        columns = list(islice(some, len(self.columns)))
        edits = None if self.edits is None else Edits(*islice(some, len(self.edits)))
        masks = None if self.masks is None else Masks(*islice(some, len(self.masks)))
        return SampleParams.of(columns, edits, masks)

    def take(self, rows: Tensor | list[int]) -> "SampleParams":
        """The parameters of some rows. Lists of edits and words of masks are shared."""
        edits, masks = self.edits, self.masks
        if edits is not None:
            edits = edits._replace(base=edits.base[rows], own=edits.own[rows])
        if masks is not None:
            masks = masks._replace(number=masks.number[rows])
        return SampleParams.of((column[rows] for column in self.columns), edits, masks)


@cache
def all_rows(n: int) -> Tensor:
    """Return the numbers of n rows, int64. Do not modify them: they are cached."""
    return torch.arange(n)


class Logprobs(NamedTuple):
    """Logprobs of n tokens and of the k most probable tokens at the same positions; host tensors.

    token  [n]     float32  log softmax of the logits
    rank   [n]     int64    rank of the token, from 1, by descending logit, then by ascending id
    ids    [n, k]  int64    token ids of the ranks 1 to k
    top    [n, k]  float32  log softmax of `ids`
    """

    token: Tensor
    rank: Tensor
    ids: Tensor
    top: Tensor


class Threads(Protocol):
    """Sets the number of threads for each forward. Results do not depend on this number."""

    def use(self, rows: int) -> None:
        """Set the number of threads for a forward of `rows` rows."""
        ...

    def observe(self, rows: int, seconds: float) -> None:
        """Record the duration of the forward that followed the last call of `use`."""
        ...

    def is_settled(self, rows: int) -> bool:
        """Whether the number of threads for `rows` rows is final."""
        ...


def set_threads(number: int) -> None:
    """Set the number of torch's threads for this thread. To ask first takes less time."""
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


class FixedThreads(NamedTuple):
    """The same number of threads for every step."""

    number: int

    def use(self, rows: int) -> None:
        set_threads(self.number)

    def observe(self, rows: int, seconds: float) -> None:
        pass

    def is_settled(self, rows: int) -> bool:
        return True
