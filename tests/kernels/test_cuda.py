"""The build for the GPU without one: packing, Triton's interpreter, its compiler, refusals."""

import random
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specserve_kernels import DeviceError, QKNorm, Rotary, load, reference
from specserve_kernels.cuda import attention, paged
from specserve_kernels.cuda.masks import Sight, kv_lengths, pack, sight
from specserve_kernels.cuda.ops import CudaOps
from specserve_kernels.cuda.staging import Staging
from tests.kernels.builds import interpreted
from tests.kernels.fake_flashinfer import BatchPrefillWithPagedKVCacheWrapper
from tests.kernels.random_steps import (
    Req,
    World,
    queries,
    random_reqs,
    random_tensor,
    random_tree,
    row_errors,
)

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # the interpreter cuts bfloat16 off
without_gpu = pytest.mark.skipif(interpreted is None, reason="Triton compiles for the GPU here")
WINDOWS = [None, 1000, 40, 31, 5, 1]


@pytest.fixture(autouse=True)
def poisoned():
    """What an op has not written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def trees(rng, longest=90):
    return [
        Req(rng.randrange(longest), parents=random_tree(rng, size))
        for size in (0, 1, rng.randint(2, 20), rng.randint(21, 62), 63)
    ]


def seen_slots(req, window):
    """For every row, what it sees, by the tree itself."""
    return [slots if window is None else slots[-window:] for slots in req.visible()]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 16, 20, 64])
@pytest.mark.parametrize("seed", range(4))
def test_the_packed_mask_is_packbits_of_what_each_row_sees(seed, block_size, window):
    reqs = trees(random.Random(seed))
    rows = World(reqs, block_size).rows()
    lengths = kv_lengths(rows, block_size)
    packed, indptr = pack(rows.qo_indptr.diff().numpy(), lengths, sight(rows, window))
    assert lengths.tolist() == [req.end for req in reqs]
    for b, req in enumerate(reqs):
        want = np.zeros((len(req.visible()), req.end), dtype=bool)
        for row, slots in enumerate(seen_slots(req, window)):
            want[row, slots] = True
        got = packed[indptr[b] : indptr[b + 1]]
        assert np.array_equal(got, np.packbits(want, bitorder="little"))


def test_the_packed_mask_of_two_small_trees_by_hand():
    """Three rows over 4 slots and two over 5: a segment begins with a byte, its rows do not."""
    ones = np.zeros(5, dtype=np.int64)
    seen = Sight(ones, np.array([1, 1, 1, 3, 3]), np.array([1, 3, 5, 1, 3], dtype=np.uint64))
    packed, indptr = pack(np.array([3, 2]), np.array([4, 5]), seen)
    rows = ["1100 1110", "1101 0000", "11110 111", "11 000000"]  # slot 0 is the lowest bit
    assert packed.tolist() == [int(bits.replace(" ", "")[::-1], 2) for bits in rows]
    assert indptr.tolist() == [0, 2, 4]


@pytest.mark.parametrize("window", WINDOWS)
def test_sight_is_what_a_row_sees(window):
    reqs = random_reqs(random.Random(3), 120)
    rows = World(reqs).rows()
    first, prefix, mask = sight(rows, window)
    every = [slots for req in reqs for slots in seen_slots(req, window)]
    for row, want in enumerate(every):
        nodes = [int(prefix[row]) + j for j in range(64) if int(mask[row]) >> j & 1]
        assert [*range(first[row], prefix[row]), *nodes] == want


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("H", "Hk", "D"), [(4, 4, 64), (8, 1, 128), (14, 2, 64), (4, 2, 256)])
@pytest.mark.parametrize("block_size", [1, 16, 20, 64])
def test_flashinfer_is_asked_for_what_rows_see(H, Hk, D, block_size, window):
    ops = interpreted
    if ops is None:
        pytest.skip("the fake one computes on the CPU")
    world = World(random_reqs(random.Random(D)), block_size, H, Hk, D, torch.bfloat16).filled()
    assert ops.flashinfer.fits(world.kv)
    q = queries(world, len(world.rows().positions))
    got, want = (world.attend(build, q, window) for build in (ops, reference))
    assert row_errors(got, want).max() < 6e-3


@without_gpu
def test_layers_of_several_windows_share_a_plan():
    world = World(random_reqs(random.Random(1)), 16, 4, 2, 64, torch.bfloat16).filled()
    q, windows = queries(world, len(world.rows().positions)), [None, 5, 70]
    plan = interpreted.plan(world.rows(), world.kv, 4, windows)
    for window in [5, None, 70, 5]:
        got = interpreted.attention(q, world.kv.layers[0], plan, 0.125, window)
        want = world.attend(reference, q, window)
        assert row_errors(got, want).max() < 6e-3


@without_gpu
@pytest.mark.parametrize(("H", "D"), [(4, 64), (4, 80)], ids=["FlashInfer", "Triton"])
@pytest.mark.parametrize("kind", ["causal", "tree"])
def test_a_step_may_be_all_causal_or_all_trees(kind, H, D):
    rng = random.Random(2)
    reqs = trees(rng, 40)[:3] if kind == "tree" else [Req(0, 5), Req(33, 1), Req(16, 16)]
    world = World(reqs, 16, H, 2, D, torch.bfloat16).filled()
    q = queries(world, len(world.rows().positions))
    got, want = (world.attend(build, q) for build in (interpreted, reference))
    assert row_errors(got, want).max() < TOLERANCE[torch.bfloat16]


def test_a_tree_before_causal_rows_is_a_mistake_of_ours():
    rows = World([Req(3, parents=[0]), Req(2, 1)]).rows()
    with pytest.raises(AssertionError, match="without a mask comes after one with"):
        attention.num_causal(rows)


SHAPES = [  # heads, KV heads, head size, block size, window, dtype: what FlashInfer has not
    (4, 2, 16, 16, None, torch.float32),
    (7, 1, 80, 17, 40, torch.float32),
    (4, 4, 80, 1, None, torch.bfloat16),
    (16, 2, 96, 64, 5, torch.bfloat16),
    (2, 1, 128, 20, 31, torch.float32),
    (6, 2, 20, 16, 1, torch.bfloat16),
]


@without_gpu
@pytest.mark.parametrize(("H", "Hk", "D", "block_size", "window", "dtype"), SHAPES)
def test_triton_attends_as_the_reference(H, Hk, D, block_size, window, dtype):
    world = World(random_reqs(random.Random(D), 100), block_size, H, Hk, D, dtype).filled()
    assert not interpreted.flashinfer.fits(world.kv)
    q = queries(world, len(world.rows().positions))
    got, want = (world.attend(build, q, window) for build in (interpreted, reference))
    assert row_errors(got, want).max() < TOLERANCE[dtype]


@without_gpu
@pytest.mark.parametrize("window", [None, 600, 100])
def test_triton_merges_the_pieces_of_a_long_context(window):
    reqs = [Req(1100, 3), Req(30, 1), Req(1531, parents=random_tree(random.Random(4), 11))]
    world = World(reqs, 16, 2, 1, 16).filled()
    tiles = paged.deal(world.rows(), sight(world.rows(), window), 2, 1)
    assert tiles.pieces == 4
    q = queries(world, 16)
    got, want = (world.attend(build, q, window) for build in (interpreted, reference))
    assert row_errors(got, want).max() < 1e-5


def test_tiles_cover_every_row_once_and_all_that_it_sees():
    reqs = random_reqs(random.Random(8), 400)
    rows = World(reqs).rows()
    for window in WINDOWS:
        seen = sight(rows, window)
        for heads, kv_heads in ((1, 1), (7, 1), (32, 8), (64, 1)):
            tiles = paged.deal(rows, seen, heads, kv_heads)
            covered = []
            for request, row0, num_rows, begin, end in tiles.table.tolist():
                covered += range(row0, row0 + num_rows)
                assert num_rows <= tiles.rows
                assert rows.qo_indptr[request] <= row0 < rows.qo_indptr[request + 1]
                some = slice(row0, row0 + num_rows)
                most = [
                    p + int(m).bit_length()
                    for p, m in zip(*(x[some] for x in seen[1:]), strict=True)
                ]
                assert (begin, end) == (min(seen.first[some]), max(most))
                assert end <= tiles.pieces * tiles.size
            assert covered == [*range(len(rows.positions))]


@without_gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 16, 150, 853, 4097])
def test_triton_computes_as_the_reference(width, dtype):
    x, y = (3 * random_tensor(3, width, dtype=dtype, seed=s) for s in (0, 1))
    weight, residual = random_tensor(width, dtype=dtype, seed=2), y.clone()
    both = torch.cat((x, y), dim=1)
    pairs = [
        (interpreted.silu_mul(both), reference.silu_mul(both)),
        (interpreted.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)),
        (
            interpreted.add_rms_norm(x, residual, weight, 1e-6),
            reference.add_rms_norm(x, y, weight, 1e-6),
        ),
        (residual, y),
    ]
    for got, want in pairs:
        assert got.dtype == dtype
        assert (row_errors(got, want) < TOLERANCE[dtype]).all()


@without_gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize(("H", "Hk", "D"), [(4, 2, 16), (7, 1, 20), (9, 3, 80), (2, 1, 128)])
def test_triton_rotates_and_writes_as_the_reference_and_only_its_slots(H, Hk, D, has_norm, dtype):
    reqs = [Req(0, 4), Req(60, 1), Req(30, parents=[0, 0, 2])]
    angle = torch.outer(torch.arange(100.0), random_tensor(D // 2))
    rotary = Rotary(angle.cos(), angle.sin())
    norm = QKNorm(*(random_tensor(D, dtype=dtype, seed=s) for s in (1, 2)), 1e-6)
    worlds = [World(reqs, 17, H, Hk, D, dtype, num_layers=2) for _ in range(2)]
    qkv = random_tensor(9, (H + 2 * Hk) * D, dtype=dtype)
    q = []
    for ops, world in zip((interpreted, reference), worlds, strict=True):
        plan = ops.plan(world.rows(), world.kv, H)
        layer = world.kv.layers[1]
        q.append(ops.rope_write_kv(qkv, rotary, norm if has_norm else None, layer, plan))
    slots = worlds[0].rows().slots
    (k, v), (want_k, want_v) = (
        [x.reshape(-1, Hk, D)[slots] for x in (w.kv.layers[1].k, w.kv.layers[1].v)] for w in worlds
    )
    assert row_errors(q[0], q[1]).max() < TOLERANCE[dtype]
    assert row_errors(k, want_k).max() < TOLERANCE[dtype]
    assert torch.equal(v, want_v)
    assert torch.equal(worlds[0].arena.isnan(), worlds[1].arena.isnan())


@without_gpu
def test_wide_tokens_are_moved_whole():
    worlds = [World([Req(40, 1)], 17, 8, 5, 128, torch.bfloat16, num_layers=2) for _ in range(2)]
    for ops, world in zip((interpreted, reference), worlds, strict=True):
        world.arena.copy_(random_tensor(*world.arena.shape))
        at = world.slots(0, 41)
        ops.move_kv(world.kv, at[[39, 40, 30]], at[[17, 18, 39]])
    assert torch.equal(worlds[0].arena, worlds[1].arena)


def test_an_upload_brings_every_tensor_as_it_was_in_one_copy():
    staging = Staging(CPU)
    for seed in range(6):  # more than there are buffers
        given = [
            random_tensor(5, seed=seed),
            torch.arange(seed, dtype=torch.int32),
            torch.tensor([[seed, 2**60]]),
            torch.arange(3, dtype=torch.uint8),
            random_tensor(100 * seed, 7, dtype=torch.bfloat16),
        ]
        got = staging.upload(given)
        assert staging.num_uploads == seed + 1
        for x, want in zip(got, given, strict=True):
            assert (x.dtype, x.shape) == (want.dtype, want.shape)
            assert torch.equal(x, want)
            assert x.data_ptr() % 16 == 0 or x.numel() == 0


def test_what_was_uploaded_in_inference_mode_is_no_hindrance_outside():
    staging = Staging(CPU)
    with torch.inference_mode():
        staging.upload([torch.ones(9)])
    for n in (9, 1000):
        (got,) = staging.upload([torch.arange(n)])
        assert torch.equal(got, torch.arange(n))


@without_gpu
@pytest.mark.parametrize("D", [64, 80], ids=["FlashInfer", "Triton"])
def test_a_plan_takes_one_upload(D):
    world = World(random_reqs(random.Random(5)), 16, 4, 2, D, torch.bfloat16)
    also = [torch.arange(9), torch.ones(4)]
    before = interpreted.staging.num_uploads
    plan = interpreted.plan(world.rows(), world.kv, 4, [None, 7], also)
    assert interpreted.staging.num_uploads == before + 1
    assert all(torch.equal(x, y) for x, y in zip(plan.also, also, strict=True))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_one_clear_error():
    with pytest.raises(
        DeviceError, match=r"^this torch \(2.* is built without CUDA: install a build"
    ):
        load("cuda")


def test_a_machine_without_a_gpu_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match=r"^torch sees no NVIDIA GPU: check nvidia-smi"):
        load("cuda")


def test_a_gpu_that_is_not_there_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"^there are 2 GPUs, counted from 0"):
        load("cuda:2")


LOAD_WITHOUT = """
import sys, torch
sys.modules[{missing!r}] = None
torch.version.cuda = "13.0"
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda index: None
from specserve_kernels import DeviceError, load
try:
    load("cuda")
except DeviceError as e:
    print(e)
"""


@pytest.mark.parametrize(("missing", "name"), [("flashinfer", "FlashInfer"), ("triton", "Triton")])
def test_a_missing_library_is_one_clear_error(missing, name):
    code = LOAD_WITHOUT.format(missing=missing)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(
        rf"{name} cannot be imported \(.*{missing}.*\): pip install 'specserve\[gpu\]'\n",
        done.stdout,
    )


def planned_by(complaint):
    """A plan by a FlashInfer that complains."""

    class Broken:
        class BatchPrefillWithPagedKVCacheWrapper:
            def __init__(self, *args, **kwargs):
                pass

            def plan(self, *args, **kwargs):
                raise complaint

    world = World([Req(3, 1)], head_dim=64, dtype=torch.bfloat16)
    flashinfer = attention.FlashInfer(CPU, Broken)
    flashinfer.plan(world.rows(), world.rows().indices, world.kv, 4, [None], {})


COMPLAINTS = {  # what FlashInfer says -> what is passed on
    "Could not find nvcc\nin any of these places": "Could not find nvcc",
    "Ninja build failed.\nld: cannot find -lcuda\nstopped": "ld: cannot find -lcuda",
    "": "",
}


@pytest.mark.parametrize(("said", "shown"), COMPLAINTS.items())
def test_flashinfer_that_cannot_compile_says_what_it_takes(said, shown):
    with pytest.raises(DeviceError, match=rf"\({shown}\): .* takes nvcc and ninja$"):
        planned_by(RuntimeError(said))


@without_gpu
def test_triton_attends_where_flashinfer_cannot_compile(caplog):
    class Broken(BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args, **kwargs):
            raise RuntimeError("Could not find nvcc")

    ops = CudaOps(CPU, SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Broken))
    world = World([Req(3, 1), Req(4, parents=[0, 0])], 16, 4, 2, 64, torch.bfloat16).filled()
    for _ in range(2):
        got, want = (world.attend(build, queries(world, 4)) for build in (ops, reference))
        assert row_errors(got, want).max() < TOLERANCE[torch.bfloat16]
    (line,) = caplog.messages
    assert "takes nvcc and ninja. Triton attends instead" in line


def test_flashinfer_out_of_memory_is_out_of_memory():
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        planned_by(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load("auto") is load("cpu")


def test_every_kernel_compiles_for_a_gpu():
    """Triton's compiler needs no GPU; a process of its own, as the interpreter is per process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_gpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
