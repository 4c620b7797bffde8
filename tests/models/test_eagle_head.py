"""An EAGLE-3 head computes what plain torch and speculators compute, in any company of rows."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specserve.errors import ConfigError
from specserve.models.eagle_head import load_eagle_head
from specserve_kernels import cpu
from specserve_kernels.ops import EagerProgram
from tests.kernels.builds import ON_GPU, cuda, recorded
from tests.models.eagle_heads import (
    AUX_LAYER_IDS,
    SPECULATORS,
    Run,
    fused,
    load_target,
    outputs,
    same_kv,
    single_rows,
    write_head,
)
from tests.models.forward import builds, prompt

BUILDS = pytest.mark.parametrize("ops", builds(), ids=lambda m: m.__name__.rpartition(".")[2])
N = 37
FIXTURES = Path(__file__).parent / "fixtures"  # write_eagle.py made them
SHAPE_OF_FIXTURES = {"hidden_size": 16, "vocab_size": 64}
CASES = {  # how the head is written
    "layers.0": {},
    "midlayer": {"first": "midlayer"},
    "speculators": {"fields": SPECULATORS},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"num_hidden_layers": 2},
    "the target's embedding": {"without": ["embed_tokens.weight"]},
    "another width than the target's": {"hidden_size": 48, "target_hidden_size": 64},
    "all of the target's tokens": {"draft_vocab_size": 320, "without": ["d2t", "t2d"]},
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request, tmp_path):
    """A target, a head's folder, its tensors, and what `outputs` gives it besides."""
    tensors = write_head(tmp_path / "head", **request.param)
    told = request.param
    flags = {"norms_residual": "norm_before_residual", "norms_output": "norm_output"}
    return tensors, {name: bool(told.get(flag)) for name, flag in flags.items()}


def aux_hidden_states_and_ids(n=N, width=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, len(AUX_LAYER_IDS) * width, generator=generator), prompt(320, n)


def read_fixture(name):
    """The tensors, and the head's config.json."""
    with safe_open(FIXTURES / f"eagle-{name}.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in sorted(file.keys())}, file.metadata()["config"]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@BUILDS
def test_logits_and_next_features_are_those_of_plain_torch(case, ops, tmp_path):
    tensors, flags = case
    target = load_target(tmp_path / "target", ops)
    head = load_eagle_head(tmp_path / "head", target)
    assert head.body.num_positions == target.num_positions
    aux_hidden_states, ids = aux_hidden_states_and_ids()
    features = fused(tensors, aux_hidden_states)
    close(head.fuse(aux_hidden_states), features)
    logits, hidden = Run(head).step(head.fuse(aux_hidden_states), ids)
    table = None if "embed_tokens.weight" in tensors else target.weights.embedding
    want, want_hidden = outputs(tensors, features, ids, table, **flags)
    close(logits, want)
    close(hidden, want_hidden)


@BUILDS
@pytest.mark.parametrize("num_layers", [1, 2])
def test_rows_that_are_only_written_have_the_kv_of_the_others(ops, num_layers, tmp_path):
    write_head(tmp_path / "head", num_hidden_layers=num_layers, norm_before_residual=True)
    head = load_eagle_head(tmp_path / "head", load_target(tmp_path / "target", ops))
    aux_hidden_states, ids = aux_hidden_states_and_ids()
    assert same_kv(head, head.fuse(aux_hidden_states), ids, len(ids) - 2)


@pytest.fixture(params=["fp32", "bf16"])
def dtype(request):
    return request.param


def load(folder, ops, dtype="fp32", **changes):
    """A head with everything at once, and its tensors."""
    told = {"norm_before_residual": True, "fc_norm": True, "norm_output": True} | changes
    tensors = write_head(folder / "head", num_hidden_layers=2, **told)
    target = load_target(folder / "target", ops, dtype)
    return load_eagle_head(folder / "head", target), tensors


@BUILDS
def test_a_draft_step_continues_with_its_own_rows(ops, tmp_path):
    """The next row's feature is the last row's output, in place of auxiliary hidden states."""
    head, tensors = load(tmp_path, ops)
    aux_hidden_states, ids = aux_hidden_states_and_ids(12)
    run, features = Run(head), head.fuse(aux_hidden_states)
    logits, hidden = run.step(features, ids)
    for _ in range(3):
        token = head.target_ids(logits[-1:].argmax(dim=1))
        ids, features = torch.cat([ids, token]), torch.cat([features, hidden[-1:]])
        logits, hidden = run.step(hidden[-1:], token)
        want, _ = outputs(tensors, features, ids, norms_residual=True, norms_output=True)
        close(logits, want[-1:])


@ON_GPU
def test_the_build_for_the_gpu_gives_them_too(tmp_path):
    head, tensors = load(tmp_path, cuda)
    aux_hidden_states, ids = aux_hidden_states_and_ids(5)
    run = Run(head, recorded)
    logits, hidden = run.step(head.fuse(cuda.place(aux_hidden_states)), ids)
    flags = {"norms_residual": True, "norms_output": True}
    want, want_hidden = outputs(tensors, fused(tensors, aux_hidden_states), ids, **flags)
    close(logits, want)
    close(hidden, want_hidden)


@BUILDS
def test_tokens_of_the_head_are_the_target_s_by_their_offsets(ops, tmp_path):
    head, tensors = load(tmp_path, ops)
    known = tensors["t2d"].nonzero()[:, 0]  # ascending, as the head's ids count them
    assert torch.equal(head.target_ids(torch.arange(200)), known)
    assert torch.equal(head.target_ids(torch.tensor([7, 0])), known[[7, 0]])


def test_weights_are_counted_as_the_checkpoint_has_them(tmp_path):
    head, tensors = load(tmp_path, cpu)
    ends = ("embed_tokens.weight", "lm_head.weight")
    maps = (x.numel() for name, x in tensors.items() if x.ndim == 2 and name not in ends)
    assert head.num_layer_weights == sum(maps)
    assert (head.aux_layer_ids, head.draft_vocab_size) == ((1, 2, 3), 200)


def test_a_recorded_step_has_the_bits_of_the_eager_one(dtype, tmp_path):
    """And all of it is recorded: nothing is left to Python."""
    head, _ = load(tmp_path, cpu, dtype)
    aux_hidden_states, ids = aux_hidden_states_and_ids()
    features = head.fuse(aux_hidden_states.to(head.body.dtype))
    eager = Run(head, lambda model, kv, *_: EagerProgram(model, kv))
    recorded = Run(head, max_rows=8)  # and again for more rows
    for a, b in itertools.pairwise((0, 3, 20, 21, N)):
        want, got = (run.step(features[a:b], ids[a:b]) for run in (eager, recorded))
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert recorded.program.host_ops == []


@BUILDS
def test_chunks_give_what_the_whole_gives(ops, dtype, tmp_path):
    head, _ = load(tmp_path, ops, dtype)
    aux_hidden_states, ids = aux_hidden_states_and_ids(64)
    features = head.fuse(aux_hidden_states.to(head.body.dtype))
    whole, chunked = Run(head).step(features, ids), Run(head)
    parts = [
        chunked.step(features[a:b], ids[a:b]) for a, b in itertools.pairwise((0, 1, 17, 40, 64))
    ]
    for want, got in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(got), want)


@BUILDS
def test_a_feature_does_not_depend_on_other_rows(ops, dtype, tmp_path):
    for name, told in {"each": {}, "all": {"fc_norm": False, "norm_before_fc": True}}.items():
        (tmp_path / name).mkdir()
        head, _ = load(tmp_path / name, ops, dtype, **told)
        aux_hidden_states = aux_hidden_states_and_ids(64)[0].to(head.body.dtype)
        want, order = head.fuse(aux_hidden_states), torch.randperm(64)
        assert torch.equal(head.fuse(aux_hidden_states[order]), want[order])
        assert all(
            torch.equal(head.fuse(aux_hidden_states[:n]), want[:n]) for n in (1, 2, 3, 8, 31)
        )


@BUILDS
@pytest.mark.parametrize("n", [1, 2, 7, 16, 31, 64])
def test_a_row_does_not_depend_on_other_requests_rows(ops, dtype, n, tmp_path):
    """Rows of requests with one row each, alone and among others in any order."""
    head, _ = load(tmp_path, ops, dtype)
    aux_hidden_states, ids = aux_hidden_states_and_ids(64)
    features = head.fuse(aux_hidden_states.to(head.body.dtype))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(n))[:n]
    want = single_rows(head, features, ids, range(64))
    got = single_rows(head, features, ids, order.tolist())
    assert all(torch.equal(x, y[order]) for x, y in zip(got, want, strict=True))


REFUSED = {  # what is wrong -> how the head is written, the complaint
    "a target of another width": (
        {"target_hidden_size": 48},
        r"target_hidden_size = 48, but the target model's hidden_size is 64\. Use a head",
    ),
    "a target of other tokens": (
        {"vocab_size": 400},
        r"vocab_size = 400, but the target model's vocab_size is 320\. Use a head",
    ),
    "a layer that the target lacks": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        r"eagle_aux_hidden_state_layer_ids = \[1, 2, 4\], but the target model has only",
    ),
    "an embedding of another width": (
        {"hidden_size": 48, "target_hidden_size": 64, "without": ["embed_tokens.weight"]},
        "embed_tokens.weight is missing, and the target model's has 64 columns instead of 48",
    ),
    "no fc": ({"without": ["fc.weight"]}, "the tensor fc.weight is missing"),
    "no map of queries": (
        {"first": "midlayer", "without": ["midlayer.self_attn.q_proj.weight"]},
        "the tensor midlayer.self_attn.q_proj.weight is missing",
    ),
    "no head": ({"without": ["lm_head.weight"]}, "the tensor lm_head.weight is missing"),
    "no offsets": (
        {"without": ["d2t"]},
        r"d2t is missing\. It maps the head's 200 tokens to the target model's 320",
    ),
}


@pytest.mark.parametrize(("told", "complaint"), REFUSED.values(), ids=REFUSED)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(told, complaint, tmp_path):
    write_head(tmp_path / "head", **told)
    with pytest.raises(ConfigError, match=complaint) as error:
        load_eagle_head(tmp_path / "head", load_target(tmp_path / "target", cpu))
    assert str(error.value).startswith(str(tmp_path / "head"))


def edit_no_norm(tensors):
    tensors["fc_norm.0.weight"] = torch.ones(64)


def edit_shape(tensors):
    tensors["layers.0.self_attn.q_proj.weight"] = torch.ones(64, 64)


def edit_offsets(tensors):
    tensors["d2t"][-1] = 320 - 199


def edit_number(tensors):
    tensors["d2t"] = tensors["d2t"][1:].clone()


def edit_type(tensors):
    tensors["d2t"] = tensors["d2t"].float()


EDITED = {
    edit_no_norm: r"the tensor fc_norm.0.weight is not part of",
    edit_shape: r"q_proj.weight has the shape \[64, 64\], but config.json requires \[64, 128\]",
    edit_offsets: r"d2t names token ids from .* to 320, but the target model has 320\. Download",
    edit_number: r"d2t has the shape \[199\] and the dtype I64, but config.json requires 200",
    edit_type: r"d2t has the shape \[200\] and the dtype F32, but config.json requires 200",
}


@pytest.mark.parametrize(("edit", "complaint"), EDITED.items())
def test_a_tensor_that_does_not_fit_is_refused_with_the_reason(edit, complaint, tmp_path):
    tensors = write_head(tmp_path / "head")
    edit(tensors)
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    with pytest.raises(ConfigError, match=complaint):
        load_eagle_head(tmp_path / "head", load_target(tmp_path / "target", cpu))


@BUILDS
@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-3.1"])
def test_logits_and_next_features_are_those_of_speculators(ops, name, tmp_path):
    """Of tokens, and of the draft steps after them, which read the text's own next tokens."""
    kept, config = read_fixture(name)
    own = {key.removeprefix("head."): x for key, x in kept.items() if key.startswith("head.")}
    (tmp_path / "config.json").write_text(config)
    save_file(own, tmp_path / "model.safetensors")
    head = load_eagle_head(tmp_path, load_target(tmp_path / "target", ops, **SHAPE_OF_FIXTURES))
    features, ids = head.fuse(kept["taps"]), torch.cat([kept["ids"], torch.zeros(2).long()])
    for last in (0, 5, 11):
        run = Run(head)
        logits, hidden = run.step(features[: last + 1], ids[: last + 1])
        for i, (want, want_hidden) in enumerate(zip(kept["logits"], kept["features"], strict=True)):
            if i > 0:
                logits, hidden = run.step(hidden[-1:], ids[last + i : last + i + 1])
            close(logits[-1], want[last])
            close(hidden[-1], want_hidden[last])
