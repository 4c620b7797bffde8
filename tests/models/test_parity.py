"""The decoder computes what transformers computes, family by family and shape by shape."""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specserve.models.loader import load_decoder
from specserve_kernels import cpu
from tests.checkpoints import FAMILIES, MULTIMODAL, oracle, tiny_checkpoint
from tests.models.formats import change_config
from tests.models.forward import (
    builds,
    causal_rows,
    empty_kv,
    logits,
    prompt,
    recorded_and_eager,
)

SMOLLM3 = {"model_type": "smollm3"}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED = {"use_sliding_window": True, "sliding_window": 5}
CONTEXT = {"original_max_position_embeddings": 16, "rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 9.0]}
LONGROPE = LONG | {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
LLAMA_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0],
}

# transformers raises Nemotron H's time steps in prompts to this number: see test_time_steps.py
STEPS = {"time_step_min": 1e-30}
CASES = {  # family, what departs from its tiny checkpoint
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm": ("smollm", {}),
    "phi3": ("phi3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, a layer without experts": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3_moe, every second layer with experts": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe, weights that are not normalized": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, one expert a row": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "mixtral": ("mixtral", {}),
    "mixtral with a window": ("mixtral", {"sliding_window": 7}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, a layer without experts": ("qwen2_moe", {"mlp_only_layers": [1]}),
    "qwen2_moe, weights that are normalized": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen2_moe without biases": ("qwen2_moe", {"qkv_bias": False}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, another limit, no attention biases": (
        "gpt_oss",
        {"swiglu_limit": 7.0, "attention_bias": False, "num_experts_per_tok": 1},
    ),
    "olmoe": ("olmoe", {}),
    "olmoe, weights that are normalized": ("olmoe", {"norm_topk_prob": True}),
    "phi3 with a window": ("phi3", {"sliding_window": 7}),
    "phi3, three quarters of a head rotate": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3, texts beyond the first length": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "phi3, texts within the first length": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 64,
        },
    ),
    "smollm3, a layer without rope": ("llama", SMOLLM3 | {"no_rope_layers": [1, 0]}),
    "every linear map with a bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "7 query heads a KV head": ("qwen2", {"num_attention_heads": 14}),
    "one KV head a query head": ("qwen3", {"num_key_value_heads": 4}),
    "heads of 80": ("qwen3", {"head_dim": 80}),
    "odd vocabulary": ("qwen2", {"vocab_size": 307}),
    "gemma2": ("gemma2", {}),
    "gemma2, a bias, no caps": (
        "gemma2",
        {
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": None,
        },
    ),
    "gemma3": ("gemma3", {}),
    "gemma3, a rope for each kind of layer": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            }
        },
    ),
    "llama4": ("llama4", {}),
    "llama4, a layer without experts, neither norms nor growing queries": (
        "llama4",
        {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False},
    ),
    "llama4, its own lists of layers": (
        "llama4",
        {"moe_layers": [0], "layer_types": [FULL, "chunked_attention"], "no_rope_layers": [0, 1]},
    ),
    "gemma3n": ("gemma3n", {}),
    "gemma3n, widths by layer, no scale, every token has inputs": (
        "gemma3n",
        {
            "activation_sparsity_pattern": None,
            "altup_correct_scale": False,
            "attention_bias": True,
            "intermediate_size": [96, 128, 128, 96, 160],
            "layer_types": None,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": True,
            "vocab_size_per_layer_input": 320,
        },
    ),
    "gemma4": ("gemma4", {}),
    "gemma4, one window, a bias, no inputs": (
        "gemma4",
        {
            "attention_bias": True,
            "hidden_size_per_layer_input": 0,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, FULL],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": False,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_moe": ("gemma4_moe", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"layer_types": [SLIDING, FULL]}),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5, biases": ("ernie4_5", {"use_bias": True}),
    "hunyuan": ("hunyuan", {}),
    "hunyuan, a larger theta": (
        "hunyuan",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "ministral3": ("ministral3", {}),
    "cohere": ("cohere", {}),
    "command_r_plus": ("command_r_plus", {"attention_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "starcoder2 without biases": ("starcoder2", {"use_bias": False}),
    "stablelm": ("stablelm", {}),
    "stablelm, biases": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    "nemotron": ("nemotron", {}),
    "nemotron, biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "apertus": ("apertus", {}),
    "granite_moe": ("granite_moe", {}),
    "minimax_m2": ("minimax_m2", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, weights that are not normalized": (
        "glm4_moe",
        {"norm_topk_prob": False, "use_qk_norm": False, "first_k_dense_replace": 0},
    ),
    "ernie4_5_moe without shared experts": ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    "ernie4_5_moe, every second layer": ("ernie4_5_moe", {"moe_layer_interval": 2}),
    "olmo2, one KV head a query head": ("olmo2", {"num_key_value_heads": 4}),
    "lfm2": ("lfm2", {}),
    "lfm2, biases, four taps, the width as given": (
        "lfm2",
        {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5, as many key heads, a bias": (
        "qwen3_5",
        {"linear_num_value_heads": 2, "attention_bias": True, "num_key_value_heads": 4},
    ),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "qwen3_next": ("qwen3_next", {}),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "olmo_hybrid, rope, positive eigenvalues": (
        "olmo_hybrid",
        {"rope_parameters": {"rope_theta": 100.0}, "linear_allow_neg_eigval": False},
    ),
    "nemotron_h": ("nemotron_h", STEPS),
    "nemotron_h_moe": ("nemotron_h_moe", STEPS),
    "granite": ("granite", {"attention_bias": True}),
    "glm4": ("glm4", {}),
    "glm4, all of a head rotates": (
        "glm4",
        {"attention_bias": False, "partial_rotary_factor": 1.0},
    ),
    "cohere2": ("cohere2", {}),
    "cohere2, a bias": ("cohere2", {"attention_bias": True, "logit_scale": 1.0}),
    "exaone4": ("exaone4", {}),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": [FULL] * 2}),
    "exaone4, a layer without a window": ("exaone4", {"layer_types": [FULL, SLIDING]}),
    "gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "odd widths": ("llama", {"hidden_size": 76, "intermediate_size": 150, "vocab_size": 331}),
    "a window shorter than the prompt": ("mistral", {"sliding_window": 7}),
    "windows from a layer on": ("qwen2", WINDOWED | {"max_window_layers": 1}),
    "windows as layer_types has them": ("qwen3", WINDOWED | {"layer_types": [SLIDING, FULL]}),
    "windows without rope": ("llama", SMOLLM3 | WINDOWED | {"no_rope_layers": [0, 1]}),
    "rope theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "rope llama3": ("llama", {"rope_parameters": LLAMA3 | CONTEXT}),
    "rope yarn": ("qwen3", {"rope_parameters": YARN | CONTEXT}),
    "rope yarn, its factor given": ("qwen2", {"rope_parameters": YARN | {"attention_factor": 2.0}}),
    "rope longrope, texts beyond the first length": (
        "llama",
        {"rope_parameters": LLAMA_LONGROPE | {"original_max_position_embeddings": 16}},
    ),
    "rope in the old style": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "qwen3_vl, tied": ("qwen3_vl", {"tie_word_embeddings": True}),
}
MAMBA = "bamba", "falcon_h1", "granite_hybrid", "granite_hybrid_moe"
CASES |= {name: (name, {}) for name in (*MAMBA, *MULTIMODAL)}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request, tmp_path_factory):
    """A checkpoint, a prompt, and transformers' logits and residuals at each of its tokens."""
    family, overrides = request.param
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), family, **overrides)
    model = oracle(folder, attn_implementation="eager")
    ids = prompt(model.config.get_text_config().vocab_size, 37)
    with torch.inference_mode():
        found = model(ids[None], output_hidden_states=True)
        # Of several residual streams, the first one.
        states = [h[0] if h.dim() == 3 else h[0, 0] for h in found.hidden_states]
        return folder, ids, found.logits[0], states


@pytest.mark.pairs
@pytest.mark.parametrize("block_size", [1, 16, 17])
@pytest.mark.parametrize("ops", builds(), ids=lambda m: m.__name__.rpartition(".")[2])
def test_logits_are_those_of_transformers(case, ops, block_size):
    folder, ids, want, _ = case
    got = logits(load_decoder(folder, "fp32", ops), ids, block_size=block_size)
    error = (got - want).norm(dim=1) / want.norm(dim=1)
    assert error.max() < 1e-4, error


def test_yarn_by_qwens_recipe_raises_the_context(tmp_path):
    """And texts beyond max_position_embeddings have transformers' logits."""
    folder = tiny_checkpoint(tmp_path, "qwen2", max_position_embeddings=40)
    change_config(
        folder,
        rope_parameters=None,
        rope_theta=1e4,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    )
    ids = prompt(320, 126)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        want = model(ids[None]).logits[0]
    decoder = load_decoder(folder, "fp32", cpu)
    assert decoder.config.max_positions == 128
    error = (logits(decoder, ids) - want).norm(dim=1) / want.norm(dim=1)
    assert error.max() < 1e-4, error


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_recorded_forward_has_the_bits_of_the_eager_one(case, dtype):
    """And all of it is recorded: nothing is left to Python, and no op runs twice or never."""
    folder, ids, *_ = case
    decoder = load_decoder(folder, dtype, cpu)
    program, recorded, eager = recorded_and_eager(decoder, ids, (23, 24))
    assert all(torch.equal(a, b) for a, b in zip(recorded, eager, strict=True))
    size = 2 + decoder.config.num_layers  # tensors of a run
    runs = [recorded[i : i + size] for i in range(0, len(recorded), size)]
    for from_ids, from_residual in zip(runs[::2], runs[1::2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(from_ids, from_residual, strict=True))
    assert program.native_ops == ops_of(decoder.config)
    assert program.host_ops == []


def change_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = {name: change(name, x) for name, x in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def ops_of(config):
    """The C++ ops of a forward that returns the inputs of all layers."""
    style = config.mixture and config.mixture.style

    def when(condition, *names):
        return names if condition else ()

    after = when(config.family.norms.after_attention, "norm")
    attention = [
        "linear",
        *when(config.qk_norm == "width", "norm", "norm"),
        *("rope_write_kv", "attention", "linear", *after),
    ]
    has_shared = config.mixture is not None and config.mixture.shared_width
    bends = when(style is not None and not style.is_gated, "elementwise")
    shared = when(has_shared, "linear", *bends, "linear")
    shared += when(has_shared and style.has_shared_gate, "linear", "add_gated")
    is_ungated = config.family.ungated is not None
    maps = {
        False: (
            "linear",
            *when(is_ungated, "elementwise"),
            "linear",
        ),
        True: (
            *("linear", "route", *when(has_shared and style.weighs_input, "weigh_rows")),
            *("expert_maps", *bends, "expert_maps", "add_experts", *shared),
        ),
    }
    if config.num_streams > 1:
        return ops_of_streams(config)
    is_beside = style is not None and style.beside is not None
    experts = "norm", "norm", "linear", "route", "norm", "expert_maps", "expert_maps", "add_experts"
    has_inputs = config.per_layer_size > 0
    ends = [
        *when(is_beside, *experts, "norm", "norm"),
        *when(has_inputs, "linear", "gate_columns", "linear", "norm"),
        *when(config.family.has_layer_scalars, "elementwise"),
    ]
    attention = [
        *attention[: attention.index("attention") + 1],
        *when(config.family.gates_attention, "linear", "gate"),
        *attention[attention.index("attention") + 1 :],
    ]
    updates = {"gated_delta": "delta_rule", "mamba": "selective_state_update"}
    update = updates.get(config.family.recurrent)
    recurrent = ["linear", "causal_conv", *when(update, update), "linear"]

    def layer(i):
        mixers = [*when(config.is_recurrent(i), *recurrent)]
        mixers += when(config.attends(i), *attention)
        norms = config.norms(i)
        before = when(norms.before_attention and mixers, "norm")
        behind = when(norms.before_mlp and config.has_mlp(i), "norm")
        mlp = when(config.has_mlp(i), *maps[config.has_experts(i)])
        mlp += when(norms.after_mlp and not is_beside and not config.has_experts(i), "norm")
        return ["copy", *before, *mixers, *behind, *mlp, *ends]

    layers = map(layer, range(config.num_layers))
    return [
        *("gather", *when(config.embedding_scale != 1, "elementwise"), "plan_attention"),
        *when(has_inputs, "gather", "elementwise", "linear", "norm"),
        *itertools.chain(*layers),
        *("gather", "norm", "linear", *when(config.logit_cap is not None, "elementwise")),
    ]


def ops_of_streams(config):
    """The same for Gemma 3n."""
    others, ops = config.num_streams - 1, ["gather", "elementwise", "plan_attention"]
    ops += ["gather", "elementwise", "linear", "norm", "linear", "spread_streams"]
    for deviations in config.deviations:
        routed = "norm", "linear", "elementwise", "linear"
        ops += ["columns", "columns", *routed, "mix_streams", "columns", "columns", "norm"]
        ops += ["linear", "linear", "linear", "rope_write_kv", "attention", "linear", "norm"]
        ops += ["norm", "norm", "elementwise", "norm", "linear"]
        ops += ["sparse_gated"] * (deviations is not None) + ["linear", "norm"]
        scaled = "weigh_columns" if config.scales_streams else "columns"
        ops += [*routed, "correct_streams", scaled, "linear", "gate_columns", "linear"]
        ops += ["norm"] * others
    ops += ["gather", "columns", "copy", *["columns", "linear", "add_matched"] * others]
    return [*ops, "elementwise", "norm", "linear", "elementwise"]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_a_recorded_forward_over_kv_of_8_bits_does_too(case, dtype, kv_dtype):
    folder, ids, *_ = case
    decoder = load_decoder(folder, dtype, cpu)
    _, recorded, eager = recorded_and_eager(decoder, ids, (23, 24), kv_dtype)
    assert all(torch.equal(a, b) for a, b in zip(recorded, eager, strict=True))


@pytest.mark.parametrize("family", [*FAMILIES, *MULTIMODAL])
@pytest.mark.parametrize("ops", builds(), ids=lambda m: m.__name__.rpartition(".")[2])
def test_bf16_stays_close_to_fp32(family, ops, tmp_path):
    # Milder weights than the other tests': these logits should not hang on a rounding.
    fields = FAMILIES[family] if family in FAMILIES else MULTIMODAL[family][2]
    experts = ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")
    num_experts = next((fields[name] for name in experts if name in fields), None)
    active = next((k for k in ("moe_k", "top_k_experts") if k in fields), "num_experts_per_tok")
    sizes = {active: num_experts} if num_experts else {}  # nor which they are
    if family.startswith("llama4"):  # whose rows have one expert
        sizes = {"num_local_experts": 1}
    has_sharp_scores = family.startswith(("gemma3n", "gemma4"))
    spread = 0.15 if has_sharp_scores else 0.05
    folder = tiny_checkpoint(tmp_path, family, initializer_range=spread, **sizes)
    if has_sharp_scores:  # no factor makes their scores small
        change_tensors(folder, lambda name, x: x / 16 if name.endswith("q_norm.weight") else x)
    ids = prompt(320, 37)
    exact, rounded = (logits(load_decoder(folder, dtype, ops), ids) for dtype in ("fp32", "bf16"))
    assert torch.cosine_similarity(rounded, exact).min() > 0.999


@pytest.mark.parametrize("ops", builds(), ids=lambda m: m.__name__.rpartition(".")[2])
def test_aux_hidden_states_are_the_hidden_states_of_transformers(case, ops):
    folder, ids, _, hidden_states = case
    decoder = load_decoder(folder, "fp32", ops)
    layers = range(decoder.config.num_layers)
    kv = empty_kv(decoder, 4, 16)
    with torch.inference_mode():
        program = decoder.ops.program(decoder, kv, len(ids), 1, aux_layer_ids=layers)
        run = program.run(causal_rows(range(4), 0, len(ids), 16), ids, torch.tensor([0]))
    assert list(run.aux_hidden_states) == list(layers)
    for layer, aux in run.aux_hidden_states.items():
        torch.testing.assert_close(aux, hidden_states[layer], rtol=1e-4, atol=1e-4)


def test_the_length_that_is_served_decides_about_the_factors_of_longrope(tmp_path):
    """For short texts transformers takes the short ones, whatever the model's greatest length."""
    given = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    folder = tiny_checkpoint(tmp_path, "phi3", **given)
    ids = prompt(320, 37)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        want = model(ids[None]).logits[0]
    short, long = (logits(load_decoder(folder, "fp32", cpu, most), ids) for most in (64, 65))
    torch.testing.assert_close(short, want, rtol=1e-3, atol=1e-3)
    assert (long - want).norm() > 0.1 * want.norm()


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_cannot_be_an_aux_layer(tmp_path, layer):
    decoder = load_decoder(tiny_checkpoint(tmp_path, "qwen3"), "fp32", cpu)
    with pytest.raises(ValueError, match=rf"auxiliary layers \[{layer}\] do not exist"):
        cpu.program(decoder, empty_kv(decoder, 4, 16), 8, 1, aux_layer_ids=[0, layer])
