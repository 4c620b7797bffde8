"""A budget ends reasoning at the same token with every drafter, and leaves the rest as it is."""

import pytest
from msgspec.structs import replace

from specserve.exchange.sampling_params import ReasoningBudget, Sampling
from specserve.models.eagle_head import load_eagle_head
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import Case, Watch, ask_always, draft_of, engine_for, load_small, plain
from tests.models.eagle_heads import write_head

OPEN, CLOSE, OTHER = 300, 301, 302
BUDGETS = [ReasoningBudget(n, (OPEN,), (CLOSE, OTHER)) for n in (0, 1, 7, 12)]
DRAFTERS = "ngram", "model", "eagle", "auto"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = load_small(tiny_checkpoint(root / "target", seed=1, tie_word_embeddings=False))
    draft = load_small(tiny_checkpoint(root / "draft", seed=1, num_hidden_layers=1))
    write_head(root / "head", eagle_aux_hidden_state_layer_ids=[0, 1])
    return target, draft, load_eagle_head(root / "head", target)


def cases_of(**given):
    """Prompts inside of reasoning and others, of tokens that lookup finds again."""
    cases = []
    for i, budget in enumerate(BUDGETS * 2):
        prompt = [5 + i, 9, 14, 5 + i, 9, 14] * 4 + [OPEN] * (i < len(BUDGETS) or i % 2)
        for temperature in (0.0, 1.0):
            sampling = Sampling(
                **{"max_tokens": 24, "temperature": temperature, "top_k": 0, "top_p": 1.0}
                | {"min_p": 0.0, "seed": i, "reasoning": budget}
                | given
            )
            cases.append(Case(prompt, sampling))
    return cases


@pytest.fixture(scope="module")
def want(models):
    return plain(models[0], cases_of())


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_that_without_drafting(models, want, drafter):
    target, draft, head = models
    head = head if drafter in ("eagle", "auto") else None
    engine = engine_for(target, draft_of(draft, drafter), drafter, head=head, max_nodes=12)
    if drafter == "auto":
        ask_always(engine)
    watch = Watch(engine)
    assert [r.token_ids.tolist() for r in watch.run(cases_of())] == want
    assert engine.stats.num_drafted > 20


def test_reasoning_ends_at_its_budget_and_the_text_before_is_the_models_own(models, want):
    free = [replace(case, sampling=replace(case.sampling, reasoning=None)) for case in cases_of()]
    own = plain(models[0], free)
    for case, *both in zip(cases_of(), want, own, strict=True):
        text, its = (tokens[len(case.prompt) :] for tokens in both)
        budget = case.sampling.reasoning
        if case.prompt[-1] == OPEN:
            closed = its[: budget.max_tokens]
            end = closed.index(CLOSE) if CLOSE in closed else budget.max_tokens
            assert text[:end] == its[:end]
            assert text[end] == CLOSE
            assert text[end + 1] == OTHER or CLOSE in closed
        else:
            assert (text == its) or OPEN in its
    assert sum(text != its for text, its in zip(want, own, strict=True)) >= len(BUDGETS)
