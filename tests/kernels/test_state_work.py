"""Lanes of committed rows and of trees: each draft token is on a path, and recorded steps fit."""

import random

import numpy as np
import pytest
import torch

from specserve_kernels import Replays, StateRows
from specserve_kernels.cuda.state_work import (
    BEGIN,
    BEHIND,
    END,
    READ,
    SNAPSHOT,
    WRITE,
    fields,
    replay_work,
    step_work,
)
from tests.kernels.random_steps import RandomStep, Req, random_tree


def ints(x):
    return torch.tensor(x, dtype=torch.int32)


def work_of(reqs, committed, size=0, at=0):
    B, none = len(reqs), [0] * len(reqs)
    blocks = ints([[10 * b, 10 * b + 1] for b in range(B)])
    states = StateRows(blocks, ints(committed), ints(none), ints(none), blocks)
    return step_work(RandomStep(reqs).rows()._replace(states=states), at, size)


def test_a_lane_of_each_leaf_has_its_path():
    rng = random.Random(3)
    trees = [random_tree(rng, n) for n in (1, 7, 20, 63)]
    reqs = [Req(0, 5), Req(9, 4), *(Req(30, parents=tree) for tree in trees)]
    work = work_of(reqs, [5, 1, 1, 1, 1, 1])
    paths = [tuple(work.order[lane[BEGIN] : lane[END]]) for lane in work.drafts]
    first, want = 9, [tuple(range(6, 9))]  # a chain behind its root
    for tree in trees:
        parents = [-1, *tree]
        for leaf in set(range(1, len(parents))) - set(tree):
            path, node = [], leaf
            while node > 0:
                path.append(first + node)
                node = parents[node]
            want.append(tuple(path[::-1]))
        first += len(parents)
    assert sorted(paths) == sorted(want)
    assert (work.drafts[:, READ] >= 0).all() and (work.drafts[:, WRITE] == -1).all()


def test_a_row_has_the_rows_before_it():
    tree = [0, 0, 2, 3, 3]
    work = work_of([Req(0, 3), Req(20, parents=tree)], [3, 1])
    before = work.rows[:, 2:]
    assert before[2].tolist() == [1, 0, -1, -2, -3, -4, -5]
    assert before[3].tolist() == [-1, -2, -3, -4, -5, -6, -7]
    assert before[8].tolist() == [6, 5, 3, -1, -2, -3, -4]
    assert before.shape[1] == BEHIND
    assert work.rows[:, 1].tolist() == [-1, -1, -1, -1, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_leaves", [1, 2, 16, 32, 48, 63])
def test_the_paths_of_a_recorded_step_fit(num_leaves):
    """The longest paths in all: a chain with all leaves at its end."""
    depth = 63 - num_leaves
    tree = [*range(depth), *[depth] * num_leaves]
    for size in (64, 128):
        reqs = [Req(5, parents=tree) for _ in range(size // 64)]
        work = work_of(reqs, [1] * len(reqs), size, 7)
        shapes = fields(size)
        assert all(len(x) <= shape[0] for x, shape in zip(work, shapes, strict=False))
        assert work.lanes[0, WRITE] == 7


def test_unused_rows_have_no_state():
    work = work_of([Req(5, 1)], [1], size=4)
    assert work.lanes[1:, [READ, WRITE, SNAPSHOT]].max() == -1
    assert work.lanes[:, [BEGIN, END]].tolist() == [[i, i + 1] for i in range(4)]


def test_replays_that_share_blocks_run_one_after_the_other():
    blocks, none = ints([[0, 1], [2, 3], [4, 5], [6, 7]]), [0, 0]
    snapshots = ints([none, none, [3, 9], [5, 8]])
    replays = Replays(
        blocks, ints([0, 1, 2, 3, 4]), ints(range(4)), ints([-1, -1, 1, 1]), snapshots
    )
    work, runs = replay_work(replays)
    assert runs == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert np.array_equal(work.tables[work.lanes[2, SNAPSHOT] :][:2], [3, 9])
