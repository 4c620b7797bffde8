"""Pool and tiers against a plain model: a block is found with its own content, or not at all."""

from array import array
from collections import Counter
from concurrent.futures import wait as wait_for
from random import Random
from threading import Event, Timer

import pytest
import torch

from specserve.memory.blocks import BlockHasher, BlockPool, BlockTable
from specserve.memory.disk_tier import DiskTier
from specserve.memory.host_tier import HostTier
from specserve.memory.tiers import Tiers
from specserve_kernels.host import HostBlocks

BYTES = 64  # of a block
SIZE = 2  # tokens
ROOT = b"root"
ACTS = {  # how often each happens
    **{"begin": 4, "load": 10, "match": 6, "compute": 8, "fork": 3, "reserve": 2, "end": 2},
    **{"plan": 12, "cancel": 2, "reset": 0.1, "pin": 0.3, "save": 1},
}


class Model:
    """A pool with tiers, driven as an engine does it. The content of a block is a hash of its text,
    so that stale or foreign content is seen.
    """

    def __init__(self, seed, num_blocks=9, num_host=7, disk=None):
        self.rng, self.pool = Random(seed), BlockPool(num_blocks, BYTES)
        self.arena = torch.zeros(num_blocks, BYTES, dtype=torch.uint8)
        memory = HostBlocks(num_host, BYTES)
        self.tiers = Tiers(self.pool, HostTier(num_host), memory, disk)
        self.tables = {}  # by number: a table and its text
        self.waiting = set()
        self.known = {}  # key -> content: all that was ever published
        self.num = dict.fromkeys(("loaded", "copied", "computed", "cancelled", "ended"), 0)

    def text(self):
        """Many begin alike."""
        rng = self.rng
        tokens = [rng.randrange(2) * 10 + i for i in range(rng.randrange(2, 13))]
        return array("i", tokens)

    def begin(self):
        number, text = self.rng.randrange(4), self.text()
        self.end(number)
        self.tables[number] = BlockTable(self.pool, SIZE, hasher=BlockHasher(ROOT, SIZE)), text
        self.waiting.add(number)

    def end(self, number):
        self.tiers.leave(number)
        self.waiting.discard(number)
        if number in self.tables:
            self.tables.pop(number)[0].clear()

    def fork(self, number):
        """Share a table up to the middle of a block: who writes there first copies the block."""
        other, text = self.tables[number]
        number = self.rng.randrange(4)
        if other.num_computed < 2 or self.tables.get(number, (None,))[0] is other:
            return
        self.end(number)
        table = BlockTable(self.pool, SIZE, hasher=BlockHasher(ROOT, SIZE))
        table.fork(other, (other.num_computed - 1) // SIZE * SIZE + 1)
        self.tables[number] = table, text[: table.num_computed] + self.text()

    def reserve(self, number):
        """Blocks and copies for rows whose launch comes later, or never."""
        table, text = self.tables[number]
        if self.pool.num_available:
            table.reserve_some(len(text), self.pool.num_available)

    def load(self, number):
        """Load what follows the blocks that are found, if there is room."""
        table, text = self.tables[number]
        if any(number in load.waiting for load in self.tiers.loads):
            return
        found = table.find(text)
        keys = table.hasher.extend(text, len(text) - 1)[: table.num_keys(text)][len(found) :]
        num = self.tiers.count(keys)
        cached = sum(self.pool.counts[block] == 0 for block in found)
        if num and num + cached <= self.pool.num_available:
            load = self.tiers.begin("target", found, keys[:num])
            if load is not None:
                load.waiting.add(number)

    def match(self, number):
        table, text = self.tables[number]
        if table.blocks or any(number in load.waiting for load in self.tiers.loads):
            return
        table.match(text, self.pool.num_available)
        self.num["loaded"] += table.num_published
        full = table.num_published * SIZE
        self.num["copied"] += table.num_computed - full
        for place in range(full):
            self.check_slot(table, text, place)
        if table.num_computed > full and self.rng.random() < 0.5:
            self.launch()  # or a later step copies the part of a block, or none
            for place in range(full, table.num_computed):
                self.check_slot(table, text, place)

    def compute(self, number):
        """Write the next tokens, as a launch does after the updates."""
        table, text = self.tables[number]
        if number in self.waiting or not self.pool.num_available:
            return
        end = table.reserve_some(len(text), self.pool.num_available)
        self.launch()
        for place in range(table.num_computed, end):
            self.cell(table, place).copy_(torch.tensor(self.content(text, place)))
            self.num["computed"] += 1
        table.num_computed = max(end, table.num_computed)
        table.publish(text)
        table.trim()
        if self.rng.random() < 0.2:
            table.publish_end(text)
            self.num["ended"] += len(self.pool.ends)
            self.end(number)

    def cell(self, table, place):
        block, offset = divmod(table.slot(place), SIZE)
        return self.arena[block, offset * BYTES // SIZE : (offset + 1) * BYTES // SIZE]

    def content(self, text, place):
        seed = hash(tuple(text[: place + 1]))
        return [Random(seed).randrange(256)] * (BYTES // SIZE)

    def check_slot(self, table, text, place):
        assert self.cell(table, place).tolist() == self.content(text, place), "other KV is found"

    def launch(self):
        updates = self.pool.updates.take()
        self.tiers.memory.store(self.arena, updates.stores)
        for source, target in updates.copies:
            self.arena[target] = self.arena[source]
        self.tiers.memory.load(self.arena, updates.loads)

    def plan(self):
        if self.rng.random() < 0.5:
            self.tiers.wait(1.0)
        for load in self.tiers.advance():
            assert load not in self.tiers.loads
        self.tiers.issue(self.rng.choice([0.5e-9, 2.5e-9, 1.0]))
        if self.rng.random() < 0.8:
            self.launch()

    def step(self):
        numbers = list(self.tables)
        act = self.rng.choices(list(ACTS), list(ACTS.values()))[0]
        if act == "begin":
            self.begin()
        elif act == "plan":
            self.plan()
        elif act == "reset":
            self.tiers.reset()
            self.pool.reset_cache()
        elif act == "save":
            self.tiers.save([*self.pool.found][:3])
        elif act == "pin":
            known = [*self.tiers.host.found]
            self.tiers.host.pin(self.rng.sample(known, min(2, len(known))))
        elif act == "cancel" and self.tiers.loads:
            self.tiers.cancel(self.rng.choice(self.tiers.loads))
            self.num["cancelled"] += 1
        elif numbers and act not in ("begin", "cancel"):
            number = self.rng.choice(numbers)
            if act == "match":
                self.match(number)
                self.waiting.discard(number)
            else:
                getattr(self, act)(number)

    def check(self):
        self.pool.check([*(t.blocks for t, _ in self.tables.values()), *self.tiers.tables])
        self.tiers.check()


@pytest.mark.parametrize("has_disk", [False, True], ids=["host", "host and disk"])
def test_10_000_operations_find_only_what_was_computed(has_disk, tmp_path):
    total = Counter()
    for seed in range(10):
        disk = DiskTier(tmp_path / f"{seed}", 16 * BYTES, BYTES) if has_disk else None
        model = Model(seed, disk=disk)
        for _ in range(2000):
            model.step()
            model.check()
        for name, stats in model.tiers.stats.items():
            total[f"hits {name}"] += stats.hits
            total[f"evictions {name}"] += stats.evictions
            if name == "disk":
                assert stats.failures == 0
        total.update(model.num)
        model.tiers.close()
    assert min(total.values()) > 10, f"something hardly happened: {total}"


def tiers_of(num_blocks=4, num_host=8):
    """A pool with a host tier. Blocks 0 to 2 were evicted, with these contents."""
    pool, memory = BlockPool(num_blocks, BYTES), HostBlocks(num_host, BYTES)
    tiers, arena = Tiers(pool, HostTier(num_host), memory), torch.zeros(num_blocks, BYTES)
    arena = arena.to(torch.uint8)
    blocks = pool.try_allocate(3)
    for block in blocks:
        arena[block] = 10 + block
        pool.publish(block, b"%d" % block)
    pool.release(reversed(blocks))
    pool.release(pool.try_allocate(num_blocks))
    launch(tiers, arena)
    assert tiers.count([b"0", b"1", b"2", b"3"]) == 3 and not pool.found
    return pool, tiers, arena


def launch(tiers, arena):
    """The updates of a launch, in the order of `Runner.update`."""
    updates = tiers.pool.updates.take()
    tiers.memory.store(arena, updates.stores)
    for source, target in updates.copies:
        arena[target] = arena[source]
    tiers.memory.load(arena, updates.loads)


def test_a_load_brings_blocks_back_under_their_keys():
    pool, tiers, arena = tiers_of()
    load = tiers.begin("draft", [], [b"0", b"1"])
    assert pool.holders()["draft"] == 2
    tiers.issue(1.0)
    assert tiers.advance() == [], "no launch has copied the blocks"
    launch(tiers, arena)
    assert tiers.advance() == [load] and not tiers.loads
    assert [arena[block, 0].item() for block in pool.find([b"0", b"1"])] == [10, 11]
    assert pool.is_whole and tiers.stats["host"].hits == 2


def test_a_load_is_spread_over_steps():
    pool, tiers, arena = tiers_of()
    tiers.host_seconds = 1.0
    tiers.begin("target", [], [b"0", b"1", b"2"])
    for _ in range(2):
        tiers.issue(1.5)
        assert len(pool.updates.loads) <= 2
        launch(tiers, arena)
        done = tiers.advance()
    assert len(done) == 1 and len(pool.find([b"0", b"1", b"2"])) == 3


def test_a_cancelled_load_writes_to_no_block_that_is_free():
    pool, tiers, arena = tiers_of()
    load = tiers.begin("target", [], [b"0"])
    tiers.issue(1.0)
    tiers.cancel(load)
    taken = pool.try_allocate(4)
    arena[:] = 7
    pool.updates.copy(taken[0], taken[1])
    launch(tiers, arena)
    assert bool((arena == 7).all())


def test_a_load_may_get_a_block_that_was_the_target_of_a_copy():
    pool, tiers, arena = tiers_of()
    source, target, *_ = pool.try_allocate(4)
    pool.updates.copy(source, target)
    pool.release([target])
    load = tiers.begin("target", [], [b"1"])
    assert load.blocks == [target]
    tiers.issue(1.0)
    launch(tiers, arena)
    assert arena[target, 0] == 11


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    _, tiers, arena = tiers_of(num_host=3)
    tiers.begin("target", [], [b"0", b"1", b"2"])
    tiers.issue(1.0)
    launch(tiers, arena)
    tiers.advance()
    assert tiers.host.try_add(b"new") is not None
    assert tiers.count([b"0", b"1", b"2"]) == 2


def test_a_pinned_block_stays_in_the_host_tier():
    _, tiers, _ = tiers_of(num_host=4)
    tiers.host.pin([b"0", b"2", b"1"])
    added = [tiers.host.try_add(key) for key in (b"a", b"b", b"c")]
    assert None not in added
    assert tiers.host.found.keys() == {b"0", b"2", b"b", b"c"}, "at most half is pinned"
    tiers.host.pin([])
    tiers.check()
    assert all(tiers.host.try_add(b"%d" % i) is not None for i in range(10, 14))


def test_a_host_tier_without_a_place_loses_the_block_only():
    pool, tiers, _ = tiers_of(num_host=3)
    load = tiers.begin("target", [], [b"0", b"1", b"2"])
    tiers.store(3, b"other")
    assert tiers.stats["host"].skips == 1 and not tiers.has(b"other")
    tiers.cancel(load)
    tiers.check()
    pool.check([])


def test_a_block_is_written_to_disk_only_after_it_was_read(tmp_path):
    """The disk may evict a block while it is read, and a session with it may then be saved."""
    pool, memory, disk = BlockPool(4, BYTES), HostBlocks(2, BYTES), DiskTier(tmp_path, BYTES, BYTES)
    tiers, may_read, read_now = Tiers(pool, HostTier(2), memory, disk), Event(), disk.read_now
    disk.write(b"1" * 32, memoryview(bytes([1] * BYTES))).result()
    disk.read_now = lambda key, out: may_read.wait(10) and read_now(key, out)
    memory.memory[:] = 7
    tiers.fetch([b"1" * 32], 1)
    disk.write(b"2" * 32, memoryview(bytes([2] * BYTES))).result()
    tiers.save([b"1" * 32])
    for _ in range(3):
        tiers.advance()
        tiers.check()
        assert not tiers.writes and tiers.saving
    may_read.set()
    wait_for(tiers.reads.values())
    tiers.advance()
    assert not tiers.has(b"1" * 32) and tiers.has(b"2" * 32)
    tiers.close()


def test_a_reset_does_not_wait_for_blocks_that_wait_for_the_disk(tmp_path):
    disk = DiskTier(tmp_path, 16 * BYTES, BYTES)
    tiers = Tiers(BlockPool(4, BYTES), HostTier(8), HostBlocks(8, BYTES), disk)
    may_write = Event()
    disk.writer.submit(may_write.wait, 10)
    for i in range(4):
        tiers.store(i, b"%d" % i * 32)
    tiers.pool.updates.take()
    tiers.advance()
    assert len(tiers.writes) == 4
    Timer(0.05, may_write.set).start()
    tiers.reset()
    tiers.check()
    assert disk.stats.stores == 0 and len(disk) == 0
    tiers.close()
