"""Ranks of an engine as threads of this process, so that a test starts them in milliseconds."""

import socket
from threading import Thread

import torch

from specserve.config import load_config
from specserve.engine.rank_process import Rank
from specserve.engine.ranks import Follower, Followers, Mesh, connections
from specserve.exchange.messages import Link
from specserve.models.loader import load_decoder
from specserve.models.shard import Shard
from specserve.models.weight import AS_STORED
from tests.engine.engines import MAX_LEN, OPS


class RankThread(Thread):
    """A rank that runs commands until its socket is closed."""

    def __init__(self, rank, sock):
        super().__init__(daemon=True)
        self.rank, self.link, self.error = rank, Link(sock), None

    def run(self):
        torch.set_num_threads(1)
        try:
            self.rank.run(self.link)
        except EOFError:
            pass
        except Exception as e:
            self.error = e
        for sock in self.rank.connections.every.sockets.values():
            sock.close()
        self.link.sock.close()

    def poll(self):
        return None

    def wait(self, seconds=None):
        self.join(seconds)
        return 0


class Shards:
    """The parts of a model, which several engines may run one after the other."""

    def __init__(self, folder, tensor, pipeline, has_whole_experts=False, rounding=AS_STORED):
        self.shard = Shard(0, tensor, pipeline, has_whole_experts)
        given = "fp32", OPS, MAX_LEN, None, rounding
        ranks = range(self.shard.size)
        self.parts = [load_decoder(folder, *given, self.shard.at(rank)) for rank in ranks]

    @property
    def target(self):
        return self.parts[0]

    def followers(self, settings):
        """New ranks for one engine, with its settings."""
        config, mesh = load_config(None, settings), Mesh(self.shard, 1 << 16)
        each = []
        for r in range(1, self.shard.size):
            ours, theirs = socket.socketpair()
            place = self.shard.at(r)
            joined = connections(place, mesh.sockets[r], mesh.memories[place.stage])
            thread = RankThread(Rank(config, self.parts[r].connected(joined), joined), theirs)
            thread.start()
            each.append(Follower(r, thread, Link(ours)))
        own = connections(self.shard, mesh.sockets[0], mesh.memories[0])
        return Followers(self.shard, own, each)
