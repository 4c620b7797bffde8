"""An EAGLE-3 head as a module of torch: one layer of Llama's kind.

It reads the embedding of a token and a feature of the token before.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.models.decoder_config import DecoderConfig
from specserve.models.eagle_config import ARCHITECTURES, AUX_LAYER_IDS
from specserve_bench.demo.training_config import HeadConfig

KV = list[tuple[Tensor, Tensor]]  # keys and values [B, Hk, L, D] of each draft step


class HeadShape(NamedTuple):
    hidden: int  # the target's, too, whose embedding the head has
    vocab_size: int  # the target's
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    eps: float
    theta: float
    max_positions: int


def shape_like(
    target: DecoderConfig, aux_layer_ids: tuple[int, ...], config: HeadConfig
) -> HeadShape:
    """A layer as wide as the target's are."""
    return HeadShape(
        hidden=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        aux_layer_ids=aux_layer_ids,
        heads=target.num_heads,
        kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        mlp=config.mlp or target.intermediate_size,
        eps=target.norm_eps,
        theta=target.rope_parameters.theta,
        max_positions=target.max_positions,
    )


class Head(nn.Module):
    """Its parameters have the names of SpecForge's files."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = linear(len(shape.aux_layer_ids) * shape.hidden, shape.hidden)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.lm_head = linear(shape.hidden, shape.draft_vocab_size)

    def forward(self, aux_hidden_states: Tensor, embedded: Tensor, num_steps: int) -> list[Tensor]:
        """The features that each draft step passes to the next one.

        aux_hidden_states  [B, L, n * hidden]   row i: the target model's, of token i
        embedded           [B, L, hidden]       row i: token i + 1
        ->                 [B, L, hidden] each  row i of step j predicts token i + 2

        The feature of row i in step j is the output of row i - 1 in step j - 1. Rows below j have
        no feature, and their outputs are meaningless.
        """
        features, rows, past = self.fc(aux_hidden_states), list[Tensor](), KV()
        table = rotary(self.shape, aux_hidden_states.shape[1], aux_hidden_states.device)
        for _ in range(num_steps):
            rows.append(self.midlayer(features, embedded, table, past))
            features = lowered(rows[-1], 1)
        return rows

    def logits(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.lm_head(self.norm(rows))
        return scores


class Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, embedded: Tensor, table: Tensor, past: KV) -> Tensor:
        read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], dim=-1)
        x = x + self.self_attn(read, table, past)
        sum_: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return sum_


class MLP(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.mlp)
        self.up_proj = linear(shape.hidden, shape.mlp)
        self.down_proj = linear(shape.mlp, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Attention(nn.Module):
    """Adds its keys and values to those of the draft steps before."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = linear(2 * shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = linear(2 * shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = linear(2 * shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = linear(shape.heads * shape.head_dim, shape.hidden)

    def forward(self, read: Tensor, table: Tensor, past: KV) -> Tensor:
        q, k, v = (
            project(read).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        past.append((rotated(k, table), v))
        found = attended(rotated(q, table), past).transpose(1, 2).flatten(2)
        out: Tensor = self.o_proj(found)
        return out


def attended(q: Tensor, past: KV) -> Tensor:
    """[B, H, L, D] of the last draft step's rows.

    Row i of step j sees the rows up to i - j of the first step, whose features are the target's.
    It also sees row i - j + m of each step m after it: the path on which it was drafted.
    """
    group = q.shape[1] // past[0][0].shape[1]
    (k, v), *later = [tuple(x.repeat_interleave(group, 1) for x in pair) for pair in past]
    if not later:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    length, step = q.shape[2], len(later)
    is_hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1 - step)
    scores = (q @ k.transpose(2, 3)).masked_fill(is_hidden, -torch.inf)
    pairs = [(lowered(k, step - m), lowered(v, step - m)) for m, (k, v) in enumerate(later, 1)]
    own = [(q * k).sum(-1, keepdim=True) for k, _ in pairs]
    weights = torch.cat([scores, *own], dim=-1).mul(q.shape[3] ** -0.5).softmax(-1)
    found = weights[..., :length] @ v
    for n, (_, v) in enumerate(pairs, length):
        found = found + weights[..., n, None] * v
    return found


def lowered(rows: Tensor, count: int) -> Tensor:
    """The last dimension but one shifted down, zeros above."""
    return F.pad(rows, (0, 0, count, 0))[..., : rows.shape[-2], :]


def rotary(shape: HeadShape, length: int, device: torch.device) -> Tensor:
    """Cosines and sines [2, L, D] of the positions from 0 on."""
    powers = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
    angles = torch.arange(length, device=device)[:, None] * shape.theta**-powers
    return torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2)


def rotated(x: Tensor, table: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat([-b, a], dim=-1) * table[1]


def linear(width: int, rows: int) -> nn.Linear:
    return nn.Linear(width, rows, bias=False)


def begin_head(head: Head, target: Any, vocabulary: Tensor) -> None:
    """Copies matrices of the target's last layer and of its output head if names and sizes match.
    The other weights are random.
    """
    hidden, given = head.shape.hidden, dict(target.named_parameters())
    last = f"model.layers.{target.config.num_hidden_layers - 1}."
    matrices = {name: p for name, p in head.named_parameters() if p.ndim == 2}
    with torch.no_grad():
        for name, matrix in matrices.items():
            nn.init.normal_(matrix, std=0.5 * matrix.shape[1] ** -0.5)
            own = given.get(last + name.removeprefix("midlayer."))
            # Whether the target's matrix fits into the last columns of the head's.
            if own is not None and len(own) == len(matrix) and own.shape[1] <= matrix.shape[1]:
                matrix[:, -own.shape[1] :] = own
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[vocabulary])


def round_weights(head: Head) -> None:
    """To the values that its files have."""
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()


def export_head(folder: Path, head: Head, vocabulary: Tensor) -> None:
    """In SpecForge's form, in bf16."""
    folder.mkdir(exist_ok=True)
    tensors = {name: p.detach().cpu().bfloat16() for name, p in head.named_parameters()}
    known = torch.zeros(head.shape.vocab_size, dtype=torch.bool)
    known[vocabulary] = True
    tensors |= {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": known}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    told = json.dumps(config_of(head.shape), indent=2)
    (folder / "config.json").write_text(f"{told}\n")


def config_of(shape: HeadShape) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES[0]],
        "attention_bias": False,
        "draft_vocab_size": shape.draft_vocab_size,
        "dtype": "bfloat16",
        AUX_LAYER_IDS: list(shape.aux_layer_ids),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": shape.max_positions,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "target_hidden_size": shape.hidden,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
    }
