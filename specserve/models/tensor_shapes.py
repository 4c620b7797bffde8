"""The names and shapes of all tensors of a decoder's checkpoint."""

from specserve.models import per_layer_names as per_layer
from specserve.models.decoder_config import DecoderConfig

SINKS = "self_attn.sinks"  # tensor name within a layer
SCALAR = "layer_scalar"  # tensor name within a layer
STREAMS = ("model.altup_projections", "model.altup_unembed_projections")
# Modules and tensors of AltUp and LAuReL within a layer.
ROUTER, PREDICT, CORRECT = (
    f"altup.{name}" for name in ("modality_router", "prediction_coefs", "correction_coefs")
)
ROUTER_NORM, STREAM_SCALE = "altup.router_norm", "altup.correct_output_scale"
LEFT, RIGHT, LAUREL_NORM = (
    f"laurel.{name}" for name in ("linear_left", "linear_right", "post_laurel_norm")
)
SCORE = "score.weight"  # tensor of a sequence classifier's head
ALPHAS = ("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n")  # xIELU's tensors within a layer


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a checkpoint, by Hugging Face name."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if config.family.norm_bias:
        shapes["model.norm.bias"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    if config.num_labels:
        shapes[SCORE] = (config.num_labels, hidden)
    if config.per_layer_size:
        width = config.num_layers * config.per_layer_size
        shapes[f"{per_layer.TABLE}.weight"] = config.per_layer_vocab, width
        shapes[f"{per_layer.PROJECTION}.weight"] = width, hidden
        shapes[f"{per_layer.NORM}.weight"] = (config.per_layer_size,)
    for i in range(config.num_streams - 1):
        shapes |= {f"{name}.{i}.weight": (hidden, hidden) for name in STREAMS}
    for i in range(config.num_layers):
        layer = layer_shapes(config, i)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def layer_shapes(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, heads = config.hidden_size, config.inner_size(layer), config.kv_heads(layer)
    q, kv = config.num_heads * heads.size, heads.number * heads.size
    queries = 2 * q if config.family.gates_attention else q
    qkv, gate_up = [queries, kv, kv], [inner, inner]
    qkv = [sum(qkv)] if config.family.fuses_qkv else qkv
    gate_up = [sum(gate_up)] if config.family.fuses_gate_up else gate_up
    gate_up = [inner] if config.family.ungated is not None else gate_up
    linears = dict[str, tuple[int, int, bool]]()  # name -> output width, input width, has a bias
    if config.attends(layer):
        for name, out in zip(config.qkv_names(layer), qkv, strict=False):
            linears[name] = out, hidden, config.qkv_bias
        linears["self_attn.o_proj"] = hidden, q, config.out_bias
    if config.mixture is not None and config.mixture.layers[layer]:
        linears |= config.mixture.shapes(hidden)
    if config.has_mlp(layer) and not config.has_experts(layer):
        for name, out in zip(config.gate_up_names, gate_up, strict=True):
            linears[name] = out, hidden, config.mlp_bias
        linears[config.down_name] = hidden, inner, config.mlp_bias
    norms = config.norms(layer)
    places = norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in places if name}
    if config.family.has_sinks:
        shapes[SINKS] = (config.num_heads,)
    if config.family.norm_bias:
        shapes |= {f"{name}.bias": (hidden,) for name in places if name}
    if config.is_recurrent(layer) and config.recurrent is not None:
        shapes |= config.recurrent.shapes(hidden)
    if config.has_qk_norm and config.attends(layer):
        names, each = config.family.qk_norm_names, config.qk_norm_shapes(layer)
        for name, shape in [*zip(names, each, strict=True)][: 2 if config.owns_kv(layer) else 1]:
            shapes[f"self_attn.{name}.weight"] = shape
    if config.mixture is not None and config.mixture.layers[layer]:
        shapes |= config.mixture.other_shapes(hidden)
    if config.family.has_layer_scalars:
        shapes[SCALAR] = (1,)
    if config.num_streams > 1:
        linears |= altup_maps(config)
        scales = STREAM_SCALE, f"{ROUTER_NORM}.weight", f"{LAUREL_NORM}.weight"
        shapes |= dict.fromkeys(scales, (hidden,))
    if config.per_layer_size:
        linears[per_layer.GATE] = config.per_layer_size, hidden, False
        linears[per_layer.OUT] = hidden, config.per_layer_size, False
        shapes[f"{per_layer.OUT_NORM}.weight"] = (hidden,)
    if config.activation == "xielu":
        shapes |= dict.fromkeys(ALPHAS, (1,))
    for name, (out, width, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (out, width)
        if has_bias:
            shapes[f"{name}.bias"] = (out,)
    return shapes


def altup_maps(config: DecoderConfig) -> dict[str, tuple[int, int, bool]]:
    """A layer's maps of AltUp and LAuReL: output width, input width, whether it has a bias."""
    N, hidden, rank = config.num_streams, config.hidden_size, config.laurel_rank
    return {
        ROUTER: (N, hidden, False),
        PREDICT: (N * N, N, False),
        CORRECT: (N, N, False),
        LEFT: (rank, hidden, False),
        RIGHT: (hidden, rank, False),
    }
