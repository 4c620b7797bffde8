"""Steps of every family beside Llama's: what is measured, and its table."""

from specserve_bench.families import DENSE, TINY, family_figures
from specserve_bench.steps import Size


def test_every_family_is_measured_beside_llama(capsys):
    sizes = [Size("1 row", (99,), 1), Size("3 rows", (40,), 3)]
    result = family_figures(TINY, sizes, rounds=2)
    assert [s["step"] for s in result["steps"]] == ["1 row", "3 rows"]
    for step in result["steps"]:
        assert {*step} == {"step", *DENSE}
        assert step["LlamaForCausalLM"]["over_llama"] == {"median": 1, "low": 1, "high": 1}
        assert all(step[name]["ms"]["low"] > 0 for name in DENSE)
    assert capsys.readouterr().out.count("\n|") == 1 + len(DENSE)
