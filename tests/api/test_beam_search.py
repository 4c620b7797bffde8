"""Beam search of the offline API and of the server's completions."""

import asyncio

import pytest

from specserve import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from specserve.errors import RequestError
from tests.checkpoints import tiny_checkpoint

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26, "model.dtype": "fp32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture
def run(folder):
    """Runs a test with an AsyncLLM."""

    async def with_llm(test):
        async with AsyncLLM(folder, set=SETTINGS) as llm:
            return await test(llm)

    return lambda test: asyncio.run(with_llm(test))


@pytest.fixture(scope="module")
def llm(folder):
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


def test_an_async_llm_yields_the_same_beams_once(llm, run):
    params = BeamSearchParams(beam_width=3, max_tokens=8, n=2)
    [found] = llm.beam_search("the cat", params)

    async def ask(a):
        return [output async for output in a.beam_search("the cat", "mine", params)]

    [output] = run(ask)
    assert output.request_id == "mine" and output.finished
    ids = output.prompt_token_ids
    assert [ids + c.token_ids for c in output.outputs] == [s.tokens for s in found.sequences]
    sums = [s.cum_logprob for s in found.sequences]
    assert [c.cumulative_logprob for c in output.outputs] == pytest.approx(sums)
    assert output.timing.ttft_ms < output.timing.total_ms
    spread = output.timing.total_ms - output.timing.ttft_ms
    assert output.timing.tpot_ms == pytest.approx(spread / 7)


def test_beams_that_an_async_llm_is_left_with_are_freed(run):
    endless = BeamSearchParams(beam_width=3, max_tokens=8000, ignore_eos=True)

    async def ask(a):
        async with asyncio.timeout(20):
            task = asyncio.create_task(anext(a.beam_search("the cat", None, endless)))
            while not a.live:
                await asyncio.sleep(0.01)
            await a.abort(next(iter(a.live)))
            output = await task
            assert [c.finish_reason for c in output.outputs] == ["abort"] * 3
            while (await a.start()).client.live:
                await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match=r"use_beam_search: .* or call beam_search"):
            await anext(a.generate("the cat", SamplingParams(use_beam_search=True)))

    run(ask)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"beam_width": 0}, "beam_width: 0 is not an integer from 1 to 128"),
        ({"beam_width": 2.0}, "beam_width: 2.0 is not an integer"),
        ({"beam_width": 2, "n": 3}, "n: 3 beams exceed beam_width = 2"),
        ({"beam_width": 2, "n": 0}, "n: Expected an integer >= 1"),
    ],
)
def test_errors_name_the_parameter_of_the_search(llm, asked, why):
    with pytest.raises(RequestError, match=why):
        llm.beam_search("the cat", BeamSearchParams(max_tokens=4, **asked))


@pytest.mark.parametrize("asked", [{"length_penalty": 2.0}, {"early_stopping": True}])
def test_parameters_of_beam_search_need_it(llm, asked):
    [name] = asked
    with pytest.raises(RequestError, match=f"{name}: only for beam search") as e:
        llm.generate("the cat", SamplingParams(max_tokens=4, **asked))
    assert e.value.param == name


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
