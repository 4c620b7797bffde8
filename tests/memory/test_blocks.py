"""Every block is free, cached, or held by exactly as many as it counts: whatever may happen."""

from array import array
from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specserve.memory.blocks import BlockHasher, BlockPool, BlockTable, BlockTokens, KVFormat

SIZES = [1, 4, 5, 5]  # tokens a block, of a table each
TABLES = st.integers(0, len(SIZES) - 1)
SLOTS = st.integers(0, 40)
TEXTS = [array("i", [k] * 10 + [0] * k + [7] * 30) for k in range(3)] + [array("i", [0] * 40)]


class Tables(RuleBasedStateMachine):
    """Tables of several block sizes on one pool, asked for more than there is.

    `content` is what stands in the slots of each block: a table has to find its own text there.
    """

    def __init__(self):
        super().__init__()
        self.content = {block: {} for block in range(12)}
        self.pool = BlockPool(12)
        self.tables = [self.table(size) for size in SIZES]
        self.texts = [TEXTS[0]] * len(SIZES)
        self.unpublished = set()  # keys

    def launch(self):
        """What is pending is done before anything is written."""
        for source, target in self.pool.updates.take().copies:
            self.content[target] = dict(self.content[source])

    def table(self, size):
        return BlockTable(self.pool, size, hasher=BlockHasher(b"%d" % size, size))

    @rule(i=TABLES, first=st.integers(0, 4), size=st.integers(1, 4))
    def unpublish(self, i, first, size):
        blocks = self.tables[i].blocks[first : first + size]
        keys = {self.pool.keys[block] for block in blocks} - {None}
        self.pool.unpublish(blocks)
        assert not keys & self.pool.found.keys()
        self.unpublished |= keys

    @rule(i=TABLES, slots=SLOTS)
    def reserve(self, i, slots):
        table, available = self.tables[i], self.pool.num_available
        needed = table.missing(slots)
        assert table.try_reserve(slots) == (needed <= available)
        if needed <= available:
            assert len(table.blocks) * table.block_size >= slots
            assert table.missing(slots) == 0

    @rule(i=TABLES, slots=SLOTS, kept=st.integers(0, 3))
    def reserve_some(self, i, slots, kept):
        table, spare = self.tables[i], self.pool.num_available - kept
        got = table.reserve_some(slots, spare)
        assert got <= max(slots, table.num_computed) and table.missing(got) == 0
        assert self.pool.num_available >= min(kept, spare + kept)
        if got < slots:
            assert table.missing(got + 1) > max(0, self.pool.num_available - kept)

    @rule(i=TABLES, slots=SLOTS, guesses=st.integers(0, 3))
    def compute(self, i, slots, guesses):
        """Write tokens, and guesses after them, in slots that are its own; publish and trim."""
        table, text = self.tables[i], self.texts[i]
        end = table.reserve_some(min(slots, len(text)), self.pool.num_available)
        self.launch()
        for slot in range(table.num_computed, min(end + guesses, self.room(table))):
            block, offset = divmod(slot, table.block_size)
            assert self.pool.counts[table.blocks[block]] == 1, "a shared block is written"
            assert self.pool.keys[table.blocks[block]] is None, "a block that is found is written"
            self.content[table.blocks[block]][offset] = text[slot] if slot < end else "guess"
        table.num_computed = max(table.num_computed, end)
        table.publish(text)
        table.trim()
        assert len(table.blocks) == -(-table.num_computed // table.block_size)

    def room(self, table):
        return len(table.blocks) * table.block_size if not table.is_copy_due else 0

    @rule(i=TABLES, text=st.sampled_from(TEXTS))
    def begin_again(self, i, text):
        table, self.texts[i] = self.fresh(i), text
        table.match(text, self.pool.num_available)
        assert table.num_computed % SIZES[i] == 0 and table.num_computed < len(text)

    @rule(i=TABLES, spare=st.integers(-1, 3))
    def go_on_with_what_is_cached(self, i, spare):
        self.tables[i].trim()
        self.tables[i].match(self.texts[i], spare)

    @rule(n=SLOTS)
    def fork(self, n):
        other, self.texts[3] = self.tables[2], self.texts[2]
        self.fresh(3).fork(other, min(n, other.num_computed))

    @rule(i=TABLES)
    def clear(self, i):
        self.tables[i].clear()
        assert (list(self.tables[i].blocks), self.tables[i].num_computed) == ([], 0)

    def fresh(self, i):
        self.tables[i].clear()
        self.tables[i] = self.table(SIZES[i])
        return self.tables[i]

    @rule()
    def reset(self):
        self.pool.reset_cache()
        assert not self.pool.cached and not self.pool.find([b""])

    @invariant()
    def every_block_is_accounted_for(self):
        self.pool.check([t.blocks for t in self.tables])
        assert sum(self.pool.holders().values()) == self.pool.num_blocks

    @invariant()
    def every_table_reads_its_own_text(self):
        """Once what is pending is done, which may be after many changes."""
        content = dict(self.content)
        for source, target in self.pool.updates.copies:
            content[target] = content[source]
        for table, text in zip(self.tables, self.texts, strict=True):
            for slot in range(table.num_computed):
                block, offset = divmod(slot, table.block_size)
                assert content[table.blocks[block]][offset] == text[slot]

    @invariant()
    def what_can_be_found_can_be_found_from_its_beginning_on(self):
        """Unless a block before it was made one that nobody finds."""
        for size in set(SIZES):
            for text in TEXTS:
                keys = BlockHasher(b"%d" % size, size).extend(text, len(text))
                are_there = [key in self.pool.found for key in keys]
                missing = are_there.index(False) if False in are_there else len(keys)
                is_cut = missing < len(keys) and keys[missing] in self.unpublished
                assert is_cut or are_there == sorted(are_there, reverse=True)


Tables.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestTables = Tables.TestCase


def test_all_blocks_are_given_out_or_none():
    pool = BlockPool(3)
    assert pool.try_allocate(4) is None
    assert pool.num_available == 3
    assert sorted(pool.try_allocate(3)) == [0, 1, 2]
    assert pool.try_allocate(1) is None
    assert pool.try_allocate(0) == []


def test_the_block_given_back_last_is_given_out_next():
    pool = BlockPool(9)
    first = pool.try_allocate(5)
    pool.release([first[1], first[3]])
    assert pool.try_allocate(2) == [first[3], first[1]]


def test_memory_is_touched_from_its_beginning():
    assert BlockPool(9).try_allocate(3) == [0, 1, 2]


def test_a_block_with_two_holders_is_free_when_both_let_go():
    pool = BlockPool(2)
    (block,) = pool.try_allocate(1)
    pool.hold(block)
    pool.check([[block], [block]])
    pool.release([block])
    assert (pool.num_available, pool.counts[block]) == (1, 1)
    pool.release([block])
    pool.check([])


def test_a_block_given_back_twice_is_noticed():
    pool = BlockPool(2)
    blocks = pool.try_allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="block 0 was released twice"):
        pool.release(blocks)


def test_blocks_are_counted_by_holder_and_shared_ones_once():
    pool = BlockPool(9)
    target, _ = pool.try_allocate(2), pool.try_allocate(3, "draft")
    pool.hold(target[0])
    pool.publish(target[1], b"key")
    pool.release([target[1]])
    assert pool.holders() == {"target": 1, "draft": 3, "cached": 1, "free": 4}


BROKEN = {  # what went wrong with blocks that are held, cached and free -> the complaint
    "a holder that nobody counts": (lambda pool: pool.counts.__setitem__(0, 2), "0: 2 != 1 holder"),
    "a count without a holder": (lambda pool: pool.counts.__setitem__(2, 1), "2: 1 != 0 holders"),
    "free and held": (lambda pool: pool.free.append(0), "block 0 is in 2 of held, free and cached"),
    "lost": (lambda pool: pool.free.clear(), "block 2 is in 0 of held, free and cached"),
    "free twice": (lambda pool: pool.free.append(2), "a block is free twice"),
    "free and cached": (
        lambda pool: pool.free.append(1),
        "block 1 is in 2 of held, free and cached",
    ),
    "another's key": (lambda pool: pool.keys.__setitem__(0, b"one"), "block 0 is not found"),
    "no key": (lambda pool: pool.forget(1), "block 1 has no key"),
    "free with a key": (lambda pool: pool.publish(2, b"two"), "block 2 is free, but has a key"),
    "two keys": (lambda pool: pool.found.update({b"x": 1}), "more keys than blocks with a key"),
    "a lost count": (
        lambda pool: pool.num_held.clear(),
        "num_held counts 0 blocks, but 1 are held",
    ),
}


@pytest.mark.parametrize(("damage", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_invariant_is_noticed(damage, words):
    pool = BlockPool(3)
    pool.try_allocate(2)
    pool.publish(1, b"one")
    pool.release([1])
    pool.check([[0]])
    damage(pool)
    with pytest.raises(AssertionError, match=words):
        pool.check([[0]])


def test_keys_of_a_tenant_follow_its_api_key_and_not_its_place():
    """If its digest is known: the key file may change before a restart."""
    names = {"name": "m", "block_size": 2, "is_per_tenant": True}
    known = KVFormat(**names, tenants=("ann", "bob")), KVFormat(**names, tenants=("bob", "ann"))
    text = array("i", [1, 2, 3])

    def keys(format, tenant):
        return format.hasher("", tenant=tenant).extend(text, 3)

    assert keys(known[0], 0) == keys(known[1], 1) != keys(known[0], 1) == keys(known[1], 0)
    assert keys(known[0], 0) != KVFormat(**names).hasher("", adapter="ann").extend(text, 3)


def pool_with_a_checkpoint():
    """A pool of five blocks, three of which are a cached checkpoint, and the blocks it evicted."""
    pool, evicted = BlockPool(5), []
    pool.on_evict = lambda block, key: evicted.append((block, key))
    blocks = pool.try_allocate(3)
    pool.publish_checkpoint(b"key", blocks)
    return pool, blocks, evicted


def test_a_checkpoint_is_evicted_as_a_whole_with_a_key_per_block():
    pool, blocks, evicted = pool_with_a_checkpoint()
    parts = [(block, key) for key, block in pool.parts.items()]
    pool.check([])
    held = pool.try_allocate(3)  # two are free
    assert evicted == parts and [block for block, _ in parts] == blocks
    assert not pool.checkpoints and not pool.parts and len(pool.free) == 2
    pool.check([held])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda pool, block: pool.checkpoint_of.pop(block), "has no key"),
        (lambda pool, block: pool.checkpoints[b"key"].remove(block), "their blocks differ"),
        (lambda pool, block: pool.parts.clear(), "a block of a checkpoint has no key"),
        (lambda pool, block: pool.hold(block), "holders"),
    ],
)
def test_a_damaged_checkpoint_is_noticed(damage, words):
    pool, blocks, _ = pool_with_a_checkpoint()
    damage(pool, blocks[1])
    with pytest.raises(AssertionError, match=words):
        pool.check([])


def test_the_block_that_begins_with_most_of_the_tokens_is_found():
    known, tokens = BlockTokens(), array("i", [1, 2, 3, 4])
    known.add(5, b"a", array("i", [1, 2, 9, 9]))
    known.add(6, b"a", array("i", [1, 2, 3, 9]))
    known.add(7, b"b", tokens)
    free, held = [0] * 8, [0] * 6 + [1, 0]
    assert known.find(b"a", tokens, free) == (6, 3)
    assert known.find(b"a", tokens, held) == (5, 2), "of those that no table holds"
    assert known.find(b"a", tokens[:1], free) == (6, 1), "a part"
    assert known.find(b"a", array("i", [9]), free) == known.find(b"c", tokens, free) == (-1, 0)
    known.drop(6)
    known.drop(6)
    assert known.find(b"a", tokens, free) == (5, 2)
    known.drop(5)
    assert list(known.by_parent) == [b"b"]
    known.clear()
    assert known.find(b"b", tokens, free) == (-1, 0) and not known.known


def test_the_oldest_of_many_blocks_is_found_if_it_is_the_best():
    known, tokens, counts = BlockTokens(), array("i", [5] * 64), [0] * 1000
    known.add(0, b"a", tokens[:60])
    for block in range(1, 1000):
        known.add(block, b"a", array("i", [5, block % 10, *[100 + block] * 62]))
    assert known.find(b"a", tokens, counts) == (0, 60)
    counts[0] = 1
    block, size = known.find(b"a", tokens, counts)
    assert (block % 10, size) == (5, 2)


def test_a_search_among_sorted_blocks_equals_the_obvious_one():
    rng, known, texts, found = Random(0), BlockTokens(), dict[int, tuple](), Counter()

    def begin(tokens, other):
        return next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), 4)

    for block in range(3000):
        counts = [rng.random() < 0.3 for _ in range(block + 1)]
        tokens = array("i", rng.choices(range(3), k=4))
        parent = rng.choice([b"a", b"b"])
        sizes = {b: begin(tokens, own) for b, (at, own) in texts.items() if at == parent}
        most = max((size for b, size in sizes.items() if not counts[b]), default=0)
        best, size = known.find(parent, tokens, counts)
        assert size == most and (size == 0 or (sizes[best] == size and not counts[best]))
        found[size] += 1
        known.add(block, parent, tokens)
        texts[block] = parent, tokens
        if rng.random() < 0.9 and len(texts) > 8:
            known.drop(gone := rng.choice([*texts]))
            del texts[gone]
    assert min(found[size] for size in range(5)) > 10


def test_a_hit_inside_a_block_is_a_use():
    """Otherwise the copied block is evicted before blocks that no request needed since."""
    pool = BlockPool(5)
    for first in (1, 2):
        table = BlockTable(pool, 8, hasher=BlockHasher(b"root", 8))
        assert table.try_reserve(8)
        table.num_computed = 8
        table.publish(array("i", [first] * 8))
        table.clear()
    other = BlockTable(pool, 8, hasher=BlockHasher(b"root", 8))
    other.match(array("i", [1] * 5 + [7] * 9), 4)
    assert other.num_computed == 4
    assert pool.try_allocate(3) is not None, "two are free, and one is evicted"
    again = BlockTable(pool, 8, hasher=BlockHasher(b"root", 8))
    again.match(array("i", [1] * 9), 4)
    assert again.num_computed == 8, "of two cached blocks, the one that was copied is left"


def test_a_part_of_a_block_is_not_found_after_its_eviction_or_a_reset():
    for event in ("evict_all", "reset_cache"):
        pool, text = BlockPool(4), array("i", range(20))
        table = BlockTable(pool, 8, hasher=BlockHasher(b"root", 8))
        assert table.try_reserve(20)
        table.num_computed = 20
        table.publish(text)
        table.publish_end(text)
        table.clear()
        assert pool.ends and len(pool.tokens.known) == len(pool.found) == 3
        getattr(pool, event)()
        other = BlockTable(pool, 8, hasher=BlockHasher(b"root", 8))
        other.match(text, 4)
        assert not other.blocks and not pool.ends and not pool.tokens.by_parent
        pool.check([])
