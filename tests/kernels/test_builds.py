"""The op tests find a broken op of the build for GPUs, and their copies change nothing."""

from functools import wraps

import pytest
import torch

from specserve_kernels import KVLayer
from tests.kernels import (
    test_adapters,
    test_attention,
    test_experts,
    test_layers,
    test_logprobs,
    test_quantize,
    test_ranks,
    test_recurrent,
    test_sampling,
    test_streams,
)
from tests.kernels.builds import DEVICE, ON_GPU, cuda, placed
from tests.kernels.placed import OPS, Placed

FP32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
CURVES = (test_layers.test_curves_bend_in_place,)
COPIES = test_layers.test_embedding_and_row_selection_copy_whole_rows, FP32
GATHERED = test_ranks.test_columns_are_gathered_in_the_order_of_ranks, False
PASSED = (test_ranks.test_a_tensor_goes_from_rank_to_rank,)
CHECKS = {  # op -> a test of it, and the arguments after the build
    "activate": (test_layers.test_an_activation_bends_in_place,
        *test_layers.ACTIVATIONS["relu2"], FP32),
    "adapted": (test_adapters.test_a_rows_adapter_is_as_if_it_were_merged_into_the_weight,
        FP32, "plain"),
    "add_gated": (test_experts.test_rows_are_added_with_a_gate_for_each, FP32),
    "all_gather": GATHERED,
    "attention": (test_attention.test_query_heads_share_kv_heads_in_order,),
    "causal_conv": (test_recurrent.test_a_build_computes_what_the_definition_does, "silu", FP32),
    "copy_blocks": (test_layers.test_blocks_are_copied_whole_and_in_order,),
    "delta_rule": (test_recurrent.test_a_build_computes_what_the_definition_does, "delta", FP32),
    "embed": COPIES,
    "experts": (test_experts.test_experts_may_have_all_rows_or_none, 16, None),
    "gate": (test_recurrent.test_a_gate_multiplies_in_place,),
    "gate_columns": (test_layers.test_columns_of_another_tensor_are_gated_in_place, "silu", FP32),
    "layer_norm": (test_layers.test_layer_norm,
        *test_layers.LAYER_NORMS["the mean is taken off"]),
    "linear": (test_layers.test_linear_is_torchs, 17, 4096, True, FP32),
    "linear_add": (test_layers.test_linear_add_writes_into_the_residual, None),
    "linear_gated": (test_layers.test_a_gated_map_multiplies_halves_of_odd_width, FP32),
    "lm_head": (test_layers.test_logits_are_not_rounded, BF16),
    "logprobs": (test_logprobs.test_a_model_says, *test_logprobs.SAID["the likeliest"]),
    "move_kv": (test_attention.test_moves_copy_tokens_in_every_layer_in_order,
        *test_attention.MOVES["a path closes up"], FP32),
    "put_columns": (test_ranks.test_columns_may_be_replaced,),
    "quantize": (test_quantize.test_of_8_bits_a_row_has_one_scale_whatever_its_width,),
    "receive": PASSED,
    "replay": (test_recurrent.test_a_replay_of_no_tokens_only_copies_the_state, "gated"),
    "rms_norm": (test_layers.test_rms_norm, *test_layers.NORMS["mean, not sum"]),
    "rms_norm_add": (test_layers.test_a_norm_is_added_to_the_residual_stream_in_place,),
    "rms_norm_columns": (test_layers.test_a_norm_of_columns_leaves_the_others_as_they_are,),
    "rope_write_kv": (test_attention.test_queries_and_keys_are_rotated_and_values_are_not,
        test_attention.ROTATIONS["no angle"]),
    "route": (test_experts.test_a_row_has_its_k_likeliest_experts, FP32,
        *test_experts.ROUTES["the largest first"]),
    "sample": (test_sampling.test_the_choice_is, *test_sampling.CHOICES["T = 0 is argmax"]),
    "scale": CURVES,
    "selective_state_update": (test_recurrent.test_a_build_computes_what_the_definition_does,
        "mamba", FP32),
    "add_matched": (test_streams.test_a_stream_of_the_size_of_the_first_is_added,),
    "correct_streams": (test_streams.test_streams_are_corrected_by_the_difference_to_the_first,),
    "mix_streams": (test_streams.test_streams_are_mixed,),
    "sparse_gated": (test_streams.test_only_gates_above_the_cutoff_are_active,
        "silu", torch.nn.functional.silu),
    "spread_streams": (test_streams.test_streams_get_the_size_of_the_first_one,),
    "weigh_columns": (test_streams.test_columns_are_weighed,),
    "send": PASSED,
    "soft_cap": CURVES,
    "take_columns": GATHERED,
    "take_rows": COPIES,
    "top_children": (test_sampling.test_the_likeliest_children_are,
        *next(iter(test_sampling.CHILDREN.values()))),
    "weigh_rows": (test_experts.test_rows_are_weighed_by_their_largest_logit, FP32),
}  # fmt: skip
UNCHECKED = {"adapter_slots", "allocate", "copy", "place", "plan", "prepack", "prepack_experts"}


class Broken:
    """The build for GPUs with one wrong op."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, name):
        op = getattr(cuda, name)
        return spoilt(op) if name == self.name else op


def spoilt(op):
    """Its first tensor is wrong; an op without a result does nothing."""

    @wraps(op)
    def spoilt_op(*args, **kwargs):
        if op.__name__ in ("copy_blocks", "move_kv", "replay"):
            return None
        result = op(*args, **kwargs)
        is_tensor = isinstance(result, torch.Tensor)
        tensor = result if is_tensor else next(x for x in result if isinstance(x, torch.Tensor))
        tensor.add_(1)
        return result

    return spoilt_op


@ON_GPU
@pytest.mark.parametrize("name", CHECKS)
def test_a_broken_op_fails_its_test(name):
    check, *args = CHECKS[name]
    check(placed, *args)
    with pytest.raises(AssertionError):
        check(Placed(Broken(name), DEVICE), *args)


def test_every_op_has_a_test():
    assert CHECKS.keys() | UNCHECKED == OPS


class InPlace:
    """Ops on the tensors that they get."""

    def scale(self, x, factor):
        self.seen = x
        return x.mul_(factor)

    def attention(self, kv, sinks):
        kv.k.add_(1)
        kv.v.add_(sinks.sum())
        return kv.v[1:]


def test_an_op_writes_into_the_tensors_of_its_test():
    ops = InPlace()
    arena = torch.arange(24.0).view(6, 4)
    x = arena[1::2, 1:]
    assert Placed(ops, CPU).scale(x, 2.0) is x
    assert ops.seen.data_ptr() != x.data_ptr() and ops.seen.stride() == x.stride()
    want = torch.arange(24.0).view(6, 4)
    want[1::2, 1:] *= 2
    assert torch.equal(arena, want)


def test_views_of_one_storage_stay_views_of_one_storage():
    arena, sinks = torch.zeros(2, 3, dtype=BF16), torch.ones(4)
    got = Placed(InPlace(), CPU).attention(KVLayer(arena[0], arena[1]), sinks)
    assert arena.tolist() == [[1] * 3, [4] * 3] and sinks.tolist() == [1] * 4
    assert got.data_ptr() == arena[1, 1:].data_ptr()
