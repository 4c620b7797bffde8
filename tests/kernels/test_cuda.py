"""The build for GPUs: packing, its kernels by the reference, its compiler, refusals."""

import itertools
import random
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specserve.memory.arena import Arena, KVLayout
from specserve_kernels import Chunks, DeviceError, QKNorm, Rotary, cpu, cuda, load, reference
from specserve_kernels.cuda import attention, gated, paged
from specserve_kernels.cuda import ops as cuda_ops
from specserve_kernels.cuda.lock import DeviceLock
from specserve_kernels.cuda.masks import Sight, kv_lengths, pack, sight
from specserve_kernels.cuda.ops import CudaOps
from specserve_kernels.cuda.staging import Staging
from tests.kernels import fake_flashinfer
from tests.kernels.builds import DEVICE, FLASHINFER, HAS_GPU, INTERPRETED, ON_GPU, placed
from tests.kernels.fake_flashinfer import BatchPrefillWithPagedKVCacheWrapper
from tests.kernels.random_steps import (
    RandomStep,
    Req,
    queries,
    random_reqs,
    random_tensor,
    random_tree,
    row_errors,
)

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # the interpreter cuts bfloat16 off
OFF_BY = 2e-2 if HAS_GPU else 6e-3  # of a row; weights are rounded to bfloat16 on a GPU
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
    rows = RandomStep(reqs, block_size).rows()
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
    rows = RandomStep(reqs).rows()
    first, prefix, mask = sight(rows, window)
    every = [slots for req in reqs for slots in seen_slots(req, window)]
    for row, want in enumerate(every):
        nodes = [int(prefix[row]) + j for j in range(64) if int(mask[row]) >> j & 1]
        assert [*range(first[row], prefix[row]), *nodes] == want


@ON_GPU
@FLASHINFER
@pytest.mark.pairs
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("H", "Hk", "D"), [(4, 4, 64), (8, 1, 128), (14, 2, 64), (4, 2, 256)])
@pytest.mark.parametrize("block_size", [1, 16, 20, 64])
def test_flashinfer_is_asked_for_what_rows_see(H, Hk, D, block_size, window):
    step = RandomStep(random_reqs(random.Random(D)), block_size, H, Hk, D, torch.bfloat16).filled()
    assert placed.flashinfer is not None, "FlashInfer is missing, or could not be compiled"
    assert placed.flashinfer.fits(step.kv, [None, 7])
    assert not placed.flashinfer.fits(step.kv, [None, Chunks(8)])
    q = queries(step, len(step.rows().positions))
    got, want = (step.attend(ops, q, window) for ops in (placed, reference))
    assert row_errors(got, want).max() < OFF_BY


@ON_GPU
def test_layers_of_several_windows_share_a_plan():
    step = RandomStep(random_reqs(random.Random(1)), 16, 4, 2, 64, torch.bfloat16).filled()
    q, windows = queries(step, len(step.rows().positions)), [None, 5, 70]
    plan = placed.plan(step.rows(), step.kv, 4, windows)
    for window in [5, None, 70, 5]:
        got = placed.attention(q, step.kv.layers[0], plan, 0.125, window)
        want = step.attend(reference, q, window)
        assert row_errors(got, want).max() < OFF_BY


@ON_GPU
@pytest.mark.parametrize(("H", "D"), [(4, 64), (4, 80)], ids=["FlashInfer", "Triton"])
@pytest.mark.parametrize("kind", ["causal", "tree"])
def test_a_step_may_be_all_causal_or_all_trees(kind, H, D):
    rng = random.Random(2)
    reqs = trees(rng, 40)[:3] if kind == "tree" else [Req(0, 5), Req(33, 1), Req(16, 16)]
    step = RandomStep(reqs, 16, H, 2, D, torch.bfloat16).filled()
    q = queries(step, len(step.rows().positions))
    got, want = (step.attend(ops, q) for ops in (placed, reference))
    assert row_errors(got, want).max() < TOLERANCE[torch.bfloat16]


def test_a_tree_before_causal_rows_is_a_mistake_of_ours():
    rows = RandomStep([Req(3, parents=[0]), Req(2, 1)]).rows()
    with pytest.raises(AssertionError, match="without a mask follows a request with"):
        attention.num_causal(rows)


SHAPES = [  # heads, KV heads, head size, block size, window, dtype: what FlashInfer has not
    (4, 2, 16, 16, None, torch.float32),
    (7, 1, 80, 17, 40, torch.float32),
    (4, 4, 80, 1, None, torch.bfloat16),
    (16, 2, 96, 64, 5, torch.bfloat16),
    (2, 1, 128, 20, 31, torch.float32),
    (6, 2, 20, 16, 1, torch.bfloat16),
]


@ON_GPU
@pytest.mark.parametrize(("H", "Hk", "D", "block_size", "window", "dtype"), SHAPES)
def test_triton_attends_as_the_reference(H, Hk, D, block_size, window, dtype):
    step = RandomStep(random_reqs(random.Random(D), 100), block_size, H, Hk, D, dtype).filled()
    assert placed.flashinfer is None or not placed.flashinfer.fits(step.kv, [None])
    q = queries(step, len(step.rows().positions))
    got, want = (step.attend(ops, q, window) for ops in (placed, reference))
    assert row_errors(got, want).max() < TOLERANCE[dtype]


@ON_GPU
@pytest.mark.parametrize("start", [40, 1100], ids=["whole", "merged"])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_triton_caps_scores_and_drains_sinks_as_the_reference(kv_dtype, start):
    reqs = [Req(start, 3), Req(30, parents=[0, 0, 2])]
    step = RandomStep(reqs, 16, 6, 2, 16, kv_dtype=kv_dtype).filled()
    q, sinks = queries(step, 7), random_tensor(6, seed=3)
    for asked in ({"soft_cap": 0.5}, {"sinks": sinks}, {"soft_cap": 0.5, "sinks": sinks}):
        got, want = (step.attend(ops, q, None, **asked) for ops in (placed, reference))
        assert row_errors(got, want).max() < 1e-5


@ON_GPU
@pytest.mark.parametrize("window", [None, 600, 100])
def test_triton_merges_the_pieces_of_a_long_context(window):
    reqs = [Req(1100, 3), Req(30, 1), Req(1531, parents=random_tree(random.Random(4), 11))]
    step = RandomStep(reqs, 16, 2, 1, 16).filled()
    work = paged.deal(step.rows(), sight(step.rows(), window), 2, 1)
    assert work.is_whole == (window == 100)
    q = queries(step, 16)
    got, want = (step.attend(ops, q, window) for ops in (placed, reference))
    assert row_errors(got, want).max() < 1e-5


@ON_GPU
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_a_row_without_a_slot_writes_no_kv(kv_dtype):
    step = RandomStep([Req(3, 5)], 16, 4, 2, 16, torch.float32, kv_dtype=kv_dtype).filled()
    rows, parts = step.rows(), step.kv.layers[0].parts
    nowhere = rows._replace(slots=torch.full_like(rows.slots, -1))
    before = [x.contiguous().view(torch.uint8).clone() for x in parts]
    plan = placed.plan(nowhere, step.kv, 4)
    rotary = Rotary(torch.ones(64, 8), torch.zeros(64, 8))
    placed.rope_write_kv(torch.randn(5, 8 * 16), rotary, None, step.kv.layers[0], plan)
    after = [x.contiguous().view(torch.uint8) for x in parts]
    assert all(map(torch.equal, after, before))


def test_bit_lengths_are_those_of_integers():
    rng = random.Random(0)
    words = [0, 1, 2, 3, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    words += [rng.getrandbits(rng.randint(1, 64)) for _ in range(200)]
    assert paged.bit_lengths(np.array(words, np.uint64)).tolist() == [w.bit_length() for w in words]


@pytest.mark.parametrize("seed", range(8))
def test_few_rows_are_divided_as_many_are(seed):
    rng = random.Random(seed)
    rows = RandomStep(random_reqs(rng, rng.choice([20, 3000]))).rows()
    for window in WINDOWS:
        qo, seen = rows.qo_indptr.numpy().astype(np.int64), sight(rows, window)
        for each, most in ((1, 1), (4, 33), (16, 264)):
            few, many = (f(qo, seen, each, most) for f in (paged.divide_few, paged.divide_many))
            for got, want in zip(few, many, strict=True):
                assert np.array_equal(got, want) and got.dtype == want.dtype


@pytest.mark.parametrize("num_rows", [None, 512])
def test_pieces_cover_all_that_every_row_sees_once(num_rows):
    reqs = random_reqs(random.Random(8), 3000)
    rows = RandomStep(reqs).rows()
    for window in WINDOWS:
        seen = sight(rows, window)
        for heads, kv_heads in ((1, 1), (7, 1), (32, 8), (64, 1)):
            work = paged.deal(rows, seen, heads, kv_heads, num_rows)
            pieces, merges = work.pieces.tolist(), work.merges.tolist()
            for row, (first, count, place) in enumerate(merges):
                mine = pieces[first : first + count]
                for request, row0, in_tile, _, _ in mine:
                    assert row0 + place == row and place < in_tile <= work.rows
                    assert rows.qo_indptr[request] <= row < rows.qo_indptr[request + 1]
                assert all(a[4] == b[3] for a, b in itertools.pairwise(mine))
                last = seen.prefix[row] + int(seen.mask[row]).bit_length()
                assert mine[0][3] <= seen.first[row] and mine[-1][4] >= last
            assert work.is_whole == (num_rows is None and all(c == 1 for _, c, _ in merges))
            assert len(pieces) == sum(dict((first, count) for first, count, _ in merges).values())
            room = (num_rows or len(merges)) + paged.num_programs(kv_heads)
            assert len(pieces) <= room


def of_rows(ops, both, x, y, weight):
    """Ops that take rows as they come."""
    return [
        ops.rms_norm(x, weight, 1e-6),
        ops.layer_norm(x, weight, 1e-3),
        ops.rms_norm_add(x, weight, 1e-6, y.clone()),
        ops.rms_norm_columns(both.clone(), x.shape[1], weight, 1e-6),
        ops.scale(x.clone(), 1.7),
        ops.soft_cap(x.clone(), 2.0),
    ]


@ON_GPU
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 16, 150, 853, 4097])
def test_triton_computes_as_the_reference(width, dtype):
    x, y = (3 * random_tensor(3, width, dtype=dtype, seed=s) for s in (0, 1))
    weight = random_tensor(width, seed=2)
    both = torch.cat((x, y), dim=1)
    products = x.float() / (1 + torch.exp(-x.float())) * y.float()
    gelu = torch.nn.functional.gelu(x.float(), approximate="tanh") * y.float()
    pairs = [
        (gated.gated(both.to(DEVICE)).cpu(), products.to(dtype)),
        (gated.gated(both.to(DEVICE), "gelu_tanh").cpu(), gelu.to(dtype)),
        *zip(*(of_rows(ops, both, x, y, weight) for ops in (placed, reference)), strict=True),
    ]
    for got, want in pairs:
        assert got.dtype == dtype
        off = (got.double() - want.double()).norm(dim=1)
        assert (off <= TOLERANCE[dtype] * want.double().norm(dim=1) + 1e-9).all()


@ON_GPU
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize(("H", "Hk", "D"), [(4, 2, 16), (7, 1, 20), (9, 3, 80), (2, 1, 128)])
def test_triton_rotates_and_writes_as_the_reference_and_only_its_slots(H, Hk, D, has_norm, dtype):
    reqs = [Req(0, 4), Req(60, 1), Req(30, parents=[0, 0, 2])]
    angle = torch.outer(torch.arange(100.0), random_tensor(D // 2))
    rotary = Rotary(angle.cos(), angle.sin())
    norm = QKNorm(*(random_tensor(D, seed=s) for s in (1, 2)), 1e-6)
    steps = [RandomStep(reqs, 17, H, Hk, D, dtype, num_layers=2) for _ in range(2)]
    qkv = random_tensor(9, (H + 2 * Hk) * D, dtype=dtype)
    q = []
    for ops, step in zip((placed, reference), steps, strict=True):
        plan = ops.plan(step.rows(), step.kv, H)
        layer = step.kv.layers[1]
        q.append(ops.rope_write_kv(qkv, rotary, norm if has_norm else None, layer, plan))
    slots = steps[0].rows().slots
    (k, v), (want_k, want_v) = (
        [x.reshape(-1, Hk, D)[slots] for x in (w.kv.layers[1].k, w.kv.layers[1].v)] for w in steps
    )
    assert row_errors(q[0], q[1]).max() < TOLERANCE[dtype]
    assert row_errors(k, want_k).max() < TOLERANCE[dtype]
    assert torch.equal(v, want_v)
    assert torch.equal(steps[0].arena.isnan(), steps[1].arena.isnan())


@ON_GPU
def test_wide_tokens_are_moved_whole():
    steps = [
        RandomStep([Req(40, 1)], 17, 8, 5, 128, torch.bfloat16, num_layers=2) for _ in range(2)
    ]
    for ops, step in zip((placed, reference), steps, strict=True):
        step.arena.copy_(random_tensor(*step.arena.shape))
        at = step.slots(0, 41)
        ops.move_kv(step.kv, at[[39, 40, 30]], at[[17, 18, 39]])
    assert torch.equal(steps[0].arena, steps[1].arena)


@ON_GPU
def test_layers_whose_kv_differs_in_shape_and_dtype_are_moved_all():
    shapes = [(2, 8, torch.float32)] * 3 + [(1, 16, torch.bfloat16), (2, 8, torch.float32)]
    shapes += [(2, 8, torch.int8)] * 2 + [(2, 8, torch.float8_e4m3fn), (1, 24, torch.int8)]
    layouts = [KVLayout(*shape) for shape in shapes]
    got, want = (Arena(torch.zeros(4 * 8192, dtype=torch.uint8), 8192) for _ in range(2))
    got.blocks.random_(0, 100, generator=torch.Generator().manual_seed(0))
    want.blocks.copy_(got.blocks)
    source, target = torch.tensor([5, 9, 1]), torch.tensor([0, 5, 30])
    for ops, arena in ((placed, got), (reference, want)):
        ops.move_kv(arena.add_view("target", layouts, 8), source, target)
    assert torch.equal(got.blocks, want.blocks) and not torch.equal(got.blocks[3], got.blocks[2])


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


@ON_GPU
@pytest.mark.parametrize("D", [64, 80], ids=["FlashInfer", "Triton"])
def test_a_plan_takes_one_upload(D):
    step = RandomStep(random_reqs(random.Random(5)), 16, 4, 2, D, torch.bfloat16)
    also = [torch.arange(9), torch.ones(4)]
    before = placed.staging.num_uploads
    plan = placed.plan(step.rows(), step.kv, 4, [None, 7], also)
    assert placed.staging.num_uploads == before + 1
    assert all(torch.equal(x.cpu(), y) for x, y in zip(plan.also, also, strict=True))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_one_clear_error():
    with pytest.raises(
        DeviceError, match=r"^This torch \(2.* is built without CUDA. Install a CUDA"
    ):
        load("cuda")


def test_a_machine_without_a_gpu_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match=r"^torch finds no NVIDIA GPU. Check nvidia-smi"):
        load("cuda")


def test_a_gpu_that_is_not_there_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=r"^GPU 2 does not exist. Use a GPU number from 0 to 1"):
        load("cuda:2")


LOAD_WITHOUT_TRITON = """
import sys, torch
sys.modules["triton"] = None
torch.version.cuda = "13.0"
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
from specserve_kernels import DeviceError, load
try:
    load("cuda")
except DeviceError as e:
    print(e)
"""


def test_a_missing_triton_is_one_clear_error():
    command = [sys.executable, "-c", LOAD_WITHOUT_TRITON]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wanted = r"Triton cannot be imported \(.*triton.*\). Install it with .*'specserve\[gpu\]'.\n"
    assert re.fullmatch(wanted, done.stdout)


@pytest.fixture
def one_gpu(monkeypatch):
    """As if there were one; what is loaded for it is the FlashInfer that its ops would get."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(cuda_ops, "CudaOps", lambda device, flashinfer, attention: flashinfer)
    cuda._on.cache_clear()
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before
    cuda._on.cache_clear()


FLASHINFERS = [  # what is installed, what is said of it
    (None, "FlashInfer cannot be imported ("),
    (SimpleNamespace(__version__="0.6.3"), "FlashInfer 0.6.3 is not supported; 0.6.4 to"),
    (SimpleNamespace(__version__="0.7.0"), "FlashInfer 0.7.0 is not supported; 0.6.4 to"),
]
UNKNOWN = pytest.mark.parametrize(
    ("module", "complaint"), FLASHINFERS, ids=["missing", "old", "new"]
)


@UNKNOWN
def test_triton_attends_where_flashinfer_is_not_there_or_not_known(
    module, complaint, one_gpu, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    assert load("cuda:0") is None
    (line,) = caplog.messages
    assert line.startswith(complaint)
    assert line.endswith("'specserve[gpu]'. Using the slower Triton attention instead.")


@UNKNOWN
def test_a_flashinfer_that_is_demanded_and_not_there_is_one_clear_error(
    module, complaint, one_gpu, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    with pytest.raises(DeviceError, match=f"^{re.escape(complaint)}.* with pip install"):
        load("cuda:0", "flashinfer")
    assert not caplog.messages


@pytest.mark.parametrize("version", ["0.6.4", "0.6.18.post1"])
def test_a_known_flashinfer_is_used_unless_triton_is_chosen(version, one_gpu, monkeypatch, caplog):
    module = SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    assert load("cuda:0") is load("cuda:0", "flashinfer") is module
    assert load("cuda:0", "triton") is None
    assert not caplog.messages


def test_a_split_sum_of_cublas_is_not_rounded_to_bfloat16(one_gpu):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    load("cuda:0", "triton")
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False


def test_the_versions_of_flashinfer_are_those_that_are_installed():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = f"flashinfer-python>={attention.FROM},<{attention.BELOW}"
    assert wanted in pyproject["project"]["optional-dependencies"]["gpu"]


def test_a_choice_of_attention_is_for_a_gpu():
    with pytest.raises(DeviceError, match="Attention backend 'triton' needs a GPU"):
        load("cpu", "triton")


def flashinfer_with(build=fake_flashinfer.get_batch_prefill_module, **methods):
    """The fake one, but for some methods of its wrapper, or its compiler."""
    wrapper = type("Wrapper", (BatchPrefillWithPagedKVCacheWrapper,), methods)
    return SimpleNamespace(
        __version__="0.6.4",
        prefill=SimpleNamespace(get_batch_prefill_module=build),
        BatchPrefillWithPagedKVCacheWrapper=wrapper,
    )


def raises(complaint):
    def complain(*args, **kwargs):
        raise complaint

    return complain


def small_step():
    """A causal row and a tree, of a kind that FlashInfer takes."""
    reqs = [Req(3, 1), Req(4, parents=[0, 0])]
    return RandomStep(reqs, 16, 4, 2, 64, torch.bfloat16).filled()


def check_attention(ops, step):
    got, want = (step.attend(build, queries(step, 4)) for build in (ops, reference))
    assert row_errors(got, want).max() < TOLERANCE[torch.bfloat16]


COMPLAINTS = {  # what FlashInfer says -> what is passed on
    "Could not find nvcc\nin any of these places": "Could not find nvcc",
    "Ninja build failed.\nld: cannot find -lcuda\nstopped": "ld: cannot find -lcuda",
    "": "",
}


@INTERPRETED
@pytest.mark.parametrize(("said", "shown"), COMPLAINTS.items())
def test_triton_attends_where_flashinfer_cannot_be_built(said, shown, caplog):
    ops, step = CudaOps(CPU, flashinfer_with(build=raises(RuntimeError(said)))), small_step()
    for _ in range(2):
        check_attention(ops, step)
    assert ops.num_planned == {"Triton": 2}
    (line,) = caplog.messages
    assert f"({shown}). It compiles them at first use: install nvcc and ninja." in line
    assert line.endswith("Using the slower Triton attention instead.")


def test_flashinfer_that_is_demanded_and_cannot_be_built_is_an_error():
    flashinfer = flashinfer_with(build=raises(OSError("no ninja")))
    ops, step = CudaOps(CPU, flashinfer, "flashinfer"), small_step()
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"cannot build its kernels \(no ninja\)"):
            ops.plan(step.rows(), step.kv, 4)


@pytest.mark.parametrize(("D", "kv_dtype"), [(80, torch.bfloat16), (64, torch.int8)])
def test_flashinfer_that_is_demanded_for_heads_it_has_not_is_an_error(D, kv_dtype):
    step = RandomStep([Req(3, 1)], head_dim=D, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    ops = CudaOps(CPU, fake_flashinfer, "flashinfer")
    with pytest.raises(DeviceError, match=rf"heads of size {D}\. Use attention 'auto'"):
        ops.plan(step.rows(), step.kv, 4)


def after_the_check(complaint):
    """A `plan` that complains of all steps but the one that checks FlashInfer's masks."""

    def plan(self, qo_indptr, *args, **kwargs):
        if qo_indptr.tolist() != [0, 3, 4]:
            raise complaint
        BatchPrefillWithPagedKVCacheWrapper.plan(self, qo_indptr, *args, **kwargs)

    return plan


@pytest.mark.parametrize(
    "complaint",
    [RuntimeError("qo_indptr[1] is below qo_indptr[0]"), ValueError("bad"), TypeError()],
)
def test_an_error_in_a_plan_is_raised_and_does_not_turn_flashinfer_off(complaint, caplog):
    ops, step = CudaOps(CPU, flashinfer_with(plan=after_the_check(complaint))), small_step()
    for _ in range(2):
        with pytest.raises(type(complaint)) as e:
            ops.plan(step.rows(), step.kv, 4)
        assert e.value is complaint
    assert not caplog.messages


WORKSPACE = (
    "Error in function 'aligned_alloc' at allocator.h:49: Buffer overflow when allocating memory "
    "for batch_prefill_tmp_v with size 1 and alignment 16, but only 0 bytes available in "
    "AlignedAllocator. Increase the workspace buffer size."
)
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("broken", ["build", "plan"])
def test_flashinfer_out_of_memory_is_out_of_memory(broken, caplog):
    methods = {"build": raises(NO_MEMORY), "plan": after_the_check(NO_MEMORY)}
    ops, step = CudaOps(CPU, flashinfer_with(**{broken: methods[broken]})), small_step()
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        ops.plan(step.rows(), step.kv, 4)
    assert not caplog.messages


def test_a_full_workspace_of_flashinfer_is_out_of_memory(caplog):
    full = flashinfer_with(plan=after_the_check(RuntimeError(WORKSPACE)))
    ops, step = CudaOps(CPU, full), small_step()
    with pytest.raises(torch.OutOfMemoryError, match=r"workspace of 512 MiB is too small.*tmp_v"):
        ops.plan(step.rows(), step.kv, 4)
    assert not caplog.messages


def planned_then(change):
    def plan(self, *args, **kwargs):
        BatchPrefillWithPagedKVCacheWrapper.plan(self, *args, **kwargs)
        change(self)

    return plan


CHANGES = {  # of what we rely on in a wrapper
    "another name": lambda w: delattr(w, "_mask_indptr_buf"),
    "another dtype": lambda w: setattr(w, "_mask_indptr_buf", w._mask_indptr_buf.long()),
    "another unit": lambda w: setattr(w, "_mask_indptr_buf", w._mask_indptr_buf * 2),
    "on the host, as a list": lambda w: setattr(w, "_mask_indptr_buf", [0, 12, 17]),
}


@INTERPRETED
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_triton_attends_where_flashinfer_keeps_masks_otherwise(change, caplog):
    ops, step = CudaOps(CPU, flashinfer_with(plan=planned_then(change))), small_step()
    check_attention(ops, step)
    assert ops.num_planned == {"Triton": 1}
    (line,) = caplog.messages
    assert line.startswith("FlashInfer 0.6.4 has an unknown interface")


@INTERPRETED
def test_masks_that_flashinfer_counts_in_bytes_itself_are_as_good():
    def in_bytes(wrapper):
        begins = wrapper._mask_indptr_buf
        wrapper._mask_indptr_buf = torch.cat((begins[:1], ((begins.diff() + 7) // 8).cumsum(0)))
        wrapper._mask_indptr_buf = wrapper._mask_indptr_buf.int()

    ops = CudaOps(CPU, flashinfer_with(plan=planned_then(in_bytes)))
    check_attention(ops, small_step())
    assert ops.num_planned == {"FlashInfer": 1}


@INTERPRETED
def test_triton_attends_where_flashinfer_has_no_such_compiler(caplog):
    flashinfer = flashinfer_with()
    del flashinfer.prefill.get_batch_prefill_module
    ops = CudaOps(CPU, flashinfer)
    check_attention(ops, small_step())
    assert ops.num_planned == {"Triton": 1}
    assert "has an unknown interface" in caplog.text


def test_flashinfers_kernels_are_built_once_for_each_head_size_with_and_without_a_window():
    built = []
    flashinfer = flashinfer_with(build=lambda backend, *variant: built.append(variant))
    ops = CudaOps(CPU, flashinfer)
    for D, windows in ((64, [None]), (64, [None, 5]), (128, [7]), (64, [5, 9]), (128, [7])):
        step = RandomStep([Req(3, 1)], head_dim=D, dtype=torch.bfloat16)
        ops.plan(step.rows(), step.kv, 4, windows)
    wanted = [(v[4], v[7]) for v in built]
    assert sorted(wanted) == [(64, False), (64, True), (128, False), (128, True)]
    assert ops.num_planned == {"FlashInfer": 5}


@INTERPRETED
@pytest.mark.parametrize("D", [64, 80], ids=["FlashInfer", "Triton"])
def test_two_threads_that_share_a_device_attend_as_one_alone(D):
    """Each is interrupted wherever it is: unlocked, one would run what the other has planned."""
    ops = CudaOps(CPU, fake_flashinfer)
    steps = [
        RandomStep(trees(random.Random(i), 20)[:2], 16, 4, 2, D, torch.bfloat16, seed=i).filled()
        for i in range(2)
    ]
    asked = [queries(step, len(step.rows().positions)) for step in steps]
    wanted = [step.attend(reference, q) for step, q in zip(steps, asked, strict=True)]
    planned = [Event(), Event()]
    errors = [[], []]

    def work(i):
        for _ in range(10):
            with ops.lock:
                plan = ops.plan(steps[i].rows(), steps[i].kv, 4)
                planned[i].set()
                planned[1 - i].wait(0.01)  # without a lock the other one plans meanwhile
                got = ops.attention(asked[i], steps[i].kv.layers[0], plan, D**-0.5)
                planned[i].clear()
            errors[i].append(row_errors(got, wanted[i]).max().item())

    threads = [Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(e) for e in errors] == [10, 10]
    assert max(errors[0] + errors[1]) < TOLERANCE[torch.bfloat16]


def test_within_the_lock_the_device_is_the_threads_own(monkeypatch):
    """And no other thread has the lock."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    lock, taken = DeviceLock(torch.device("cuda", 1)), []

    def other():
        taken.append(lock.lock.acquire(blocking=False))

    with lock:
        with lock:
            assert current[-1] == 1
        assert current[-1] == 1
        thread = Thread(target=other)
        thread.start()
        thread.join()
    assert current[-1] == 0
    assert taken == [False]


def test_builds_that_keep_nothing_between_ops_are_never_waited_for():
    for ops in (reference, cpu):
        with ops.lock, ops.lock, ThreadPoolExecutor(1) as other:
            assert other.submit(lambda lock=ops.lock: lock.__enter__() is None).result(timeout=5)


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load("auto") is load("cpu")


@pytest.mark.parametrize("which", ["each once", pytest.param("all", marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_a_gpu(which):
    """Triton's compiler needs no GPU; a process of its own, as the interpreter is per process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_gpu", which],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
