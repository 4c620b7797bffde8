"""A rank other than 0: loads its part of the target model, and repeats each step of rank 0."""

import logging
import socket
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from specserve import logs
from specserve.config import Config
from specserve.engine.adapters import use_one_core
from specserve.engine.loading import load_ops, load_target
from specserve.engine.rank_messages import (
    Allocate,
    AllocateHost,
    Command,
    Forward,
    Logits,
    PutAdapter,
    RankFailed,
    RankStart,
    ReadAdapter,
    Update,
    rows_in,
    tensor_of,
)
from specserve.engine.rank_network import SECONDS, Hello, RankListener, connect
from specserve.engine.ranks import connections, identity, join_devices, placed, shard_of
from specserve.engine.runner import reserve_kept, update_arena
from specserve.errors import ConfigError
from specserve.exchange.messages import Link
from specserve.memory.arena import Arena, shard_block_bytes
from specserve.memory.blocks import KVUpdates
from specserve.models.adapters import AdapterSlots, PackedAdapter, read_adapter
from specserve.models.decoder import Connections, Decoder
from specserve.models.reader import KV_DTYPES
from specserve.process import die_with_parent, ignore_signals, keep_objects, prepare
from specserve_kernels import KVCache, Program, RankLost

log = logging.getLogger("specserve")
KEPT = 8  # adapters that were read last and stay in memory; others are read again
MOST = 253  # file descriptors that one message can carry


def main(fd: int, log_format: str) -> None:
    """Run the commands of rank 0 until it closes its end of the socket, or a rank ends."""
    prepare()
    logs.configure(log_format)
    ignore_signals()  # rank 0 decides when its ranks end
    sock = socket.socket(fileno=fd)
    _, descriptors, _, _ = socket.recv_fds(sock, 1, MOST)
    link = Link(sock)
    try:
        start = first_message(link)
        if start.ends_with_thread:
            die_with_parent()
        placed(start.config, start.rank, start.cpus)
        shard = shard_of(start.config, start.rank)
        others = [rank for rank in range(shard.size) if rank != start.rank]
        sockets = (socket.socket(fileno=number) for number in descriptors[: len(others)])
        memory = descriptors[len(others)] if len(descriptors) > len(others) else None
        joined = connections(shard, dict(zip(others, sockets, strict=True)), memory)
        follow(link, start, joined)
    except (EOFError, ConnectionResetError, BrokenPipeError):
        pass  # rank 0 has closed or ended
    except RankLost as e:
        log.error("Rank exits: %s", e)
    except ConfigError:
        pass  # rank 0 reports it


def first_message(link: Link) -> RankStart:
    payload, *rest = link.receive(wait=True)
    assert not rest, "rank 0 waits for the answer to its first message"
    return msgspec.msgpack.decode(payload, type=RankStart)


def follow(link: Link, start: RankStart, joined: Connections) -> None:
    """Load a rank's part of the model, and run the commands of rank 0. ConfigError, which rank 0
    receives too, if that is impossible.
    """
    shard = shard_of(start.config, start.rank)
    try:
        decoder = load_target(start.config, load_ops(start.config, start.rank), shard)
        ready = identity(start.config, decoder)
    except ConfigError as e:
        link.send(RankFailed(str(e)))
        raise
    link.send(ready)
    join_devices(decoder.ops, joined, shard, start.folder)
    Rank(start.config, decoder.connected(joined), joined).run(link)


def join(address: tuple[str, int], secret: bytes, rank: int, model: str | None) -> None:
    """Run a rank for the engine of another machine, until it ends. EOFError or RankLost then;
    OSError if nothing listens at the address.

    model  overrides `model.path` of rank 0's config
    """
    listener = RankListener((own_host(address), 0), secret)
    with closing(listener):
        control = connect(address, secret, Hello(rank, listener.port))
        link = Link(control)
        start = first_message(link)
        if model is not None:
            path = replace(start.config.model, path=model)
            start = replace(start, config=replace(start.config, model=path))
        lower = dict(enumerate((address, *start.peers)))
        sockets = {r: connect(lower[r], secret, Hello(rank, 0)) for r in range(rank)}
        while len(sockets) < start.config.parallel.size - 1:
            sock, hello = listener.accept()
            sockets[hello.rank] = sock
    try:
        follow(link, start, connections(shard_of(start.config, rank), sockets, None))
    finally:
        for sock in (control, *sockets.values()):
            sock.close()


def own_host(address: tuple[str, int]) -> str:
    """Return this machine's address on the network of another one."""
    with socket.create_connection(address, SECONDS) as sock:
        host: str = sock.getsockname()[0]
        return host


class Rank:
    """A part of the target model with its KV."""

    def __init__(self, config: Config, decoder: Decoder, connections: Connections) -> None:
        self.config, self.decoder, self.connections = config, decoder, connections
        self.slots: AdapterSlots | None = None
        if config.lora.num_slots:
            self.slots = AdapterSlots(decoder, config.lora.num_slots, config.lora.max_rank)
            self.decoder = self.slots.decoder
        self.thread = ThreadPoolExecutor(1, "adapters", use_one_core)
        self.read: deque[Future[PackedAdapter]] = deque(maxlen=KEPT)  # adapters
        self.folders: dict[str, Path] = {}  # of all adapters that were read, by digest
        self.arena: Arena | None = None
        self.program: Program | None = None

    @torch.inference_mode()
    def run(self, link: Link) -> None:
        """Run commands. EOFError once rank 0 has closed its end; RankLost if another rank ended."""
        decode = msgspec.msgpack.Decoder(Command).decode
        while True:
            for payload in link.receive(wait=True):
                self.do(decode(payload))

    def do(self, command: Command) -> None:
        if isinstance(command, Allocate):
            self.allocate(command)
            return
        assert self.arena is not None and self.program is not None, "nothing is allocated"
        if isinstance(command, AllocateHost):
            block_bytes = self.arena.blocks.shape[1]
            self.arena.host = self.decoder.ops.host_blocks(command.num_blocks, block_bytes)
        elif isinstance(command, Update):
            moves, *others = msgspec.structs.astuple(command)
            updates = KVUpdates({"target": moves} if moves else {}, *others)
            update_arena(self.decoder.ops, self.arena, updates)
        elif isinstance(command, ReadAdapter):
            self.read.append(self.thread.submit(self.read_adapter, Path(command.folder)))
        elif isinstance(command, PutAdapter):
            self.put_adapter(command)
        elif isinstance(command, Logits):
            self.program.logits(tensor_of(command.read))
            self.check()
        else:
            self.forward(command, self.program)

    def allocate(self, command: Allocate) -> None:
        ops, block_size = self.decoder.ops, command.block_size
        layouts = self.decoder.kv_layouts(KV_DTYPES.get(self.config.memory.kv_dtype))
        states = self.decoder.state_layouts()
        block_bytes = shard_block_bytes(layouts, states, block_size)
        self.arena = Arena(ops.allocate(command.num_blocks * block_bytes), block_bytes)
        kv = self.arena.add_view("target", layouts, block_size)
        num_kept = self.config.max_step_nodes
        kv = KVCache(kv.layers, self.arena.add_states(states, num_kept, command.state_size))
        sizes = command.max_rows, command.max_read
        self.program = self.decoder.program(kv, *sizes, command.aux_layer_ids)
        keep_objects()

    def read_adapter(self, folder: Path) -> PackedAdapter:
        assert self.slots is not None, "the config has no adapters"
        decoder, rank = self.decoder, self.config.lora.max_rank
        read = self.slots.packed(read_adapter(folder, decoder.config, rank, decoder.dtype))
        self.folders[read.digest] = folder
        return read

    def put_adapter(self, command: PutAdapter) -> None:
        """Fill or clear a slot. RuntimeError if this rank has read other files than rank 0."""
        assert self.slots is not None, "the config has no adapters"
        digest = command.digest
        found = None if digest is None else self.adapter(digest)
        self.slots.put(command.slot, found)

    def adapter(self, digest: str) -> PackedAdapter:
        wait(self.read)
        read = (future.result() for future in self.read if future.exception() is None)
        found = next((adapter for adapter in read if adapter.digest == digest), None)
        if found is None and digest in self.folders:  # it has waited long for a slot
            found = self.read_adapter(self.folders[digest])
        if found is None or found.digest != digest:
            raise RuntimeError(f"the adapter {digest} that rank 0 has read is not in this rank")
        return found

    def forward(self, command: Forward, program: Program) -> None:
        torch.set_num_threads(command.threads)
        read = tensor_of(command.read)
        rows = rows_in(command)
        if self.arena is not None and rows.states is not None:
            reserve_kept(self.arena.states, program, rows.states, rows.qo_indptr)
        program.run(rows, tensor_of(command.token_ids), read)
        self.check()

    def check(self) -> None:
        for ranks in self.connections:
            ranks.check()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
