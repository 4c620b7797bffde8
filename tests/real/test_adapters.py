"""A random LoRA adapter of SmolLM2, against peft on the dequantized modules."""

import pytest
import torch
from peft import PeftModel

from specserve import SamplingParams
from tests.adapters import write_adapter

# peft asks transformers for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
SCALE = 0.02  # changes the text, and leaves a language model


@pytest.fixture(scope="module")
def adapter(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters") / "random"
    return write_adapter(folder, models.smollm2_folder, seed=5, rank=8, scale=SCALE)


def of_peft(model, adapter, ids):
    """Log-probabilities after each token."""
    adapted = PeftModel.from_pretrained(model, adapter).eval()
    try:
        with torch.inference_mode():
            return adapted(torch.tensor([ids])).logits[0].log_softmax(1)
    finally:
        adapted.unload()


def test_logprobs_of_a_prompt_are_those_of_peft(load, adapter, smollm2_of_transformers, problems):
    llm = load(dtype="float32", lora_modules={"random": adapter})
    ids = llm.tokenizer.encode(problems[0]["prompt"])[:60]
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=3)
    base, output = llm.generate([ids, ids], params, lora=[None, "random"])
    text = [*ids, *output.token_ids]
    want = of_peft(smollm2_of_transformers, adapter, text)
    for position, told in enumerate(output.prompt_logprobs[1:]):
        for token, logprob in told.items():
            assert logprob.logprob == pytest.approx(want[position, token].item(), abs=2e-3)
    assert want[len(ids) - 1 : -1].argmax(1).tolist() == output.token_ids
    first = [told[ids[i + 1]].logprob for i, told in enumerate(base.prompt_logprobs[1:])]
    adapted = [told[ids[i + 1]].logprob for i, told in enumerate(output.prompt_logprobs[1:])]
    assert max(abs(a - b) for a, b in zip(first, adapted, strict=True)) > 0.1
