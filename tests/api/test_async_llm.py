"""The API for an event loop: what comes while an answer grows, and what leaving it frees."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from specserve import LLM, AsyncLLM, SamplingParams
from specserve.engine.engine import Engine
from specserve.errors import ConfigError, EngineDied, RequestError
from tests.checkpoints import tiny_checkpoint
from tests.server.in_process import engine_thread

SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26}
PARAMS = SamplingParams(max_tokens=30, seed=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, seed=4, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=8000, seed=4, ignore_eos=True)  # seconds, to be left before


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return tiny_checkpoint(folder, seed=1, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, set=SETTINGS, progress=False) as llm:
        yield llm


@pytest.fixture
def run(folder, monkeypatch):
    """Runs a test with an AsyncLLM whose engine is a thread of this process."""

    def run(test):
        with contextlib.ExitStack() as engines:

            def fork_server(config, drafters):
                start = partial(engines.enter_context, engine_thread(config))
                return SimpleNamespace(start=start, begin_with=None, release=None)

            monkeypatch.setattr("specserve.api.async_llm.ForkServer", fork_server)

            async def with_llm():
                async with AsyncLLM(folder, set=SETTINGS) as llm:
                    return await test(llm)

            return asyncio.run(with_llm())

    return run


async def all_of(outputs):
    return [output async for output in outputs]


@pytest.fixture
def in_turns(monkeypatch):
    """`all_of`, but a step waits until the output of the one before it has been taken: on a busy
    machine several would come as one.
    """
    taken, step = threading.Semaphore(), Engine.step

    def in_turn(engine):
        if not engine.is_idle:
            taken.acquire(timeout=1)
        return step(engine)

    async def all_of(outputs):
        monkeypatch.setattr(Engine, "step", in_turn)
        all = []
        async for output in outputs:
            all.append(output)
            taken.release()
        return all

    return all_of


def test_what_scripts_for_vllm_ask_for_besides(run):
    async def ask(a):
        conversation = [{"role": "user", "content": "hi"}]
        tokenizer = await a.get_tokenizer()
        chat = (await all_of(a.chat(conversation, PARAMS, tools=None)))[-1]
        assert chat.prompt == tokenizer.apply_chat_template(conversation, False, True)
        both = {"prompt": "the cat", "prompt_token_ids": [5, 6]}
        (*_, last) = await all_of(a.generate(both, PARAMS, "id", lora_request=None))
        assert (last.prompt, last.prompt_token_ids) == ("the cat", [5, 6])

    run(ask)


def test_shutdown_ends_requests_and_the_engine_without_being_awaited(run):
    async def ask(a):
        stream = a.generate("the cat", ENDLESS)
        await anext(stream)
        client = (await a.start()).client
        a.shutdown()
        last = [output async for output in stream][-1]
        assert last.finish_reason == "abort"
        await asyncio.wait_for(client.died.wait(), 5)
        with pytest.raises(EngineDied, match="closed"):
            await anext(a.generate("a"))

    run(ask)


def test_a_change_of_drafters_may_be_asked_for_before_the_start(folder):
    llm = AsyncLLM(folder, set=SETTINGS)
    for change in (llm.unload_draft_model(), llm.change_speculation(max_nodes=0)):
        change.close()  # it has not begun; it starts the engine when it is awaited


async def held_blocks(llm):
    """Blocks of running requests, once the engine has reported after all that was sent to it."""
    client = (await llm.start()).client
    reports = []
    client.on_report = reports.append
    await llm.reset_cache()
    return reports[-1].blocks["target"] + reports[-1].num_running + reports[-1].num_waiting


def test_outputs_grow_into_what_generate_returns(run, llm, in_turns):
    (want,) = llm.generate("the cat", PARAMS)
    outputs = run(lambda a: in_turns(a.generate("the cat", PARAMS, request_id="mine")))
    last = outputs[-1]
    assert (last.text, last.token_ids, last.usage) == (want.text, want.token_ids, want.usage)
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) > 2 and {(o.request_id, o.prompt) for o in outputs} == {("mine", "the cat")}
    for one, next in itertools.pairwise(outputs):
        assert one.finish_reason is None and len(one.token_ids) < len(next.token_ids)
        assert next.token_ids[: len(one.token_ids)] == one.token_ids
        assert next.text.startswith(one.text)


def test_logprobs_grow_into_what_generate_returns(run, llm, in_turns):
    params = msgspec.structs.replace(PARAMS, logprobs=2, prompt_logprobs=1, n=2)
    (want,) = llm.generate("the cat", params)
    outputs = run(lambda a: in_turns(a.generate("the cat", params)))
    assert [c.logprobs for c in outputs[-1].choices] == [c.logprobs for c in want.choices]
    assert outputs[-1].cumulative_logprob == want.cumulative_logprob < 0
    assert outputs[-1].prompt_logprobs == want.prompt_logprobs and len(outputs) > 4
    for output in outputs:
        for choice, whole in zip(output.choices, want.choices, strict=True):
            assert choice.logprobs == whole.logprobs[: len(choice.token_ids)]


def test_the_best_of_choices_is_not_known_while_they_come(run):
    params = SamplingParams(best_of=2)
    with pytest.raises(RequestError, match=r"best_of: .* call LLM.generate"):
        run(lambda a: all_of(a.generate("the cat", params)))


def test_requests_of_every_kind_run_side_by_side(run, llm):
    params = SamplingParams(max_tokens=20, seed=3, n=2)
    message = [{"role": "user", "content": "hi"}]
    continued = [*message, {"role": "assistant", "content": "the"}]

    async def ask(a):
        asked = (
            a.generate("the cat", params),
            a.generate([5, 6, 7], sampling_params=params),
            a.generate({"prompt_token_ids": [9] * 40}, params),
            a.chat(message, params),
            a.chat(continued, params, continue_final_message=True),
        )
        return [outputs[-1] for outputs in await asyncio.gather(*map(all_of, asked))]

    got = run(ask)
    want = llm.generate(["the cat", [5, 6, 7], [9] * 40], params) + llm.chat(message, params)
    want += llm.chat(continued, params, continue_final_message=True)
    assert [[c.text for c in o.choices] for o in got] == [[c.text for c in o.choices] for o in want]
    assert len({o.request_id for o in got}) == 5


def test_a_stop_string_ends_an_answer_and_its_request(run, llm):
    (whole,) = llm.generate("the cat", LONG)
    stop = whole.text[8:11]

    async def ask(a):
        params = SamplingParams(max_tokens=400, seed=4, ignore_eos=True, stop=stop)
        outputs = a.generate("the cat", params)
        first = await anext(outputs)  # on a busy machine the whole answer
        [answer] = a.live.values()
        while not answer.generations[0].is_done:
            await asyncio.sleep(0)
        held = await held_blocks(a)  # before anybody has asked for what follows
        return [first, *await all_of(outputs)][-1], held, a.live

    last, held, live = run(ask)
    assert (last.text, last.stop_reason) == (whole.text[: whole.text.index(stop)], stop)
    assert (held, live) == (0, {})


@pytest.mark.parametrize("how", ["closed", "broken off", "cancelled"])
def test_who_leaves_aborts(run, how):
    async def first(outputs):
        async for output in outputs:
            return output

    async def ask(a):
        outputs = a.generate("the cat", ENDLESS)
        if how == "cancelled":
            task = asyncio.create_task(all_of(outputs))
            while not a.live or not next(iter(a.live.values())).generations[0].token_ids:
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        else:
            assert not (await first(outputs)).finished
            assert len(a.live) == 1
            if how == "closed":
                await outputs.aclose()
            del outputs
            await asyncio.sleep(0.01)
        return a.live, await held_blocks(a)

    assert run(ask) == ({}, 0)


def test_an_aborted_request_reports_what_has_come(run):
    async def ask(a):
        reasons = []
        async for output in a.generate("the cat", ENDLESS, "mine"):
            reasons.append(output.finish_reason)
            await a.abort("mine")
        await a.abort("mine")
        return reasons, len(output.token_ids), await held_blocks(a)

    reasons, num_tokens, held = run(ask)
    assert reasons[-1] == "abort" and 0 < num_tokens < 8000 and held == 0


def test_closing_ends_what_runs_and_takes_no_more(run):
    async def ask(a):
        outputs = a.generate("the cat", ENDLESS)
        await anext(outputs)
        await a.close()
        last = (await all_of(outputs))[-1]
        with pytest.raises(EngineDied, match="closed"):
            await anext(a.generate("the cat"))
        await a.close()
        return last

    assert run(ask).finish_reason == "abort"


REFUSED = {
    "a prompt of nothing": (("",), "no tokens"),
    "an id beyond the vocabulary": (([320],), r"\[0, 320\)"),
    "no parameters": (("a", {"temperature": 0}), "not a SamplingParams"),
    "a wrong parameter": (("a", SamplingParams(temperature=-1)), "temperature"),
    "too long a prompt": (([5] * 9000,), "9000 tokens"),
    "a name that is taken": (("a", None, "mine"), "belongs to a running request"),
}


@pytest.mark.parametrize(("asked", "complaint"), REFUSED.values(), ids=REFUSED)
def test_refused_and_no_other_request_notices(run, llm, asked, complaint):
    async def ask(a):
        other = a.generate("the cat", PARAMS, "mine")
        first = await anext(other)
        with pytest.raises(RequestError, match=complaint):
            await anext(a.generate(*asked))
        return [first, *await all_of(other)][-1]

    assert run(ask).token_ids == llm.generate("the cat", PARAMS)[0].token_ids


def test_a_model_that_is_not_there_is_reported_at_the_start():
    async def start():
        async with AsyncLLM("no/such/folder"):
            pass

    with pytest.raises(ConfigError, match="no/such/folder"):
        asyncio.run(start())
    with pytest.raises(ConfigError, match=r"AsyncLLM\(set\): memory.block_size = 0"):
        AsyncLLM("x", set={"memory.block_size": 0})


def test_the_engine_is_a_process_that_ends_with_it_and_that_is_replaced_if_it_dies(folder):
    async def ask():
        async with AsyncLLM(folder, set=SETTINGS) as llm:
            first = (await all_of(llm.generate("the cat", PARAMS)))[-1]
            server = (await llm.start()).client.process.server
            assert server.poll() is None
        assert server.returncode is not None
        llm = AsyncLLM(folder, set=SETTINGS)
        undisturbed = (await all_of(llm.generate("the cat", LONG)))[-1]
        client = (await llm.start()).client
        for spawn, params in ((client.respawn, LONG), (None, ENDLESS)):
            client.respawn = spawn
            outputs = llm.generate("the cat", params)
            await anext(outputs)
            client.process.kill()
            if spawn is not None:
                assert (await all_of(outputs))[-1].text == undisturbed.text
        with pytest.raises(EngineDied):
            await all_of(outputs)
        with pytest.raises(EngineDied, match="Create a new"):
            await anext(llm.generate("the cat"))
        await llm.close()
        return first

    assert len(asyncio.run(ask()).token_ids) == 30


def test_its_process_imports_no_torch():
    code = "import sys; from specserve import AsyncLLM; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
