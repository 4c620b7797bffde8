"""EAGLE-3 heads with random weights in both forms, and what plain torch makes of them."""

import json

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from specserve.models.loader import load_decoder
from specserve_kernels import Rows
from tests.checkpoints import SIZES, tiny_checkpoint
from tests.models.forward import causal_rows, empty_kv

AUX_LAYER_IDS, EPS, THETA = [1, 2, 3], 1e-5, 100.0
LAYERS = {
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "vocab_size": SIZES["vocab_size"],
}
OWN = {"draft_vocab_size": 200, "eagle_aux_hidden_state_layer_ids": AUX_LAYER_IDS}
LLAMA = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} | LAYERS | OWN
SPECULATORS = OWN | {
    "norm_before_residual": False,
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {"model_type": "llama"} | LAYERS,
}


def load_target(folder, ops, dtype="fp32", **overrides):
    return load_decoder(
        tiny_checkpoint(folder, "llama", num_hidden_layers=4, **overrides), dtype, ops
    )


def write_head(folder, first="layers.0", without=(), fields=LLAMA, **changes):
    """Its tensors; None takes a field out of config.json."""
    fields = fields | changes
    tensors = random_tensors(fields.get("transformer_layer_config", {}) | fields, first)
    for name in without:
        del tensors[name]
    folder.mkdir()
    told = {key: value for key, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(told))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def random_tensors(fields, first):
    h, inner, draft = fields["hidden_size"], fields["intermediate_size"], fields["draft_vocab_size"]
    target = fields.get("target_hidden_size") or h
    n = len(fields["eagle_aux_hidden_state_layer_ids"])
    q, kv = (fields["head_dim"] * fields[f"num_{x}_heads"] for x in ("attention", "key_value"))
    shapes = {"fc": (h, n * target), "lm_head": (draft, h), "norm": (h,)}
    shapes["embed_tokens"] = fields["vocab_size"], h
    if fields.get("norm_before_fc"):
        shapes["input_norm"] = (n * target,)
    if fields.get("fc_norm"):
        shapes |= {f"fc_norm.{i}": (target,) for i in range(n)}
    for i in range(fields["num_hidden_layers"]):
        layer, width = (f"layers.{i}", h) if i else (first, 2 * h)
        if not i:
            shapes[f"{layer}.hidden_norm"] = (h,)
        shapes |= {
            f"{layer}.input_layernorm": (h,),
            f"{layer}.post_attention_layernorm": (h,),
            f"{layer}.self_attn.q_proj": (q, width),
            f"{layer}.self_attn.k_proj": (kv, width),
            f"{layer}.self_attn.v_proj": (kv, width),
            f"{layer}.self_attn.o_proj": (h, q),
            f"{layer}.mlp.gate_proj": (inner, h),
            f"{layer}.mlp.up_proj": (inner, h),
            f"{layer}.mlp.down_proj": (h, inner),
        }
    generator = torch.Generator().manual_seed(7)
    tensors = {f"{name}.weight": random(shape, generator) for name, shape in shapes.items()}
    known = torch.randperm(fields["vocab_size"], generator=generator)[:draft].sort().values
    t2d = torch.zeros(fields["vocab_size"], dtype=torch.bool)
    t2d[known] = True
    return tensors | {"d2t": known - torch.arange(draft), "t2d": t2d}


def random(shape, generator):
    drawn = torch.randn(shape, generator=generator)
    return 1 + 0.3 * drawn if len(shape) == 1 else 0.2 * drawn


def fused(tensors, aux_hidden_states):
    """The features of concatenated auxiliary hidden states."""
    if "input_norm.weight" in tensors:
        aux_hidden_states = normed(aux_hidden_states, tensors["input_norm.weight"])
    norms = [tensors[f"fc_norm.{i}.weight"] for i in range(3) if f"fc_norm.{i}.weight" in tensors]
    if norms:
        parts = aux_hidden_states.chunk(len(norms), dim=1)
        aux_hidden_states = torch.cat(
            [normed(x, w) for x, w in zip(parts, norms, strict=True)], dim=1
        )
    return linear(aux_hidden_states, tensors["fc.weight"])


def outputs(tensors, features, ids, embedding=None, *, norms_residual=False, norms_output=False):
    """Logits and features of the next draft step, of rows that each see those before them."""
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
    table = tensors["embed_tokens.weight"] if embedding is None else embedding
    x, i = features, 0
    while f"layers.{i}.input_layernorm.weight" in tensors:
        of_layer = f"layers.{i}."
        part = {n.removeprefix(of_layer): t for n, t in tensors.items() if n.startswith(of_layer)}
        read = normed(table[ids] if i == 0 else x, part["input_layernorm.weight"])
        if i == 0:
            feature = normed(x, part["hidden_norm.weight"])
            read = torch.cat([read, feature], dim=1)
            x = feature if norms_residual else x
        x = x + attended(part, read)
        read = normed(x, part["post_attention_layernorm.weight"])
        gate, up, down = (part[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + linear(silu(linear(read, gate)) * linear(read, up), down)
        i += 1
    last = normed(x, tensors["norm.weight"])
    return linear(last, tensors["lm_head.weight"]), last if norms_output else x


def normed(x, weight):
    return rms_norm(x, weight.shape, weight, EPS)


def attended(part, read):
    q, k, v = (
        linear(read, part[f"self_attn.{name}_proj.weight"]).view(len(read), -1, 16).movedim(1, 0)
        for name in "qkv"
    )
    found = scaled_dot_product_attention(
        rotated(q)[None], rotated(k)[None], v[None], is_causal=True, enable_gqa=True
    )
    return linear(found[0].movedim(0, 1).flatten(1), part["self_attn.o_proj.weight"])


def rotated(x):
    """Of heads [H, R, D] at the positions 0 to R - 1."""
    R, D = x.shape[1:]
    angles = torch.arange(R)[:, None] * THETA ** (-torch.arange(0, D, 2) / D)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Run:
    """A head over KV of its own, of one text; `step` computes the next rows of it."""

    def __init__(self, head, make=None, max_rows=64):
        self.head, self.table, self.length = head, [3, 0, 4, 1, 2, 5], 0
        with torch.inference_mode():
            self.kv = empty_kv(head, len(self.table), 16)
            self.program = (make or head.ops.program)(head, self.kv, max_rows, max_rows)

    def step(self, features, ids):
        """Logits and features of the next draft step."""
        start, self.length = self.length, self.length + len(ids)
        rows = causal_rows(self.table, start, self.length, 16)
        with torch.inference_mode():
            features = self.head.ops.place(features)
            out = self.program.run(rows, ids, torch.arange(len(ids)), residual=features)
        return out.logits.clone().cpu(), out.residual.clone().cpu()


def same_kv(head, features, ids, size):
    """Whether writing alone gives the KV that the forward gives, and more rows can follow it."""
    whole, part = Run(head), Run(head)
    want, _ = whole.step(features, ids)
    with torch.inference_mode():
        rows = causal_rows(part.table, 0, size, 16)
        plan = head.plan(rows, part.kv, [ids[:size]])
        head.write(features[:size].clone(), part.kv, plan)
    part.length = size
    got, _ = part.step(features[size:], ids[size:])
    torch.testing.assert_close(got, want[size:], rtol=1e-4, atol=1e-4)
    pairs = [(a, b) for a, b in zip(part.kv.layers, whole.kv.layers, strict=True)]
    return all(
        torch.allclose(x, y, rtol=1e-4, atol=1e-4, equal_nan=True)
        for one, other in pairs
        for x, y in zip(one.parts, other.parts, strict=True)
    )


def single_rows(head, features, ids, which):
    """Logits and features of a step of requests that have one row each, after five random ones."""
    n, which = len(which), list(which)
    with torch.inference_mode():
        kv = empty_kv(head, 64, 16)
        for x in (x for layer in kv.layers for x in layer.parts):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))
        each, blocks = torch.arange(n + 1, dtype=torch.int32), torch.tensor(which)
        six, no_mask = torch.full((n,), 6, dtype=torch.int32), torch.zeros(n, dtype=torch.int64)
        rows = Rows(each, each, blocks.int(), six, six - 1, blocks * 16 + 5, six, no_mask)
        program = head.ops.program(head, kv, n, n)
        out = program.run(rows, ids[which], torch.arange(n), residual=features[which])
    return out.logits.clone(), out.residual.clone()
