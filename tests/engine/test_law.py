"""The law of the tokens, integrated over a grid of noise: no sampling, no seed, no flake."""

from math import log

import pytest
import torch

from specserve.speculation.verify import verify_tree
from specserve_drafters import ROOT, Draft
from specserve_kernels.reference.sampling import allowed, edited, transform
from tests.kernels.edits import BAN, edits_of, masks_of

TARGET = torch.tensor([0.6, 0.3, 0.1]).log()
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def gumbel_of(u):
    return -(-u.log()).log()


def noise_grid(n):
    """Gumbel noise of three ids over all of [0, 1]^3, [n^3, 3]."""
    u = (torch.arange(n) + 0.5) / n
    return gumbel_of(torch.cartesian_prod(u, u, u))


def law_of(tokens):
    return torch.bincount(tokens, minlength=3) / len(tokens)


LAWS = {  # parameters -> the renormalized softmax of what they leave
    "plain": ({}, [0.6, 0.3, 0.1]),
    "a low temperature sharpens": ({"temperature": 0.5}, [36 / 46, 9 / 46, 1 / 46]),
    "a high one flattens": ({"temperature": 3}, [0.4266, 0.3386, 0.2348]),
    "top_k": ({"top_k": 2}, [2 / 3, 1 / 3, 0]),
    "top_p": ({"top_p": 0.7}, [2 / 3, 1 / 3, 0]),
    "min_p": ({"min_p": 0.4}, [2 / 3, 1 / 3, 0]),
    "temperature before min_p": ({"temperature": 2, "min_p": 0.4}, [0.4727, 0.3343, 0.1930]),
    "top_k before top_p": ({"top_k": 2, "top_p": 0.65}, [1, 0, 0]),
    "min_p before top_p": ({"min_p": 0.4, "top_p": 0.65}, [1, 0, 0]),
}


@pytest.mark.parametrize(("params", "law"), LAWS.values(), ids=LAWS)
def test_the_law_is_the_softmax_of_what_is_left(params, law):
    z = transform(TARGET, **(OFF | params))
    got, want = law_of((z + noise_grid(40)).argmax(-1)), torch.tensor(law).float()
    torch.testing.assert_close(got, want, atol=8e-3, rtol=0)
    assert torch.equal(got == 0, want == 0)


BETTER = (log(5), 1, 0)
EDITED = {  # edits, allowed ids, parameters -> the law; names tell the order
    "a ban": ({0: BAN}, None, {}, [0, 3 / 4, 1 / 4]),
    "a bias multiplies odds": ({2: BETTER}, None, {}, [6 / 14, 3 / 14, 5 / 14]),
    "a penalty divides them": ({0: (0, 1, log(3))}, None, {}, [2 / 6, 3 / 6, 1 / 6]),
    "a repeated id gets a power": ({1: (0, 2, 0)}, None, {}, [60 / 79, 9 / 79, 10 / 79]),
    "a mask": ({}, {0, 2}, {}, [6 / 7, 0, 1 / 7]),
    "all but one forbidden": ({}, {2}, {"temperature": 9, "top_p": 0.9}, [0, 0, 1]),
    "edits, temperature": ({2: BETTER}, None, {"temperature": 0.5}, [36 / 70, 9 / 70, 25 / 70]),
    "edits, min_p": ({0: (-log(4), 1, 0)}, None, {"min_p": 0.4}, [1 / 3, 2 / 3, 0]),
    "a mask, min_p": ({}, {1, 2}, {"min_p": 0.3}, [0, 3 / 4, 1 / 4]),
    "edits, top_k": ({2: BETTER}, None, {"top_k": 2}, [6 / 11, 0, 5 / 11]),
    "a mask, top_k": ({}, {1, 2}, {"top_k": 1}, [0, 1, 0]),
    "a mask, top_p": ({}, {1, 2}, {"top_p": 0.7}, [0, 1, 0]),
    "edits, a mask": ({1: (9, 1, 0)}, {0, 2}, {}, [6 / 7, 0, 1 / 7]),
}  # fmt: skip


@pytest.mark.parametrize(("edits", "ids", "params", "law"), EDITED.values(), ids=EDITED)
def test_the_law_is_that_of_the_edited_logits(edits, ids, params, law):
    z = allowed(edited(TARGET, edits_of((edits, {})), 0), masks_of(3, ids), 0)
    z = transform(z, **(OFF | params))
    got, want = law_of((z + noise_grid(40)).argmax(-1)), torch.tensor(law).float()
    torch.testing.assert_close(got, want, atol=8e-3, rtol=0)
    assert torch.equal(got == 0, want == 0)


SECOND = torch.tensor([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]).log()  # by the first
DRAFTS = {  # what the draft model believes, of the first token and of the second
    "identical": (TARGET, SECOND),
    "uniform": (torch.zeros(3), torch.zeros(3, 3)),
    "contrary": (-TARGET, -SECOND),
}


def coupled_trees(q, noise, width):
    """On every grid point the likeliest children under the very noise of the target's draw."""
    first = (q[0] + noise[0]).topk(width).indices
    second = (q[1] + noise[1][:, None]).topk(width).indices  # [points, 3, width]
    parents = [ROOT] * width + [k for k in range(1, width + 1) for _ in range(width)]
    return [
        Draft(top + [token for t in top for token in below[t]], parents)
        for top, below in zip(first.tolist(), second.tolist(), strict=True)
    ]


def tokens_of(drafts, noise):
    """Two tokens on every grid point [points, 2], in as many steps as the drafts leave needed."""
    answers = [
        (TARGET + noise[0]).argmax(-1).tolist(),
        (SECOND + noise[1][:, None]).argmax(-1).tolist(),
    ]
    said = [[] for _ in drafts]

    def answer(at):
        return [
            answers[1][i][drafts[i].tokens[node - 1]] if node else after_root(i) for i, node in at
        ]

    def after_root(i):
        return answers[1][i][said[i][0]] if said[i] else answers[0][i]

    def is_last(i, tokens):
        return len(said[i]) + len(tokens) == 2

    first = verify_tree(drafts, answer, is_last)
    for tokens, path in zip(said, first, strict=True):
        tokens += path.tokens
    rest = [i for i, tokens in enumerate(said) if len(tokens) < 2]
    again = verify_tree(
        [Draft()] * len(rest), lambda at: [after_root(rest[i]) for i, _ in at], is_last
    )
    for i, path in zip(rest, again, strict=True):
        said[i] += path.tokens
    return torch.tensor(said)


def two_noises(n):
    """Noise of the first and of the second token: n points of a lattice that fills [0, 1]^6."""
    ratio = 1.0969815577985598  # x^7 = x + 1: the golden ratio of six dimensions (Roberts' R6)
    steps = ratio ** -torch.arange(1, 7, dtype=torch.float64)
    return gumbel_of((0.5 + torch.outer(torch.arange(n), steps)) % 1).float().split(3, dim=1)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("q", DRAFTS.values(), ids=DRAFTS)
def test_coupled_trees_leave_the_law_of_both_tokens_unchanged(q, width):
    noise = two_noises(5000)
    plain = tokens_of([Draft()] * len(noise[0]), noise)
    got = tokens_of(coupled_trees(q, noise, width), noise)
    joint = TARGET.exp()[:, None] * SECOND.exp()
    for tokens in (plain, got):
        torch.testing.assert_close(law_of(tokens[:, 0]), joint.sum(1), atol=5e-3, rtol=0)
        torch.testing.assert_close(law_of(tokens[:, 1]), joint.sum(0), atol=5e-3, rtol=0)
    assert torch.equal(got, plain)  # and more than the law: the tokens


def test_an_identical_coupled_draft_is_always_right():
    noise = two_noises(2000)
    drafts = coupled_trees(DRAFTS["identical"], noise, 1)
    assert [d.tokens for d in drafts] == tokens_of([Draft()] * len(drafts), noise).tolist()


def test_coupling_is_what_makes_a_draft_of_another_model_right_more_often():
    """At least (1 - TV) / (1 + TV), which an uncoupled draw of the same law does not reach."""
    q, p = torch.tensor([0.4, 0.3, 0.3]), TARGET.exp()
    grid = noise_grid(40)
    agreed = ((q.log() + grid).argmax(-1) == (TARGET + grid).argmax(-1)).float().mean()
    total_variation = (p - q).abs().sum() / 2
    assert agreed > (1 - total_variation) / (1 + total_variation) > (p * q).sum()
