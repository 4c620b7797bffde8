"""Time steps of Mamba-2 have no limit: `time_step_min` only initializes weights for training."""

import torch

from specserve.models.loader import load_decoder
from specserve_kernels import reference
from tests.checkpoints import oracle, tiny_checkpoint
from tests.models.formats import change_config
from tests.models.forward import logits, prompt

NONE, HIGH = 1e-30, 0.9  # of time steps, most of which are smaller
KNOWN = 20  # tokens of the prompt


@torch.inference_mode()
def test_nemotron_h_ignores_time_step_min_as_transformers_does_token_by_token(tmp_path):
    """transformers raises time steps to it in prompts, but not in single tokens."""
    folder = tiny_checkpoint(tmp_path, "nemotron_h", time_step_min=NONE)
    ids, of_prompts = prompt(320, 37)[None], oracle(folder)
    change_config(folder, time_step_min=HIGH)
    of_tokens = oracle(folder)
    found = of_prompts(ids[:, :KNOWN], use_cache=True)
    want = [found.logits[0]]
    for i in range(KNOWN, ids.shape[1]):
        step = of_tokens(ids[:, i : i + 1], past_key_values=found.past_key_values, use_cache=True)
        want.append(step.logits[0])
    got = logits(load_decoder(folder, "fp32", reference), ids[0])
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-4 * got.abs().max())
    of_whole_text = of_tokens(ids).logits[0]
    assert (of_whole_text - got).abs().max() > 0.01 * got.abs().max(), "no step is that short"
