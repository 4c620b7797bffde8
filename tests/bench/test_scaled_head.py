"""An EAGLE-3 head that is padded to a larger model's compute proposes the same draft tokens."""

import json

import pytest
import torch
from safetensors.torch import save_file

from specserve.config import DEMO_COST, DEMO_HEAD, DEMO_TARGET
from specserve.errors import ConfigError
from specserve.models import folder
from specserve.models.checkpoint import Checkpoint
from specserve.models.eagle_head import (
    check_target,
    load_eagle_head,
    places,
    read_targets,
    shown_shapes,
)
from specserve.models.loader import load_decoder
from specserve.models.reader import EMBEDDING
from specserve.models.source import load_eagle_config, open_source
from specserve.models.tensor_views import show
from specserve_bench.demo import scaled_model
from specserve_bench.demo.scaled_model import ScaledDemo, head_sizes
from specserve_bench.demo.scaled_weights import HeadTensors
from specserve_bench.scale import scale_model
from specserve_kernels import cpu
from tests.checkpoints import TEXT, tiny_checkpoint
from tests.models.eagle_heads import AUX_LAYER_IDS, LLAMA, SPECULATORS, Run, write_head
from tests.models.forward import causal_rows, empty_kv, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

N, KNOWN, ALL = 11, 200, 32_000  # rows; tokens of the head, and of the scaled one
IDS = prompt(320, N + 1)
COST = "qwen3-0.6b"
HAS_HEAD = pytest.mark.skipif(not DEMO_HEAD.exists(), reason="the package has no demo head")
EACH_OF = {"num_key_value_heads": 4}  # as many KV heads as heads
OF_LAYERS = SPECULATORS["transformer_layer_config"] | EACH_OF
LARGER = {  # sizes at which all factors are powers of two, so that scaled weights are exact
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 5,
    "hidden_size": 256,
    "intermediate_size": 160,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "vocab_size": 33_000,
    "max_position_embeddings": 512,
}
CASES = {  # how the head is written
    "plain": {},
    "midlayer": {"first": "midlayer"},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "speculators": {"fields": SPECULATORS | {"transformer_layer_config": OF_LAYERS}},
    "all of the target's tokens": {"draft_vocab_size": 320},
}


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Folders in the place of the package's: of models, and of files that name them."""
    monkeypatch.setattr(folder, "DEMO_COST", tmp_path / "at_cost")
    monkeypatch.setattr(scaled_model, "DEMO", tmp_path)
    tied = {"num_hidden_layers": 4, "tie_word_embeddings": True}
    tiny_checkpoint(tmp_path / "target", "qwen3", dtype=torch.bfloat16, **EACH_OF, **tied)
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text(json.dumps(LARGER))
    (tmp_path / "at_cost").mkdir()
    for name in ("target", "head"):
        made_by = "specserve_bench.demo.scaled_model:ScaledDemo"
        recipe = {"made_by": made_by, "source": name, "like": str(tmp_path / "like")}
        (tmp_path / "at_cost" / f"{name}.json").write_text(json.dumps(recipe))
    return tmp_path


def write_rounded(folder, without=("embed_tokens.weight",), fields=LLAMA | EACH_OF, **told):
    """A head without an embedding, in bfloat16."""
    tensors = write_head(folder, without=without, fields=fields, **told)
    rounded = {name: x.bfloat16() if x.is_floating_point() else x for name, x in tensors.items()}
    save_file(rounded, folder / "model.safetensors")


def pair(folder, target, head, ids=IDS, dtype="fp32"):
    """A head, its features of a text, and the tokens after them."""
    model = load_decoder(folder / target, dtype, cpu)
    with torch.inference_mode():
        kv = empty_kv(model, 1, 16)
        plan = model.plan(causal_rows([0], 0, N, 16), kv)
        _, aux_hidden_states = model.forward(model.embed(ids[:N]), kv, plan, AUX_LAYER_IDS)
        found = load_eagle_head(folder / head, model)
        features = found.fuse(torch.cat([aux_hidden_states[i] for i in AUX_LAYER_IDS], dim=1))
        return found, features, ids[1:]


def drafted(head, features, ids):
    """The logits [N + 3, draft V] of a text and of three draft steps after it, and their tokens."""
    run, found, tokens = Run(head), [], []
    logits, hidden = run.step(features, ids)
    for _ in range(3):
        tokens.append(head.target_ids(logits[-1:].argmax(dim=1)))
        found.append(logits)
        logits, hidden = run.step(hidden[-1:], tokens[-1])
    return torch.cat([*found, logits]), torch.cat(tokens)


@pytest.mark.parametrize("told", CASES.values(), ids=CASES)
def test_its_logits_in_every_draft_step_are_the_small_ones(demo, told):
    write_rounded(demo / "head", **told)
    want, tokens = drafted(*pair(demo, "target", "head"))
    got, same_tokens = drafted(*pair(demo, "at_cost/target.json", "at_cost/head.json"))
    known, added = got.split([want.shape[1], ALL - want.shape[1]], dim=1)
    assert (known - want).abs().max() <= 1e-5 * want.abs().max()
    assert torch.equal(tokens, same_tokens)
    assert added.isfinite().all()
    assert (known.amax(1) - added.amax(1)).min() > 100


def test_each_of_its_tokens_is_another_one_of_the_targets(demo):
    write_rounded(demo / "head")
    small, large = (
        pair(demo, *names)[0]
        for names in (("target", "head"), ("at_cost/target.json", "at_cost/head.json"))
    )
    ids = large.target_ids(torch.arange(ALL))
    assert torch.equal(ids[:KNOWN], small.target_ids(torch.arange(KNOWN)))
    assert len(ids.unique()) == ALL
    assert ids[KNOWN:].min() >= 320


def test_what_is_added_reads_at_random_and_writes_nothing(demo):
    write_rounded(demo / "head")
    tensors = HeadTensors(demo / "head", *head_sizes(demo / "head", str(demo / "like")))
    get = lambda name: tensors.get_tensor(f"layers.0.{name}_proj.weight").float()  # noqa: E731
    heads = [i for i in range(10) if i not in (0, 2, 4, 6)]
    reads = [get("self_attn.q").view(10, 64, 512)[heads], get("mlp.gate")[96:], get("mlp.up")[96:]]
    for added in [*reads, *(get(f"self_attn.{x}").view(5, 64, 512)[4:] for x in "kv")]:
        assert added.std() == pytest.approx(0.02, rel=0.05)
    assert not get("self_attn.o").view(256, 10, 64)[:, heads].any()
    assert not get("mlp.down")[:, 96:].any()


SIZES = {  # of a head for such a target, as others publish it
    "qwen3-0.6b": {
        "fc": (1024, 3072),
        "q_proj": (2048, 2048),
        "k_proj": (1024, 2048),
        "v_proj": (1024, 2048),
        "o_proj": (1024, 2048),
        "gate_proj": (3072, 1024),
        "up_proj": (3072, 1024),
        "down_proj": (1024, 3072),
        "lm_head": (32_000, 1024),
    },
    "llama-3.1-8b": {
        "fc": (4096, 12288),
        "q_proj": (4096, 8192),
        "k_proj": (1024, 8192),
        "v_proj": (1024, 8192),
        "o_proj": (4096, 4096),
        "gate_proj": (14336, 4096),
        "up_proj": (14336, 4096),
        "down_proj": (4096, 14336),
        "lm_head": (32_000, 4096),
    },
}


@pytest.mark.parametrize("like", SIZES)
def test_its_maps_have_the_sizes_of_a_head_for_such_a_target(tmp_path, like):
    write_rounded(tmp_path / "head")
    found = HeadTensors(tmp_path / "head", *head_sizes(tmp_path / "head", like)).shapes
    assert {n.split(".")[-2]: shape for n, shape in found.items() if len(shape) > 1} == SIZES[like]


@HAS_HEAD
@pytest.mark.parametrize("like", SIZES)
def test_the_demo_head_has_every_cost(like):
    file = DEMO_COST / f"{DEMO_HEAD.name}-{like}.json"
    assert ScaledDemo(file).scaled().like == like
    config, checkpoint = load_eagle_config(file), Checkpoint(file)
    check_target(file, config, open_source(DEMO_COST / f"{DEMO_TARGET.name}-{like}.json").config())
    assert config.aux_layer_ids == load_eagle_config(DEMO_HEAD).aux_layer_ids
    assert read_targets(checkpoint, config).max() < config.layers.vocab_size
    shapes = shown_shapes(config)
    del shapes[EMBEDDING]
    show(checkpoint, shapes, places(checkpoint, config, shapes))


@pytest.mark.slow
@HAS_HEAD
def test_the_demo_head_draft_tokens_the_same_at_another_cost():
    """But for near ties: the scaled weights are rounded to bfloat16 once more."""
    ids = open_source(DEMO_TARGET).tokenizer().encode(TEXT)[: N + 1]
    names = f"{DEMO_TARGET.name}-{COST}.json", f"{DEMO_HEAD.name}-{COST}.json"
    pairs = (DEMO_TARGET, DEMO_HEAD), names
    (want, _), (got, _) = (
        drafted(*pair(DEMO_COST, *named, torch.tensor(ids), "bf16")) for named in pairs
    )
    assert (got.argmax(1) == want.argmax(1)).sum() >= N


REFUSED = {  # how the head is written -> the complaint
    "two layers": ({"num_hidden_layers": 2}, "it has 2 layers; take a head with one"),
    "grouped heads": ({"num_key_value_heads": 2}, "2 KV heads for 4 heads; take a Llama"),
    "biases": ({"mlp_bias": True}, "its MLP has biases; take"),
    "another width than the target's": (
        {"target_hidden_size": 48},
        "its hidden size is not its target's; take",
    ),
    "more tokens": (
        {"vocab_size": 33_000, "draft_vocab_size": 32_001},
        "it knows 32001 tokens; take",
    ),
    "larger heads": ({"head_dim": 128}, "head size: 128, and .* only 64"),
    "a Qwen3's layers": (
        {"fields": SPECULATORS | {"transformer_layer_config": OF_LAYERS | {"model_type": "qwen3"}}},
        "it is a Qwen3ForCausalLM; take a LlamaForCausalLM",
    ),
    "an embedding of its own": ({"without": ()}, "the tensor embed_tokens.weight is not part of"),
}


@pytest.mark.parametrize(("told", "complaint"), REFUSED.values(), ids=REFUSED)
def test_a_head_that_cannot_be_scaled_is_refused_with_the_reason(demo, told, complaint):
    write_rounded(demo / "head", **told)
    with pytest.raises(ConfigError, match=complaint) as error:
        HeadTensors(demo / "head", *head_sizes(demo / "head", str(demo / "like")))
    assert str(error.value).startswith(str(demo / "head"))


@pytest.mark.parametrize("fields", [LLAMA, SPECULATORS], ids=["SpecForge", "speculators"])
def test_the_command_refuses_heads(tmp_path, fields):
    write_head(tmp_path / "head", fields=fields)
    with pytest.raises(ConfigError, match=r"head: an EAGLE-3 head\. .* with the demo models only"):
        scale_model(tmp_path / "head", tmp_path / "scaled", "qwen3-0.6b")
    assert not (tmp_path / "scaled").exists()
