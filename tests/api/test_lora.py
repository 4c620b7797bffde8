"""Adapters of `LLM` and `AsyncLLM`, by our names and by vLLM's."""

import asyncio
from contextlib import closing

import pytest

from specserve import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    ConfigError,
    LoRARequest,
    RequestError,
    SamplingParams,
)
from specserve.api.lora import AdapterNames
from specserve.config import load_config
from tests.adapters import write_adapter
from tests.checkpoints import tiny_checkpoint

PROMPT, GREEDY = "the cat sat on the mat", SamplingParams(max_tokens=20, temperature=0)
SETTINGS = {"model.threads": 1, "memory.kv_bytes": 1 << 26}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    base = tiny_checkpoint(root / "tiny", seed=1)
    for seed, name in enumerate(("one", "two")):
        write_adapter(root / name, base, seed)
    return root


@pytest.fixture(scope="module")
def llm(root):
    modules = {"one": root / "one"}
    with LLM(root / "tiny", lora_modules=modules, set=SETTINGS, progress=False) as llm:
        yield llm


def texts(outputs):
    return [output.text for output in outputs]


def test_each_prompt_may_choose_an_adapter(llm, root):
    base, own = texts(llm.generate([PROMPT] * 2, GREEDY, lora=[None, "one"]))
    assert base != own
    assert texts(llm.generate(PROMPT, GREEDY, lora="one")) == [own]
    assert texts(llm.generate(PROMPT, GREEDY)) == [base]
    assert "".join(text for text, _ in llm.stream(PROMPT, GREEDY, lora="one")) == own
    told = [{"role": "user", "content": PROMPT}]
    assert texts(llm.chat(told, GREEDY, lora="one")) != texts(llm.chat(told, GREEDY))


def test_all_beams_have_the_adapter(llm):
    """The adapted model gives each beam, as a prompt, the same logprobs."""
    [found] = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=6), lora="one")
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for beam in found.sequences:
        [output] = llm.generate({"prompt_token_ids": beam.tokens}, scored, lora="one")
        each = zip(output.prompt_logprobs[-6:], beam.tokens[-6:], strict=True)
        want = [table[token].logprob for table, token in each]
        assert beam.cum_logprob == pytest.approx(sum(want), abs=1e-4)


def test_adapters_come_and_go(llm, root):
    llm.load_lora_adapter("two", root / "two")
    base, one, two = texts(llm.generate([PROMPT] * 3, GREEDY, lora=[None, "one", "two"]))
    assert len({base, one, two}) == 3
    with pytest.raises(ConfigError, match=r"belongs to another adapter\. Unload that first"):
        llm.load_lora_adapter("two", root / "one")
    llm.load_lora_adapter("two", root / "one", load_inplace=True)
    assert texts(llm.generate(PROMPT, GREEDY, lora="two")) == [one]
    llm.unload_lora_adapter("two")
    with pytest.raises(RequestError, match=r"unknown adapter 'two' \(loaded: one\)"):
        llm.generate(PROMPT, GREEDY, lora="two")
    with pytest.raises(RequestError, match="unknown adapter 'two'"):
        llm.unload_lora_adapter("two")
    with pytest.raises(ConfigError, match="missing"):
        llm.load_lora_adapter("bad", root / "tiny")
    assert [*llm.adapters.known] == ["one"]


def test_vllms_request_loads_what_is_at_its_path(llm, root):
    one, two = (LoRARequest(name, i, str(root / name)) for i, name in enumerate(("one", "two"), 1))
    want = texts(llm.generate(PROMPT, GREEDY, lora="one"))
    assert texts(llm.generate(PROMPT, GREEDY, lora_request=one)) == want
    got = texts(llm.generate([PROMPT] * 2, GREEDY, lora_request=[one, two]))
    assert got[:1] == want != got[1:]
    assert [*llm.adapters.known] == ["one", "two"]
    llm.unload_lora_adapter("two")


def test_what_is_at_a_path_is_read_once_however_the_path_is_written(llm, root, monkeypatch):
    read, folders = llm.engine.adapters.read, []
    monkeypatch.setattr(llm.engine.adapters, "read", lambda at: folders.append(at) or read(at))
    monkeypatch.chdir(root)
    for path in ("./two/", "./two/", "two", "two"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("three", 3, path))
    llm.unload_lora_adapter("three")
    assert len(folders) == 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"lora": ["one"]}, "lora: 2 prompts and 1 adapters. Pass one per prompt"),
        ({"lora": ["one", 3]}, "lora: 3 is not the name of an adapter"),
        ({"lora": "one", "lora_request": "one"}, "have the same meaning. Pass one"),
        ({"lora_request": LoRARequest("x", 1, "")}, "unknown adapter 'x'"),
        ({"lora_request": LoRARequest("x", 1, "/missing")}, "/missing: no such folder"),
    ],
)
def test_what_chooses_no_adapter_is_refused(llm, asked, message):
    with pytest.raises((RequestError, ConfigError), match=message):
        llm.generate([PROMPT] * 2, GREEDY, **asked)


def test_vllms_arguments_say_how_many_there_may_be(root):
    def slots(**arguments):
        with closing(LLM(root / "tiny", set=SETTINGS, progress=False, **arguments)) as llm:
            return llm.config.lora.num_slots, llm.config.lora.max_rank

    assert slots() == (0, 16) == slots(enable_lora=False)
    assert slots(enable_lora=True, max_loras=2, max_lora_rank=8) == (2, 8)
    assert slots(enable_lora=True) == (4, 16)


def test_without_slots_there_are_no_adapters(root):
    with LLM(root / "tiny", set=SETTINGS, progress=False) as llm:
        with pytest.raises(ConfigError, match=r"Set lora\.max_loras"):
            llm.load_lora_adapter("one", root / "one")
        with pytest.raises(
            RequestError, match=r"unknown adapter 'one': adapters are off.*max_loras"
        ):
            llm.generate(PROMPT, GREEDY, lora="one")


def test_there_are_as_many_slots_as_modules_but_four_at_least():
    def slots(**settings):
        return load_config(None, {f"lora.{k}": v for k, v in settings.items()}).lora.num_slots

    assert slots(modules={str(i): "x" for i in range(6)}) == 6
    assert slots(folder="adapters") == slots(allow_hub=True) == slots(modules={"a": "x"}) == 4
    assert slots(max_loras=2, folder="adapters") == 2


def test_a_digest_is_forgotten_once_no_name_has_it():
    names = AdapterNames(load_config(None, {"lora.max_loras": 1}), "base")
    first, second = (Ref(digest) for digest in "ab")
    assert names.put("x", first) is None and names.put("y", first) is None
    assert names.put("x", second) is None  # y has it
    assert names.remove("y") == "a" and names.put("x", second) is None
    assert names.put("x", first) == "b" and names.remove("x") == "a"


class Ref:
    def __init__(self, digest):
        self.digest = digest


def test_another_process_serves_them_as_well(root):
    async def run():
        modules = {"one": root / "one"}
        async with AsyncLLM(root / "tiny", lora_modules=modules, set=SETTINGS) as llm:
            await llm.load_lora_adapter("two", root / "two")
            request = LoRARequest("three", 3, str(root / "one"))
            asked = [{}, {"lora": "one"}, {"lora": "two"}, {"lora_request": request}]
            each = (last(llm.generate(PROMPT, GREEDY, **how)) for how in asked)
            got = await asyncio.gather(*each)
            await llm.unload_lora_adapter("two")
            with pytest.raises(RequestError, match=r"unknown adapter 'two' \(loaded: one, three\)"):
                await last(llm.generate(PROMPT, GREEDY, lora="two"))
            with pytest.raises(ConfigError, match="missing"):
                await llm.load_lora_adapter("bad", root / "tiny")
            return got

    base, one, two, three = asyncio.run(run())
    assert len({base, one, two}) == 3 and three == one


async def last(outputs):
    async for output in outputs:
        text = output.text
    return text
