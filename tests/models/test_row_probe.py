"""The probe finds models whose rows depend on what else a step computes."""

import pytest
import torch

from specserve.memory.arena import KVLayout
from specserve.models.row_probe import CONTEXTS, differing_rows
from specserve_kernels import reference
from specserve_kernels.ops import EagerProgram
from specserve_kernels.types import Rotary
from tests.models.transformers_models import foreign_checkpoint, load_foreign

V, D = 97, 8


class Fake:
    """One layer of attention, and a head; `spoil(residual)` is what one made to fail does to the
    rows of a step.
    """

    num_heads, windows, dtype, ops = 1, (None,), torch.float32, reference

    class config:
        vocab_size = V

    def __init__(self, spoil=lambda x: x, spoil_logits=lambda x: x):
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(V, D, generator=generator)
        self.still = Rotary(torch.ones(64, D // 2), torch.zeros(64, D // 2))
        self.spoil, self.spoil_logits, self.steps = spoil, spoil_logits, []

    def kv_layouts(self):
        return (KVLayout(1, D, torch.float32),)

    def program(self, kv, max_rows, max_read):
        return EagerProgram(self, kv)

    def plan(self, rows, kv, also=()):
        self.steps.append(rows)
        return reference.plan(rows, kv, 1, (None,), also)

    def embed(self, token_ids):
        return self.table[token_ids]

    def forward(self, residual, kv, plan, aux_layer_ids=()):
        q = reference.rope_write_kv(residual.repeat(1, 3), self.still, None, kv.layers[0], plan)
        return self.spoil(residual + reference.attention(q, kv.layers[0], plan, 0.3)), {}

    def logits(self, residual, rows):
        x = residual[rows]
        return self.spoil_logits(torch.stack([self.table @ row for row in x]))


def larger(x, from_rows):
    """By the last bit, in steps of so many rows and more."""
    return x * (1 + 2**-22) if len(x) >= from_rows else x


def test_a_model_that_computes_each_row_by_itself_passes():
    assert differing_rows(Fake(), 200) is None


@pytest.mark.parametrize(
    ("spoil", "size"),
    [
        (lambda x: x + 1e-6 * x.mean(0), 1),
        (lambda x: larger(x, 2), 1),  # alone it differs from all others
        (lambda x: x * (1 + 2**-22) if len(x) == 64 else x, 64),
        (lambda x: torch.cat([larger(x[:1], 1), x[1:]]) if len(x) == 17 else x, 17),
        (lambda x: x.flip(0).cumsum(0).flip(0) if len(x) == 130 else x, 130),
        (lambda x: x * (1 + 2**-22) if torch.get_num_threads() == 1 else x, 1),
    ],
    ids=["mean of the rows", "one row", "64 rows", "the first of 17", "130 rows", "one thread"],
)
def test_a_model_whose_rows_depend_on_their_step_is_found(spoil, size):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert differing_rows(Fake(spoil), 200) == size
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_row_that_depends_on_its_place_in_the_largest_step_is_found():
    """The same rows in another order."""
    spoil = lambda x: x * (1 + 2**-22 * (torch.arange(len(x)) % 2)[:, None]) if len(x) == 20 else x  # noqa: E731
    assert differing_rows(Fake(spoil), 20) is not None


def test_a_head_whose_logits_depend_on_the_rows_that_are_read_is_found():
    assert differing_rows(Fake(spoil_logits=lambda x: larger(x, 17)), 200) == 1
    one = Fake(spoil_logits=lambda x: x * (1 + 2**-22) if len(x) == 33 else x)
    assert differing_rows(one, 200) == 33


def test_equal_nan_is_no_difference():
    assert differing_rows(Fake(lambda x: x * torch.nan), 40) is None


def test_rows_are_of_requests_with_contexts_of_all_lengths_in_random_order():
    fake = Fake()
    differing_rows(fake, 40)
    prefix, whole, *others = fake.steps
    assert len(prefix.positions) == max(CONTEXTS)
    assert set(whole.positions.tolist()) == {*CONTEXTS}
    assert [len(rows.positions) for rows in others] == [1, 1, 2, 17, 33, 40]
    for rows in others:
        assert len(rows.qo_indptr) == len(rows.positions) + 1
        assert len(set(rows.slots.tolist())) == len(rows.slots)
    assert others[-1].slots.tolist() != sorted(others[-1].slots.tolist())


def test_a_model_made_of_modules_is_found_when_a_layer_mixes_rows(tmp_path):
    model = load_foreign(foreign_checkpoint(tmp_path, model_type="olmo"))
    assert differing_rows(model, 40) is None
    norm = model.body.norm
    norm.register_forward_hook(lambda module, given, out: out + 1e-6 * out.mean(1, keepdim=True))
    assert differing_rows(model, 40) == 1
