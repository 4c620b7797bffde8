"""FlashInfer's paged attention: causal rows by position, trees by a packed mask.

The only file that knows FlashInfer. Read in 0.6.4 and kept to what later versions share.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specserve_kernels.cuda.masks import kv_lengths, pack, sight
from specserve_kernels.errors import DeviceError
from specserve_kernels.types import KVCache, KVLayer, Rows

HEAD_SIZES = (64, 128, 256)
WORKSPACE_BYTES = 512 << 20  # for the pieces of a split KV: H/Hk x 264 tiles of 128 rows at most
# fa3 is the faster for long chunks, but has no split KV and a program for every query head, so
# that a few rows over a long context would leave most of the chip idle. And with one arithmetic
# for causal rows and for trees, a drafter flips fewer near-ties.
BACKEND = "fa2"


def load_flashinfer() -> Any:
    try:
        import flashinfer
    except ImportError as e:
        raise DeviceError(
            f"FlashInfer cannot be imported ({e}): pip install 'specserve[gpu]'"
        ) from e
    return flashinfer


class Part(NamedTuple):
    """Rows [begin, end) of a step, and the wrapper that attends for them, by window."""

    begin: int
    end: int
    wrappers: dict[int | None, Any]


class FlashInfer:
    """Wrappers that are planned once a step and run once a layer."""

    def __init__(self, device: torch.device, module: Any, backend: str = BACKEND) -> None:
        self.module, self.backend = module, backend
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrappers: dict[tuple[str, int | None], Any] = {}
        self.planned = torch.cuda.Event() if device.type == "cuda" else None

    def fits(self, kv: KVCache) -> bool:
        k = kv.layers[0].k
        return k.shape[-1] in HEAD_SIZES and k.dtype == torch.bfloat16

    def masks(
        self, rows: Rows, kv: KVCache, windows: Sequence[int | None]
    ) -> dict[int | None, tuple[Tensor, Tensor]]:
        """The trees' packed masks and where each request's begins; host tensors."""
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
        windows: Sequence[int | None],
        masks: dict[int | None, tuple[Tensor, Tensor]],
    ) -> list[Part]:
        """The step's parts: its causal requests, and its trees.

        indices, masks  on the device
        """
        if self.planned is not None:
            self.planned.synchronize()  # the last plan has left the pinned memory that this takes
        b, r = num_causal(rows)
        all_requests, num_rows = len(rows.last_page_len), len(rows.positions)
        parts = []
        if b:
            wrappers = {
                w: self.planned_wrapper("causal", w, slice(0, b), rows, indices, kv, num_heads)
                for w in windows
            }
            parts.append(Part(0, r, wrappers))
        if b < all_requests:
            trees = slice(b, all_requests)
            wrappers = {
                w: self.planned_wrapper("tree", w, trees, rows, indices, kv, num_heads, masks[w])
                for w in windows
            }
            parts.append(Part(r, num_rows, wrappers))
        if self.planned is not None:
            self.planned.record()
        return parts

    def planned_wrapper(
        self,
        kind: str,
        window: int | None,
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
        _, block_size, num_kv_heads, D = kv.layers[0].k.shape
        dtype = kv.layers[0].k.dtype
        try:
            wrapper.plan(
                qo - qo[0],
                indptr - indptr[0],
                indices[int(indptr[0]) : int(indptr[-1])],
                rows.last_page_len[requests],
                num_heads,
                num_kv_heads,
                D,
                block_size,
                packed_custom_mask=None if mask is None else mask[0],
                causal=mask is None,
                sm_scale=1.0,  # `run` has the scale
                # Its window counts slots, which for causal rows are the positions.
                window_left=-1 if mask is not None or window is None else window - 1,
                q_data_type=dtype,
                kv_data_type=dtype,
            )
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, OSError) as e:
            reason = cause(str(e))
            raise DeviceError(
                f"FlashInfer cannot prepare its kernels ({reason}): it compiles them at their "
                "first use, which takes nvcc and ninja"
            ) from e
        if mask is not None:
            # Given a packed mask, 0.6.4 takes the number of bits for the number of bytes.
            wrapper._mask_indptr_buf = mask[1]
        return wrapper

    @torch.inference_mode(False)  # it makes buffers that it writes into
    def wrapper(self, kind: str, window: int | None) -> Any:
        if (kind, window) not in self.wrappers:
            make = self.module.BatchPrefillWithPagedKVCacheWrapper
            self.wrappers[kind, window] = make(self.workspace, "NHD", backend=self.backend)
        return self.wrappers[kind, window]

    def run(
        self, q: Tensor, kv: KVLayer, parts: list[Part], scale: float, window: int | None
    ) -> Tensor:
        """[R, H, D] in, and out."""
        out = torch.empty_like(q)
        for part in parts:
            at = slice(part.begin, part.end)
            part.wrappers[window].run(q[at], (kv.k, kv.v), q_scale=scale, out=out[at])
        return out


def cause(complaint: str) -> str:
    """The line of a failed build that says why; else the first."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "cannot find" in line]
    return (telling or lines or [""])[0][:300]


def num_causal(rows: Rows) -> tuple[int, int]:
    """Requests without a mask, and their rows: they come first."""
    is_tree = rows.mask.numpy()[rows.qo_indptr.numpy()[:-1]] != 0
    num_requests = int((~is_tree).sum())
    assert not is_tree[:num_requests].any(), "a request without a mask comes after one with"
    return num_requests, int(rows.qo_indptr[num_requests])
