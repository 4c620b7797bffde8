"""FlashInfer's paged attention: causal rows by position, draft trees by a packed mask.

Only this file uses FlashInfer. It is written against the sources of 0.6.4 and 0.6.18.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specserve_kernels.cuda.masks import kv_lengths, pack, sight
from specserve_kernels.errors import DeviceError
from specserve_kernels.types import Chunks, KVCache, KVLayer, Rows, Window

FROM, BELOW = "0.6.4", "0.7"  # supported versions; pyproject.toml has the same bounds
HEAD_SIZES = (64, 128, 256)
WORKSPACE_BYTES = 512 << 20  # for pieces of a split KV: at most H/Hk x 264 tiles of 128 rows
# fa3 is faster for long chunks, but does not split the KV, and runs one program per query head. A
# few rows over a long context would leave most of the GPU idle. Also, fa2 computes causal rows and
# trees with the same arithmetic, so speculation flips fewer near-ties.
BACKEND = "fa2"


def load_flashinfer() -> Any:
    """Import FlashInfer. DeviceError if it is missing or has an unsupported version."""
    try:
        import flashinfer
    except (ImportError, RuntimeError, OSError) as e:  # the import loads shared libraries
        raise DeviceError(
            f"FlashInfer cannot be imported ({cause(str(e))}). Install it with pip install "
            "'specserve[gpu]'."
        ) from e
    if not version(FROM) <= version(flashinfer.__version__) < version(BELOW):
        raise DeviceError(
            f"FlashInfer {flashinfer.__version__} is not supported; {FROM} to below {BELOW} is. "
            "Install a supported version with pip install 'specserve[gpu]'."
        )
    return flashinfer


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


class PlannedRows(NamedTuple):
    """Rows [begin, end) of a step, and their FlashInfer wrappers by window."""

    begin: int
    end: int
    wrappers: dict[Window, Any]


class FlashInfer:
    """FlashInfer wrappers, planned once per step and run once per layer."""

    def __init__(self, device: torch.device, module: Any, backend: str = BACKEND) -> None:
        self.module, self.backend = module, backend
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrappers: dict[tuple[str, Window], Any] = {}
        self.built: set[tuple[int, bool]] = set()  # head size, has a window
        self.planned = torch.cuda.Event() if device.type == "cuda" else None

    def fits(self, kv: KVCache, windows: Sequence[Window]) -> bool:
        k, has_chunks = kv.layers[0].k, any(isinstance(window, Chunks) for window in windows)
        is_uniform = len({layer.k.shape[2:] for layer in kv.layers}) == 1
        is_served = k.shape[-1] in HEAD_SIZES and k.dtype == torch.bfloat16
        return is_uniform and is_served and not has_chunks

    def build(self, kv: KVCache, windows: Sequence[Window]) -> None:
        """Compile and load the kernels of later plans. DeviceError if that fails.

        FlashInfer's `plan` would also build them, but its build errors look like other errors.
        """
        D = kv.layers[0].k.shape[-1]
        # A tree's mask includes the window, so tree kernels need no window.
        for has_window in {False, *(w is not None for w in windows)}:
            if (D, has_window) not in self.built:
                self.build_kernels(D, has_window)
                self.check_masks(D)
                self.built.add((D, has_window))

    def build_kernels(self, D: int, has_window: bool) -> None:
        q = kv = out = torch.bfloat16
        no_rotation, no_soft_cap, no_fp16 = 0, False, False
        variant = (q, kv, out, torch.int32, D, D, no_rotation, has_window, no_soft_cap, no_fp16)
        try:
            self.module.prefill.get_batch_prefill_module(self.backend, *variant)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, OSError) as e:
            raise DeviceError(
                f"FlashInfer cannot build its kernels ({cause(str(e))}). It compiles them at first "
                "use: install nvcc and ninja."
            ) from e
        except (AttributeError, TypeError) as e:
            raise self.unknown(e) from e

    def check_masks(self, D: int) -> None:
        """Check that `plan` stores the mask offsets in `_mask_indptr_buf`; else DeviceError.

        `planned_wrapper` replaces this private attribute. The check plans two requests: 3 rows over
        4 slots, and one row over 5. Their masks begin at the bits 0 and 12, or the bytes 0 and 2.
        """
        ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 4], [0, 1, 2], [0, 1], [4, 5])]
        mask = torch.full((3,), 255, dtype=torch.uint8, device=self.workspace.device)
        ints[2] = ints[2].to(self.workspace.device)
        wrapper = self.wrapper("tree", None)
        self.ask(wrapper, ints, (1, 1, D, 16), -1, mask)
        begins = getattr(wrapper, "_mask_indptr_buf", None)
        if not torch.is_tensor(begins) or begins.dtype != torch.int32:
            raise self.unknown(f"_mask_indptr_buf is {begins!r}")
        if begins.tolist() not in ([0, 12, 17], [0, 2, 3]):
            raise self.unknown(f"_mask_indptr_buf is {begins.tolist()}")

    def unknown(self, what: object) -> DeviceError:
        return DeviceError(
            f"FlashInfer {self.module.__version__} has an unknown interface ({what}). Install "
            f"version {FROM}."
        )

    def masks(
        self, rows: Rows, kv: KVCache, windows: Sequence[Window]
    ) -> dict[Window, tuple[Tensor, Tensor]]:
        """Return, by window, the trees' packed masks and each request's offset, as host tensors."""
        b, r = num_causal(rows)
        if b == len(rows.last_page_len):
            return {}
        num_rows = np.diff(rows.qo_indptr.numpy()[b:]).astype(np.int64)
        lengths = kv_lengths(rows, kv.block_size)[b:]
        masks = {}
        for window in windows:
            packed, indptr = pack(num_rows, lengths, sight(rows, window).from_row(r))
            masks[window] = torch.from_numpy(packed), torch.from_numpy(indptr.astype(np.int32))
        return masks

    def plan(
        self,
        rows: Rows,
        indices: Tensor,
        kv: KVCache,
        num_heads: int,
        windows: Sequence[Window],
        masks: dict[Window, tuple[Tensor, Tensor]],
    ) -> list[PlannedRows]:
        """Plan the parts of a step: its causal requests, and its draft trees.

        indices, masks  on the device
        """
        if self.planned is not None:
            self.planned.synchronize()  # the last plan's copies read the same pinned memory
        b, r = num_causal(rows)
        all_requests, num_rows = len(rows.last_page_len), len(rows.positions)
        parts = []
        if b:
            wrappers = {
                w: self.planned_wrapper("causal", w, slice(0, b), rows, indices, kv, num_heads)
                for w in windows
            }
            parts.append(PlannedRows(0, r, wrappers))
        if b < all_requests:
            trees = slice(b, all_requests)
            wrappers = {
                w: self.planned_wrapper("tree", w, trees, rows, indices, kv, num_heads, masks[w])
                for w in windows
            }
            parts.append(PlannedRows(r, num_rows, wrappers))
        if self.planned is not None:
            self.planned.record()
        return parts

    def planned_wrapper(
        self,
        kind: str,
        window: Window,
        requests: slice,
        rows: Rows,
        indices: Tensor,
        kv: KVCache,
        num_heads: int,
        mask: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        wrapper = self.wrapper(kind, window)
        upto = slice(requests.start, requests.stop + 1)
        qo, indptr = rows.qo_indptr[upto], rows.indptr[upto]
        own = indices[int(indptr[0]) : int(indptr[-1])]
        ints = [qo - qo[0], indptr - indptr[0], own, rows.last_page_len[requests]]
        _, block_size, num_kv_heads, D = kv.layers[0].k.shape
        assert not isinstance(window, Chunks), "FlashInfer has no windows that start at multiples"
        # FlashInfer's window counts slots. For causal rows, slots equal positions.
        window_left = -1 if mask is not None or window is None else window - 1
        heads = num_heads, num_kv_heads, D, block_size
        self.ask(wrapper, ints, heads, window_left, None if mask is None else mask[0])
        if mask is not None:
            # Given a packed mask, `plan` stores offsets in bits, but the kernels read bytes.
            wrapper._mask_indptr_buf = mask[1]
        return wrapper

    def ask(
        self,
        wrapper: Any,
        ints: Sequence[Tensor],
        heads: tuple[int, int, int, int],
        window_left: int,
        mask: Tensor | None,
    ) -> None:
        """Call the wrapper's `plan`. torch.OutOfMemoryError if the workspace is too small.

        ints   qo_indptr, indptr, indices, last_page_len, as in Rows
        heads  query heads, KV heads, head size, block size
        """
        try:
            wrapper.plan(
                *ints,
                *heads,
                packed_custom_mask=mask,
                causal=mask is None,
                sm_scale=1.0,  # `run` takes the scale
                window_left=window_left,
                q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16,
            )
        except RuntimeError as e:
            if "workspace" not in str(e):
                raise
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. FlashInfer's workspace of {WORKSPACE_BYTES >> 20} MiB is too "
                f"small for this step. {cause(str(e))}"
            ) from e

    @torch.inference_mode(False)  # the wrapper also writes its buffers outside that mode
    def wrapper(self, kind: str, window: Window) -> Any:
        if (kind, window) not in self.wrappers:
            make = self.module.BatchPrefillWithPagedKVCacheWrapper
            self.wrappers[kind, window] = make(self.workspace, "NHD", backend=self.backend)
        return self.wrappers[kind, window]


def run_parts(
    q: Tensor, kv: KVLayer, parts: list[PlannedRows], scale: float, window: Window
) -> Tensor:
    """Run attention of the last planned step, part by part; q and result are [R, H, D]."""
    out = torch.empty_like(q)
    for part in parts:
        at = slice(part.begin, part.end)
        part.wrappers[window].run(q[at], (kv.k, kv.v), q_scale=scale, out=out[at])
    return out


def cause(complaint: str) -> str:
    """Return the line of a build's output that names the error, else the first line."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "cannot find" in line]
    return (telling or lines or [""])[0][:300]


def num_causal(rows: Rows) -> tuple[int, int]:
    """Return the number of requests without a mask, which come first, and of their rows."""
    is_tree = rows.mask.numpy()[rows.qo_indptr.numpy()[:-1]] != 0
    num_requests = int((~is_tree).sum())
    assert not is_tree[:num_requests].any(), (
        "a request without a mask follows a request with a mask"
    )
    return num_requests, int(rows.qo_indptr[num_requests])
