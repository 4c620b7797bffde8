"""Exchanges between ranks on GPUs: over NCCL, or over sockets if `Ranks.device` is None."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from specserve_kernels import reference
from specserve_kernels.ranks import Gathering, Ranks
from specserve_kernels.reference.experts import of_holders as of_holders_on_host


def join(ranks: Ranks, folder: Path, name: str) -> None:
    """Connect the GPUs of ranks on one host. All ranks call this at the same time.

    folder  where the ranks find each other; only their user may write to it
    name    of this group of ranks
    """
    store = FileStore(str(folder / name), ranks.size)
    options = dist.ProcessGroupNCCL.Options()
    ranks.device = dist.ProcessGroupNCCL(store, ranks.rank, ranks.size, options)


def all_gather(x: Tensor, gathering: Gathering, reader: int | None = None) -> Tensor:
    """Same as the reference op. NCCL gathers parts of equal width, so narrower ones are padded."""
    ranks, begins = gathering
    if ranks.device is None:
        return reference.all_gather(x.cpu(), gathering, reader).to(x.device)
    widths = [end - begin for begin, end in pairwise(begins)]
    widest = max(widths)
    own = x.new_zeros(len(x), widest)
    own[:, : x.shape[1]] = x
    found = x.new_empty(ranks.size * len(x), widest)
    wait(ranks.device._allgather_base(found, own))
    parts = zip(found.view(ranks.size, len(x), widest), widths, strict=True)
    return torch.cat([part[:, :width] for part, width in parts], 1)


def of_holders(outputs: Tensor, experts: Tensor, holders: Gathering) -> Tensor:
    """Return each pair's output, from the rank that holds its expert.

    outputs  [pairs, N]  float32  of this rank's experts; zeros for others
    experts  [pairs]     int      of each pair
    """
    ranks = holders.ranks
    if ranks.device is None:
        found = of_holders_on_host(outputs.cpu(), experts.cpu(), holders)
        return found.to(outputs.device)
    wait(ranks.device.allreduce([outputs]))  # exact: only one rank adds a number to zeros
    return outputs


def send(x: Tensor, ranks: Ranks, other: int) -> Tensor:
    """Same as the reference op."""
    if ranks.device is None:
        reference.send(x.cpu(), ranks, other)
    else:
        wait(ranks.device.send([x.contiguous()], other, 0))
    return x


def receive(rows: Tensor, width: int, dtype: torch.dtype, ranks: Ranks, other: int) -> Tensor:
    """Same as the reference op."""
    if ranks.device is None:
        found = reference.receive(rows, width, dtype, ranks, other)
        return found.to(rows.device)
    out = torch.empty(len(rows), width, dtype=dtype, device=rows.device)
    wait(ranks.device.recv([out], other, 0))
    return out


def wait(work: Any) -> None:
    """Let the current stream wait for an exchange; the host does not wait."""
    work.wait()
