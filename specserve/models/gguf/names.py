"""llama.cpp's names of tensors, and the rows of some that it stores in another order."""

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Architectures that turn neighbours (2i, 2i + 1) of a head; checkpoints have (i, i + D/2).
TURNS_NEIGHBOURS = ("llama", "smollm3")
TURNED = ("attn_q", "attn_k")


def checkpoint_name(name: str) -> str | None:
    """model.layers.3.self_attn.q_proj.weight of blk.3.attn_q.weight; None if it has no such."""
    module, _, kind = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    block, _, rest = module.partition(".")
    number, _, inner = rest.partition(".")
    if block != "blk" or inner not in IN_LAYER:
        return None
    return f"model.layers.{number}.{IN_LAYER[inner]}.{kind}"


def file_name(name: str) -> str:
    """blk.3.attn_q.weight of model.layers.3.self_attn.q_proj.weight."""
    module, _, kind = name.rpartition(".")
    if module in TOP.values():
        return f"{key_of(TOP, module)}.{kind}"
    number, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{key_of(IN_LAYER, inner)}.{kind}"


def key_of(names: dict[str, str], value: str) -> str:
    return next(key for key, name in names.items() if name == value)


def is_turned(architecture: str, name: str) -> bool:
    """Whether the tensor's rows are in the order of neighbours."""
    return architecture in TURNS_NEIGHBOURS and name.split(".")[-2] in TURNED
