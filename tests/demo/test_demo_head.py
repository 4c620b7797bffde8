"""What heads bring: the demo's, and one that reads the wrong layer on purpose."""

import json

import pytest

from specserve import LLM, SamplingParams
from specserve_bench.demo import train_head
from specserve_bench.local import Local
from specserve_bench.results import Load
from specserve_bench.workloads import workload
from tests.checkpoints import TEXT
from tests.demo.test_train_head import CONFIG, target  # noqa: F401  a fixture

SMALL = {"memory.kv_bytes": 1 << 28, "model.threads": 1}
ALONE = {"drafter.options": {"ngrams": False}, "speculation.max_nodes": 8}


@pytest.mark.parametrize(
    ("name", "temperature", "least", "most"),
    [("completion", None, 2.1, 2.8), ("completion", 0.8, 1.7, 2.3), ("agent", None, 1.5, 2.1)],
)
def test_the_demos_head_is_right_as_often_as_it_was(name, temperature, least, most):
    """Correct text hides a head that is broken."""
    llm = LLM(drafter="eagle", set=SMALL | ALONE, progress=False)
    round = Local(llm).run(workload(name, 8, 0, temperature), Load(concurrency=4))
    assert least < round.speculation.acceptance_length < most


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):  # noqa: F811
    """A head that reads what comes into one layer."""
    root = tmp_path_factory.mktemp("trained")
    (root / "some.txt").write_text(TEXT * 60)
    (root / "mine.json").write_text(json.dumps(CONFIG | {"tokens": 120 * 64}))
    given = ["--target", str(target), "--text", str(root / "some.txt"), "--aux-layers", "1"]
    train_head.main([str(root / "out"), *given, "--config", str(root / "mine.json")])
    [head] = (root / "out").glob("*-head")
    return target, head


@pytest.mark.parametrize("layer", [1, 0])
def test_a_head_that_reads_the_layer_before_is_warned_about(trained, layer, caplog):
    target, head = trained  # noqa: F811
    file = head / "config.json"
    told = json.loads(file.read_text()) | {"eagle_aux_hidden_state_layer_ids": [layer]}
    file.write_text(json.dumps(told))
    llm = LLM(target, draft_head=head, drafter="eagle", set=SMALL, progress=False)
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    llm.generate(["the cat", "def read_lines(path):", "for line in"], [params] * 3)
    assert llm.engine.head.watch is None, "there were enough steps"
    assert ("most likely next token matched" in caplog.text) is (layer == 0)
