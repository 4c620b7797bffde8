"""Trees from a scripted draft model: its probabilities after a text are a function of the test."""

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_drafters import Draft, DraftRequest
from specserve_drafters.model import ModelDrafter
from specserve_kernels import SampleParams, reference


class Script:
    """An executor that counts its calls; `paths` holds every text that it has run."""

    ops = reference
    num_ids = 320

    def __init__(self, says, late=(), full=()):
        self.says, self.late, self.full = says, late, full  # ids not ready, ids without room
        self.paths, self.calls = {}, []

    def extend(self, items):
        ready = [i for i, item in enumerate(items) if item.id not in self.late]
        self.paths = {items[i].id: [items[i].token_ids.tolist()] for i in ready}
        return ready, self.logits([self.paths[items[i].id][0] for i in ready])

    def expand(self, nodes):
        self.calls.append(nodes)
        fit = [i for i, n in enumerate(nodes) if n.id not in self.full]
        new = []
        for id, tokens, parents in (nodes[i] for i in fit):
            above = [self.paths[id][parent] for parent in parents]
            new += [[*text, token] for text, token in zip(above, tokens, strict=True)]
            self.paths[id] += new[-len(tokens) :]
        return fit, self.logits(new)

    def logits(self, texts):
        return torch.tensor([self.says(text) for text in texts]).log()


def ask(id=0, ids=(1, 2, 3), limit=4, temperature=0.0, seed=0):
    return DraftRequest(id, array("i", ids), limit, temperature, seed)


def propose(script, *items, **options):
    options = {"tau": 1.0, "width": 2, "min_gain": 0.0, "min_value": 0.0} | options
    return ModelDrafter(ModelDrafter.Options(**options), script).propose(items)


def always(text):
    return [0.6, 0.3, 0.09, 0.01]


def paths(draft):
    texts = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        texts.append([*texts[parent], token])
    return texts


def test_the_likeliest_tree_is_drafted_its_likeliest_path_first():
    # Of the paths 0 .6, 00 .36, 1 .3, 000 .216, 01 .18, 10 .18 the first four. The draft model ran
    # 0 1 | 00 01 | 000, in this order.
    script = Script(always)
    assert propose(script, ask()) == [Draft([0, 0, 0, 1], [0, 1, 2, 0], [1, 3, 5, 2])]
    assert [[n[1:] for n in call] for call in script.calls] == [
        [([0, 1], [0, 0])],
        [([0, 1], [1, 1])],
        [([0], [3])],
    ]


DEPTHS = {  # limit, options -> how often the draft model runs a level
    "a single guess needs none": (1, {}, 0),
    "no deeper than the limit": (2, {}, 1),
    "no deeper than is likely": (4, {}, 3),
    "not where nothing likely is left": (8, {}, 4),
    "one level is the root's own": (8, {"max_depth": 1}, 0),
    "no deeper than asked": (8, {"max_depth": 3}, 2),
    "all that a level promises counts": (4, {"min_gain": 0.53}, 2),
    "a level that promises less is not run": (4, {"min_gain": 0.55}, 1),
    "a gain that no level has": (4, {"min_gain": 0.95}, 0),
    "a chain": (6, {"width": 1}, 5),
}


@pytest.mark.parametrize(("limit", "options", "levels"), DEPTHS.values(), ids=DEPTHS)
def test_the_draft_model_runs_no_level_in_vain(limit, options, levels):
    script = Script(always)
    propose(script, ask(limit=limit), **options)
    assert len(script.calls) == levels


def test_tau_says_how_far_the_model_is_believed():
    chain, bush = (propose(Script(always), ask(), tau=tau)[0] for tau in (0.2, 4.0))
    assert chain.parents == [0, 1, 2, 3]
    assert bush.parents.count(0) == 2


def test_a_draft_that_is_hardly_ever_right_is_not_worth_its_row():
    # Of the four above, 1 has .3 and 000 has .216: one is kept, the other is not.
    assert propose(Script(always), ask(), min_value=0.25) == [
        Draft([0, 0, 1], [0, 1, 0], [1, 3, 2])
    ]


AGAIN = (1, 2, 3, 1, 2)  # n-grams go on with 3, 1, 2, ...


def test_a_path_that_stood_here_before_is_one_among_the_others():
    # At first an n-gram's token is trusted by half: 3 .5, 31 .25, 312 .125; the model's as above.
    [draft] = propose(Script(always), ask(ids=AGAIN, limit=5))
    assert paths(draft) == [[], [0], [0, 0], [3], [1], [3, 1]]
    assert draft.expanded == [1, 3, 0, 2, 0]


def test_a_token_that_both_draft_is_one_node_as_likely_as_the_surer_of_them_says():
    [draft] = propose(Script(lambda text: [0.1, 0.1, 0.1, 0.7]), ask(ids=AGAIN, limit=3))
    assert paths(draft) == [[], [3], [3, 3], [3, 3, 3]]
    [draft] = propose(Script(lambda text: [0.3, 0.3, 0.2, 0.2]), ask(ids=AGAIN, limit=1))
    assert paths(draft) == [[], [3]]


def test_n_grams_are_trusted_as_far_as_they_were_right():
    script = Script(lambda text: [0.6, 0.3, 0.09, 0.01])
    drafter = ModelDrafter(ModelDrafter.Options(width=2, min_gain=0.0, min_value=0.0), script)
    asked = ask(ids=AGAIN, limit=4)
    for _ in range(30):
        [draft] = drafter.propose([asked])
        right = [
            k for k, path in enumerate(paths(draft)) if path and path == [3, 1, 2, 3][: len(path)]
        ]
        drafter.observe(asked.id, draft, right)
    assert paths(draft) == [[], [3], [3, 1], [3, 1, 2], [3, 1, 2, 3]]
    for _ in range(30):
        [draft] = drafter.propose([asked])
        drafter.observe(asked.id, draft, [])
    assert not any(path[:1] == [3] for path in paths(draft))
    drafter.forget(asked.id)
    assert [3] in paths(drafter.propose([asked])[0])
    assert not drafter.trust


def test_what_is_warned_about_a_draft_that_was_not_made_is_no_error():
    drafter = ModelDrafter(ModelDrafter.Options(), Script(always))
    drafter.propose([ask(7, ids=AGAIN, limit=4)])
    drafter.observe(7, Draft.chain([1]), [1])
    drafter.observe(8, Draft(), [])
    drafter.forget(7)
    assert not drafter.trust and not drafter.looked_up


def test_n_grams_can_be_left_out():
    [draft] = propose(Script(always), ask(ids=AGAIN, limit=4), ngrams=False)
    assert draft == Draft([0, 0, 0, 1], [0, 1, 2, 0], [1, 3, 5, 2])


def test_all_requests_of_a_level_go_through_together():
    script = Script(always)
    drafts = propose(script, ask(7), ask(8, limit=2), ask(9))
    assert drafts[0] == drafts[2] == Draft([0, 0, 0, 1], [0, 1, 2, 0], [1, 3, 5, 2])
    assert drafts[1] == Draft([0, 0], [0, 1], [1, 0])
    assert [[n.id for n in call] for call in script.calls] == [[7, 8, 9], [7, 9], [7, 9]]


def test_who_has_not_caught_up_is_drafted_by_ngrams():
    script = Script(always, late=[8])
    late = ask(8, ids=[5, 6, 7, 5, 6], limit=2)
    assert propose(script, ask(7, limit=1), late) == [Draft([0], [0], [0]), Draft([7, 5], [0, 1])]


def test_nobody_ready_is_no_error():
    script = Script(always, late=[0])
    assert propose(script, ask()) == [Draft()]
    assert script.calls == []


def test_a_tree_without_room_stays_as_it_is_and_the_others_grow():
    script = Script(always, full=[7])
    cut, request_tries = propose(script, ask(7), ask(8))
    assert (cut.tokens, cut.parents) == ([0, 1], [0, 0])
    assert request_tries == Draft([0, 0, 0, 1], [0, 1, 2, 0], [1, 3, 5, 2])
    assert [[n.id for n in call] for call in script.calls] == [[7, 8], [8], [8]]


def test_a_vocabulary_smaller_than_the_width_is_no_error():
    (draft,) = propose(Script(lambda text: [0.7, 0.3]), ask(limit=63), width=16, max_depth=3)
    assert len(draft) == 2 + 4 + 8


def law_after(seed, V=5):
    """A draft model that attends to everything."""

    def says(text):
        g = torch.Generator().manual_seed(hash((seed, *text)) % 2**40)
        return torch.randn(V, generator=g).mul(1.5).softmax(-1).tolist()

    return says


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    limit=st.integers(1, 63),
    width=st.integers(1, 16),
    max_depth=st.sampled_from([1, 2, 8, 63]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_numbers_are_valid_and_say_what_the_draft_model_ran(
    seed, limit, width, max_depth, temperature
):
    script = Script(law_after(seed))
    item = ask(limit=limit, temperature=temperature, seed=seed)
    (draft,) = propose(script, item, width=width, max_depth=max_depth)
    assert draft.cut(limit, 5) == draft and len(draft.expanded) == len(draft) > 0
    for path, e in zip(paths(draft)[1:], draft.expanded, strict=True):
        assert e == 0 or script.paths[0][e] == [1, 2, 3, *path]
    siblings = [*zip(draft.parents, draft.tokens, strict=True)]
    assert len(set(siblings)) == len(siblings)
    assert len(script.paths[0]) <= 64


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_an_identical_draft_model_says_what_the_target_will_draw(seed, temperature):
    item = ask(limit=6, temperature=temperature, seed=seed)
    (draft,) = propose(Script(law_after(seed)), item, width=2, tau=0.1)
    text = [1, 2, 3]
    for node in range(1, 4):
        params = SampleParams.greedy(1)._replace(
            temperature=torch.tensor([temperature]),
            seeds=torch.tensor([seed]),
            token_index=torch.tensor([len(text)]),
        )
        logits = torch.tensor([law_after(seed)(text)]).log()
        text += reference.sample(logits, torch.tensor([0]), params).tolist()
        assert [1, 2, 3, *paths(draft)[node]] == text


def test_greedy_and_sampled_requests_share_a_level():
    items = [ask(0, temperature=0.0, seed=3), ask(1, temperature=1.0, seed=3)]
    together = propose(Script(law_after(1)), *items)
    assert together == [propose(Script(law_after(1)), item)[0] for item in items]
    assert together[0] != together[1]
