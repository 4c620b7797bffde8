"""Beam search of the offline API and of the server's completions."""

import pytest

from specserve import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from specserve.errors import RequestError
from tests.checkpoints import tiny_checkpoint

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26, "model.dtype": "fp32"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1)
    with LLM(folder, set=SETTINGS, progress=False) as llm:
        yield llm


def test_sequences_come_best_first_with_their_logprobs(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=8, n=2)
    one, other = llm.beam_search(["the cat", "a mat"], params)
    for prompt, found in (("the cat", one), ("a mat", other)):
        first, second = found.sequences
        ids = llm.tokenizer.encode(prompt)
        assert first.tokens[: len(ids)] == ids and first.text == llm.tokenizer.decode(first.tokens)
        assert len(first.logprobs) == len(first.tokens) - len(ids)
        own = [
            table[token].logprob
            for table, token in zip(first.logprobs, first.tokens[len(ids) :], strict=True)
        ]
        assert first.cum_logprob == pytest.approx(sum(own))
        ranked = [s.cum_logprob / len(s.logprobs) for s in (first, second)]
        assert ranked == sorted(ranked, reverse=True) and first.tokens != second.tokens


def test_one_beam_is_the_greedy_text(llm):
    [found] = llm.beam_search("the cat", BeamSearchParams(beam_width=1, max_tokens=12))
    [greedy] = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=12))
    assert found.sequences[0].tokens == greedy.prompt_token_ids + greedy.token_ids


def test_beams_keep_a_grammar(llm):
    params = SamplingParams(
        use_beam_search=True,
        n=3,
        max_tokens=20,
        structured_outputs=StructuredOutputsParams(choice=["the cat", "the mat", "a dog"]),
    )
    [found] = llm.generate("say", params)
    assert {choice.text for choice in found.choices} <= {"the cat", "the mat", "a dog"}
    assert [choice.finish_reason for choice in found.choices] == ["stop"] * 3
    assert len({tuple(choice.token_ids) for choice in found.choices}) == 3
    assert found.speculation.disabled_by == "use_beam_search" and found.speculation.steps == 0


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.5}, {"top_p": 0.9}, {"stop": "a"}, {"min_tokens": 2}, {"prediction": "a"}],
    ids=lambda asked: next(iter(asked)),
)
def test_parameters_that_change_logits_are_refused(llm, asked):
    [name] = asked
    with pytest.raises(RequestError, match=f"{name}: not supported with use_beam_search") as e:
        llm.generate("the cat", SamplingParams(use_beam_search=True, max_tokens=4, **asked))
    assert e.value.param == name


def test_streams_and_logits_processors_are_refused(llm):
    params = SamplingParams(use_beam_search=True, max_tokens=4)
    with pytest.raises(RequestError, match="use_beam_search: a stream returns one choice"):
        llm.stream("the cat", params)
    with pytest.raises(RequestError, match="logits_processors: not supported with use_beam_search"):
        llm.generate("the cat", params, logits_processors=[lambda ids, logits: logits])
    with pytest.raises(RequestError, match="is not a BeamSearchParams"):
        llm.beam_search("the cat", params)
    with pytest.raises(RequestError, match="temperature: not supported"):
        llm.beam_search("the cat", BeamSearchParams(beam_width=2, max_tokens=4, temperature=1.0))
