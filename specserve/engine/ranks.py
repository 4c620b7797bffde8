"""The ranks that run one model together. Rank 0 starts the others, and leads their steps."""

import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from specserve.config import Config
from specserve.engine.rank_messages import (
    Allocate,
    AllocateHost,
    Command,
    Logits,
    PutAdapter,
    RankFailed,
    RankReady,
    RankStart,
    forward_of,
    update_of,
)
from specserve.engine.rank_network import RankListener, parse_address, read_secret
from specserve.errors import ConfigError
from specserve.exchange.messages import Link, pack
from specserve.exchange.spawn import start_module
from specserve.memory.blocks import KVUpdates
from specserve.models.adapters import AdapterSlots, PackedAdapter
from specserve.models.decoder import Connections, Decoder
from specserve.models.reader import name_of_dtype
from specserve.models.selection import resolve_model
from specserve.models.shard import Shard
from specserve.models.source import open_source
from specserve.version import VERSION
from specserve_kernels import (
    Ops,
    Outputs,
    Program,
    RankLost,
    Ranks,
    Rows,
)
from specserve_kernels.cpu.compiler import source_hash
from specserve_kernels.ranks import SLOT, shared_memory
from specserve_kernels.threads import numa_nodes, topology

log = logging.getLogger("specserve")

PATIENCE = 5.0  # seconds in which a rank must end after its connections were closed


def shard_of(config: Config, rank: int = 0) -> Shard:
    parallel = config.parallel
    return Shard(rank, parallel.tensor, parallel.pipeline, parallel.expert)


def check_parallel(config: Config) -> None:
    """Raise ConfigError for settings that ranks do not support."""
    if config.parallel.size == 1:
        return
    if config.parallel.pipeline > 1 and config.model.task in ("embed", "rank"):
        raise ConfigError(
            f"model.task = {config.model.task!r}: the hidden states are in the last stage of the "
            "pipeline. Set parallel.pipeline = 1; parallel.tensor is supported"
        )
    if is_on_gpus(config):
        check_gpus(config)
    if config.memory.disk_path is not None:
        raise ConfigError(
            "[parallel] does not support memory.disk_path: each rank has only a part of a block. "
            "Remove it; memory.host_bytes is supported"
        )


def is_on_gpus(config: Config) -> bool:
    device = config.model.device
    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def shares_gpu(config: Config) -> bool:
    """Whether all ranks compute on one GPU, and exchange tensors through the host."""
    return ":" in config.model.device


def has_gpu_per_rank(config: Config) -> bool:
    return is_on_gpus(config) and not shares_gpu(config)


def num_sharing(config: Config) -> int:
    """Return how many ranks share the memory of one."""
    has_own = config.parallel.address is not None or has_gpu_per_rank(config)
    return 1 if has_own else config.parallel.size


def check_gpus(config: Config) -> None:
    """Raise ConfigError if the ranks cannot have a GPU each."""
    if config.parallel.address is not None:
        raise ConfigError(
            "parallel.address does not support GPUs, which exchange columns only "
            "within one machine. Remove it, or set model.device = 'cpu'"
        )
    size, count = config.parallel.size, torch.cuda.device_count()
    if 0 < count < size and not shares_gpu(config):
        raise ConfigError(
            f"[parallel] asks for {size} ranks, each with a GPU, and this machine has {count}. "
            f"Lower parallel.tensor or parallel.pipeline, or show more GPUs in "
            "CUDA_VISIBLE_DEVICES. For tests, model.device = 'cuda:0' lets all ranks share a GPU"
        )


def own_threads(config: Config) -> Config:
    """Return the config with an equal share of this machine's cores for each rank."""
    size = config.parallel.size if config.parallel.address is None else 1
    is_one = config.parallel.size == 1
    return config if is_one else with_threads(config, max(1, topology().cores // size))


def with_threads(config: Config, threads: int) -> Config:
    """Return the config with this number of threads, unless it has one."""
    if config.model.threads is not None:
        return config
    model = msgspec.structs.replace(config.model, threads=threads)
    return msgspec.structs.replace(config, model=model)


@cache
def first_cpus() -> tuple[int, ...]:
    """Return the CPUs that this process could use at the first call."""
    return tuple(sorted(os.sched_getaffinity(0)))


def placed(config: Config, rank: int = 0, cpus: tuple[int, ...] = ()) -> Config:
    """Let this process compute on a NUMA node of its own, if each rank of the machine can have one.
    Return the config with the number of threads. Memory lies on the node that first writes to it.

    cpus  of all nodes, because a process that rank 0 starts inherits the node of rank 0
    """
    nodes, parallel = numa_nodes(cpus or first_cpus()), config.parallel
    if parallel.address is None and 1 < parallel.size <= len(nodes):
        os.sched_setaffinity(0, nodes[rank])
        config = with_threads(config, topology().cores)
    return own_threads(config)


def identity(config: Config, decoder: Decoder) -> RankReady:
    """Return what must be equal in all ranks, and the bytes of this rank's weights."""
    source = open_source(resolve_model(config))
    digest = msgspec.json.encode([part.hex() for part in source.identity()]).decode()
    return RankReady(
        version=VERSION,
        sources=source_hash(),
        arithmetic=decoder.ops.arithmetic(),
        model=digest,
        dtype=name_of_dtype(decoder.dtype),
        num_bytes=decoder.forms.num_bytes,
    )


class Mesh:
    """The connections of all ranks on one host: a socket pair for each two ranks, and memory for
    each stage.
    """

    def __init__(self, shard: Shard, slot_bytes: int) -> None:
        self.shard = shard
        pairs = {pair: socket.socketpair() for pair in combinations(range(shard.size), 2)}
        self.sockets: list[dict[int, socket.socket]] = [{} for _ in range(shard.size)]
        for (one, other), (first, second) in pairs.items():
            self.sockets[one][other], self.sockets[other][one] = first, second
        has_columns = shard.tensor > 1
        self.memories = [
            shared_memory(slot_bytes) if has_columns else None for _ in range(shard.pipeline)
        ]

    def descriptors(self, rank: int) -> list[int]:
        """Return the file descriptors for a rank: a socket per other rank, then its memory."""
        memory = self.memories[self.shard.at(rank).stage]
        sockets = [self.sockets[rank][other].fileno() for other in sorted(self.sockets[rank])]
        return [*sockets, *(() if memory is None else (memory,))]

    def own(self) -> Connections:
        """Return the connections of rank 0."""
        return connections(self.shard, self.sockets[0], self.memories[0])

    def close(self) -> None:
        """Close what belongs to the other ranks, and the descriptors of memory."""
        for sockets in self.sockets[1:]:
            for sock in sockets.values():
                sock.close()
        for memory in self.memories:
            if memory is not None:
                os.close(memory)


def connections(shard: Shard, sockets: dict[int, socket.socket], memory: int | None) -> Connections:
    """Return a rank's connections, from sockets by rank and the memory of its stage."""
    first, T = shard.stage * shard.tensor, shard.tensor
    columns = {r - first: s for r, s in sockets.items() if first <= r < first + T}
    return Connections(
        columns=Ranks(shard.column, T, columns, memory),
        every=Ranks(shard.rank, shard.size, sockets),
    )


def join_devices(ops: Ops, joined: Connections, shard: Shard, folder: str | None) -> None:
    """Connect the GPUs of all ranks, which find each other in a folder; None: ranks exchange
    tensors through the host. All ranks call this at the same time.
    """
    if folder is not None:
        ops.join(joined.every, Path(folder), "every")
        ops.join(joined.columns, Path(folder), f"stage {shard.stage}")


class RankProcess(Protocol):
    """A started rank; `subprocess.Popen` has these methods."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Follower(NamedTuple):
    """A rank that runs each step of rank 0."""

    rank: int
    process: RankProcess
    link: Link


def start_followers(config: Config, ends_with_thread: bool) -> "Followers | None":
    """Start the other ranks, which begin to load their weights; None if there are none."""
    shard = shard_of(config)
    if shard.size == 1:
        return None
    shape = open_source(resolve_model(config)).shape(config.model.implementation)
    row_bytes = 4 * shape.vocab_size
    if config.parallel.address is not None:
        return joined_followers(config, shard)
    has_gpus = has_gpu_per_rank(config)
    folder = tempfile.TemporaryDirectory(prefix="specserve-ranks-") if has_gpus else None
    name = None if folder is None else folder.name
    mesh, each = Mesh(shard, max(SLOT, row_bytes)), list[Follower]()
    for rank in range(1, shard.size):
        process, sock = start_module("specserve.engine.rank_process")
        start = RankStart(config, rank, name, ends_with_thread, cpus=first_cpus())
        with suppress(BrokenPipeError, ConnectionResetError):  # reading reports it
            socket.send_fds(sock, [b"\0"], mesh.descriptors(rank))
            sock.sendall(pack(msgspec.msgpack.encode(start)))
        each.append(Follower(rank, process, Link(sock)))
    own = mesh.own()
    mesh.close()
    return Followers(shard, own, each, folder)


class RemoteRank:
    """A rank of another machine. It ends by itself once its connections are closed."""

    def poll(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        pass


def joined_followers(config: Config, shard: Shard) -> "Followers":
    """Wait for the ranks of other machines."""
    secret = read_secret(config.parallel.secret_file)
    listener = RankListener(parse_address(config.parallel.address or ""), secret)
    log.info("Waiting for %d ranks at %s", shard.size - 1, config.parallel.address)
    controls, addresses = dict[int, socket.socket](), dict[int, tuple[str, int]]()
    tensors = dict[int, socket.socket]()
    while len(tensors) < shard.size - 1:
        sock, (rank, port) = listener.accept()
        given = controls if port else tensors
        if not 0 < rank < shard.size:
            log.warning("Rank %d is refused: the ranks are 1 to %d", rank, shard.size - 1)
            sock.close()
            continue
        if (earlier := given.pop(rank, None)) is not None:  # it has started anew
            earlier.close()
        given[rank] = sock
        if port:
            addresses[rank] = sock.getpeername()[0], port
        if port and len(controls) == shard.size - 1:
            for r, control in controls.items():
                peers = tuple(addresses[other] for other in range(1, r))
                start = RankStart(config, r, None, False, peers)
                control.sendall(pack(msgspec.msgpack.encode(start)))
    listener.close()
    each = [Follower(r, RemoteRank(), Link(controls[r])) for r in sorted(controls)]
    return Followers(shard, connections(shard, tensors, None), each)


class Followers:
    """The other ranks of rank 0's target model. They end once this one closes."""

    def __init__(
        self,
        shard: Shard,
        connections: Connections,
        each: Sequence[Follower],
        folder: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        """`folder` is where ranks with a GPU each find each other."""
        self.shard, self.connections, self.each, self.folder = shard, connections, each, folder
        self.sending = Lock()  # a thread reads adapters

    def wait_until_ready(self, own: RankReady, ops: Ops) -> None:
        """Wait until the ranks have loaded their weights. ConfigError, naming the rank, if one
        cannot, or if its weights or build differ from rank 0's.
        """
        for rank, process, link in self.each:
            try:
                answer = answer_of(link)
            except (EOFError, ConnectionResetError) as e:
                self.close()
                code = process.wait()
                raise ConfigError(
                    f"rank {rank} ended during start-up (exit code {code}). Its last messages on "
                    "stderr give the reason; missing memory is the usual one"
                ) from e
            if isinstance(answer, RankFailed):
                self.close()
                raise ConfigError(f"rank {rank}: {answer.reason}")
            if (name := own.differing(answer)) is not None:
                self.close()
                values = getattr(answer, name), getattr(own, name)
                raise ConfigError(
                    f"rank {rank} has another {name} than rank 0: {values[0]} instead of "
                    f"{values[1]}. Install the same specserve and the same model for all ranks"
                )
        folder = None if self.folder is None else self.folder.name
        join_devices(ops, self.connections, self.shard, folder)

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        rows: tuple[int, int],
        aux: Sequence[int],
        state_size: int = 0,
    ) -> None:
        """Allocate the KV of all ranks: as many blocks as rank 0 has."""
        self.send(Allocate(num_blocks, block_size, *rows, tuple(aux), state_size))

    def allocate_host(self, num_blocks: int) -> None:
        self.send(AllocateHost(num_blocks))

    def update(self, updates: KVUpdates) -> None:
        """Repeat updates of rank 0's KV."""
        self.send(update_of(updates))

    def leading(self, program: Program) -> "LeadingProgram":
        """Return a program whose runs all ranks repeat."""
        return LeadingProgram(program, self)

    def send(self, command: Command) -> None:
        """Send a command to all ranks. RankLost if one has ended."""
        data = pack(msgspec.msgpack.encode(command))
        try:
            with self.sending:
                for follower in self.each:
                    follower.link.sock.sendall(data)
        except OSError as e:
            raise RankLost(self.lost_words()) from e

    def check(self) -> None:
        """Raise RankLost if a rank has ended during a forward."""
        if self.connections.columns.is_lost or self.connections.every.is_lost:
            raise RankLost(self.lost_words())

    def lost_words(self) -> str:
        """Return which ranks have ended, with their exit codes."""
        codes = {rank: process.poll() for rank, process, _ in self.each}
        ended = [f"{rank} (exit code {code})" for rank, code in codes.items() if code is not None]
        return f"lost rank {', '.join(ended) or 'or connection'}"

    def close(self) -> None:
        """End the ranks: they exit once their connections are closed."""
        for _, _, link in self.each:
            link.sock.close()
        for ranks in self.connections:
            ranks.close()
        for _, process, _ in self.each:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.folder is not None:
            self.folder.cleanup()


def answer_of(link: Link) -> RankReady | RankFailed:
    """Return a rank's answer; EOFError if it ends without one. It may end after its answer."""
    while True:
        data = link.sock.recv(1 << 16)
        if not data:
            raise EOFError
        for payload in link.frames.feed(data):
            return msgspec.msgpack.decode(payload, type=RankReady | RankFailed)


class LeadingSlots:
    """Adapter slots of rank 0. All ranks put the same adapters into theirs."""

    def __init__(self, slots: AdapterSlots, followers: Followers) -> None:
        self.slots, self.followers = slots, followers
        self.layers = slots.layers

    def put(self, slot: int, adapter: PackedAdapter | None) -> None:
        self.followers.send(PutAdapter(slot, None if adapter is None else adapter.digest))
        self.slots.put(slot, adapter)


class LeadingProgram(Program):
    """A program of rank 0. All ranks run its forwards."""

    def __init__(self, program: Program, followers: Followers) -> None:
        self.program, self.followers = program, followers

    @cached_property
    def words(self) -> str:
        shard = self.followers.shard
        stages = f", in {shard.pipeline} stages" if shard.pipeline > 1 else ""
        return f"{self.program.words}, in each of {shard.size} ranks{stages}"

    def run(
        self,
        rows: Rows,
        token_ids: Tensor | None,
        read: Tensor,
        also: Sequence[Tensor] = (),
        residual: Tensor | None = None,
    ) -> Outputs:
        assert token_ids is not None and residual is None, "ranks start from token ids"
        self.followers.send(forward_of(rows, token_ids, read))
        outputs = self.program.run(rows, token_ids, read, also)
        self.followers.check()
        return outputs

    def logits(self, read: Tensor) -> Tensor:
        self.followers.send(Logits(bytearray(read.numpy().data)))
        logits = self.program.logits(read)
        self.followers.check()
        return logits

    def forget(self) -> None:
        self.program.forget()
