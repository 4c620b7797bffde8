"""The demo models, padded to a larger model's compute while they load."""

import pytest
import torch

from specserve import LLM, SamplingParams
from specserve.config import DEMO_COST, DEMO_DRAFT, DEMO_HEAD, DEMO_TARGET, load_config
from specserve.models import preflight
from specserve.models.checkpoint import Checkpoint
from specserve.models.folder import name_of
from specserve.models.source import open_source
from specserve_bench.demo.scaled_model import SHAPES
from specserve_bench.scale import scale_model

PROMPTS = [
    "with open(path) as f:",
    "import os\nimport",
    "def __init__(self",
    "for i in range(",
    "class Error(",
    "return self.",
]
DRAFT = DEMO_COST / "specserve-demo-draft-qwen3-0.6b.json"


def test_its_weights_are_those_of_a_scaled_folder(tmp_path):
    scale_model(DEMO_DRAFT, tmp_path / "written", "qwen3-0.6b-draft")
    written, made = Checkpoint(tmp_path / "written"), Checkpoint(DRAFT)
    assert {*made.files} == {*written.files}
    for name in written.files:
        assert made.stored(name) == written.stored(name)
        module, _, suffix = name.rpartition(".")
        ours, theirs = (c.tensors(module, [suffix])[suffix] for c in (made, written))
        assert torch.equal(ours, theirs), name
    source, folder = open_source(DRAFT), open_source(tmp_path / "written")
    assert source.config() == folder.config()
    assert (source.scaled().source, source.scaled().like) == (DEMO_DRAFT.name, "qwen3-0.6b-draft")
    assert source.tokenizer().get_vocab() == folder.tokenizer().get_vocab()
    assert name_of(str(DRAFT)) == "specserve-demo-draft-qwen3-0.6b"


def test_every_cost_has_a_pair():
    costs = [name for name in SHAPES if not name.endswith("-draft")]
    assert {f.name for f in DEMO_COST.iterdir()} == {
        f"{model.name}-{cost}.json"
        for model in (DEMO_TARGET, DEMO_DRAFT, DEMO_HEAD)
        for cost in costs
    }
    for cost in costs:
        config = load_config(None, {"model.demo_compute": cost})
        target, draft, *_ = preflight.check(config)
        assert open_source(target).scaled().like == cost
        assert open_source(draft).scaled().like == f"{cost}-draft"


def test_a_costs_identity_is_its_own():
    identities = {b"".join(open_source(file).identity()) for file in DEMO_COST.iterdir()}
    assert len(identities) == 6


@pytest.mark.slow
def test_the_pair_says_the_same_at_another_cost():
    """But for one prompt at most: the scaled weights are rounded to bfloat16 once more."""
    params = SamplingParams(max_tokens=12, temperature=0)
    texts = []
    for cost in ({}, {"model.demo_compute": "qwen3-0.6b"}):
        with LLM(set={"memory.kv_bytes": 1 << 30} | cost, progress=False) as llm:
            texts.append([o.text for o in llm.generate(PROMPTS, params)])
    print(*zip(*texts, strict=True), sep="\n")
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(PROMPTS) - 1
