"""Every block is free, or held by exactly as many as it counts: after anything that may happen."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specserve.memory import BlockPool, BlockTable

SIZES = [1, 16, 17]  # tokens a block, of a table each
TABLES = st.integers(0, len(SIZES) - 1)
SLOTS = st.integers(0, 100)


class Tables(RuleBasedStateMachine):
    """Tables of several block sizes on one pool, asked for more than there is."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12)
        self.tables = [BlockTable(self.pool, size) for size in SIZES]

    @rule(i=TABLES, slots=SLOTS)
    def reserve(self, i, slots):
        table, free, had = self.tables[i], self.pool.num_free, list(self.tables[i].blocks)
        needed = max(0, -(-slots // table.block_size) - len(had))
        assert table.missing(slots) == needed
        assert table.try_reserve(slots) == (needed <= free)
        assert list(table.blocks)[: len(had)] == had, "a block moved"
        assert len(table.blocks) == len(had) + (needed if needed <= free else 0)

    @rule(i=TABLES, slots=SLOTS)
    def reserve_some(self, i, slots):
        table, free = self.tables[i], self.pool.num_free
        room = (len(table.blocks) + free) * table.block_size
        assert table.reserve_some(slots) == min(slots, room)
        assert table.missing(min(slots, room)) == 0

    @rule(i=TABLES, slots=SLOTS)
    def compute_and_trim(self, i, slots):
        table = self.tables[i]
        table.num_computed = min(slots, len(table.blocks) * table.block_size)
        kept = list(table.blocks)[: -(-table.num_computed // table.block_size)]
        table.trim()
        assert list(table.blocks) == kept

    @rule(i=TABLES)
    def clear(self, i):
        self.tables[i].clear()
        assert (list(self.tables[i].blocks), self.tables[i].num_computed) == ([], 0)

    @invariant()
    def every_block_is_accounted_for(self):
        self.pool.check([t.blocks for t in self.tables])
        held = sum(len(t.blocks) for t in self.tables)
        assert self.pool.num_free + held == self.pool.num_blocks


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestTables = Tables.TestCase


def test_all_blocks_are_given_out_or_none():
    pool = BlockPool(3)
    assert pool.try_allocate(4) is None
    assert pool.num_free == 3
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
    pool.counts[block] += 1
    pool.check([[block], [block]])
    pool.release([block])
    assert (pool.num_free, pool.counts[block]) == (1, 1)
    pool.release([block])
    pool.check([])


def test_a_block_given_back_twice_is_noticed():
    pool = BlockPool(2)
    blocks = pool.try_allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="block 0 was given back twice"):
        pool.release(blocks)


BROKEN = {  # what went wrong with one block held of two -> words of the complaint
    "a holder that nobody counts": (lambda pool: None, [[0], [0]], "block 0: 1 != 2 holders"),
    "a count without a holder": (lambda pool: None, [], "block 0: 1 != 0 holders"),
    "free and held": (lambda pool: pool.free.append(0), [[0]], "block 0 is lost, or free and held"),
    "lost": (lambda pool: pool.free.clear(), [[0]], "block 1 is lost, or free and held"),
    "free twice": (lambda pool: pool.free.append(1), [[0]], "a block is free twice"),
}


@pytest.mark.parametrize(("damage", "tables", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_invariant_is_noticed(damage, tables, words):
    pool = BlockPool(2)
    pool.try_allocate(1)
    damage(pool)
    with pytest.raises(AssertionError, match=words):
        pool.check(tables)
