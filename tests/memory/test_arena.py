import pytest
import torch

from specserve.memory.arena import Arena, KVLayout, block_bytes, tokens_that_fit, used_bytes
from specserve_kernels import KVCache, cpu

WIDE = [KVLayout(num_kv_heads=2, head_dim=20, dtype=torch.float32)] * 3
NARROW = [KVLayout(num_kv_heads=1, head_dim=6, dtype=torch.bfloat16)] * 2
# Layers of one model that differ in everything, as when some keep their KV in fewer bits.
MIXED = [KVLayout(1, 8, torch.bfloat16), KVLayout(2, 6, torch.float32), KVLayout(1, 16, torch.int8)]


def arena_of(num_blocks, block_bytes):
    return Arena(cpu.allocate(num_blocks * block_bytes), block_bytes)


def test_a_token_has_k_and_v_in_every_layer():
    assert used_bytes(WIDE, 4) == 3 * 2 * 4 * 2 * 20 * 4
    assert [tokens_that_fit(WIDE, size) for size in (1000, 960, 959)] == [1, 1, 0]


def test_a_layers_k_and_v_each_begin_at_a_multiple_of_16_bytes():
    assert used_bytes(NARROW, 1) == 2 * 2 * 16
    assert used_bytes(NARROW, 4) == 2 * 2 * 48
    assert tokens_that_fit(NARROW, 2 * 2 * 48) == 4
    assert used_bytes(MIXED, 3) == 2 * (48 + 144 + 48 + 16)


def test_kv_of_8_bits_has_a_scale_for_each_token_and_head():
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert used_bytes([KVLayout(8, 128, dtype)] * 2, 16) == 2 * 2 * 16 * 8 * (128 + 4)
    assert tokens_that_fit([KVLayout(8, 128, torch.int8)], 2 * 16 * 8 * 128 * 2) == 31


def test_codes_and_scales_of_a_block_keep_out_of_each_others_bytes():
    arena = arena_of(3, used_bytes(MIXED, 5))
    layers = arena.add_view("target", MIXED, 5).layers
    parts = [x for layer in layers for x in layer.parts]
    for i, part in enumerate(parts):
        part.fill_(i + 1)
    assert all((part == i + 1).all() for i, part in enumerate(parts))
    k_scale = layers[2].k_scale
    assert k_scale.shape == (3, 5, 1) and k_scale.stride()[1:] == (1, 5)
    assert [layer.k_scale is None for layer in layers] == [True, True, False]


SIZES = {  # the target, its block size, the other model -> bytes of a block
    "the target's tokens": (WIDE, 16, [], 16 * 960),
    "a small model fits in": (WIDE, 16, NARROW, 16 * 960),
    "at least a token of either model": (NARROW, 4, WIDE, 960),
}


@pytest.mark.parametrize(("target", "size", "other", "want"), SIZES.values(), ids=SIZES)
def test_a_block_holds(target, size, other, want):
    assert block_bytes(target, size, other) == want


def test_a_block_lies_as_layer_k_or_v_slot_head_dim():
    arena = arena_of(5, 4096)
    cache = arena.add_view("target", WIDE, 4)
    want = torch.randn(5, 3, 2, 4, 2, 20, generator=torch.Generator().manual_seed(0))
    for i, layer in enumerate(cache.layers):
        layer.k.copy_(want[:, i, 0])
        layer.v.copy_(want[:, i, 1])
    raw = arena.blocks
    assert torch.equal(raw[:, : 4 * 960].contiguous().view(torch.float32), want.view(5, 960))
    assert not raw[:, 4 * 960 :].any(), "written beyond the tokens of a block"


def test_layers_of_different_shapes_and_dtypes_keep_out_of_each_others_bytes():
    arena = arena_of(3, used_bytes(MIXED, 5))
    parts = [x for layer in arena.add_view("target", MIXED, 5).layers for x in (layer.k, layer.v)]
    for i, part in enumerate(parts):
        part.fill_(i + 1)
    assert all((part == i + 1).all() for i, part in enumerate(parts))
    shapes = [(3, 5, 1, 8), (3, 5, 2, 6), (3, 5, 1, 16)]
    assert [tuple(part.shape) for part in parts[::2]] == shapes
    assert [part.dtype for part in parts[::2]] == [layout.dtype for layout in MIXED]


@pytest.mark.parametrize(("layouts", "size"), [(WIDE, 4), (WIDE, 1), (NARROW, 85), (MIXED, 24)])
def test_what_one_model_writes_into_its_blocks_no_other_block_sees(layouts, size):
    arena = arena_of(6, 4096)
    arena.blocks.fill_(7)
    for layer in arena.add_view("target", layouts, size).layers:
        for part in layer.parts:
            part[[1, 4]] = 1
    touched = (arena.blocks != 7).any(1)
    assert touched.tolist() == [False, True, False, False, True, False]


def test_two_models_keep_their_tokens_in_blocks_of_their_own():
    arena = arena_of(4, 960)
    target, draft = arena.add_view("target", WIDE, 1), arena.add_view("draft", NARROW, 20)
    assert arena.views == {"target": target, "draft": draft}
    for cache, blocks, value in ((target, [0, 2], 3.0), (draft, [1, 3], 5.0)):
        for layer in cache.layers:
            layer.k[blocks] = layer.v[blocks] = value
    for cache, blocks, value in ((target, [0, 2], 3.0), (draft, [1, 3], 5.0)):
        assert all((x[blocks] == value).all() for layer in cache.layers for x in (layer.k, layer.v))


def test_layers_are_views_that_share_the_arenas_memory():
    arena = arena_of(3, 4096)
    cache = arena.add_view("target", WIDE, 4)
    assert isinstance(cache, KVCache)
    assert (len(cache.layers), cache.block_size) == (3, 4)
    for layer in cache.layers:
        assert layer.k.shape == layer.v.shape == (3, 4, 2, 20)
        assert layer.k.untyped_storage().data_ptr() == arena.blocks.data_ptr()


def test_memory_is_zero_until_it_is_touched():
    assert not arena_of(3, 4096).blocks.any()


def test_a_block_too_small_for_its_tokens_is_noticed():
    with pytest.raises(AssertionError, match="block_size does not fit"):
        arena_of(2, 960).add_view("target", WIDE, 2)
