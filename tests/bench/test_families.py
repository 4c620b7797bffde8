"""Steps of every family beside Llama's: what is measured, and its table."""

from specserve_bench.bound import StepSize
from specserve_bench.figures import families
from specserve_bench.figures.families import DENSE, SHAPE

TINY = SHAPE | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "vocab_size": 320}


def test_every_family_is_measured_next_to_llama():
    sizes = [StepSize("1 row", (99,), 1), StepSize("3 rows", (40,), 3)]
    result = families.measure(TINY | {"num_hidden_layers": 2}, sizes, rounds=2)
    assert [s["step"] for s in result["steps"]] == ["1 row", "3 rows"]
    for step in result["steps"]:
        assert {*step} == {"step", *DENSE}
        assert step["LlamaForCausalLM"]["over_llama"] == {"median": 1, "low": 1, "high": 1}
        assert all(step[name]["ms"]["low"] > 0 for name in DENSE)
    assert families.table(result).count("\n|") == 1 + len(DENSE)
