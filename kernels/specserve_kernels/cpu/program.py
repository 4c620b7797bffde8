"""A forward, recorded as a flat list of C++ ops on buffers with fixed addresses."""

from collections.abc import Collection, Sequence
from ctypes import addressof
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve_kernels.cpu import arguments, native
from specserve_kernels.cpu.recorder import READ, STEP, Hosted, Index, Native, Recorder
from specserve_kernels.ops import ModelForward, Outputs
from specserve_kernels.states import StateRows
from specserve_kernels.types import AdapterRows, KVCache, Rows, StepColumns

MAX_VIEWS = 256  # most kept sets of views, about 1 KB each


class NativePiece(NamedTuple):
    """Consecutive native ops, which one call runs, or one op in Python."""

    ops: Any  # ctypes array; None for an op in Python
    hosted: Hosted | None


class Recording:
    """The ops of one forward and their buffers, for steps of up to `max_rows` rows.

    max_rows  rows of a step, rows whose logits are read
    """

    def __init__(
        self,
        model: ModelForward,
        kv: KVCache,
        max_rows: tuple[int, int],
        aux_layer_ids: Collection[int],
    ) -> None:
        recorder: Any = Recorder((*max_rows, max_rows[STEP]))
        self.max_rows = max_rows
        on: Any = model.on(recorder)
        self.entry = on.embed(Index(STEP))
        layers = len(recorder.calls)
        plan = on.plan(recorder, kv)
        self.residual, self.aux_hidden_states = on.forward(self.entry, kv, plan, aux_layer_ids)
        head = len(recorder.calls)
        self.logits = on.logits(self.residual, Index(READ))
        self.calls: list[Native | Hosted] = recorder.calls
        self.from_ids = pieces(self.calls)
        self.from_residual, self.head = pieces(self.calls[layers:]), pieces(self.calls[head:])
        self.memory, self.kept = recorder.memory, recorder.kept
        of_layers = {(call.name, call.domain) for call in self.calls[layers:]}
        # Whether the forward reads token ids even if it begins with a residual.
        self.reads_ids = not of_layers.isdisjoint({("gather", STEP), ("gather_codes", STEP)})
        self.adapter_rows: AdapterRows | None = recorder.adapter_rows
        self.views: dict[tuple[int, int], Outputs] = {}  # of the buffers, by numbers of rows

    def outputs(self, R: int, n: int) -> Outputs:
        """Return the first rows of the buffers, for a step of R rows of which n are read."""
        found = self.views.get((R, n))
        if found is None:
            aux = {layer: aux.tensor[:R] for layer, aux in self.aux_hidden_states.items()}
            logits = self.logits.tensor[:n] if n else None
            found = Outputs(self.residual.tensor[:R], logits, aux, ())
            if len(self.views) == MAX_VIEWS:
                self.views.clear()
            self.views[R, n] = found
        return found

    def take_adapters(self, rows: AdapterRows) -> int:
        """Copy a step's adapter rows into the buffers of the ops. Return their number."""
        assert self.adapter_rows is not None, "the model has no adapter slots"
        for own, given in zip(self.adapter_rows, rows, strict=True):
            own[: len(given)] = given
        return len(rows.order)


def pieces(calls: Sequence[Native | Hosted]) -> list[NativePiece]:
    found = []
    for is_native, group in groupby(calls, lambda call: isinstance(call, Native)):
        if is_native:
            filled = [
                native.Op(native.address(c.name), addressof(c.args), c.domain)
                for c in group
                if isinstance(c, Native)
            ]
            found.append(NativePiece((native.Op * len(filled))(*filled), None))
        else:
            found += [NativePiece(None, call) for call in group if isinstance(call, Hosted)]
    return found


class NativeProgram:
    """A recorded forward. A step with more rows than the buffers hold records it again."""

    def __init__(
        self,
        model: ModelForward,
        kv: KVCache,
        max_rows: int,
        max_read: int,
        aux_layer_ids: Collection[int] = (),
    ) -> None:
        self.model, self.kv, self.aux_layer_ids = model, kv, aux_layer_ids
        self.recording = Recording(model, kv, (max_rows, max_read), aux_layer_ids)
        self.attention = arguments.AttentionPlan()
        self.step = native.StepStruct(attention=self.attention.address)
        self.kept: Any = None  # tensors or arrays whose addresses the step holds
        self.rows = native.RowsStruct()

    @property
    def native_ops(self) -> list[str]:
        """Names of the C++ ops, in the order of execution."""
        return [c.name for c in self.recording.calls if isinstance(c, Native)]

    @property
    def host_ops(self) -> list[str]:
        """Names of the ops that run in Python."""
        return [c.name for c in self.recording.calls if isinstance(c, Hosted)]

    @property
    def words(self) -> str:
        size = self.recording.memory.num_bytes / 2**20
        names = ", ".join(sorted(set(self.host_ops)))
        hosted = f" and {len(self.host_ops)} in Python ({names})" if names else ""
        return f"{len(self.native_ops)} operations in C++{hosted}, {size:.0f} MiB of buffers"

    def run(
        self,
        rows: Rows,
        token_ids: Tensor | None,
        read: Tensor,
        also: Sequence[Tensor] = (),
        residual: Tensor | None = None,
    ) -> Outputs:
        given = token_ids if residual is None else residual
        assert given is not None, "pass token ids or a residual"
        R, n = len(given), len(read)
        ids = None if token_ids is None else token_ids.data_ptr()
        self.kept = rows, token_ids, read
        self.place(native.rows_of(rows), (R, ids), (n, read.data_ptr()), rows.adapters)
        found = self.recording
        if residual is None:
            self.run_pieces(found.from_ids)
        else:
            assert token_ids is not None or not found.reads_ids, "this model needs token ids, too"
            found.entry.tensor[:R].copy_(residual)
            self.run_pieces(found.from_residual)
        return found.outputs(R, n)._replace(also=also)

    def run_columns(
        self,
        columns: StepColumns,
        adapters: AdapterRows | None,
        states: StateRows | None,
        also: Sequence[Tensor] = (),
    ) -> Outputs:
        self.kept = columns, states
        ids, R = columns.token_ids.buffer_info()
        read, n = columns.read.buffer_info()
        self.place(native.rows_of_columns(columns, states), (R, ids), (n, read), adapters)
        self.run_pieces(self.recording.from_ids)
        outputs = self.recording.outputs(R, n)
        return outputs._replace(also=also) if also else outputs

    def place(
        self,
        rows: native.RowsStruct,
        token_ids: tuple[int, int | None],
        read: tuple[int, int],
        adapters: AdapterRows | None,
    ) -> None:
        """Set the step's rows; `token_ids` and `read` are numbers of rows and addresses."""
        self.reserve(token_ids[0], read[0])
        step, self.rows = self.step, rows
        num_adapted = 0 if adapters is None else self.recording.take_adapters(adapters)
        step.num_rows[:] = token_ids[0], read[0], num_adapted  # STEP, READ, ADAPTED
        step.token_ids, step.read, step.rows = token_ids[1], read[1], addressof(rows)

    def logits(self, read: Tensor) -> Tensor:
        n = len(read)
        assert n <= self.recording.max_rows[READ], "more rows than reserved"
        self.step.num_rows[READ], self.step.read = n, read.data_ptr()
        self.run_pieces(self.recording.head)
        return self.recording.logits.tensor[:n]  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Keep the recording: addresses on the host do not change."""

    def reserve(self, num_rows: int, num_read: int) -> None:
        """Record again if the buffers are too small for a step. This step takes longer."""
        most = self.recording.max_rows
        if num_rows <= most[STEP] and num_read <= most[READ]:
            return
        # Rounded up to a power of two, so that few sizes are recorded.
        sizes = zip(most, (num_rows, num_read), strict=True)
        larger = [max(n, 1 << (k - 1).bit_length()) for n, k in sizes]
        self.recording = Recording(self.model, self.kv, (larger[0], larger[1]), self.aux_layer_ids)

    def run_pieces(self, found: Sequence[NativePiece]) -> None:
        threads = torch.get_num_threads()
        for piece in found:
            if piece.hosted is not None:
                if self.step.num_rows[piece.hosted.domain]:
                    piece.hosted.run(self.step.num_rows)
            else:
                native.run(piece.ops, self.step, threads)
