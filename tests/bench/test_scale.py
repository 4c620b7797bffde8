"""A scaled checkpoint computes its source's function, in the sizes of its shape."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specserve import LLM, SamplingParams
from specserve.cli.quantize import quantize
from specserve.errors import ConfigError
from specserve.models.checkpoint import Checkpoint, unquantized
from specserve.models.folder import scaled_from
from specserve.models.parse_config import load_config
from specserve.models.tensor_shapes import tensor_shapes
from specserve.models.weight import Rounding
from specserve.models.weight_files import INDEX, SINGLE
from specserve_bench import scale
from specserve_bench.demo.scaled_model import SHAPES, shape_config
from specserve_bench.scale import main, scale_model
from tests.checkpoints import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
SOURCE = {"num_key_value_heads": 4, "num_hidden_layers": 3, "tie_word_embeddings": True}
SAME = QWEN3 | {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 64,  # unlike the source's: it may not matter
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
}
GQA = {"num_attention_heads": 15, "num_key_value_heads": 5}
LARGER = GQA | {
    "num_hidden_layers": 5,
    "hidden_size": 96,
    "intermediate_size": 160,
    "head_dim": 32,
    "vocab_size": 400,
}
MIXTURE = LARGER | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 144,
    "mlp_only_layers": [1],
    "norm_topk_prob": False,  # in a scaled one it is true, else the source's MLP would count less
}
UNTIED = {"tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CASES = {  # what departs from SOURCE, from SAME
    "the same": ({}, {}),
    "more layers": ({}, {"num_hidden_layers": 5}),
    "a larger hidden size": ({}, {"hidden_size": 96}),
    "a larger MLP": ({}, {"intermediate_size": 160}),
    "more heads": ({}, {"num_attention_heads": 6, "num_key_value_heads": 6}),
    "grouped heads": ({}, GQA),
    "larger heads": ({}, {"head_dim": 32}),
    "a larger vocabulary": ({}, {"hidden_size": 65, "vocab_size": 400}),
    "all of it": ({}, LARGER),
    "all of it, untied": (UNTIED, LARGER | UNTIED),
    "all of it, to be untied": ({}, LARGER | UNTIED),
    "a Llama's": ({}, LARGER | LLAMA | {"hidden_size": 90}),
    "a Qwen2's": ({}, LARGER | QWEN2 | {"hidden_size": 90}),
    "a mixture's": ({}, MIXTURE),
    "another eps": ({"rms_norm_eps": 0.1}, LARGER),
    "another rope": ({"rope_parameters": LLAMA3 | {"rope_theta": 100.0}}, LARGER),
    "yarn": ({"rope_parameters": YARN | {"rope_theta": 100.0}}, LARGER | {"head_dim": 16}),
}


def tiny_source(folder, **overrides):
    return tiny_checkpoint(folder / "source", **SOURCE | overrides)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """For tests that only read it."""
    return tiny_source(tmp_path_factory.mktemp("model"))


def shape_folder(folder, **overrides):
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(SAME | overrides))
    return str(folder / "shape")


def scaled(folder, source, target="target", *, shape=LARGER, **options):
    if not (folder / "shape").exists():
        shape_folder(folder, **shape)
    options = {"dtype": torch.float32} | options
    scale_model(source, folder / target, str(folder / "shape"), **options)
    return folder / target


def logits(folder):
    """[37, V] as transformers has them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(320, (1, 37), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(ids).logits[0]


def assert_same_function(source, target):
    want, got = logits(source), logits(target)
    known, added = got.split([want.shape[1], got.shape[1] - want.shape[1]], dim=1)
    assert (known - want).abs().max() <= 1e-5 * want.abs().max()
    if added.numel():
        assert added.isfinite().all()
        assert (known.amax(1) - added.amax(1)).min() > 100


def matrices(config):
    return {name: size for name, size in tensor_shapes(config).items() if len(size) == 2}


def tensors_of(folder):
    shards = folder.glob("*.safetensors")
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


@pytest.mark.parametrize(("overrides", "shape"), CASES.values(), ids=CASES)
def test_the_logits_are_the_sources_and_the_sizes_the_shapes(tmp_path, overrides, shape):
    source = tiny_source(tmp_path, **overrides)
    target = scaled(tmp_path, source, shape=shape)
    assert_same_function(source, target)
    config, like = load_config(target), load_config(tmp_path / "shape")
    is_mixture = like.mixture is not None
    assert config.architecture == f"Qwen3{'Moe' * is_mixture}ForCausalLM"
    assert config.max_positions == load_config(source).max_positions
    assert matrices(config) == matrices(like)
    Checkpoint(target).check(unquantized(tensor_shapes(config)))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("factor", [1e-4, 1e6])
def test_hidden_states_may_be_of_any_norm(tmp_path, factor, tied):
    source = tiny_source(tmp_path, tie_word_embeddings=tied)
    tensors = load_file(source / SINGLE)
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            tensor *= factor
    save_file(tensors, source / SINGLE, metadata={"format": "pt"})
    shape = LARGER | {"tie_word_embeddings": tied}
    assert_same_function(source, scaled(tmp_path, source, shape=shape))


def test_small_queries_and_keys_feel_the_same_eps(tmp_path):
    source = tiny_source(tmp_path)
    tensors = load_file(source / SINGLE)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor *= 1e-3
    save_file(tensors, source / SINGLE, metadata={"format": "pt"})
    assert_same_function(source, scaled(tmp_path, source))


def test_greedy_text_is_the_sources(tmp_path, source):
    prompts = ["the cat sat", "def read", "with open(path) as file", "a"]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for folder in (source, scaled(tmp_path, source)):
        settings = {"model.threads": 1, "memory.kv_bytes": 1 << 26}
        with LLM(folder, dtype="fp32", set=settings, progress=False) as llm:
            texts.append([output.token_ids for output in llm.generate(prompts, greedy)])
    assert texts[0] == texts[1]
    assert len(set(map(tuple, texts[0]))) == len(prompts)


def test_what_is_added_reads_at_random_and_writes_nothing(tmp_path, source):
    tensors = tensors_of(scaled(tmp_path, source))
    for layer in range(5):
        part = {
            name.split(".")[-2]: tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        num = 4 if layer < 3 else 0  # heads of the source's
        heads, kv_heads = [j for j in range(15) if j not in range(0, 3 * num, 3)], slice(num, None)
        units = slice(128 if num else 0, None)
        added = [part["q_proj"].view(15, 32, 96)[heads], part["gate_proj"][units]]
        added += [part[f"{x}_proj"].view(5, 32, 96)[kv_heads] for x in "kv"]
        for reads in [*added, part["up_proj"][units]]:
            assert reads.count_nonzero() == reads.numel()
            assert reads.std() == pytest.approx(0.02, rel=0.05)
        assert not part["o_proj"].view(96, 15, 32)[:, heads].any()
        assert not part["down_proj"][:, units].any()
        assert all(part[norm].any() for norm in part if norm.endswith("norm"))


def test_the_constant_is_unseen_by_the_layers_of_the_source(tmp_path, source):
    tensors = tensors_of(scaled(tmp_path, source))
    norms = [tensors[f"model.layers.{i}.input_layernorm.weight"] for i in range(3)]
    norms += [tensors[f"model.layers.{i}.post_attention_layernorm.weight"] for i in range(3)]
    assert not any(norm[64:].any() for norm in norms)
    assert tensors["model.norm.weight"][64:].nonzero().tolist() == [[0]]


def test_the_same_seed_gives_the_same_bytes(tmp_path, source):
    same, again, other = (
        (scaled(tmp_path, source, name, seed=seed) / SINGLE).read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert same == again != other


def test_shards_are_the_same_model(tmp_path, source):
    whole = scaled(tmp_path, source)
    sharded = scaled(tmp_path, source, "sharded", shard_bytes=1 << 20)
    want, got = tensors_of(whole), tensors_of(sharded)
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert max((sharded / shard).stat().st_size for shard in shards) < (1 << 20) + 4096
    assert json.loads((sharded / INDEX).read_text())["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in got.values()
    )
    assert torch.equal(logits(sharded), logits(whole))
    assert (whole / SINGLE).exists() and not (whole / INDEX).exists()


def test_a_tensor_above_the_limit_has_a_shard_of_its_own():
    assert list(scale.split({"a": 9, "b": 2, "c": 2, "d": 1}, 4).values()) == [
        ["a"],
        ["b", "c"],
        ["d"],
    ]


def test_a_run_that_was_killed_leaves_no_model(tmp_path, source, monkeypatch):
    written = []

    def fail_late(tensors, path, metadata):
        written.append(path)
        save_file(tensors, path, metadata)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(scale, "save_file", fail_late)
    with pytest.raises(KeyboardInterrupt):
        scaled(tmp_path, source, shard_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_config(tmp_path / "target")


def test_tokenizer_and_defaults_come_along_and_weights_do_not(tmp_path):
    source = tiny_source(tmp_path)
    (source / "pytorch_model.bin").touch()
    (source / INDEX).write_text("{}")
    (source / "folder").mkdir()
    target = scaled(tmp_path, source)
    names = {path.name for path in target.iterdir()}
    assert names == {path.name for path in source.iterdir()} - {
        "pytorch_model.bin",
        INDEX,
        "folder",
    }
    for name in names - {SINGLE, "config.json"}:
        assert (target / name).read_bytes() == (source / name).read_bytes()


def test_a_scaled_model_says_what_it_is(tmp_path, source, capsys):
    target = tmp_path / "target"
    shape = shape_folder(tmp_path, **LARGER)
    assert main([str(source), str(target), "--like", shape]) == 0
    assert "source, padded to" in capsys.readouterr().out
    said = scaled_from(target)
    assert (said.source, said.like) == ("source", "shape")
    assert "demo" in said.note
    assert scaled_from(source) is None
    config, was = (json.loads((f / "config.json").read_text()) for f in (target, source))
    assert config["eos_token_id"] == was["eos_token_id"] is not None
    assert config["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in tensors_of(target).values()} == {torch.bfloat16}


def test_the_dtype_of_an_older_config_is_not_kept_next_to_the_new_one(tmp_path):
    source = tiny_source(tmp_path)
    fields = json.loads((source / "config.json").read_text())
    fields["torch_dtype"] = fields.pop("dtype")
    (source / "config.json").write_text(json.dumps(fields))
    target = scaled(tmp_path, source, dtype=torch.bfloat16)
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config


def test_the_command_takes_a_dtype_and_a_seed(tmp_path, source):
    shape, target = shape_folder(tmp_path, **LARGER), tmp_path / "target"
    main([str(source), str(target), "--like", shape, "--dtype", "fp32", "--seed", "7"])
    want = scaled(tmp_path, source, "want", seed=7)
    assert (target / SINGLE).read_bytes() == (want / SINGLE).read_bytes()


REFUSED = {  # what departs from SOURCE, from SAME -> the complaint
    "another family": ({"family": "llama"}, {}, "it is a LlamaForCausalLM; take a Qwen3"),
    "grouped heads": ({"num_key_value_heads": 2}, {}, "2 KV heads for 4 heads; take"),
    "biases": ({"attention_bias": True}, {}, "biases; take"),
    "windows": (
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {},
        "sliding windows; take",
    ),
    "no eps": ({"rms_norm_eps": 0.0}, {}, "rms_norm_eps is 0; take"),
    "fewer layers": ({}, {"num_hidden_layers": 2}, "layers: 3, .* only 2; take a larger"),
    "a smaller hidden size": ({}, {"hidden_size": 32}, "hidden size: 64, .* only 32; take"),
    "a smaller MLP": ({}, {"intermediate_size": 64}, "MLP size: 128, .* only 64; take"),
    "smaller experts": (
        {},
        MIXTURE | {"moe_intermediate_size": 127},
        "MLP size: 128, .* only 127; take",
    ),
    "fewer KV heads": ({}, {"num_key_value_heads": 2}, "KV heads: 4, .* only 2; take"),
    "smaller heads": ({}, {"head_dim": 8}, "head size: 16, .* only 8; take"),
    "a smaller vocabulary": ({}, {"vocab_size": 300}, "vocabulary: 320, .* only 300; take"),
    "heads of another size": ({}, {"head_dim": 24}, "has 24, no multiple of 16; take"),
    "no room for more tokens": ({}, {"vocab_size": 321}, "hidden size: 64 .* its 1 added tokens"),
    "a head of its own": (UNTIED, {}, "head of its own.*take an untied shape"),
    "yarn": (
        {"rope_parameters": YARN | {"rope_theta": 100.0}},
        {"head_dim": 32},
        "rope_parameters .*take a shape with its head size",
    ),
}


@pytest.mark.parametrize(("overrides", "shape", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, overrides, shape, complaint
):
    source = tiny_source(tmp_path, **overrides)
    with pytest.raises(ConfigError, match=complaint):
        scaled(tmp_path, source, shape=shape)
    assert not (tmp_path / "target").exists()


def test_what_is_quantized_already_is_refused(tmp_path, source):
    quantize(source, tmp_path / "rounded", Rounding(4, 8))
    with pytest.raises(ConfigError, match=r"rounded: quantized already \(compressed.*\); take"):
        scaled(tmp_path, tmp_path / "rounded")


def test_an_unknown_shape_is_refused_with_those_that_are_known(tmp_path, source):
    with pytest.raises(ConfigError, match=r"--like gpt-9: .*qwen3-0\.6b, .*llama-3\.1-8b-draft"):
        scale_model(source, tmp_path / "target", "gpt-9")


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "folder"])
def test_nothing_is_overwritten(tmp_path, source, is_file):
    target = tmp_path / "target"
    (target if is_file else target / "precious").parent.mkdir(exist_ok=True)
    (target if is_file else target / "precious").write_text("x")
    with pytest.raises(ConfigError, match=r"target: exists.*Remove it or name another"):
        scaled(tmp_path, source)


def test_an_empty_folder_may_stand_already(tmp_path, source):
    (tmp_path / "target").mkdir()
    assert load_config(scaled(tmp_path, source)).architecture == "Qwen3ForCausalLM"


SIZES = {  # as their makers state them; a draft's come from its table of sizes
    "qwen3-0.6b": 596_049_920,
    "llama-3.1-8b": 8_030_261_248,
}


@pytest.mark.parametrize("shape", SIZES)
def test_a_known_shape_has_as_many_weights_as_the_model(shape):
    assert sum(map(math.prod, tensor_shapes(shape_config(shape)).values())) == SIZES[shape]


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in SIZES])
def test_a_drafts_shape_has_the_vocabulary_of_its_target(shape):
    draft, target = shape_config(shape), shape_config(shape.removesuffix("-draft"))
    assert (draft.num_layers, draft.vocab_size) == (1, target.vocab_size)
