"""A layer for multi-token prediction computes what transformers' own layers compute, in any company
of rows, and a target loads whether or not it is asked for.
"""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from specserve.errors import ConfigError
from specserve.models.loader import load_decoder, weight_bytes
from specserve.models.mtp_config import has_mtp
from specserve.models.mtp_head import load_mtp_head
from specserve_kernels import cpu
from specserve_kernels.ops import EagerProgram
from tests.checkpoints import tiny_checkpoint
from tests.kernels.builds import ON_GPU, cuda, recorded
from tests.models.eagle_heads import Run, same_kv, single_rows
from tests.models.formats import FORMATS, change_config, quantized
from tests.models.forward import builds, logits, prompt
from tests.models.mtp_layers import (
    OWN_EMBEDDING,
    OWN_HEAD,
    STYLES,
    WEIGHTS,
    Oracle,
    load_target,
    write_target,
)

BUILDS = pytest.mark.parametrize("ops", builds(), ids=lambda m: m.__name__.rpartition(".")[2])
N = 33


def own_tables(tensors):
    generator = torch.Generator().manual_seed(9)
    for name in (OWN_EMBEDDING, OWN_HEAD):
        tensors[name] = 0.2 * torch.randn(320, 64, generator=generator)


FULL = {"layer_types": ["full_attention"] * 2}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
CASES = {  # how the target is written
    **{style: {"style": style} for style in STYLES},
    "an embedding and a head of its own": {"edit": own_tables},
    "the target's tied head": {"tie_word_embeddings": True},
    "biases": {"style": "mimo", "family": "qwen2"},
    "experts": {"style": "qwen", "family": "qwen3_moe"},
    "no experts, and the target's last layer has some": {
        "style": "qwen",
        "family": "qwen3_moe",
        "mlp_only_layers": [0],
    },
    "experts that share tensors": {"family": "gpt_oss"} | FULL,
    "turned heads and fused maps": {"family": "glm4"},
    "norms that add one": {"family": "gemma3"} | FULL,
    "capped logits": {"family": "gemma3", "final_logit_softcapping": 3.0} | FULL,
    "scales": {"family": "granite"},
    "gated attention, in a model with recurrent layers": {"style": "qwen", "family": "qwen3_5"}
    | HYBRID,
    "experts that share tensors, in such a model": {"style": "qwen", "family": "qwen3_5_moe"}
    | HYBRID,
    "experts and a shared one, in such a model": {"style": "qwen", "family": "qwen3_next"} | HYBRID,
}


def load(folder, ops, dtype="fp32", **told):
    tensors = write_target(folder, **told)
    target = load_target(folder, ops, dtype)
    head = load_mtp_head(folder / "target", target)
    return head, target, Oracle(folder, told.get("style", "deepseek"), tensors)


def features_and_ids(n=N, width=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, width, generator=generator), prompt(320, n)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@BUILDS
@pytest.mark.parametrize("told", CASES.values(), ids=CASES)
def test_logits_and_next_features_are_those_of_transformers(ops, told, tmp_path):
    head, target, oracle = load(tmp_path, ops, **told)
    assert (head.aux_layer_ids, head.draft_vocab_size) == ((2,), 320)
    assert head.body.num_positions == target.num_positions
    ids = prompt(320, N + 1)
    residual, feature = oracle.residual_and_feature(ids[:-1])
    features = head.fuse(residual.clone())
    close(features, feature)
    got, got_next = Run(head).step(features, ids[1:])
    want, want_next = oracle.outputs(feature, ids[1:])
    close(got, want)
    close(got_next, want_next)


@BUILDS
@pytest.mark.parametrize("style", STYLES)
def test_rows_that_are_only_written_have_the_kv_of_the_others(ops, style, tmp_path):
    head, _, _ = load(tmp_path, ops, style=style)
    features, ids = features_and_ids()
    assert same_kv(head, features, ids, len(ids) - 2)


@BUILDS
@pytest.mark.parametrize("style", STYLES)
def test_a_draft_step_continues_with_its_own_rows(ops, style, tmp_path):
    """The next row has as its feature what the last one gave, as if the target had brought it."""
    head, _, oracle = load(tmp_path, ops, style=style)
    features, ids = features_and_ids(12)
    run = Run(head)
    got, hidden = run.step(features, ids)
    for _ in range(3):
        token = head.target_ids(got[-1:].argmax(dim=1))
        ids, features = torch.cat([ids, token]), torch.cat([features, hidden[-1:]])
        got, hidden = run.step(hidden[-1:], token)
        close(got, oracle.outputs(features, ids)[0][-1:])


@ON_GPU
def test_the_build_for_the_gpu_gives_them_too(tmp_path):
    head, _, oracle = load(tmp_path, cuda)
    features, ids = features_and_ids(5)
    run = Run(head, recorded)
    for got, want in zip(run.step(features, ids), oracle.outputs(features, ids), strict=True):
        close(got, want)


@pytest.fixture(params=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture(params=["qwen3", "granite", "qwen3_moe"])
def family(request):
    """Of which each has ops that the others lack."""
    return request.param


def test_a_recorded_step_has_the_bits_of_the_eager_one(family, dtype, tmp_path):
    """And all of it is recorded: nothing is left to Python."""
    head, *_ = load(tmp_path, cpu, dtype, family=family)
    features, ids = features_and_ids()
    features = features.to(head.body.dtype)
    eager = Run(head, lambda model, kv, *_: EagerProgram(model, kv))
    recorded = Run(head, max_rows=8)  # and again for more rows
    for a, b in itertools.pairwise((0, 3, 20, 21, N)):
        want, got = (run.step(features[a:b], ids[a:b]) for run in (eager, recorded))
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert recorded.program.host_ops == []


@BUILDS
def test_chunks_give_what_the_whole_gives(ops, dtype, tmp_path):
    head, *_ = load(tmp_path, ops, dtype)
    features, ids = features_and_ids(64)
    features = features.to(head.body.dtype)
    whole, chunked = Run(head).step(features, ids), Run(head)
    parts = [
        chunked.step(features[a:b], ids[a:b]) for a, b in itertools.pairwise((0, 1, 17, 40, 64))
    ]
    for want, got in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(got), want)


@BUILDS
@pytest.mark.parametrize("style", STYLES)
def test_a_feature_does_not_depend_on_other_rows_and_has_memory_of_its_own(
    ops, dtype, style, tmp_path
):
    head, *_ = load(tmp_path, ops, dtype, style=style)
    residual = features_and_ids(64)[0].to(head.body.dtype)
    want, order = head.fuse(residual), torch.randperm(64)
    assert torch.equal(head.fuse(residual[order]), want[order])
    assert all(torch.equal(head.fuse(residual[:n]), want[:n]) for n in (1, 2, 3, 8, 31))
    kept = want.clone()
    residual.zero_()  # as the target's next step overwrites it
    assert torch.equal(want, kept)


@BUILDS
def test_a_row_does_not_depend_on_other_requests_rows(ops, dtype, tmp_path):
    """Rows of requests with one row each, alone and among others in any order."""
    head, *_ = load(tmp_path, ops, dtype)
    features, ids = features_and_ids()
    features = features.to(head.body.dtype)
    want = single_rows(head, features, ids, range(N))
    for n in range(1, N + 1):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(n))[:n]
        got = single_rows(head, features, ids, order.tolist())
        assert all(torch.equal(x, y[order]) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("style", STYLES)
def test_a_target_loads_as_if_it_had_none(style, tmp_path):
    write_target(tmp_path, style)
    bare = tiny_checkpoint(tmp_path / "bare", tie_word_embeddings=False)
    got, want = (load_decoder(folder, "fp32", cpu) for folder in (tmp_path / "target", bare))
    ids = prompt(320, 30)
    assert torch.equal(logits(got, ids), logits(want, ids))
    assert weight_bytes(tmp_path / "target", "fp32", cpu) == weight_bytes(bare, "fp32", cpu)


def test_a_quantized_target_may_have_a_layer_that_is_not(tmp_path):
    head, _, oracle = load(tmp_path, cpu, style="qwen", **FORMATS["gptq-v1"]["shape"])
    folder = quantized(tmp_path / "quantized", "gptq-v1", lambda x: x.update(oracle.tensors))
    change_config(folder, mtp_num_hidden_layers=1)
    other = load_mtp_head(folder, load_decoder(folder, "fp32", cpu))
    got, want = (Run(x).step(*features_and_ids(width=32)) for x in (other, head))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("style", STYLES)
def test_of_several_layers_the_first_is_taken(style, tmp_path):
    first, second = STYLES[style]["layer"], STYLES[style]["second"]

    def edit(tensors):
        for name in [name for name in tensors if name.startswith(first)]:
            tensors[name.replace(first, second)] = torch.zeros(3)

    want = Run(load(tmp_path / "one", cpu, style=style)[0]).step(*features_and_ids())
    write_target(tmp_path / "two", style, edit=edit)
    change_config(tmp_path / "two" / "target", **{STYLES[style]["field"]: 2})
    target = load_target(tmp_path / "two", cpu)
    got = Run(load_mtp_head(tmp_path / "two" / "target", target)).step(*features_and_ids())
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_weights_are_counted_as_the_checkpoint_has_them(tmp_path):
    head, _, oracle = load(tmp_path, cpu)
    maps = (x.numel() for x in oracle.tensors.values() if x.ndim == 2)
    assert head.num_layer_weights == sum(maps)


def without_all(tensors):
    tensors.clear()


FOUND = {
    **{f"those of {style}": ({"style": style}, {}, True) for style in STYLES},
    "none that config.json tells of": ({}, {"num_nextn_predict_layers": 0}, False),
    "none in the weights": ({"edit": without_all}, {}, False),
    "those of Qwen3-Next, without a field of config.json": (
        {"style": "qwen", "family": "qwen3_next"} | HYBRID,
        {"mtp_num_hidden_layers": 0},
        True,
    ),
    "none in Qwen3-Next": (
        {"style": "qwen", "family": "qwen3_next", "edit": without_all} | HYBRID,
        {"mtp_num_hidden_layers": 0},
        False,
    ),
    "of an architecture without native code": ({}, {"architectures": ["NewForCausalLM"]}, False),
}


@pytest.mark.parametrize(("told", "fields", "want"), FOUND.values(), ids=FOUND)
def test_whether_a_model_has_them_is_known_by_its_names(told, fields, want, tmp_path):
    write_target(tmp_path, **told)
    change_config(tmp_path / "target", **fields)
    assert has_mtp(tmp_path / "target") == want


def test_whether_a_model_has_them_is_read_from_an_index_too(tmp_path):
    write_target(tmp_path)
    folder = tmp_path / "target"
    (folder / WEIGHTS).rename(folder / "one.safetensors")
    names = load_file(folder / "one.safetensors")
    index = {"weight_map": dict.fromkeys(names, "one.safetensors")}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert has_mtp(folder)
    assert load_mtp_head(folder, load_target(tmp_path, cpu)).aux_layer_ids == (2,)


def test_whether_a_model_has_them_is_known_without_torch(tmp_path):
    write_target(tmp_path)
    code = (
        "import sys, pathlib; from specserve.models.mtp_config import has_mtp;"
        "assert has_mtp(pathlib.Path(sys.argv[1]));"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "target"], check=True)


@pytest.mark.parametrize("damaged", [b"", b"\xff" * 16, (4).to_bytes(8, "little") + b"null"])
def test_damaged_weights_are_reported(damaged, tmp_path):
    write_target(tmp_path)
    (tmp_path / "target" / WEIGHTS).write_bytes(damaged)
    with pytest.raises(ConfigError, match=f"{WEIGHTS} is not a valid safetensors file"):
        has_mtp(tmp_path / "target")


def test_a_gguf_file_has_none(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    assert not has_mtp(path)


def drop(name):
    return lambda tensors: tensors.pop(name)


def reshape(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def quantize(tensors):
    name = "model.layers.2.self_attn.q_proj"
    del tensors[f"{name}.weight"]
    tensors[f"{name}.qweight"] = torch.zeros(8, 64, dtype=torch.int32)


LAYER = "model.layers.2"
REFUSED = {  # what is wrong -> how the target is written, fields of its config.json, the complaint
    "no layers by config.json": (
        {"edit": without_all},
        {"num_nextn_predict_layers": None},
        "config.json describes no MTP layers .num_nextn_predict_layers or",
    ),
    "no tensors": ({"edit": without_all}, {}, "their tensors are missing. Use a checkpoint"),
    "no join": ({"edit": drop(f"{LAYER}.eh_proj.weight")}, {}, "2.eh_proj.weight is missing"),
    "no norm": (
        {"style": "qwen", "edit": drop("mtp.norm.weight")},
        {},
        "the tensor mtp.norm.weight is missing",
    ),
    "no map of the layer": (
        {"style": "mimo", "edit": drop("model.mtp_layers.0.mlp.up_proj.weight")},
        {},
        "the tensor model.mtp_layers.0.mlp.up_proj.weight is missing",
    ),
    "no expert": (
        {"family": "qwen3_moe", "edit": drop(f"{LAYER}.mlp.experts.3.up_proj.weight")},
        {},
        "the tensor model.layers.2.mlp.experts.3.up_proj.weight is missing",
    ),
    "a join of one": (
        {"edit": reshape(f"{LAYER}.eh_proj.weight", 64, 64)},
        {},
        r"eh_proj.weight has the shape \[64, 64\], but config.json requires \[64, 128\]",
    ),
    "a head of other tokens": (
        {"edit": reshape(OWN_HEAD, 300, 64)},
        {},
        r"shared_head.head.weight has the shape \[300, 64\], .* \[320, 64\]",
    ),
    "more than is known": (
        {"style": "qwen", "edit": reshape("mtp.embed_tokens.weight", 320, 64)},
        {},
        "the tensor mtp.embed_tokens.weight is not part of",
    ),
    "quantized": (
        {"edit": quantize},
        {},
        "self_attn.q_proj.qweight has the dtype I32, but MTP layers must be unquantized",
    ),
    "layers of two kinds": (
        {"family": "gemma3"},
        {},
        "layers differ in sliding windows .* does not describe model.layers.2",
    ),
}


@pytest.mark.parametrize(("told", "fields", "complaint"), REFUSED.values(), ids=REFUSED)
def test_a_layer_that_cannot_draft_is_refused_with_the_reason(told, fields, complaint, tmp_path):
    """And the target loads all the same."""
    write_target(tmp_path, **told)
    folder = tmp_path / "target"
    change_config(folder, **fields)
    target = load_target(tmp_path, cpu)
    with pytest.raises(ConfigError, match=complaint) as error:
        load_mtp_head(folder, target)
    assert str(error.value).startswith(str(folder))


def test_layers_that_config_json_does_not_report_of_have_no_place_in_a_target(tmp_path):
    write_target(tmp_path)
    change_config(tmp_path / "target", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"model\.layers\.2\..* is not part of the model"):
        load_target(tmp_path, cpu)


def test_mimo_is_computed_as_qwen_2(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen2")
    ids = prompt(320, 30)
    want = logits(load_decoder(folder, "fp32", cpu), ids)
    change_config(folder, architectures=["MiMoForCausalLM"], model_type="mimo", attention_bias=True)
    assert torch.equal(logits(load_decoder(folder, "fp32", cpu), ids), want)
