"""A drafter of given acceptance: right as often as asked, without changing the text."""

import json
from array import array

import pytest

from specserve import LLM, SamplingParams
from specserve.errors import ConfigError
from specserve_bench.results import Speculation
from specserve_bench.scripted import NAME, ScriptedDrafter, ScriptedOptions
from specserve_drafters.base import DraftRequest
from tests.checkpoints import tiny_checkpoint

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26}
PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=100, ignore_eos=True)
PROMPTS = ["the cat", "def read", "with open(path) as file", "a"]


def item(tokens, limit=16, id=1, seed=0):
    return DraftRequest(id, array("i", tokens), limit, 0.0, seed)


def drafter(folder, texts, *acceptance):
    file = folder / "recording.json"
    file.write_text(json.dumps(texts))
    return ScriptedDrafter(ScriptedOptions(recording=str(file), acceptance=acceptance))


def test_it_goes_on_as_recorded_as_deep_as_it_may(tmp_path):
    sure = drafter(tmp_path, [[1, 2, 3, 4, 5, 6], [1, 2, 9, 9]], 1.0, 1.0, 1.0)
    short, far, end, other, unknown = sure.propose(
        [
            item([1, 2, 3], limit=2, id=1),
            item([1, 2, 3], id=2),
            item([1, 2, 3, 4, 5], id=3),
            item([1, 2, 9], id=4),
            item([7], id=5),
        ]
    )
    assert (short.tokens, far.tokens, end.tokens) == ([4, 5], [4, 5, 6], [6])
    assert (other.tokens, unknown.tokens) == ([9], [])
    assert far.parents == [0, 1, 2]


def test_a_request_that_turns_out_to_be_another_one_is_found_again(tmp_path):
    sure = drafter(tmp_path, [[1, 2, 3], [1, 5, 6]], 1.0)
    assert sure.propose([item([1])])[0].tokens == [2]
    assert sure.propose([item([1, 5])])[0].tokens == [6]
    sure.forget(1)
    assert sure.known == {}


def test_what_is_wrong_is_wrong_from_there_on(tmp_path):
    half = drafter(tmp_path, [list(range(50))], 1.0, 0.0, 1.0)
    [draft] = half.propose([item([0, 1])])
    assert draft.tokens[0] == 2 and len(draft) == 3
    assert all(token != right for token, right in zip(draft.tokens[1:], (3, 4), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


def test_the_engine_accepts_what_was_asked_for_and_says_the_same(folder, tmp_path):
    with LLM(folder, drafter="none", set=SETTINGS, progress=False) as llm:
        plain = llm.generate(PROMPTS, PARAMS)
    texts = [o.prompt_token_ids + o.token_ids for o in plain]
    (tmp_path / "recording.json").write_text(json.dumps(texts))
    options = {"recording": str(tmp_path / "recording.json"), "acceptance": [0.8, 0.5, 0.5]}
    settings = SETTINGS | {"drafter.options": options}
    with LLM(folder, drafter=NAME, set=settings, progress=False, weights=llm.weights) as llm:
        generations = [g for p in PROMPTS for g in llm.start(*llm.check(p, PARAMS))]
        while not all(g.is_done for g in generations):
            llm.step()
        assert [g.token_ids for g in generations] == [o.token_ids for o in plain]
        steps = [accepted for g in generations for drafted, accepted in g.steps if drafted == 3]
    counts = [steps.count(n) for n in range(4)]
    reached = Speculation(len(steps), 0, 0, counts).acceptance_by_depth
    assert len(steps) > 100
    assert reached == pytest.approx([0.8, 0.4, 0.2], abs=0.11)


def test_a_chance_above_one_is_refused(folder):
    options = {"recording": "r.json", "acceptance": [1.2]}
    with pytest.raises(ConfigError, match=r"<= 1"):
        LLM(folder, drafter=NAME, set={"drafter.options": options}, progress=False)
