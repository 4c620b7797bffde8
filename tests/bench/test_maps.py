"""Maps of codes beside bf16: what is measured, and its table."""

import torch

from specserve_bench.figures import maps
from specserve_kernels import Codes, cpu


def test_figures_have_every_form_and_number_of_rows(monkeypatch):
    monkeypatch.setattr("specserve_bench.bound.READ_BYTES", 1 << 20)
    monkeypatch.setattr("specserve_bench.bound.MULTIPLY_SECONDS", 1e-4)
    result = maps.measure(rows=(1, 3), rounds=2, size=64)
    names = {kind.name for kind in maps.KINDS}
    assert [row["rows"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert row.keys() == names | {"rows"}
        assert row["bf16"]["over_bf16"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        assert all(row[name]["ms"]["low"] > 0 for name in names)
    assert result["arithmetic"] == cpu.arithmetic()
    assert maps.table(result).count("\n|") == 4


def test_a_list_multiplies_by_every_copy():
    each = maps.Map(maps.Kind("w4", 4, 32), size=64)
    each.ms(3)
    assert len({packed.words.data_ptr() for packed in each.copies}) == len(each.copies) >= 2
    assert torch.equal(each.out[:3], cpu.linear(each.x[:3], each.copies[-1]))


def test_a_form_may_have_offsets():
    made = maps.weight(maps.Kind("w4", 4, 32, has_offsets=True), 64, 64, torch.Generator())
    assert isinstance(made, Codes) and made.offset is not None and made.offset.all()


def test_a_group_is_a_channel_of_a_smaller_map():
    made = maps.weight(maps.Kind("w8", 8, 4096), 64, 64, torch.Generator())
    assert isinstance(made, Codes) and made.group == 64 and made.scale.shape == (64, 1)
