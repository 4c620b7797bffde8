"""What rounding its weights costs the demo pair in perplexity, on text that training left out."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from specserve import LLM
from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.errors import ConfigError
from specserve_bench import commands
from specserve_bench.demo.held_out import source_files
from specserve_bench.perplexity import perplexity
from tests.checkpoints import tiny_checkpoint

# Of the perplexity in bf16, by what the layers and the embedding are rounded to.
BOUNDS = {("w8", "none"): 0.005, ("w8a8", "none"): 0.01, ("w4", "none"): 0.06, ("w4", "w8"): 0.06}
SETTINGS = {"memory.kv_bytes": 1 << 26, "model.threads": 1}


def measured(model, texts, quantize=None, embedding="none"):
    settings = SETTINGS | {"model.quantize_embedding": embedding}
    with LLM(model, drafter="none", quantize=quantize, set=settings, progress=False) as llm:
        return perplexity(llm, texts)


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(DEMO_TARGET, id="target", marks=pytest.mark.slow),
        pytest.param(DEMO_DRAFT, id="draft"),
    ],
)
def test_perplexity_stays_within_its_bounds(folder):
    texts = [text[len(text) // 2 :][:1500] for text in source_files().values()]
    own = measured(folder, texts)
    costs = {names: measured(folder, texts, *names) / own - 1 for names in BOUNDS}
    assert all(abs(costs[names]) < bound for names, bound in BOUNDS.items()), (own, costs)
    assert costs["w4", "none"] > abs(costs["w8", "none"])  # so that both were measured
    assert costs["w4", "w8"] != costs["w4", "none"]


def test_perplexity_is_what_transformers_computes(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    with LLM(folder, drafter="none", set=SETTINGS, progress=False) as llm:
        text = "def read_lines(path):\n" * 60
        ids = llm.tokenizer.encode(text)
        assert 512 < len(ids) < 1024
        got = perplexity(llm, [text])
    model = AutoModelForCausalLM.from_pretrained(folder)
    windows = [torch.tensor([ids[:512]]), torch.tensor([ids[512:]])]
    with torch.no_grad():
        losses = [float(model(w, labels=w).loss) * (w.shape[1] - 1) for w in windows]
    assert got == pytest.approx(math.exp(sum(losses) / (len(ids) - 2)), rel=1e-3)


def test_one_command_measures_it(tmp_path, capsys):
    file = tmp_path / "text.py"
    file.write_text("def read_lines(path):\n" * 3)
    folder = str(tiny_checkpoint(tmp_path / "model"))
    flags = ["--model", folder, "--text", str(file), "--set", "memory.kv_bytes=67108864"]
    assert commands.main(["perplexity", *flags]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["stored", "w8", "w8a8", "w4"]
    assert all(float(line[2].rstrip(",")) > 1 for line in lines)


def test_a_text_that_cannot_be_read_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"--text .*gone: cannot be read"):
        commands.main(["perplexity", "--text", str(tmp_path / "gone")])
