"""A random target, a draft and a head of it, all peaked enough for texts that repeat and for
guesses that are right at times.
"""

from functools import cache
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from specserve.models.mtp_head import load_mtp_head
from specserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import EOS, FAMILIES, SIZES, random_model, save_quietly, tiny_tokenizer
from tests.engine.engines import load_small
from tests.models.formats import change_config

VOCAB = SIZES["vocab_size"]
END = tiny_tokenizer().convert_tokens_to_ids(EOS)
PEAK = 2.5  # the head's weights, times those of other tiny models
CONTEXT = 0.4  # the weights that bring context in: what follows a token is mostly its own
APART = 0.1  # of the draft's weights, in standard deviations of the target's


class Pair(NamedTuple):
    model: object  # the target, as transformers runs it
    target: object
    draft: object
    head: object
    tokenizer: Tokenizer


def random_pair(folder):
    """Written to `folder` and loaded from there."""
    config = CONFIG_MAPPING["qwen3"](**SIZES | FAMILIES["qwen3"] | {"model_type": "qwen3"})
    model, draft = random_model(config, 1), random_model(config, 1)
    silent = sorted({*range(VOCAB)} - {*spoken()})
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        for weight in draft.parameters():
            weight += APART * weight.std() * torch.randn_like(weight)
        for each in (model, draft):
            for layer in each.model.layers:
                layer.self_attn.o_proj.weight *= CONTEXT
                layer.mlp.down_proj.weight *= CONTEXT
            each.lm_head.weight *= PEAK
            each.lm_head.weight[silent] *= 0.01  # hardly ever the likeliest
    for name, each in (("target", model), ("draft", draft)):
        save_quietly(each, folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    add_head(folder / "target", model)
    target, draft = (load_small(folder / name, max_len=512) for name in ("target", "draft"))
    head = load_mtp_head(folder / "target", target)
    return Pair(model, target, draft, head, load_tokenizer(folder / "target"))


def add_head(folder, model):
    """Give the target a layer for multi-token prediction: its own first, which reads embeddings and
    hardly any features.
    """
    embedding = model.get_input_embeddings().weight
    hidden = embedding.shape[1]
    tensors = {
        "mtp.fc.weight": torch.cat([torch.eye(hidden), 0.02 * torch.eye(hidden)], dim=1),
        "mtp.pre_fc_norm_embedding.weight": embedding.square().mean().sqrt().expand(hidden),
        "mtp.pre_fc_norm_hidden.weight": torch.ones(hidden),
        "mtp.norm.weight": model.model.norm.weight,
    }
    layer = model.model.layers[0].state_dict()
    tensors |= {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}
    file = folder / "model.safetensors"
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    save_file(load_file(file) | copies, file, {"format": "pt"})
    change_config(folder, mtp_num_hidden_layers=1)


@cache
def spoken():
    """The few ids of a text: most have a text of their own, and some are parts of a character."""
    tokenizer = tiny_tokenizer()
    texts = {i: tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer))}
    ascii = [i for i, text in texts.items() if text.isascii() and text.isprintable() and text]
    return sorted([*ascii[:: len(ascii) // 28], *[i for i in texts if texts[i] == "\ufffd"][::60]])
