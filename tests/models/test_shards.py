"""The parts of a model, in several ranks, compute the bits that one process computes."""

import json
from functools import partial

import pytest
import torch

from specserve.errors import ConfigError
from specserve.models import families, multimodal_families
from specserve.models.adapters import AdapterSlots, read_adapter
from specserve.models.loader import load_decoder, weight_bytes
from specserve.models.parse_config import load_config
from specserve.models.shard import Shard
from specserve.models.weight import AS_STORED, Rounding
from specserve_kernels import AdapterRows, reference
from tests.adapters import ALL, write_adapter
from tests.checkpoints import FAMILIES, MULTIMODAL, RECURRENT, tiny_checkpoint
from tests.models.formats import change_config, quantized
from tests.models.forward import builds, causal_rows, empty_kv, prompt
from tests.models.shards import in_ranks

OPS = builds()[-1]
BITS = torch.uint8
RANK = 4  # of adapters


def outputs(decoder, adapter=None):
    """The logits and all auxiliary hidden states of three steps of a program."""
    if adapter is not None:
        slots = AdapterSlots(decoder, 1, RANK)
        decoder = slots.decoder
        slots.put(0, slots.packed(read_adapter(adapter, decoder.config, RANK, decoder.dtype)))
    ids, table, found = prompt(320, 40), [3, 1, 4, 2, 0], []
    with torch.inference_mode():
        kv = empty_kv(decoder, len(table), 16)
        layers = range(decoder.config.num_layers)
        program = decoder.program(kv, 40, 8, aux_layer_ids=layers)
        for start, end in [(0, 30), (30, 31), (31, 40)]:
            read = torch.arange(max(0, end - start - 8), end - start)
            rows = causal_rows(table, start, end, 16, kv)
            if adapter is not None:
                rows = rows._replace(adapters=AdapterRows.of([0] * (end - start), 1))
            run = program.run(rows, ids[start:end], read)
            aux = [run.aux_hidden_states[i] for i in sorted(run.aux_hidden_states)]
            found += [x.clone() for x in (run.logits, *aux)]
            found.append(program.logits(read[:1]).clone())
    return found


def assert_same(folder, tensor, pipeline, dtype="bf16", rounding=AS_STORED, adapter=None, **given):
    run = partial(outputs, adapter=adapter)
    expected = run(load_decoder(folder, dtype, OPS, 288, None, rounding))
    found = in_ranks(folder, OPS, dtype, tensor, pipeline, run, rounding, **given)[0]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.view(BITS), other.view(BITS))


LINEAR, FULL = "linear_attention", "full_attention"
BLOCKS = "layers_block_type"
STAGED = {  # recurrent layers, so that each of two stages has attention
    "lfm2": {"layer_types": ["conv", FULL] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 2, "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "falcon_h1": {},
    "nemotron_h": {BLOCKS: [LINEAR, FULL, "mlp", LINEAR, FULL]},
    "nemotron_h_moe": {BLOCKS: [LINEAR, FULL, "moe", LINEAR, FULL]},
}
STAGED = {
    name: STAGED.get(name, {"layer_types": [LINEAR, FULL] * 2, "num_hidden_layers": 4})
    for name in RECURRENT
}
# name -> tiny checkpoint, what departs from it. Together they have every supported architecture.
CASES = {name: (name, STAGED.get(name, {})) for name in (*FAMILIES, *MULTIMODAL)} | {
    "smollm3": ("llama", {"model_type": "smollm3", "no_rope_layers": [1, 0]}),
    "mimo": ("qwen2", {}),  # its own code derives from that
    "gemma3n_vision": ("gemma3n", {}),  # transformers needs another package for its vision
    "every linear map with a bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "arcee with biases": ("arcee", {"mlp_bias": True}),
    "apertus, odd widths": ("apertus", {"hidden_size": 76, "intermediate_size": 150}),
    "nemotron, odd widths": ("nemotron", {"hidden_size": 76, "intermediate_size": 150}),
    "stablelm, biases": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    "command_r_plus, a KV head per rank": ("command_r_plus", {"num_key_value_heads": 4}),
    "glm4_moe, all layers": ("glm4_moe", {"norm_topk_prob": False, "first_k_dense_replace": 0}),
    "ernie4_5_moe, every second layer": ("ernie4_5_moe", {"moe_layer_interval": 2}),
}


def checkpoint_of(case, folder):
    family, fields = CASES[case]
    tiny_checkpoint(folder, family, **fields)
    if case == "mimo":
        change_config(folder, architectures=["MiMoForCausalLM"], model_type="mimo")
    if case == "gemma3n_vision":
        text = json.loads((folder / "config.json").read_text())
        whole = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
        (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_the_bits_of_one_process(case, tmp_path):
    """Or refuse a family that they cannot share."""
    folder, tensor = checkpoint_of(case, tmp_path), 2
    config = load_config(folder)
    if config.num_shared_layers:
        for shard in (Shard(0, 2), Shard(0, 1, 2)):
            with pytest.raises(ConfigError, match="Run the model in one process"):
                load_decoder(folder, "fp32", OPS, 288, shard=shard)
        return
    if config.family.has_kinds:
        with pytest.raises(ConfigError, match=r"Use parallel\.pipeline instead"):
            load_decoder(folder, "fp32", OPS, 288, shard=Shard(0, 2))
        tensor = 1
    assert_same(folder, tensor, pipeline=2)


@pytest.mark.parametrize(("family", "tensor"), [("qwen3_5", 4), ("lfm2", 3), ("falcon_h1", 4)])
def test_recurrent_heads_are_divided_as_those_of_attention(family, tensor, tmp_path):
    """Several ranks may have the same key head, and unequal numbers of channels."""
    heads = {"num_key_value_heads": 4} if tensor == 3 else {}
    folder = tiny_checkpoint(tmp_path, family, **STAGED[family], **heads)
    assert_same(folder, tensor, pipeline=1)


@pytest.mark.parametrize(
    ("family", "fields", "shard", "words"),
    [
        ("bamba", {"mamba_n_groups": 1}, Shard(0, 2), r"each of its 1 groups.*parallel\.pipeline"),
        ("qwen3_5", {}, Shard(0, 1, 2), "layers 0 to 0 of the model have no attention"),
        (
            "falcon_h1",
            {"mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 3, "num_key_value_heads": 4},
            Shard(0, 4),
            "does not fit 6 heads with 3 groups in recurrent layers. Set it to at most 3",
        ),
    ],
    ids=["groups with a norm", "a stage without attention", "more ranks than groups"],
)
def test_recurrent_layers_that_ranks_cannot_share_are_refused(
    family, fields, shard, words, tmp_path
):
    folder = tiny_checkpoint(tmp_path, family, **fields)
    with pytest.raises(ConfigError, match=words):
        load_decoder(folder, "fp32", OPS, 288, shard=shard)


def test_every_family_is_compared(tmp_path):
    folders = [checkpoint_of(case, tmp_path / str(i)) for i, case in enumerate(CASES)]
    found = {load_config(folder).architecture for folder in folders}
    assert found == {*families.FAMILIES, *multimodal_families.MULTIMODAL}


@pytest.mark.parametrize(("tensor", "pipeline"), [(4, 1), (3, 1), (1, 3), (2, 3)])
def test_ranks_may_have_unequal_parts(tensor, pipeline, tmp_path):
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 200}
    if tensor == 4:  # two ranks hold each KV head
        shape |= {"num_attention_heads": 6, "num_key_value_heads": 2}
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=4, **shape)
    assert_same(folder, tensor, pipeline)


@pytest.mark.parametrize("family", ["nemotron", "arcee", "apertus", "gemma2", "glm4_moe"])
def test_functions_of_numbers_have_the_same_bits_for_every_width(family, tmp_path):
    """Of activations, whose kernels compute the last numbers of a row in another way."""
    sizes = {"intermediate_size": 150, "hidden_size": 76}
    assert_same(tiny_checkpoint(tmp_path, family, **sizes), 2, 1, dtype="fp32")


@pytest.mark.parametrize("family", ["llama", "nemotron"])
def test_ranks_have_the_adapters_of_their_columns(family, tmp_path):
    folder = tiny_checkpoint(tmp_path / "base", family)
    ups = {"nemotron": ["up_proj", "down_proj"]}
    write_adapter(tmp_path / "adapter", folder, 0, RANK, ups.get(family, ALL), scale=0.3)
    assert_same(folder, 2, 2, adapter=tmp_path / "adapter")


def test_ranks_of_several_hosts_use_only_sockets(tmp_path):
    assert_same(tiny_checkpoint(tmp_path), 2, 2, shares_memory=False)


@pytest.mark.parametrize("layers", ["w4", "w8", "w8a8"])
def test_maps_may_be_quantized_at_loading(layers, tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3_moe")
    assert_same(folder, 2, 1, rounding=Rounding.named(layers, "w8"))


# name -> family, tensor, pipeline, rounding, fields. Sums of two experts have no order.
EXPERTS = {
    "2 ranks": ("qwen3_moe", 2, 1, AS_STORED, {"num_experts_per_tok": 5}),
    "uneven, and stages": ("qwen2_moe", 2, 2, AS_STORED, {"num_experts": 7}),
    "4 ranks in w4": ("qwen3_moe", 4, 1, Rounding.named("w4", "w8"), {"num_experts": 6}),
    "rounded rows": ("qwen3_moe", 2, 1, Rounding.named("w8a8", "w8"), {}),
    "biases and clamped gates": ("gpt_oss", 2, 1, AS_STORED, {"num_experts_per_tok": 3}),
    "a shared expert without a gate": ("glm4_moe", 2, 1, AS_STORED, {}),
}


@pytest.mark.parametrize("shares_memory", [True, False], ids=["memory", "sockets"])
@pytest.mark.parametrize("case", EXPERTS)
def test_ranks_with_whole_experts_compute_the_bits_of_one_process(case, shares_memory, tmp_path):
    """In fp32: bf16 would hide the order of sums."""
    family, tensor, pipeline, rounding, fields = EXPERTS[case]
    folder = tiny_checkpoint(tmp_path, family, **fields)
    given = {"shares_memory": shares_memory, "has_whole_experts": True}
    assert_same(folder, tensor, pipeline, "fp32", rounding, **given)


@pytest.mark.parametrize("form", ["gptq-v1-asym", "awq", "compressed-w8a8", "fp8-block"])
def test_maps_may_be_stored_quantized(form, tmp_path):
    assert_same(quantized(tmp_path, form), 2, 1)


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_the_reference_ops_exchange_the_same(has_whole_experts, tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen2_moe", num_experts_per_tok=3)
    expected = outputs(load_decoder(folder, "fp32", reference, 288))
    given = {"has_whole_experts": has_whole_experts}
    found = in_ranks(folder, reference, "fp32", 2, 2, outputs, **given)[0]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


REFUSED = {
    "a norm of all keys": ({"family": "olmo2"}, Shard(0, 4), "each rank needs one of its 2 KV"),
    "more ranks than heads": ({}, Shard(0, 8), "at most 2, or to a multiple of 2 up to 4"),
    "no multiple of the KV heads": ({}, Shard(0, 3), "3 does not fit 4 attention heads"),
    "more stages than layers": ({}, Shard(0, 1, 3), "the model's 2 layers"),
}


def test_a_model_needs_an_expert_for_each_rank(tmp_path):
    shard = Shard(0, 4, has_whole_experts=True)
    given = {"num_attention_heads": 4, "num_key_value_heads": 4}
    for family, words in (("qwen3", "has no experts"), ("mixtral", "at most 3")):
        fields = given | ({} if family == "qwen3" else {"num_local_experts": 3})
        folder = tiny_checkpoint(tmp_path / family, family, **fields)
        with pytest.raises(ConfigError, match=words):
            load_decoder(folder, "fp32", OPS, 288, shard=shard)


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_cut_are_refused(case, tmp_path):
    fields, shard, words = REFUSED[case]
    fields = dict(fields)
    folder = tiny_checkpoint(tmp_path, fields.pop("family", "qwen3"), **fields)
    with pytest.raises(ConfigError, match=words):
        load_decoder(folder, "fp32", OPS, 288, shard=shard)


@pytest.mark.parametrize("family", ["qwen3", "smollm", "nemotron", "ernie4_5_moe"])
def test_the_memory_of_a_shard_is_known_before_loading(family, tmp_path):
    folder = tiny_checkpoint(tmp_path, family)
    for rank in range(4):
        shard = Shard(rank, 2, 2)
        decoder = load_decoder(folder, "fp32", OPS, 288, shard=shard)
        expected = weight_bytes(folder, "fp32", OPS, shard=shard)
        assert expected == pytest.approx(decoder.forms.num_bytes, rel=0.1)
