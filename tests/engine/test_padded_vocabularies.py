"""Target and draft models with one tokenizer, and embedding tables padded to other sizes."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve import LLM, SamplingParams
from specserve.engine import engine as step_loop
from tests.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.engine.engines import let_all_guess

NUM_IDS = len(tiny_tokenizer())
SIZES = NUM_IDS + 4, NUM_IDS + 44  # rows of the embedding tables
SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 25, "model.dtype": "fp32"}
SOURCES = ["ngram", "model", "suffix", "recycle", "prediction"]
ASKED = [
    SamplingParams(max_tokens=40, temperature=0),
    SamplingParams(max_tokens=40, temperature=0.8, seed=5, n=2),
    SamplingParams(max_tokens=40, temperature=0.8, seed=6, repetition_penalty=1.1),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models by role and size. Their padding rows have such weights that both often choose them."""
    return {
        (role, size): padded(tmp_path_factory.mktemp(role), size, seed)
        for role, seed in {"target": 1, "draft": 2}.items()
        for size in SIZES
    }


def padded(folder, size, seed):
    tiny_checkpoint(folder, seed=seed, vocab_size=size)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][NUM_IDS:] *= 2.0 if seed == 1 else 6.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def proposed(monkeypatch):
    """The draft tokens that steps verify; no clock decides about them."""
    let_all_guess(monkeypatch)
    seen, verify = [], step_loop.accepted_paths

    def watched(sampled, answers):
        seen.extend(token for s in sampled for token in s.draft.tokens)
        return verify(sampled, answers)

    monkeypatch.setattr(step_loop, "accepted_paths", watched)
    return seen


def outputs(llm, prompt):
    return [list(c.token_ids) for asked in ASKED for c in llm.generate([prompt], asked)[0].outputs]


def load(folders, target, draft=None, **settings):
    draft = None if draft is None else folders["draft", draft]
    return LLM(folders["target", target], draft, set=SETTINGS | settings, progress=False)


@pytest.mark.parametrize("sizes", [SIZES, SIZES[::-1]], ids=["larger draft", "larger target"])
@pytest.mark.parametrize("drafter", ["model", "auto"])
def test_padding_rows_are_never_proposed_and_change_no_text(folders, proposed, sizes, drafter):
    target, draft = sizes
    # The target emits padding ids, and the prompts have them: one that both tables have, and one
    # that only the larger table has.
    prompts = [5, 6, NUM_IDS, 5, 6], [7, target - 1, 8, 9, 7]
    with load(folders, target, **{"drafter.name": "none"}) as llm:
        want = [outputs(llm, prompt) for prompt in prompts]
    assert any(token >= NUM_IDS for texts in want for text in texts for token in text)
    settings = {"drafter.name": drafter}
    if drafter == "auto":
        settings["drafter.options.sources"] = SOURCES
    with load(folders, target, draft, **settings) as llm:
        assert [outputs(llm, prompt) for prompt in prompts] == want
        assert llm.engine.draft_model.num_rows > 0
    assert proposed and max(proposed) < NUM_IDS


@pytest.mark.parametrize("sizes", [SIZES, SIZES[::-1]], ids=["larger draft", "larger target"])
def test_a_draft_model_with_another_padding_can_come_at_run_time(folders, proposed, sizes):
    target, draft = sizes
    prompt = [5, 6, 7, NUM_IDS + 1, 5, 6, 7]
    with load(folders, target, **{"drafter.options.sources": ["ngram"]}) as llm:
        want = outputs(llm, prompt)
        llm.load_draft_model(folders["draft", draft])
        proposed.clear()
        assert outputs(llm, prompt) == want
        assert llm.engine.draft_model.num_rows > 0
    assert proposed and max(proposed) < NUM_IDS


def test_a_draft_model_runs_no_token_that_its_embedding_lacks(folders):
    large, small = SIZES[::-1]
    with load(folders, large, small, **{"drafter.name": "model"}) as llm:
        ids, params = llm.check([5, 6, small, 7, 8], ASKED[0])
        [generation] = llm.start(ids, params)
        for _ in range(4):
            llm.step()
        [request] = llm.engine.requests.values()
        assert request.draft_table.num_computed == 2, "the rows before that token"
        assert generation.token_ids


def test_logits_of_padding_rows_are_masked_before_a_draft_model_chooses(folders):
    small, large = SIZES
    with load(folders, small, large, **{"drafter.name": "model"}) as llm:
        model = llm.engine.draft_model
        logits = model.masked(torch.zeros(2, large), [(0, 0), (1, 0)])
        assert model.num_ids == NUM_IDS
        assert logits.isneginf().any(0).nonzero().flatten().tolist() == [*range(NUM_IDS, large)]
