"""Fields of config.json that change a model with recurrent layers: compared with transformers."""

import pytest
import torch

from specserve.errors import ConfigError
from specserve.models.loader import load_decoder
from specserve_kernels import reference
from tests.checkpoints import oracle, tiny_checkpoint
from tests.models.formats import change_config
from tests.models.forward import logits, prompt

NONE = 1e-30  # transformers raises time steps to it in prompts
FIELDS = [
    ("nemotron_h", {"use_bias": True, "time_step_min": NONE}),
    ("lfm2_moe", {"use_expert_bias": False}),
]


@pytest.mark.parametrize(("family", "fields"), FIELDS, ids=str)
@torch.inference_mode()
def test_logits_are_those_of_transformers(tmp_path, family, fields):
    folder, ids = tiny_checkpoint(tmp_path, family, **fields), prompt(320, 37)
    got = logits(load_decoder(folder, "fp32", reference), ids)
    want = oracle(folder)(ids[None]).logits[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max())


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_a_layer_that_config_json_does_not_name_is_refused(tmp_path, family):
    """It is no MTP layer: names of unnamed MTP layers begin with mtp."""
    kinds = {"layer_types": ["linear_attention", "full_attention"]} if family == "qwen3_5" else {}
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    change_config(folder, num_hidden_layers=2 if kinds else 1, **kinds)
    with pytest.raises(ConfigError, match=r"layers\.\d\..* is not part of the model"):
        load_decoder(folder, "fp32", reference)
