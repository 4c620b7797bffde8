"""The ranks of one model as threads of this process."""

from concurrent.futures import ThreadPoolExecutor
from socket import SHUT_RDWR

import torch

from specserve.engine.ranks import Mesh, connections
from specserve.models.loader import load_decoder
from specserve.models.shard import Shard
from specserve.models.weight import AS_STORED


def in_ranks(
    folder,
    ops,
    dtype,
    tensor,
    pipeline,
    run,
    rounding=AS_STORED,
    shares_memory=True,
    has_whole_experts=False,
):
    """What `run` returns for each rank's part of a model; the ranks run at the same time."""
    shard = Shard(0, tensor, pipeline, has_whole_experts)
    mesh = Mesh(shard, 1 << 14)
    parts = [load_decoder(folder, dtype, ops, 288, None, rounding, shard.at(r))
             for r in range(shard.size)]  # fmt: skip

    def rank(number):
        torch.set_num_threads(1)
        own = shard.at(number)
        memory = mesh.memories[own.stage] if shares_memory else None
        joined = connections(own, mesh.sockets[number], memory)
        try:
            return run(parts[number].connected(joined))
        except BaseException:
            for sock in mesh.sockets[number].values():
                sock.shutdown(SHUT_RDWR)  # so that no rank waits for this one
            raise

    with ThreadPoolExecutor(shard.size) as threads:
        found = list(threads.map(rank, range(shard.size)))
    mesh.close()
    for sock in mesh.sockets[0].values():
        sock.close()
    return found
