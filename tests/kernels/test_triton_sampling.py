"""The Triton kernels that choose tokens, by the reference: noise, filters, choices, children."""

import pytest
import torch
import triton
import triton.language as tl

import specserve_kernels.cuda.graphs
from specserve_kernels import NO_TOKEN, NOT_FINITE, SampleParams, reference
from specserve_kernels.cuda.graphs import ChildGraphs
from specserve_kernels.cuda.ops import changing
from specserve_kernels.cuda.sample import bounds, edited, gumbel, sample
from specserve_kernels.cuda.top_children import launch_top_children, logprobs, top_children
from specserve_kernels.reference import sampling
from tests.kernels.builds import DEVICE, ON_GPU
from tests.kernels.edits import edits_of, masks_of, random_edits, random_masks
from tests.kernels.random_steps import random_tensor
from tests.kernels.rerun import rerun
from tests.kernels.test_edits import ROWS
from tests.kernels.test_logprobs import asked as asked_of
from tests.kernels.test_noise import EXTREMES, KNOWN, SEEDS, flat, ints
from tests.kernels.test_sampling import FILTERS, NO_NUMBERS, asked, mixed

pytestmark = ON_GPU
CASES = list(enumerate([1, 5, 64, 300, 1000, 4099]))  # which of the mixes, V
STEPS = pytest.mark.parametrize("step", [31, pytest.param(11, marks=pytest.mark.slow)])  # of those
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def poisoned():
    """New tensors hold NaN or the greatest integer: no kernel may read what none has written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_device(params):
    return params.with_tensors(x.to(DEVICE) for x in params.tensors())


def drawn(logits, rows, params):
    return sample(logits.to(DEVICE), rows.to(DEVICE), on_device(params)).cpu()


def left(logits, rows, params):
    """Which tokens the kernel's filters leave, [n, V]; never those that are impossible."""
    bound, last = bounds(logits.to(DEVICE), rows.to(DEVICE), on_device(params))
    bound, last, t = bound.cpu()[:, None], last.cpu()[:, None], params.temperature[:, None]
    z = logits[rows].float() / t.where(t > 0, 1.0)
    is_left = (z > bound) | ((z == bound) & (torch.arange(z.shape[1]) <= last))
    return is_left & z.isfinite()


def left_by_definition(logits, rows, params):
    each = zip(rows.tolist(), *(x.tolist() for x in params[:4]), strict=True)
    return torch.stack([sampling.transform(logits[r].float(), *p).isfinite() for r, *p in each])


# Of each number of levels and each V one, every day.
TIES = [(2, 1500), (30, 4099), (None, 1500)]
TIES += [
    pytest.param(*tied, marks=pytest.mark.slow) for tied in ((2, 4099), (30, 1500), (None, 4099))
]


@pytest.mark.parametrize(("levels", "V"), TIES)
def test_top_k_leaves_what_it_should_however_many_are_tied(levels, V):
    """Of few levels more are at the bound than a program keeps."""
    k = torch.tensor([1, 5, 100, 1024, 1025, V - 1] * 2, dtype=torch.int32)
    p = torch.tensor([1.0] * 6 + [0.6] * 6)
    n = len(k)
    logits = random_tensor(n, V) if levels is None else random_tensor(n, V).mul(levels / 8).round()
    params = asked(n, 0.7)._replace(top_k=k, top_p=p)
    rows = torch.arange(n)
    assert torch.equal(left(logits, rows, params), left_by_definition(logits, rows, params))
    some = params._replace(min_p=torch.full((n,), 0.05))
    assert torch.equal(left(logits, rows, some), left_by_definition(logits, rows, some))


def some_mixes(start, step):
    """Of the mixes of all parameters every step-th."""
    return SampleParams(*(x[start::step].contiguous() for x in mixed().columns))


@triton.jit
def _philox(counter, key, out):
    w0, w1, w2, w3 = tl.philox(
        tl.load(key) | (tl.load(key + 1) << 32),
        *(tl.load(counter), tl.load(counter + 1), tl.load(counter + 2), tl.load(counter + 3)),
    )
    tl.store(out, w0)
    tl.store(out + 1, w1)
    tl.store(out + 2, w2)
    tl.store(out + 3, w3)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_tritons_philox_gives_the_published_words(counter, key, words):
    counter, key = (torch.tensor(ints(x), device=DEVICE) for x in (counter, key))
    out = torch.empty(4, dtype=torch.int64, device=DEVICE)
    _philox[(1,)](counter.to(torch.uint32), key, out)
    assert out.tolist() == ints(words)


@triton.jit
def _gumbel(seeds, index, out, first, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    noise = gumbel(tl.load(seeds + i), tl.load(index + i), first, BLOCK)
    tl.store(out + i * BLOCK + tl.arange(0, BLOCK), noise)


def noise(seeds, index, first, n):
    """The kernels' noise, [.., n], of the ids from `first` on."""
    out = torch.empty(len(seeds), n, device=DEVICE)
    seeds, index = (torch.tensor(x, device=DEVICE) for x in (seeds, index))
    _gumbel[(len(seeds),)](seeds, index, out, first, BLOCK=n)
    return out.cpu()


@pytest.mark.parametrize("first", [0, 4, 1024, 151_936])
def test_noise_is_the_references(first):
    cases = [(s, i) for s in SEEDS for i in (0, 1, 4096, 2**31, 2**32 - 1)]
    want = torch.stack([sampling.gumbel(*case, first + 64)[first:] for case in cases])
    got = noise(*zip(*cases, strict=True), first, 64)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_an_extreme_word_is_finite_noise():
    seeds, index, ids, _, want = zip(*EXTREMES, strict=True)
    got = noise(seeds, index, 0, 4)[torch.arange(len(ids)), ids]
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("p", "params", "ids"), FILTERS.values(), ids=FILTERS)
def test_filters_leave(p, params, ids):
    got = left(torch.tensor([p]).log(), torch.zeros(1).long(), asked(1, **params))
    assert set(got[0].nonzero().flatten().tolist()) == ids


@pytest.mark.pairs
@pytest.mark.parametrize("spread", [0.5, 8.0], ids=["flat", "peaked"])
@STEPS
@pytest.mark.parametrize(("start", "V"), CASES)
def test_filters_leave_what_the_reference_leaves(start, V, step, spread):
    logits, params = spread * random_tensor(7, V), some_mixes(start, step)
    rows = torch.arange(len(params.top_k)) % 7
    assert torch.equal(left(logits, rows, params), left_by_definition(logits, rows, params))


def test_filters_cut_ties_as_the_reference():
    logits = torch.randint(3, (7, 999), generator=torch.Generator().manual_seed(0)).float()
    params = some_mixes(1, 2)
    rows = torch.arange(len(params.top_k)) % 7
    assert torch.equal(left(logits, rows, params), left_by_definition(logits, rows, params))


def test_filters_leave_of_impossible_tokens_none():
    logits, params = 3 * random_tensor(2, 50), some_mixes(0, 5)
    logits[:, ::3], logits[1, 4:] = -INF, -INF
    rows = torch.arange(len(params.top_k)) % 2
    assert torch.equal(left(logits, rows, params), left_by_definition(logits, rows, params))


@pytest.mark.parametrize(("x", "base", "own", "ids", "want"), ROWS.values(), ids=ROWS)
def test_a_row_becomes(x, base, own, ids, want):
    """Beside one that nothing changes."""
    params = asked(2)._replace(edits=edits_of((base, own), ({}, {})), masks=masks_of(4, ids, None))
    assert edits(torch.tensor([x]).float(), torch.zeros(2).long(), params).tolist() == [want, x]


def edits(logits, rows, params):
    return edited(logits.to(DEVICE), rows.to(DEVICE), on_device(params)).cpu()


@pytest.mark.pairs
@pytest.mark.parametrize("kinds", ["edits", "masks", "edits and masks"])
@pytest.mark.parametrize("V", [1, 33, 1000, 9001])
def test_rows_become_what_they_become_in_the_reference(V, kinds):
    logits, rows = 3 * random_tensor(3, V), torch.arange(7) % 3
    params = asked(7)._replace(
        edits=random_edits(7, V) if "edits" in kinds else None,
        masks=random_masks(7, V) if "masks" in kinds else None,
    )
    want = [sampling.edited(logits[r].float(), params.edits, i) for i, r in enumerate(rows)]
    want = [sampling.allowed(z, params.masks, i) for i, z in enumerate(want)]
    torch.testing.assert_close(edits(logits, rows, params), torch.stack(want), rtol=1e-6, atol=1e-6)


@NO_NUMBERS  # some rows have no id left
def test_tokens_of_changed_rows_are_chosen_as_by_the_reference():
    logits, params = 3 * random_tensor(7, 1000), some_mixes(0, 7)
    n = len(params.top_k)
    params = params._replace(edits=random_edits(n, 1000), masks=random_masks(n, 1000))
    rows = torch.arange(n) % 7
    assert torch.equal(drawn(logits, rows, params), reference.sample(logits, rows, params))


def test_the_rows_of_the_start_up_take_each_way_and_stay_as_they_are():
    x, plain, row = random_tensor(1, 50), asked(1), torch.zeros(1).long()
    some = changing(plain, 50)
    assert [(p.edits is None, p.masks is None) for p in some] == [
        *((False, True), (True, False), (False, False))
    ]
    assert all(torch.equal(edits(x, row, params), x) for params in some)


LONG = [  # top_k, top_p, min_p of a row that no program takes in at once
    (7000, 1.0, 0.0),
    (15000, 1.0, 0.0),
    (0, 0.5, 0.0),
    (0, 0.9999, 0.0),
    (0, 0.95, 0.5),
    (12000, 0.9, 0.01),
    (12000, 0.3, 0.0),
]


@pytest.mark.parametrize("levels", [2, 10**9], ids=["ties", "no ties"])
def test_filters_of_a_long_row_leave_what_the_reference_leaves(levels):
    logits = torch.randint(levels, (1, 20_011), generator=torch.Generator().manual_seed(0))
    logits = 3.0 * logits / levels
    n, rows = len(LONG), torch.zeros(len(LONG)).long()
    top_k, top_p, min_p = (torch.tensor(x) for x in zip(*LONG, strict=True))
    params = asked(n)._replace(top_k=top_k.int(), top_p=top_p, min_p=min_p)
    assert torch.equal(left(logits, rows, params), left_by_definition(logits, rows, params))


NUMBERS = {  # logits, the parameters -> the token
    "a NaN in a later split": ([1.0] * 3000 + [NAN], {}, NOT_FINITE),
    "no id is left in any split": ([-INF] * 1500, {}, NO_TOKEN),
    "an infinite logit and top_k": ([1.0, 2.0, INF, 1.0], {"top_k": 2}, NOT_FINITE),
    "many infinite logits and top_p": ([INF, 2.0] * 900, {"top_p": 0.5}, NOT_FINITE),
    "two zeros": ([-1.0, -0.0, 0.0], {"temperature": 0}, 1),
    "the other two zeros": ([-1.0, 0.0, -0.0], {"temperature": 0}, 1),
}


@NO_NUMBERS
@pytest.mark.parametrize(("logits", "params", "token"), NUMBERS.values(), ids=NUMBERS)
def test_of_odd_numbers_the_choice_is(logits, params, token):
    logits, row = torch.tensor([logits]), torch.zeros(1).long()
    assert reference.sample(logits, row, asked(1, **params)).tolist() == [token]
    assert drawn(logits, row, asked(1, **params)).tolist() == [token]


@pytest.mark.pairs
@STEPS
@pytest.mark.parametrize(("start", "V"), CASES)
def test_tokens_are_chosen_as_by_the_reference(start, V, step):
    logits, params = 3 * random_tensor(7, V), some_mixes(start, step)
    rows = torch.arange(len(params.top_k)) % 7
    assert torch.equal(drawn(logits, rows, params), reference.sample(logits, rows, params))


@pytest.mark.parametrize("V", [2, 63, 4097])
def test_flat_logits_are_decided_by_the_references_noise(V):
    logits, params = flat(8, V, [s * 2**40 + 1 for s in range(8)], [i * i for i in range(8)])
    rows = torch.arange(8)
    assert torch.equal(drawn(logits, rows, params), reference.sample(logits, rows, params))


def test_ties_go_to_the_lowest_id_across_splits():
    logits = torch.zeros(2, 3000)
    logits[0, [1500, 2500]], logits[1, [700, 1030, 2999]] = 1.0, 1.0
    assert drawn(logits, torch.arange(2), SampleParams.greedy(2)).tolist() == [1500, 700]


def test_a_tensor_with_gaps_is_refused():
    """It is made on the device, as a copy to it would have none."""
    wide, logits = torch.zeros(2, 6, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    pairs = torch.zeros(2, 2, device=DEVICE).long()
    rows, params = pairs[0], on_device(SampleParams.greedy(2))
    gaps = params._replace(seeds=pairs[:, 0])
    for given in (
        (wide[:, ::2], rows, params),
        (logits, pairs[:, 0], params),
        (logits, rows, gaps),
    ):
        with pytest.raises(AssertionError, match="not contiguous"):
            sample(*given)
    for given in ((wide[:, ::2], params), (logits, gaps)):
        with pytest.raises(AssertionError, match="not contiguous"):
            top_children(*given, 1, 1.0)


def test_recorded_launches_find_the_children_of_what_logits_and_parameters_are_then():
    recorded = []

    def record(launch):
        recorded.append(launch)
        return rerun(launch)

    graphs = ChildGraphs(torch.device(DEVICE), record)
    whole = torch.zeros(4, 300, device=DEVICE)
    assert graphs.launch(whole, SampleParams.greedy(4), 2, 0.8) is None, "it is not followed"
    graphs.follow(whole, 2)
    assert len(recorded) == 2, "those of 3 and of 4 rows"
    warm = asked(3, 0.9)
    for seed, k, params in (
        (1, 2, SampleParams.greedy(3)),
        (2, 2, warm),
        (3, 2, warm),
        (4, 2, warm._replace(seeds=warm.seeds + 5, token_index=warm.token_index + 3)),
        (5, 2, SampleParams.greedy(3)),
        (6, 4, SampleParams.greedy(3)),
        (7, 4, warm),
    ):
        whole.copy_(random_tensor(4, 300, seed=seed))
        n = len(params.seeds)
        got = graphs.launch(whole[:n], params, k, 0.8)
        want = launch_top_children(whole[:n].clone(), on_device(params), k, 0.8)
        assert torch.equal(got, want)
    assert len(recorded) == 4
    assert graphs.launch(torch.zeros(17, 300), SampleParams.greedy(17), 2, 0.8) is None


def test_recordings_are_bounded(monkeypatch):
    monkeypatch.setattr(specserve_kernels.cuda.graphs, "MOST", 3)
    graphs, logits = ChildGraphs(torch.device(DEVICE), rerun), random_tensor(1, 30).to(DEVICE)
    graphs.follow(logits, 1)
    for k in (1, 2, 3, 4, 1, 4):
        got = graphs.launch(logits, SampleParams.greedy(1), k, 1.0)
        want = launch_top_children(logits, on_device(SampleParams.greedy(1)), k, 1.0)
        assert torch.equal(got, want)
    assert len(graphs.recordings) == 3


def test_there_are_no_more_children_than_tokens():
    with pytest.raises(AssertionError, match="k exceeds the vocabulary"):
        children(torch.zeros(1, 3), SampleParams.greedy(1), 4, 1.0)


def children(logits, params, k, tau):
    return top_children(logits.to(DEVICE), on_device(params), k, tau)


@pytest.mark.pairs
@pytest.mark.parametrize("temperature", [0, 0.5])
@pytest.mark.parametrize(("V", "k"), [(1, 1), (16, 16), (5, 2), (300, 1), (1025, 16), (4099, 8)])
def test_children_are_ranked_as_by_the_reference(V, k, temperature):
    logits, params = 3 * random_tensor(3, V), asked(3, temperature)
    (got, weight), (want, law) = (
        f(logits, params, k, 0.8) for f in (children, reference.top_children)
    )
    assert torch.equal(got, want)
    torch.testing.assert_close(weight, law, rtol=1e-5, atol=1e-5)


def test_children_across_splits_are_ranked_by_id_where_tied_and_however_low_all_are():
    logits = torch.randint(3, (2, 2500), generator=torch.Generator().manual_seed(0)) - 300.0
    logits[0, 1024:] = -INF
    (got, weight), (want, law) = (
        f(logits, SampleParams.greedy(2), 16, 1.0) for f in (children, reference.top_children)
    )
    assert torch.equal(got, want)
    torch.testing.assert_close(weight, law, rtol=1e-5, atol=1e-5)


@NO_NUMBERS
@pytest.mark.parametrize("V", [5, 1500])
def test_children_of_odd_numbers_are_the_references(V):
    logits = random_tensor(5, V)
    logits[0], logits[1, :3], logits[2, 1], logits[3, 2], logits[4, 4:] = -INF, -INF, NAN, INF, -INF
    (got, weight), (want, law) = (
        f(logits, asked(5), 5, 0.8) for f in (children, reference.top_children)
    )
    assert torch.equal(got, want)
    torch.testing.assert_close(weight, law, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_children_come_from_the_device_as_one_tensor():
    logits, params = random_tensor(3, 50), asked(3)
    packed = launch_top_children(logits.to(DEVICE), on_device(params), 4, 0.8).cpu()
    ids, weight = children(logits, params, 4, 0.8)
    assert packed.dtype == torch.int32 and (ids.dtype, weight.dtype) == (torch.int64, torch.float32)
    assert torch.equal(packed, torch.cat([ids.int(), weight.view(torch.int32)], dim=1))


def said(logits, rows, tokens, k):
    return logprobs(logits.to(DEVICE), rows.to(DEVICE), tokens.to(DEVICE), k)


@pytest.mark.parametrize(("V", "k"), [(5, 5), (1000, 0), (2100, 7), (9001, 1)])
def test_what_is_said_is_what_the_reference_says(V, k):
    logits, given = 3 * random_tensor(5, V), asked_of(6, V)
    got, want = (f(logits, *given, k) for f in (said, reference.logprobs))
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert torch.equal(got.rank, want.rank) and torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.token, want.token, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got.top, want.top, rtol=1e-6, atol=2e-6)
