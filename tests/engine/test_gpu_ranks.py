"""Ranks on GPUs, as far as one GPU allows: NCCL with one rank, and two ranks that share the GPU."""

import sys
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE, STDOUT, Popen

import pytest
import torch

from specserve import LLM, SamplingParams
from specserve.errors import ConfigError
from specserve.memory.arena import Arena, used_bytes
from specserve.models.decoder import Gatherings
from specserve.models.loader import load_decoder
from specserve_kernels import Gathering, Ranks, load
from specserve_kernels.ops import EagerProgram
from tests.checkpoints import tiny_checkpoint
from tests.models.forward import causal_rows, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # libraries warn at their first use
]
DEVICE = "cuda"
SECONDS = 60  # most of a process
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8] * 4, [9, 1, 3]]
TWO_RANKS = """
import os
import sys
from pathlib import Path
import torch
from specserve_kernels import Gathering, Ranks, load

rank, ops = int(sys.argv[1]), load("cuda:0")
ranks = Ranks(rank, 2, {})
whole = torch.arange(48.0, device="cuda:0").view(3, 16)
gathering = Gathering(ranks, (0, 5, 16))
try:
    ops.join(ranks, Path(sys.argv[2]), "two")
    found = ops.all_gather(ops.take_columns(whole, *gathering.own), gathering)
    print("gathered", torch.equal(found, whole))
except Exception as e:
    print("refused", e)
sys.stdout.flush()
os._exit(0)  # without waiting for the other rank
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The only rank of a group, connected by NCCL."""
    ranks = Ranks(0, 1, {})
    load(DEVICE).join(ranks, tmp_path_factory.mktemp("ranks"), "alone")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nccl_gathers_the_columns_of_one_rank(alone, dtype):
    ops = load(DEVICE)
    for rows in (1, 70, 1000):
        x = torch.randn(rows, 300, device=DEVICE).to(dtype)
        found = ops.all_gather(x.clone(), Gathering(alone, (0, 300)))
        assert torch.equal(found, x)


def forward(decoder, ids):
    """The logits of three steps, op by op."""
    layouts, found = decoder.kv_layouts(), []
    size = used_bytes(layouts, 16)
    arena = Arena(decoder.ops.allocate(3 * size), size)
    with torch.inference_mode():
        program = EagerProgram(decoder, arena.add_view("target", layouts, 16))
        for start, end in ((0, 30), (30, 31), (31, 40)):
            rows = causal_rows([2, 0, 1], start, end, 16)
            read = torch.arange(end - start)
            found.append(program.run(rows, ids[start:end], read).logits.clone())
    return torch.cat(found)


def gathered_by(ranks, decoder, has_whole_experts):
    """The same model, whose columns and experts one rank gathers."""
    c, found = decoder.config, decoder.replaced()
    widths = {
        "heads": c.num_heads * c.head_dim,
        "inner": c.intermediate_size,
        "experts": c.mixture.width,
        "shared": c.mixture.shared_width,
        "hidden": c.hidden_size,
        "logits": c.vocab_size,
    }
    if has_whole_experts:
        widths |= {"holders": c.mixture.num_experts}
        del widths["experts"]
    found.gatherings = Gatherings(**{k: Gathering(ranks, (0, n)) for k, n in widths.items()})
    return found


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_a_forward_with_nccl_has_the_bits_of_one_without(alone, has_whole_experts, tmp_path):
    folder, ids = tiny_checkpoint(tmp_path, "qwen2_moe", seed=1), prompt(320, 40)
    decoder = load_decoder(folder, "bf16", load(DEVICE, "triton"), 288)
    ranked = gathered_by(alone, decoder, has_whole_experts)
    assert torch.equal(forward(ranked, ids), forward(decoder, ids))


def test_nccl_connects_two_ranks_or_names_the_gpu_that_they_share(tmp_path, record_property):
    """NCCL wants a GPU per rank, unless it is new and may put two on one."""
    command = [sys.executable, "-c", TWO_RANKS]

    def run(rank):
        process = Popen([*command, str(rank), str(tmp_path)], stdout=PIPE, stderr=STDOUT, text=True)
        try:
            return process.communicate(timeout=SECONDS)[0]
        finally:
            process.kill()

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, range(2)))
    record_property("two ranks on one GPU", found)
    has_gathered = all("gathered True" in output for output in found)
    assert has_gathered or any("Duplicate GPU" in output for output in found), found


def test_ranks_that_share_a_gpu_generate_the_text_of_one_process(tmp_path, record_property):
    """Through the host. The logits may differ in bits: cuBLAS may sum a map of fewer columns in
    another order.
    """
    folder = tiny_checkpoint(tmp_path, seed=1, tie_word_embeddings=False)
    given = {"model.device": f"{DEVICE}:0", "model.dtype": "fp32", "memory.kv_bytes": 1 << 24}
    given |= {"scheduler.prefill_chunk": 16, "scheduler.max_batched_tokens": 72}
    texts = []
    for size in (1, 2):
        ranks = {"parallel.tensor": size, "parallel.pipeline": size}
        with LLM(folder, drafter="ngram", set=given | ranks, progress=False) as llm:
            texts.append([list(o.token_ids) for o in llm.generate(PROMPTS, GREEDY)])
    record_property("texts", texts)
    assert texts[0] == texts[1]


def test_more_ranks_than_gpus_are_refused(tmp_path):
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"this machine has {count}"):
        LLM(tiny_checkpoint(tmp_path), set={"parallel.pipeline": count + 1})
