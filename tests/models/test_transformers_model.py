"""transformers' modules over our paged KV compute what they compute by themselves."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specserve.errors import ConfigError
from specserve.models import transformers_loader
from specserve.models.row_probe import differing_rows
from specserve.models.source import open_source
from specserve.models.transformers_loader import TOLERANCE, linears, norm_of, refuse_other_sizes
from specserve.models.transformers_model import Hook, Norm, PackedLinear
from specserve.models.weight import Rounding
from specserve_kernels import Rows, cpu
from tests.models.forward import builds, causal_rows, empty_kv, logits, prompt
from tests.models.transformers_models import CASES, foreign_checkpoint, load_foreign


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request, tmp_path_factory):
    """A checkpoint, a prompt, and transformers' logits at each of its tokens."""
    folder = foreign_checkpoint(tmp_path_factory.mktemp("model"), **request.param)
    ids = prompt(320, 37)
    return folder, ids, eager(folder, ids)


def eager(folder, ids, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        return model(ids[None]).logits[0].float()


def error(got, want):
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).max()


@pytest.mark.parametrize("ops", builds(), ids=lambda m: m.__name__.rpartition(".")[2])
def test_logits_in_chunks_over_blocks_are_those_of_transformers(case, ops):
    folder, ids, want = case
    model = load_foreign(folder, ops=ops)
    for block_size, chunks in ((16, (1, 3, 23)), (5, (36,))):
        got = logits(model, ids, block_size=block_size, chunks=chunks)
        assert error(got, want) < 1e-4


def test_kv_of_8_bits_stays_close(case):
    folder, ids, want = case
    got = logits(load_foreign(folder), ids, kv_dtype=torch.int8)
    if is_dense(folder):  # else a row may go to other experts
        assert torch.cosine_similarity(got, want).min() > 0.98


def test_a_tree_has_the_logits_of_each_of_its_paths(case):
    """Two paths of two nodes behind a root, in one step, against each path as a text."""
    folder, ids, _ = case
    model, known = load_foreign(folder), ids[:20]
    nodes, paths = [5, 6, 7, 8], ([0, 1], [2, 3])
    kv = empty_kv(model, 3, 16)
    with torch.inference_mode():
        program = model.program(kv, 32, 32)
        program.run(causal_rows(range(3), 0, 19, 16), known[:19], torch.tensor([0]))
        given = torch.tensor([int(known[19]), *nodes])
        found = program.run(tree_rows(), given, torch.arange(5)).logits.clone()
    for path in paths:
        want = eager(folder, torch.cat([known, torch.tensor([nodes[node] for node in path])]))
        assert error(found[[0, *(node + 1 for node in path)]], want[19:]) < 1e-4


def tree_rows():
    """The last of 20 tokens, and the nodes 1-2 and 3-4 behind it."""
    ints = [0, 5], [0, 2], [0, 1], [8], [19, 20, 21, 20, 21]
    return Rows(
        *(torch.tensor(x, dtype=torch.int32) for x in ints),
        torch.tensor([19, 20, 21, 22, 23]),
        torch.full((5,), 19, dtype=torch.int32),
        torch.tensor([0b1, 0b11, 0b111, 0b1001, 0b11001]),
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_of_dense_models_have_the_same_bits_in_all_steps(case, dtype):
    folder, *_ = case
    model = load_foreign(folder, dtype)
    if is_dense(folder):
        assert differing_rows(model, 150) is None
    elif dtype == "fp32":
        assert differing_rows(model, 150) is not None


def is_dense(folder):
    return json.loads((folder / "config.json").read_text())["model_type"] not in (
        "mixtral",
        "gpt_oss",
    )


def test_a_model_in_bf16_is_that_of_transformers(tmp_path):
    folder = foreign_checkpoint(tmp_path, model_type="olmo", initializer_range=0.05)
    ids = prompt(320, 37)
    got, want = logits(load_foreign(folder, "bf16"), ids), eager(folder, ids, torch.bfloat16)
    assert torch.cosine_similarity(got, want).min() > 0.999


@pytest.mark.parametrize("bits", [8, 4])
def test_linear_maps_are_rounded_as_those_of_native_models(bits, tmp_path):
    folder = foreign_checkpoint(tmp_path, model_type="starcoder2", initializer_range=0.05)
    ids = prompt(320, 37)
    model = load_foreign(folder, rounding=Rounding(bits, 8))
    forms = {(form.bits, form.is_head) for form in model.forms.maps}
    assert forms == {(bits, False), (8, True)}
    got, want = logits(model, ids), eager(folder, ids)
    assert torch.cosine_similarity(got, want).min() > (0.999 if bits == 8 else 0.95)


def test_an_embedding_is_not_rounded(tmp_path):
    folder = foreign_checkpoint(tmp_path, model_type="olmo")
    with pytest.raises(ConfigError, match=r"Remove model\.quantize_embedding"):
        load_foreign(folder, rounding=Rounding(8, 8, embedding=8))


def test_a_forward_starts_from_a_residual_as_from_token_ids(tmp_path):
    model = load_foreign(foreign_checkpoint(tmp_path, model_type="granite"))
    ids, read, rows = prompt(320, 9), torch.tensor([3, 8]), causal_rows(range(1), 0, 9, 16)
    with torch.inference_mode():
        program = model.program(empty_kv(model, 1, 16), 9, 9)
        first = program.run(rows, ids, read).logits.clone()
        again = program.run(rows, None, read, residual=model.embed(ids)).logits
        assert torch.equal(first, again)
        with pytest.raises(ValueError, match="no auxiliary hidden states"):
            model.forward(model.embed(ids), None, None, aux_layer_ids=[1])


def test_the_unpacked_weights_of_linear_maps_are_let_go(tmp_path):
    folder = foreign_checkpoint(tmp_path, model_type="olmo", tie_word_embeddings=True)
    model = load_foreign(folder)
    left = {name for name, _ in model.causal.named_parameters()}
    assert left == {"model.embed_tokens.weight"}  # olmo's norms have no weights


def parts_of(model):
    """How many linear maps are computed together, by place."""
    return [len(m.maps.widths) for m in model.body.modules() if isinstance(m, PackedLinear)]


def test_maps_that_read_the_same_tensor_are_computed_as_one_with_the_same_bits(
    tmp_path, monkeypatch
):
    folder, ids = foreign_checkpoint(tmp_path, model_type="starcoder2"), prompt(320, 37)
    wide = load_foreign(folder, "bf16")
    monkeypatch.setattr(transformers_loader, "together", lambda causal, *_: each_alone(causal))
    alone = load_foreign(folder, "bf16")
    layers = wide.config.num_layers
    assert parts_of(wide) == [3, 3, 3, 1, 1, 1] * layers
    assert parts_of(alone) == [1] * 6 * layers
    assert sum(form.number for form in wide.forms.maps) == 4 * layers + 1
    assert torch.equal(logits(wide, ids), logits(alone, ids))


def each_alone(causal):
    return [[name] for name, _ in linears(causal)]


def test_a_parallel_mlp_joins_queries_keys_and_values(tmp_path):
    model = load_foreign(foreign_checkpoint(tmp_path, model_type="cohere2", sliding_window=7))
    assert parts_of(model)[:7] == [5, 5, 5, 1, 5, 5, 1]


def test_a_tensor_that_is_changed_between_two_maps_is_read_by_each(tmp_path, monkeypatch):
    from transformers.models.olmo.modeling_olmo import OlmoMLP

    def forward(self, x):
        gate = self.gate_proj(x)
        x.mul_(2.0)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    monkeypatch.setattr(OlmoMLP, "forward", forward)
    folder, ids = foreign_checkpoint(tmp_path, model_type="olmo"), prompt(320, 37)
    model = load_foreign(folder)
    assert parts_of(model)[:7] == [3, 3, 3, 1, 1, 1, 1]
    assert error(logits(model, ids), eager(folder, ids)) < 1e-4


def test_rounded_maps_are_joined_only_with_those_of_the_same_form(tmp_path):
    folder = foreign_checkpoint(tmp_path, model_type="starcoder2")
    model = load_foreign(folder, rounding=Rounding(4, 8))
    assert parts_of(model)[:3] == [3, 3, 3]
    assert {(form.bits, form.is_head) for form in model.forms.maps} == {(4, False), (8, True)}


@pytest.mark.parametrize(
    ("kind", "per_layer"), [("qwen3", 4), ("gemma3_text", 6), ("olmo", 0), ("gpt2", 0)]
)
def test_what_proves_to_be_an_rms_norm_is_computed_by_our_op(kind, per_layer, tmp_path):
    """Gemma adds one to its weights; olmo's and GPT-2's norms are others."""
    heads = {"num_key_value_heads": 4} if kind == "gpt2" else {}
    model = load_foreign(foreign_checkpoint(tmp_path, model_type=kind, **heads))
    norms = [m for m in model.body.modules() if isinstance(vars(m).get("forward"), Norm)]
    assert len(norms) == per_layer * model.config.num_layers + (per_layer > 0)


class Almost(torch.nn.Module):
    """An RMSNorm with one difference."""

    def __init__(self, spoil):
        super().__init__()
        self.weight, self.eps, self.spoil = torch.nn.Parameter(torch.rand(64)), 1e-6, spoil

    def forward(self, x):
        eps, weight = self.spoil.get("eps", self.eps), self.weight + self.spoil.get("added", 0)
        x = x - self.spoil.get("mean", 0) * x.mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@pytest.mark.parametrize(
    ("spoil", "is_norm"),
    [({}, True), ({"added": 1}, True), ({"added": 0.01}, False), ({"eps": 1e-5}, False),
     ({"mean": 1}, False)],
)  # fmt: skip
def test_a_module_that_is_almost_an_rms_norm_is_left_alone(spoil, is_norm):
    assert (norm_of(Almost(spoil), Hook(), cpu) is not None) is is_norm


def test_torch_has_one_thread_and_our_ops_have_all(tmp_path, monkeypatch):
    """But for experts, which torch multiplies by."""
    found = {"llama": set(), "mixtral": set()}
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for kind, seen in found.items():
            model = load_foreign(foreign_checkpoint(tmp_path / kind, model_type=kind))
            note = lambda name, seen=seen: seen.add((name, torch.get_num_threads()))  # noqa: E731
            model.body.layers[0].register_forward_hook(lambda *_, note=note: note("torch"))
            monkeypatch.setattr(cpu.ops, "run", noting(cpu.ops.run, note))
            logits(model, prompt(320, 37))
            monkeypatch.undo()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)
    assert found["llama"] == {("torch", 1), ("linear", 2), ("norm", 2), ("attention", 2)}
    assert ("torch", 2) in found["mixtral"]


def noting(run, note):
    def noted(name, *args, **kwargs):
        if name in ("linear", "norm", "attention"):
            note(name)
        return run(name, *args, **kwargs)

    return noted


# What is found while it is loaded


def rewrite(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kind", ["bloom", "mpt", "gptj"])
def test_attention_that_cannot_be_replaced_is_refused(kind, tmp_path):
    folder = foreign_checkpoint(tmp_path, model_type=kind)
    with pytest.raises(ConfigError, match="Use another checkpoint"):
        load_foreign(folder)


def test_a_window_of_which_attention_is_not_reported_is_refused(tmp_path):
    folder = foreign_checkpoint(tmp_path, model_type="olmo")
    rewrite(folder, sliding_window=8)
    with pytest.raises(ConfigError, match="do not pass the windows"):
        load_foreign(folder)


def test_a_missing_tensor_and_one_without_a_place_are_refused(tmp_path):
    """transformers itself would take random numbers in its place."""
    folder = foreign_checkpoint(tmp_path, model_type="olmo")
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    lost = tensors.pop(name)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        load_foreign(folder)
    save_file(tensors | {name: lost, "model.more": lost.clone()}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.more is not part of"):
        load_foreign(folder)


def test_a_size_that_transformers_reads_otherwise_is_refused(tmp_path):
    folder = foreign_checkpoint(tmp_path, model_type="olmo")
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = 321
    with pytest.raises(ConfigError, match="vocab_size is 320, but transformers reads 321"):
        refuse_other_sizes(folder, open_source(folder).shape("transformers"), config)


def test_code_that_does_more_than_its_attention_says_is_refused(tmp_path, monkeypatch):
    """A bias by position, as of ALiBi: nothing tells our attention of it."""
    from transformers.models.olmo import modeling_olmo

    plain = modeling_olmo.eager_attention_forward

    def biased(module, query, key, value, attention_mask, **kwargs):
        mask = attention_mask + torch.arange(key.shape[2]) * 0.5
        return plain(module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(modeling_olmo, "eager_attention_forward", biased)
    folder = foreign_checkpoint(tmp_path, model_type="olmo")
    with pytest.raises(ConfigError, match="has other logits than with transformers' attention"):
        load_foreign(folder)


def test_a_context_that_needs_gigabytes_of_positions_is_refused(tmp_path):
    folder = foreign_checkpoint(tmp_path, model_type="olmo", max_position_embeddings=1 << 22)
    with pytest.raises(ConfigError, match=r"Set scheduler\.max_model_len"):
        load_foreign(folder)
    assert load_foreign(folder, max_len=100).num_positions == 164


def test_a_tree_behind_the_last_position_is_computed(tmp_path):
    """A table of learned positions ends where texts do."""
    folder = foreign_checkpoint(
        tmp_path, model_type="gpt2", num_key_value_heads=4, max_position_embeddings=20
    )
    model = load_foreign(folder)
    with torch.inference_mode():
        program = model.program(empty_kv(model, 3, 16), 32, 32)
        ids = torch.tensor([random.Random(0).randrange(320) for _ in range(20)])
        program.run(causal_rows(range(3), 0, 19, 16), ids[:19], torch.tensor([0]))
        found = program.run(tree_rows(), torch.tensor([1, 2, 3, 4, 5]), torch.arange(5))
    assert found.logits.isfinite().all()


def test_every_dtype_has_a_tolerance():
    assert {torch.float32, torch.bfloat16} == {*TOLERANCE}
