"""The parts of a model, in several ranks, compute the bits that one process computes."""

import pytest
import torch

from specserve.errors import ConfigError
from specserve.models.loader import load_decoder
from specserve.models.shard import Shard
from specserve.models.weight import AS_STORED, Rounding
from specserve_kernels import reference
from tests.checkpoints import FAMILIES, tiny_checkpoint
from tests.models.formats import quantized
from tests.models.forward import builds, causal_rows, empty_kv, prompt
from tests.models.shards import in_ranks

OPS = builds()[-1]
NARROW = {"olmo2", "olmoe"}  # cannot be cut by columns
BITS = torch.uint8


def outputs(decoder):
    """The logits and all auxiliary hidden states of three steps of a program."""
    ids, table, found = prompt(320, 40), [3, 1, 4, 2, 0], []
    with torch.inference_mode():
        kv = empty_kv(decoder, len(table), 16)
        layers = range(decoder.config.num_layers)
        program = decoder.program(kv, 40, 8, aux_layer_ids=layers)
        for start, end in [(0, 30), (30, 31), (31, 40)]:
            read = torch.arange(max(0, end - start - 8), end - start)
            run = program.run(causal_rows(table, start, end, 16), ids[start:end], read)
            aux = [run.aux_hidden_states[i] for i in sorted(run.aux_hidden_states)]
            found += [x.clone() for x in (run.logits, *aux)]
            found.append(program.logits(read[:1]).clone())
    return found


def assert_same(folder, tensor, pipeline, dtype="bf16", rounding=AS_STORED, **given):
    expected = outputs(load_decoder(folder, dtype, OPS, 288, None, rounding))
    found = in_ranks(folder, OPS, dtype, tensor, pipeline, outputs, rounding, **given)[0]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.view(BITS), other.view(BITS))


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_the_bits_of_one_process(family, tmp_path):
    tensor = 1 if family in NARROW else 2
    assert_same(tiny_checkpoint(tmp_path, family), tensor, pipeline=2)


@pytest.mark.parametrize(("tensor", "pipeline"), [(4, 1), (3, 1), (1, 3), (2, 3)])
def test_ranks_may_have_unequal_parts(tensor, pipeline, tmp_path):
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 200}
    if tensor == 4:  # two ranks hold each KV head
        shape |= {"num_attention_heads": 6, "num_key_value_heads": 2}
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=4, **shape)
    assert_same(folder, tensor, pipeline)


def test_ranks_of_several_hosts_use_only_sockets(tmp_path):
    assert_same(tiny_checkpoint(tmp_path), 2, 2, shares_memory=False)


@pytest.mark.parametrize("layers", ["w4", "w8", "w8a8"])
def test_maps_may_be_quantized_at_loading(layers, tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3_moe")
    assert_same(folder, 2, 1, rounding=Rounding.named(layers, "w8"))


@pytest.mark.parametrize("form", ["gptq-v1-asym", "awq", "compressed-w8a8", "fp8-block"])
def test_maps_may_be_stored_quantized(form, tmp_path):
    assert_same(quantized(tmp_path, form), 2, 1)


def test_the_reference_ops_exchange_the_same(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen2_moe")
    expected = outputs(load_decoder(folder, "fp32", reference, 288))
    found = in_ranks(folder, reference, "fp32", 2, 2, outputs)[0]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


REFUSED = {
    "more ranks than heads": ({}, Shard(0, 8), "at most 2, or to a multiple of 2 up to 4"),
    "no multiple of the KV heads": ({}, Shard(0, 3), "3 does not fit 4 attention heads"),
    "more stages than layers": ({}, Shard(0, 1, 3), "the model's 2 layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_cut_are_refused(case, tmp_path):
    fields, shard, words = REFUSED[case]
    folder = tiny_checkpoint(tmp_path, **fields)
    with pytest.raises(ConfigError, match=words):
        load_decoder(folder, "fp32", OPS, 288, shard=shard)


def test_norms_of_whole_queries_are_refused(tmp_path):
    folder = tiny_checkpoint(tmp_path, "olmo2")
    with pytest.raises(ConfigError, match=r"Use parallel\.pipeline instead"):
        load_decoder(folder, "fp32", OPS, 288, shard=Shard(0, 2))
