import pytest
import torch

from specserve.memory import Arena, KVLayout
from specserve.memory.arena import block_bytes
from specserve_kernels import KVCache, cpu

WIDE = KVLayout(num_layers=3, num_kv_heads=2, head_dim=20, dtype=torch.float32)
NARROW = KVLayout(num_layers=2, num_kv_heads=1, head_dim=6, dtype=torch.bfloat16)


def arena_of(num_blocks, block_bytes):
    return Arena(cpu.allocate(num_blocks * block_bytes), block_bytes)


def test_a_token_has_k_and_v_in_every_layer():
    assert (WIDE.token_bytes, NARROW.token_bytes) == (3 * 2 * 2 * 20 * 4, 2 * 2 * 1 * 6 * 2)
    assert (WIDE.block_size(1000), WIDE.block_size(960), WIDE.block_size(959)) == (1, 1, 0)
    assert NARROW.block_size(960) == 20


SIZES = {  # the target, its block size, the other models -> bytes of a block
    "the target's tokens": (WIDE, 16, [], 16 * 960),
    "small models fit in": (WIDE, 16, [NARROW], 16 * 960),
    "at least a token of any model": (NARROW, 4, [WIDE], 960),
    "rounded up to 16 bytes": (NARROW, 3, [], 144),
    "not rounded where it fits": (NARROW, 2, [], 96),
    "by less than 16": (NARROW, 1, [], 48),
    "an odd one": (KVLayout(1, 1, 1, torch.bfloat16), 5, [], 32),
}


@pytest.mark.parametrize(("target", "size", "others", "want"), SIZES.values(), ids=SIZES)
def test_a_block_holds(target, size, others, want):
    assert block_bytes(target, size, others) == want


def test_a_block_lies_as_layer_k_or_v_slot_head_dim():
    arena = arena_of(5, 4096)
    cache = arena.view(WIDE, 4)
    want = torch.randn(5, 3, 2, 4, 2, 20, generator=torch.Generator().manual_seed(0))
    for i, layer in enumerate(cache.layers):
        layer.k.copy_(want[:, i, 0])
        layer.v.copy_(want[:, i, 1])
    raw = arena.bytes.view(5, 4096)
    assert torch.equal(raw[:, : 4 * 960].contiguous().view(torch.float32), want.view(5, 960))
    assert not raw[:, 4 * 960 :].any(), "written beyond the tokens of a block"


@pytest.mark.parametrize(("layout", "size"), [(WIDE, 4), (WIDE, 1), (NARROW, 85)], ids=str)
def test_what_one_model_writes_into_its_blocks_no_other_block_sees(layout, size):
    arena = arena_of(6, 4096)
    arena.bytes.fill_(7)
    for layer in arena.view(layout, size).layers:
        layer.k[[1, 4]] = 1.0
        layer.v[[1, 4]] = 1.0
    touched = (arena.bytes.view(6, 4096) != 7).any(1)
    assert touched.tolist() == [False, True, False, False, True, False]


def test_two_models_keep_their_tokens_in_blocks_of_their_own():
    arena = arena_of(4, 960)
    target, draft = arena.view(WIDE, 1), arena.view(NARROW, 20)
    for cache, blocks, value in ((target, [0, 2], 3.0), (draft, [1, 3], 5.0)):
        for layer in cache.layers:
            layer.k[blocks] = layer.v[blocks] = value
    for cache, blocks, value in ((target, [0, 2], 3.0), (draft, [1, 3], 5.0)):
        assert all((x[blocks] == value).all() for layer in cache.layers for x in (layer.k, layer.v))


def test_layers_are_views_that_share_the_arenas_memory():
    arena = arena_of(3, 4096)
    cache = arena.view(WIDE, 4)
    assert isinstance(cache, KVCache)
    assert (len(cache.layers), cache.block_size) == (3, 4)
    for layer in cache.layers:
        assert layer.k.shape == layer.v.shape == (3, 4, 2, 20)
        assert layer.k.untyped_storage().data_ptr() == arena.bytes.data_ptr()


def test_memory_is_zero_until_it_is_touched():
    assert not arena_of(3, 4096).bytes.any()


def test_a_block_too_small_for_its_tokens_is_noticed():
    with pytest.raises(AssertionError, match="more tokens a block than fit"):
        arena_of(2, 960).view(WIDE, 2)
