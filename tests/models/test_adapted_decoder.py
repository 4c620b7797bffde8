"""A decoder with adapters in its slots: its logits are peft's, and each row's bits its own."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.models.adapters import AdapterSlots, read_adapter
from specserve.models.loader import load_decoder
from specserve.models.parse_config import load_config
from specserve_kernels import AdapterRows, cpu, reference
from specserve_kernels.ops import EagerProgram
from tests.checkpoints import save_quietly, tiny_checkpoint
from tests.models.forward import causal_rows, empty_kv, prompt
from tests.models.test_adapters import FAMILIES, MAX_RANK, TOLD, peft_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),
]
NUM_SLOTS, LENGTH, BLOCK = 3, 40, 8
IN_AND_OUT = ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
SPLIT = [f"in_proj_{x}" for x in ("qkvz", "ba")] + ["out_proj", "q_proj", "v_proj", "o_proj"]
RECURRENT = {  # peft does not adapt `out_proj` of some families with Mamba-2
    "lfm2": TOLD,
    "qwen3_5": TOLD,
    "falcon_h1": TOLD | {"target_modules": IN_AND_OUT},
    "bamba": TOLD,
    "granite_hybrid": TOLD,
    "qwen3_next": {"r": 4, "lora_alpha": 1, "target_modules": SPLIT},
    "olmo_hybrid": TOLD,
}
EVERYDAY = *FAMILIES, "lfm2", "qwen3_5", "falcon_h1"
NAMES = [
    name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow)
    for name in FAMILIES | RECURRENT
]
SMALL = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def adapted(folder, ops, dtype="fp32", **adapters):
    """A decoder with an adapter in each named slot, told by peft's arguments."""
    slots = AdapterSlots(load_decoder(folder, dtype, ops), NUM_SLOTS, MAX_RANK)
    config, of_rows = slots.decoder.config, slots.decoder.dtype
    for slot, told in enumerate(adapters.values()):
        path = folder.parent / f"adapter-{slot}"
        peft_model(folder, **told).save_pretrained(path)
        slots.put(slot, slots.packed(read_adapter(path, config, MAX_RANK, of_rows)))
    return slots


def run(program, kv, ids, slot, start, end):
    """The logits of some rows of one request, all of an adapter; -1: of the model itself."""
    rows = causal_rows(range(20), start, end, BLOCK, kv)
    if slot >= 0:
        rows = rows._replace(adapters=AdapterRows.of([slot] * (end - start), NUM_SLOTS))
    return program.run(rows, ids[start:end], torch.arange(end - start)).logits.clone()


def logits(decoder, ids, slot, chunks=(23, LENGTH)):
    kv = empty_kv(decoder, 20, BLOCK)
    program = decoder.program(kv, LENGTH, LENGTH)
    starts = (0, *chunks[:-1])
    parts = [run(program, kv, ids, slot, a, b) for a, b in zip(starts, chunks, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("family", NAMES)
def test_logits_are_those_of_pefts_unmerged_model(tmp_path, family, ops):
    folder = tiny_checkpoint(tmp_path / "base", family, **FAMILIES.get(family, {}))
    told = RECURRENT.get(family, TOLD)
    slots = adapted(folder, ops, first=told)
    # With seed 0, transformers in float32 is further from its float64 than the bound, too.
    seed = 1 if family == "qwen3_next" else 0
    ids = prompt(slots.decoder.config.vocab_size, LENGTH, seed)
    model = peft_model(folder, **told).double().eval()  # float32 rounds as much as we do
    if family == "qwen3_next":
        model.base_model.model.set_experts_implementation("eager")  # others have no double
    with torch.no_grad():
        want = model(ids[None]).logits[0].float()
        with model.disable_adapter():
            base = model(ids[None]).logits[0].float()
    with torch.inference_mode():
        got, without = (logits(slots.decoder, ids, slot) for slot in (0, -1))
    scale = want.abs().max()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * scale)
    torch.testing.assert_close(without, base, rtol=1e-4, atol=1e-4 * base.abs().max())
    assert (want - base).abs().max() > 0.01 * scale, "the adapter changes too little to be seen"


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_program_has_the_bits_of_the_forward_op_by_op(tmp_path, family):
    folder = tiny_checkpoint(tmp_path / "base", family)
    told = RECURRENT.get(family, TOLD)
    decoder = adapted(folder, cpu, "bf16", first=told, second=SMALL).decoder
    ids = prompt(decoder.config.vocab_size, LENGTH)
    with torch.inference_mode():
        for slot in (0, 1, -1):
            kv = empty_kv(decoder, 20, BLOCK)
            want = run(EagerProgram(decoder, kv), kv, ids, slot, 0, LENGTH)
            assert torch.equal(logits(decoder, ids, slot, (LENGTH,)), want)


def test_an_adapter_that_is_replaced_or_taken_out_leaves_nothing(tmp_path):
    folder = tiny_checkpoint(tmp_path / "base", "llama")
    slots = adapted(folder, cpu, "bf16", first=TOLD, second=SMALL)
    ids = prompt(slots.decoder.config.vocab_size, LENGTH)
    second = read_adapter(tmp_path / "adapter-1", slots.decoder.config, MAX_RANK, torch.bfloat16)
    with torch.inference_mode():
        want, base = (logits(slots.decoder, ids, slot) for slot in (1, -1))
        assert not torch.equal(logits(slots.decoder, ids, 0), want)
        slots.put(0, slots.packed(second))
        assert torch.equal(logits(slots.decoder, ids, 0), want)
        slots.put(0, None)
        assert torch.equal(logits(slots.decoder, ids, 0), base)


def test_a_model_without_slots_refuses_rows_with_an_adapter(tmp_path):
    decoder = load_decoder(tiny_checkpoint(tmp_path), "fp32", cpu)
    with pytest.raises(AssertionError, match="no adapter slots"), torch.inference_mode():
        logits(decoder, prompt(decoder.config.vocab_size, LENGTH), 0)


def test_tensors_of_nemotron_h_may_begin_with_backbone(tmp_path):
    folder = tiny_checkpoint(tmp_path / "base", "nemotron_h")
    config, path = load_config(folder), tmp_path / "adapter"
    peft_model(folder, r=2, target_modules=["in_proj", "up_proj"]).save_pretrained(path)
    digests = [read_adapter(path, config, MAX_RANK, torch.float32).digest]
    tensors = load_file(path / "adapter_model.safetensors")
    renamed = {name.replace("model.layers", "backbone.layers"): t for name, t in tensors.items()}
    save_file(renamed, path / "adapter_model.safetensors")
    digests.append(read_adapter(path, config, MAX_RANK, torch.float32).digest)
    assert renamed.keys() != tensors.keys() and digests[0] == digests[1]


@pytest.mark.slow
def test_an_adapter_of_nemotron_h_changes_logits_as_its_merged_model(tmp_path):
    """transformers limits this family's time steps from below, so its own logits differ."""
    told = {"r": 4, "lora_alpha": 12, "target_modules": [*IN_AND_OUT, "up_proj"]}
    folder = tiny_checkpoint(tmp_path / "base", "nemotron_h")
    decoder = adapted(folder, cpu, first=told).decoder
    save_quietly(peft_model(folder, **told).merge_and_unload(), tmp_path / "merged")
    merged = load_decoder(tmp_path / "merged", "fp32", cpu)
    ids = prompt(decoder.config.vocab_size, LENGTH)
    with torch.inference_mode():
        got, without = (logits(decoder, ids, slot) for slot in (0, -1))
        want = logits(merged, ids, -1)
    scale = want.abs().max()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * scale)
    assert (got - without).abs().max() > 0.01 * scale
