"""A build for a device as op tests see it: it takes tensors of the host and returns such."""

import inspect
from functools import partial

import torch

from specserve_kernels import (
    AdapterRows,
    Codes,
    DeltaParams,
    Edits,
    KVCache,
    KVLayer,
    Logprobs,
    MambaParams,
    Masks,
    QKNorm,
    Rotary,
    Rows,
    SampleParams,
    StateLayer,
)
from specserve_kernels.cuda.experts import Routing

KINDS = AdapterRows, Codes, Edits, KVCache, Logprobs, Masks, QKNorm, Rotary, Routing, Rows
KINDS += SampleParams, DeltaParams, MambaParams, tuple, list
HOST = {  # op -> the arguments that it takes from the host
    "copy_blocks": ("source", "target"),
    "logprobs": ("rows", "tokens"),
    "move_kv": ("source", "target"),
    "plan": ("rows", "also"),
    "prepack": ("weight",),
    "prepack_experts": ("weights",),
    "quantize": ("weight",),
    "replay": ("replays",),
    "sample": ("rows", "params"),
    "top_children": ("params",),
}
# Ops that return objects of the build, which read nothing of the host.
OPAQUE = {"adapted", "adapter_slots", "plan", "prepack", "prepack_experts"}
OPS = OPAQUE | HOST.keys() | {
    *("activate", "add_gated", "allocate", "attention", "copy", "embed", "experts"),
    *("gate_columns", "layer_norm", "linear", "linear_add", "linear_gated", "lm_head", "place"),
    *("rms_norm", "rms_norm_add", "add_matched", "correct_streams", "mix_streams"),
    *("sparse_gated", "spread_streams", "weigh_columns"),
    *("rms_norm_columns", "rope_write_kv", "route", "scale", "soft_cap", "take_rows"),
    *("causal_conv", "delta_rule", "gate", "selective_state_update"),
    *("all_gather", "receive", "send", "take_columns", "put_columns", "weigh_rows"),
}  # fmt: skip


class Placed:
    """The build `ops`, whose tensors lie on `device`, for tests whose tensors lie on the host.

    Each call copies the storages of its tensors to the device, and copies them back afterwards. So
    an op that writes in place changes the test's tensors, and views of one storage stay views of
    one storage. Without a GPU the device is the CPU, and the storages are copied all the same.
    """

    def __init__(self, ops, device):
        self.ops, self.device = ops, device

    def __getattr__(self, name):
        value = getattr(self.ops, name)
        return partial(self.call, name, value) if name in OPS else value

    def call(self, name, op, *args, **kwargs):
        given = inspect.signature(op).bind(*args, **kwargs).arguments
        stay, copies = HOST.get(name, ()), Copies(self.device)
        placed = {key: x if key in stay else copies.to_device(x) for key, x in given.items()}
        result = op(**placed)
        copies.write_back()
        return result if name in OPAQUE else copies.to_host(result)


class Copies:
    """The storages of one call on both sides."""

    def __init__(self, device):
        self.device = device
        self.storages = []  # (bytes on the host, bytes on the device)
        self.tensors = []  # (on the host, on the device)

    def to_device(self, x):
        if isinstance(x, torch.Tensor):
            return self.placed(x) if x.device.type == "cpu" else x
        return mapped(self.to_device, x)

    def to_host(self, x):
        if isinstance(x, torch.Tensor):
            return self.fetched(x)
        return mapped(self.to_host, x)

    def placed(self, x):
        for host, device in self.tensors:
            if host is x:
                return device
        device = view(x, self.storage(bytes_of(x)))
        self.tensors.append((x, device))
        return device

    def storage(self, host):
        for known, device in self.storages:
            if known.data_ptr() == host.data_ptr() and host.numel():
                return device
        device = host.to(self.device, copy=True)
        self.storages.append((host, device))
        return device

    def write_back(self):
        for host, device in self.storages:
            host.copy_(device)

    def fetched(self, x):
        """The test's own tensor, if the op has returned one of its arguments or a view of it."""
        for host, device in self.tensors:
            if device is x:
                return host
        for host, device in self.storages:
            if host.numel() and bytes_of(x).data_ptr() == device.data_ptr():
                return view(x, host)
        return x.cpu()


def mapped(change, x):
    if isinstance(x, KVLayer):
        return KVLayer(*map(change, (x.k, x.v, x.k_scale, x.v_scale)))
    if isinstance(x, StateLayer):
        return StateLayer(
            change(x.memory), x.places, x.shape, x.dtype, change(x.kept), x.num_groups
        )
    if type(x) in KINDS:
        parts = map(change, x)
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def bytes_of(x):
    """All of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def view(x, storage):
    """What `x` is in its own storage, in the storage of these bytes."""
    empty = torch.empty(0, dtype=x.dtype, device=storage.device)
    return empty.set_(storage.untyped_storage(), x.storage_offset(), x.size(), x.stride())
