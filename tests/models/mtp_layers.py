"""Tiny targets with a layer for multi-token prediction, and what transformers makes of it."""

import json

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm
from transformers import AutoModelForCausalLM

from specserve.models.loader import load_decoder
from tests.checkpoints import tiny_checkpoint
from tests.models.formats import change_config

WEIGHTS = "model.safetensors"
STYLES = {  # name -> how the tensors of a target of two layers are named, and config.json's field
    "deepseek": {
        "layer": "model.layers.2.",
        "second": "model.layers.3.",
        "module": "model.layers.2.",
        "names": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "field": "num_nextn_predict_layers",
    },
    "qwen": {
        "layer": "mtp.layers.0.",
        "second": "mtp.layers.1.",
        "module": "mtp.",
        "names": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        "field": "mtp_num_hidden_layers",
    },
    "mimo": {
        "layer": "model.mtp_layers.0.",
        "second": "model.mtp_layers.1.",
        "module": "model.mtp_layers.0.",
        "names": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "field": "num_nextn_predict_layers",
    },
}
OWN_EMBEDDING, OWN_HEAD = (
    "model.layers.2.embed_tokens.weight",
    "model.layers.2.shared_head.head.weight",
)


def write_target(folder, style="deepseek", family="qwen3", edit=lambda tensors: None, **overrides):
    """A target whose layer for multi-token prediction is that of `folder`/donor, a whole model of
    one layer; `edit` may change its tensors.
    """
    told, shape = STYLES[style], {"tie_word_embeddings": False} | overrides
    folder.mkdir(exist_ok=True)
    target = tiny_checkpoint(folder / "target", family, **shape)
    donor = tiny_checkpoint(folder / "donor", family, seed=5, **one_layer(shape))
    tensors = mtp_tensors(told, load_file(donor / WEIGHTS))
    edit(tensors)
    save_file(load_file(target / WEIGHTS) | tensors, target / WEIGHTS, {"format": "pt"})
    change_config(target, **{told["field"]: 1})
    return tensors


def one_layer(shape):
    kinds = {key: x[-1:] for key, x in shape.items() if key == "layer_types"}
    return shape | kinds | {"num_hidden_layers": 1}


def mtp_tensors(told, donor):
    """The donor's layer and last norm under a style's names, and random ones of the join."""
    embedding_norm, feature_norm, join, norm = told["names"]
    hidden = len(donor["model.norm.weight"])
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name.replace("model.layers.0.", told["layer"]): tensor
        for name, tensor in donor.items()
        if name.startswith("model.layers.0.")
    }
    own = {
        join: 0.2 * torch.randn(hidden, 2 * hidden, generator=generator),
        embedding_norm: 1 + 0.3 * torch.randn(hidden, generator=generator),
        feature_norm: 1 + 0.3 * torch.randn(hidden, generator=generator),
        norm: donor["model.norm.weight"],
    }
    return tensors | {f"{told['module']}{name}.weight": x for name, x in own.items()}


def load_target(folder, ops, dtype="fp32"):
    return load_decoder(folder / "target", dtype, ops)


class Oracle:
    """The target's and the donor's own code, and the join in plain torch."""

    def __init__(self, folder, style, tensors):
        self.told, self.tensors, self.is_mimo = STYLES[style], tensors, style == "mimo"
        self.target, self.donor = (
            AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
            for name in ("target", "donor")
        )
        self.table = tensors.get(OWN_EMBEDDING, self.target.get_input_embeddings().weight)
        self.head = tensors.get(OWN_HEAD, self.target.lm_head.weight)
        self.fields = json.loads((folder / "target" / "config.json").read_text())

    def residual_and_feature(self, ids):
        """The target's last residual of a text, and what the head is handed of it."""
        found = []
        hook = self.target.model.norm.register_forward_pre_hook(lambda _, x: found.append(x[0][0]))
        with torch.inference_mode():
            normed = self.target.model(input_ids=ids[None]).last_hidden_state[0]
        hook.remove()
        return found[0], found[0] if self.is_mimo else normed

    @torch.inference_mode()
    def outputs(self, features, ids):
        """Logits and features of the next draft step, of rows that each see those before them."""
        names = [f"{self.told['module']}{name}.weight" for name in self.told["names"]]
        embedding_norm, feature_norm, join = (self.tensors[name] for name in names[:3])
        factor = self.fields.get("embedding_multiplier", 1)
        embedding = self.normed(self.table[ids] * factor, embedding_norm)
        both = [embedding, self.normed(features, feature_norm)]
        joined = linear(torch.cat(both[::-1] if self.is_mimo else both, dim=1), join)
        # Granite's code multiplies what comes in place of its embeddings.
        last = self.donor.model(inputs_embeds=joined[None] / factor).last_hidden_state[0]
        logits = linear(last, self.head) / self.fields.get("logits_scaling", 1)
        cap = self.fields.get("final_logit_softcapping")
        return (cap * torch.tanh(logits / cap) if cap else logits), last

    def normed(self, x, weight):
        kind = self.fields["model_type"]
        has_one = any(name in kind for name in ("gemma", "qwen3_5", "qwen3_next"))
        return rms_norm(x, weight.shape, weight + has_one, self.fields["rms_norm_eps"])
