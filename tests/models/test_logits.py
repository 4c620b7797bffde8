"""Logits are float32 in every kind of model: rounded to bfloat16, many of them would be equal."""

import pytest
import torch

from specserve.models.loader import load_decoder
from specserve.models.weight import Rounding
from tests.checkpoints import tiny_checkpoint
from tests.kernels.builds import MODEL_BUILDS
from tests.models import test_eagle_head, test_mtp_head
from tests.models.transformers_models import foreign_checkpoint, load_foreign


def native(folder, ops, **changes):
    return load_decoder(tiny_checkpoint(folder, **changes), "bf16", ops)


def of_codes(folder, ops):
    rounding = Rounding.named("w8", "w8")
    return load_decoder(tiny_checkpoint(folder), "bf16", ops, rounding=rounding)


def capped(folder, ops):
    return native(folder, ops, family="gemma2", final_logit_softcapping=5.0)


def by_transformers(folder, ops, model_type="olmo"):
    return load_foreign(foreign_checkpoint(folder, model_type=model_type), "bf16", ops)


def with_a_bias(folder, ops):
    return by_transformers(folder, ops, "phi")


def eagle(folder, ops):
    return test_eagle_head.load(folder, ops, "bf16")[0]


def mtp(folder, ops):
    return test_mtp_head.load(folder, ops, "bf16")[0]


KINDS = [native, of_codes, capped, by_transformers, with_a_bias, eagle, mtp]


@MODEL_BUILDS
@pytest.mark.parametrize("load", KINDS)
@torch.inference_mode()
def test_logits_are_not_rounded_to_the_dtype_of_the_rows(load, ops, tmp_path):
    model = load(tmp_path, ops)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, model.config.hidden_size, generator=generator).bfloat16()
    logits = model.logits(ops.place(rows), ops.place(torch.arange(3)))
    assert logits.dtype == torch.float32 and model.dtype == torch.bfloat16
    assert (logits != logits.bfloat16()).float().mean() > 0.9
