"""Drafters that do to what they are given whatever Python allows: no text may change."""

import numpy as np
import pytest

from specserve.config import load_config
from specserve.errors import ConfigError
from specserve.exchange.sampling_params import Sampling
from specserve.models.selection import check_drafter
from specserve.speculation.speculator import UserSource
from specserve_drafters import Draft, base
from specserve_drafters.candidates import Candidate
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import Case, engine_for, load_small, plain, planned

PROMPT = [5, 17, 42, 5, 17, 99, 3]
CASES = [
    Case(PROMPT, Sampling(max_tokens=12, temperature=t, top_k=0, top_p=1.0, min_p=0.0, seed=7))
    for t in (0.0, 1.0)
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3))


class Guess:
    """Guesses the last known token twice."""

    def propose(self, items):
        return [Draft.chain([item.known[-1]] * min(2, item.limit)) for item in items]

    def observe(self, id, draft, accepted):
        pass


class KeepsAView(Guess):
    def propose(self, items):
        self.kept = [np.frombuffer(item.known, np.int32) for item in items]
        return super().propose(items)


class Writes(Guess):
    def propose(self, items):
        drafts = super().propose(items)
        for item in items:
            item.known[-1] = 7
        return drafts


class Appends(Guess):
    def propose(self, items):
        drafts = super().propose(items)
        for item in items:
            item.known.append(7)
        return drafts


class AddsToAccepted(Guess):
    def observe(self, id, draft, accepted):
        accepted.append(50)


class EmptiesDrafts(Guess):
    def observe(self, id, draft, accepted):
        draft.tokens.clear()
        draft.parents.clear()


class NeverEnds(Guess):
    def candidates(self, items):
        while True:
            yield [Candidate(1, 0, 0.5, "mine")]


@pytest.mark.parametrize("is_auto", [False, True], ids=["alone", "auto"])
@pytest.mark.parametrize(
    "drafter", [KeepsAView, Writes, Appends, AddsToAccepted, EmptiesDrafts, NeverEnds]
)
def test_no_text_changes(target, drafter, is_auto):
    want = plain(target, CASES)
    engine = engine_for(target, None, "auto" if is_auto else drafter(), max_nodes=4)
    if is_auto:
        engine.speculator = planned(engine, UserSource("mine", drafter(), 320))
    requests = [engine.add(case.prompt, case.sampling) for case in CASES]
    while not engine.is_idle:
        engine.step()
        engine.check()
    assert [r.token_ids.tolist() for r in requests] == want


class Unchecked(Guess):
    def candidates(self, items):
        guess = Candidate(items[0].known[-1], 0, 0.5, "mine")
        return [[guess, guess._replace(parent=5), guess] for _ in items]


def test_candidates_that_are_dropped_are_reported_once(target, caplog):
    engine = engine_for(target, None, "auto", max_nodes=4)
    engine.speculator = planned(engine, UserSource("mine", Unchecked(), 320))
    engine.add(CASES[0].prompt, CASES[0].sampling)
    while not engine.is_idle:
        engine.step()
    [message] = caplog.messages
    assert "drafter mine: candidate 2 of a list, Candidate(" in message and "parent=5" in message
    assert engine.stats.sources["mine"].proposed > 1


SOURCES = {  # drafter.options.sources, drafter.model -> the complaint
    "one that is not there": (
        ["ngram", "no_such.module:X"],
        None,
        "Unknown drafter 'no_such.module:X'",
    ),
    "auto itself": (["auto"], None, "unknown source 'auto'"),
    "a model that is not there": (["model"], None, "Set drafter.model"),
    "no one to run the model": (["ngram"], "draft", "drafter.model = 'draft' has no effect"),
}


@pytest.mark.parametrize(("sources", "model", "complaint"), SOURCES.values(), ids=SOURCES)
def test_sources_that_cannot_draft_are_refused(sources, model, complaint):
    settings = {"model.path": "target", "drafter.options": {"sources": sources}}
    config = load_config(None, settings | ({"drafter.model": model} if model else {}))
    with pytest.raises(ConfigError, match=complaint):
        check_drafter(config)


def test_the_draft_model_is_run_by_one_source(target):
    name = f"{RunsTheModel.__module__}:{RunsTheModel.__name__}"
    engine_for(target, target, "auto", options={"sources": ["ngram", name]})
    with pytest.raises(ConfigError, match=f"{name} and model run the draft model"):
        engine_for(target, target, "auto", options={"sources": [name, "model"]})


class RunsTheModel(Guess):
    needs_executor = True

    class Options(base.Options, frozen=True):
        pass

    def __init__(self, options, executor):
        pass


class HasOptions(Guess):
    class Options(base.Options, frozen=True):
        length: int = 4

    def __init__(self, options):
        self.length = options.length


NAME = f"{HasOptions.__module__}:HasOptions"


def test_a_source_has_the_options_under_its_name(target):
    options = {"sources": ["ngram", NAME], "source_options": {NAME: {"length": 7}}}
    engine = engine_for(target, None, "auto", options=options)
    assert engine.speculator.sources[1].drafter.length == 7


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({NAME: {"lenght": 7}}, f"drafter.options for '{NAME}': .*lenght"),
        ({NAME: {"length": "long"}}, f"drafter.options for '{NAME}': .*length"),
        (
            {"ngram": {}},
            rf"'ngram' is not a package.module:Class .*\. Sources with options: {NAME}",
        ),
        ({"my:Other": {}}, "'my:Other' is not a"),
    ],
    ids=str,
)
def test_options_that_no_source_has_are_refused(given, complaint):
    options = {"sources": ["ngram", NAME], "source_options": given}
    config = load_config(None, {"model.path": "target", "drafter.options": options})
    with pytest.raises(ConfigError, match=complaint):
        check_drafter(config)
