"""What KV of 8 bits costs the demo pair in perplexity, and that drafters change no text over it."""

import math

import pytest
import torch
from torch.nn import functional as F

from specserve import LLM, SamplingParams
from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.models.loader import load_decoder
from specserve.models.reader import KV_DTYPES
from specserve.text.tokenizer import load_tokenizer
from specserve_bench.demo.evaluate import WINDOW
from specserve_bench.demo.held_out import source_files
from specserve_kernels import cpu
from tests.models.forward import logits

BOUND = {"int8": 0.005, "fp8": 0.01}  # of the perplexity with KV in bf16


def windows(folder):
    """A window of every held-out file, from its middle."""
    tokenizer = load_tokenizer(folder)
    for text in source_files().values():
        ids = torch.tensor(tokenizer.encode(text))
        start = max(0, (len(ids) - WINDOW) // 2)
        yield ids[start : start + WINDOW]


def perplexity(decoder, texts, kv_dtype):
    total = count = 0
    for ids in texts:
        said = logits(decoder, ids, chunks=(), kv_dtype=kv_dtype)
        total += float(F.cross_entropy(said[:-1], ids[1:], reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(DEMO_TARGET, id="target", marks=pytest.mark.slow),
        pytest.param(DEMO_DRAFT, id="draft"),
    ],
)
def test_perplexity_is_that_of_bf16(folder):
    decoder, texts = load_decoder(folder, "bf16", cpu), list(windows(folder))
    own = perplexity(decoder, texts, None)
    for name, dtype in KV_DTYPES.items():
        ratio = perplexity(decoder, texts, dtype) / own
        assert abs(ratio - 1) < BOUND[name], f"{own:.3f} {ratio - 1:+.3%} with KV in {name}"


PROMPTS = ["What does shutil.copytree do?", "How do I read a file line by line? " * 9]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_drafters_change_no_text_over_kv_of_8_bits(kv_dtype):
    texts, weights, accepted = [], (), []
    for drafter in ("none", "ngram", "model", "auto"):
        settings = {"memory.kv_bytes": 1 << 26, "memory.kv_dtype": kv_dtype}
        with LLM(drafter=drafter, set=settings, progress=False, weights=weights) as llm:
            weights = llm.weights
            asked = [SamplingParams(temperature=t, seed=3, max_tokens=40) for t in (0, 1)]
            outputs = llm.generate(PROMPTS * 2, [asked[0]] * 2 + [asked[1]] * 2)
            again = llm.generate(PROMPTS, [asked[0]] * 2)
        texts.append([o.token_ids for o in (*outputs, *again)])
        accepted.append(sum(o.speculation.accepted for o in outputs))
        assert again[1].usage.cached_tokens > 0
    assert texts[1:] == texts[:1] * 3
    assert accepted[0] == 0 < accepted[2]
