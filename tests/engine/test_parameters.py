"""Penalties, bias, bad words, allowed ids, min_tokens: by a sampler in a few lines of NumPy, and
with guesses as without.
"""

from collections import Counter

import numpy as np
import pytest
import torch

from specserve.exchange.sampling_params import Sampling
from specserve.scheduling.text_state import TextState, edits_of
from specserve_drafters import Draft
from specserve_kernels.reference.sampling import edited, gumbel
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import (
    Case,
    Scripted,
    Watch,
    bush,
    draft_of,
    engine_for,
    hedge,
    load_small,
    plain,
    right,
    wrong_later,
)
from tests.engine.test_promise import truth_by_id

VOCAB = 320
PROMPT = [5, 9, 9, 7, 120, 9, 9, 7, 31]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Its text repeats itself, so that penalties have something to do."""
    folder = tmp_path_factory.mktemp("models") / "target"
    return load_small(tiny_checkpoint(folder, seed=1, tie_word_embeddings=False))


def asks(**given):
    how = {"max_tokens": 40, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    return Sampling(**(how | given))


def next_token(x, prompt, output, asked):
    """The oracle: all that the parameters mean, for one token after the text."""
    z = x.astype(np.float64)
    for token, bias in asked.logit_bias.items():
        z[token] += bias
    for token in {*prompt, *output}:
        z[token] *= asked.repetition_penalty ** (-1 if z[token] > 0 else 1)
    for token, count in Counter(output).items():
        z[token] -= asked.frequency_penalty * count + asked.presence_penalty
    for *begin, last in asked.bad_words:
        if output[len(output) - len(begin) :] == begin:
            z[last] = -np.inf
    if len(output) < asked.min_tokens:
        z[list(asked.stop_ids)] = -np.inf
    if asked.allowed_ids is not None:
        z[np.setdiff1d(np.arange(len(z)), asked.allowed_ids)] = -np.inf
    if asked.temperature == 0:
        return z.argmax()
    z /= asked.temperature
    z[z < z.max() + np.log(max(asked.min_p, 1e-300))] = -np.inf
    z[np.argsort(-z, kind="stable")[asked.top_k or len(z) :]] = -np.inf
    order = np.argsort(-z, kind="stable")
    p = np.exp(z[order] - z.max())
    z[order[1:][(p.cumsum() - p)[1:] >= asked.top_p * p.sum()]] = -np.inf
    noise = gumbel(asked.seed, len(prompt) + len(output), len(z)).numpy()
    return (z + noise).argmax()


def run_watched(target, prompt, sampling):
    """A request's output without guesses, and the logits that each token was drawn from."""
    engine, logits = engine_for(target, max_nodes=0), []
    launch = engine.target.launch

    def on_launch(step):
        launched = launch(step)
        if len(step.columns.read):
            logits.append(launched.logits[0].numpy().copy())
        return launched

    engine.target.launch = on_launch
    request = engine.add(prompt, sampling)
    while not engine.is_idle:
        engine.step()
    return request.token_ids.tolist()[len(prompt) :], logits


ASKED = {
    "nothing": {},
    "presence": {"presence_penalty": 1.5},
    "a reward for repeating": {"presence_penalty": -1.5, "frequency_penalty": -0.5},
    "frequency": {"frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {9: 4.0, 7: -100.0, 300: 1.0}},
    "allowed ids": {"allowed_ids": tuple(range(0, VOCAB, 7))},
    "one allowed id": {"allowed_ids": (17,)},
    "min_tokens": {"min_tokens": 12, "stop_ids": frozenset(range(0, VOCAB, 3))},
    "all": {
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {9: 1.5, 31: 2.0},
        "allowed_ids": tuple(range(150)),
        "bad_words": ((9,), (31, 120)),
        "min_tokens": 12,
        "stop_ids": frozenset(range(0, VOCAB, 10)),
    },
}
DRAWN = {
    "greedy": {},
    "T = 1": {"temperature": 1.0},
    "filters": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


def bad_words_of(target, given):
    """Words that the text would have without them: of one, two and three tokens."""
    said, _ = run_watched(target, PROMPT, asks(**given))
    return ((said[3],), tuple(said[10:12]), tuple(said[20:23]))


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("asked", [*ASKED.values(), "bad words"], ids=[*ASKED, "bad words"])
def test_a_text_is_that_of_the_oracle(target, asked, drawn):
    given = {"bad_words": bad_words_of(target, drawn)} if asked == "bad words" else asked
    sampling = asks(**drawn, **given)
    output, logits = run_watched(target, PROMPT, sampling)
    want = [next_token(x, PROMPT, output[:i], sampling) for i, x in enumerate(logits)]
    assert output == want
    plain, _ = run_watched(target, PROMPT, asks(**drawn))
    assert (output == plain) == (not given), "the parameters change nothing in this text"


def test_the_prompt_counts_for_repetition_alone():
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 1.0}
    assert not TextState(asks(**penalties), [1, 2], 9).base.ids
    state = TextState(asks(**penalties, repetition_penalty=2.0), [1, 1, 2], 9)
    assert [state.edit(t) for t in (1, 3)] == [(0, 2, 0), (0, 1, 0)]
    state.extend([1, 3, 3])
    assert [state.edit(t) for t in (1, 3)] == [(0, 2, 2), (0, 2, 3)]
    assert [*map(len, state.each(Draft()))] == [0], "what is known needs no edit of a node"


def test_a_word_is_bad_where_its_beginning_was_said():
    state = TextState(asks(bad_words=((4,), (1, 2), (3, 1, 5))), [1], 9)
    assert [*state.base.ids] == [4] and [*map(len, state.each(Draft()))] == [0]
    state.extend([3, 1])
    tree = Draft([6, 3, 1, 1], [0, 0, 2, 1])
    for _ in range(2):
        bans = [{*own.edits} for own in state.each(tree)]
        assert bans == [{2, 5}, set(), set(), {2, 5}, {2}]


def test_a_state_is_made_with_the_first_token(target):
    """A hundred long prompts may come between two steps, and they would all wait for it."""
    engine = engine_for(target, max_nodes=0)
    samplings = [asks(repetition_penalty=1.3, seed=seed) for seed in range(3)]
    choices = engine.add_choices(PROMPT * 9, samplings)
    while not engine.scheduler.running or engine.scheduler.running[0].is_computing:
        assert not any(request.text for request in choices)
        engine.step()
    engine.step()
    assert len({request.text for request in choices}) == 3, "each has its own"
    assert len({id(request.text.prompt) for request in choices}) == 1, "a copy of the first's"


class Counted(int):
    """A token that counts how often it is looked at."""

    looks = 0

    def look(self, other):
        Counted.looks += 1
        return int(self) == other

    def __hash__(self):
        return self.look(0) or int(self)

    __eq__ = look


@pytest.mark.parametrize("change", [0, 60])
def test_a_look_at_many_words_that_are_alike_takes_no_longer_than_at_one(change):
    """They differ in their last token, or in one before it."""
    state = TextState(asks(), [1], 999)
    for other in range(256):
        word = [1] * 62
        word[-1 - change] = 100 + other
        state.words.add(tuple(word))
    Counted.looks = 0
    found = [*state.words.after([Counted(1)] * 1000)]
    assert found == ([] if change else [*range(100, 356)]) and 0 < Counted.looks < 300


def test_early_ends_are_ruled_out_by_the_same_edits_at_every_node():
    """Copies of up to 1024 for each node of 128 choices would take longer than the step."""
    state = TextState(asks(min_tokens=3, stop_ids=frozenset(range(9)), presence_penalty=1), [1], 99)
    tree = Draft([6, 30, 1], [0, 1, 2])
    for _ in range(2):
        root, *nodes = state.each(tree)
        assert {id(own.others) for own in (root, *nodes[:2])} == {id(state.early)}
        assert [*state.early.ids] == [*range(9)] and not nodes[2].others.ids
        assert [{*own.edits} for own in nodes] == [set(), {30}, {1, 6, 30}], "all are distinct"
    assert state.fork().early is state.early


def test_nodes_of_a_tree_have_the_edits_of_their_texts():
    """Whatever their numbers, to the bit; and a look down the tree changes nothing."""
    how, known = asks(**ASKED["all"]), [31, 9, 14]
    tree = Draft([31, 8, 120, 31, 31], [0, 0, 1, 3, 2])
    state = TextState(how, PROMPT, VOCAB)
    state.extend(known)
    x = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    paths = [[], [31], [8], [31, 120], [31, 120, 31], [8, 31]]
    for _ in range(2):
        edits = edits_of([None, state], [Draft(), tree])
        assert torch.equal(edited(x, edits, 0), x)
        for row, path in enumerate(paths, 1):
            other = TextState(how, PROMPT, VOCAB)
            other.extend([*known, *path])
            want = edited(x, edits_of([other], [Draft()]), 0)
            assert torch.equal(edited(x, edits, row), want)


@pytest.fixture(scope="module")
def cases(target):
    """Each parameter with each way to draw, and the texts without guesses."""
    given = [drawn | asked for drawn in DRAWN.values() for asked in ASKED.values()]
    given += [drawn | {"bad_words": bad_words_of(target, drawn)} for drawn in DRAWN.values()]
    cases = [Case(PROMPT, asks(**how), arrives=i, n=1 + i % 2) for i, how in enumerate(given)]
    return cases, plain(target, cases)


@pytest.mark.parametrize("drafter", [right, bush, hedge, wrong_later, "ngram", "model", "auto"])
def test_a_drafter_changes_none_of_these_texts(target, cases, drafter):
    """Beside each other, some preempted."""
    cases, want = cases
    is_name = isinstance(drafter, str)
    engine = engine_for(
        target,
        draft_of(target, drafter),
        drafter if is_name else Scripted(drafter, truth_by_id(cases, want)),
        max_nodes=8,
        max_step_nodes=60,
    )
    got = Watch(engine).run(cases, {9: "preempt", 15: "preempt"})
    assert [r.token_ids.tolist() for r in got] == want
    assert engine.stats.num_accepted > 0
