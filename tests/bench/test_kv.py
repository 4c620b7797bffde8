"""Attention over KV of 8 bits against bf16."""

import pytest

from specserve.models import parse_config
from specserve_bench.demo.scaled_model import SHAPES
from specserve_bench.figures import kv

SMALL = parse_config.parse(SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 2, "head_dim": 16})


def test_every_dtype_is_timed_at_every_size():
    result = kv.measure(SMALL, ((20, 1), (100, 3)), rounds=3)
    assert [(each["context"], each["rows"]) for each in result["attention"]] == [(20, 1), (100, 3)]
    for each in result["attention"]:
        for name in ("bf16", "int8", "fp8"):
            ms = each[name]["ms"]
            assert 0 < ms["low"] <= ms["median"] <= ms["high"]
        assert each["bf16"]["over_bf16"]["median"] == pytest.approx(1)
    assert "| 100 | 3 |" in kv.table(result)
