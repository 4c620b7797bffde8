"""FlashInfer's paged prefill as documented, in torch: what our use of it is tested by.

Faithful to 0.6.4 where that is not what one would expect: `plan` counts a packed mask's place in
bits instead of bytes, and takes `qo_indptr` and the like as host tensors only to be quick.
"""

from types import SimpleNamespace

import torch

__version__ = "0.6.4"
built = []  # what has been compiled, in order


def get_batch_prefill_module(backend, *variant):
    built.append((backend, *variant))


prefill = SimpleNamespace(get_batch_prefill_module=get_batch_prefill_module)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        assert backend in ("auto", "fa2", "fa3")

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        packed_custom_mask=None,
        causal=False,
        sm_scale=None,
        window_left=-1,
        q_data_type="float16",
        kv_data_type=None,
    ):
        ints = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(x.dtype == torch.int32 for x in ints)
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert (paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()
        assert not causal or packed_custom_mask is None
        self.heads = num_qo_heads, num_kv_heads, head_dim_qk
        self.page_size, self.causal, self.window_left = page_size, causal, window_left
        self.dtypes = q_data_type, kv_data_type
        self.scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.qo, self.indptr = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices, self.mask = paged_kv_indices.clone(), packed_custom_mask
        used = paged_kv_indptr.diff() - 1
        self.kv_len = (used * page_size + paged_kv_last_page_len).tolist()
        bits = [0]
        for b, kv_len in enumerate(self.kv_len):
            bits.append(bits[-1] + (self.qo[b + 1] - self.qo[b]) * kv_len)
        self._mask_indptr_buf = torch.tensor(bits, dtype=torch.int32)

    def run(self, q, paged_kv_cache, *, q_scale=None, out=None):
        k, v = paged_kv_cache
        assert (q.dtype, k.dtype) == self.dtypes and out.dtype == q.dtype
        assert k.stride() == v.stride() and k.shape[1] == self.page_size
        assert (q.shape[1], k.shape[2], q.shape[2]) == self.heads
        scale = self.scale * (1 if q_scale is None else q_scale)
        group = q.shape[1] // k.shape[2]
        for b, kv_len in enumerate(self.kv_len):
            rows = slice(self.qo[b], self.qo[b + 1])
            slots = torch.arange(kv_len)
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            at = pages[slots // self.page_size], slots % self.page_size
            keys, values = (x[at].double().repeat_interleave(group, dim=1) for x in (k, v))
            score = torch.einsum("rhd,shd->hrs", q[rows].double(), keys) * scale
            seen = self.seen(b, rows.stop - rows.start, kv_len)
            weight = score.masked_fill(~seen, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hrs,shd->rhd", weight, values).to(out.dtype)
        return out

    def seen(self, b, num_rows, kv_len):
        i, s = torch.arange(num_rows)[:, None], torch.arange(kv_len)[None]
        if self.mask is None:
            seen = s <= kv_len - num_rows + i if self.causal else s >= 0
        else:
            bit = i * kv_len + s
            byte = self.mask[int(self._mask_indptr_buf[b]) + bit // 8]
            seen = (byte >> (bit % 8)) & 1 == 1
        if self.window_left >= 0:  # slots, not positions
            seen = seen & (s + num_rows + self.window_left >= kv_len + i)
        return seen
