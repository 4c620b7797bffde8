"""Responses of the model families mean their texts and calls, however they come in pieces."""

import json
import random
import time

import pytest

from specserve.config import ToolParser
from specserve.text.answer.events import CallArguments, CallBegin, answer_of, joined
from specserve.text.answer.families import FAMILIES, family_of
from specserve.text.answer.formats import AnswerReader, Wanted, find_formats
from specserve.text.answer.pythonic import MOST, as_pythonic
from specserve.text.grammars.structured_outputs import quoted
from specserve.text.grammars.tools import CallGrammar
from tests.text.answer.outputs import read, without_ids
from tests.text.answer.transcripts import (
    CONVERSATIONS,
    REASONING,
    THOUGHT,
    TOOLS,
    WRITERS,
    hermes,
    python_calls,
)

EACH = [(name, i) for name in WRITERS for i in range(len(CONVERSATIONS))]
each = pytest.mark.parametrize(("name", "i"), EACH, ids=[f"{n}-{i}" for n, i in EACH])


def formats_of(name):
    return find_formats(name.partition(" ")[0], "auto", "", ())


def parsed(name, pieces):
    parser = AnswerReader(formats_of(name), Wanted(TOOLS), "").parser()
    return joined([*(e for p in pieces for e in parser.push(p)), *parser.finish()])


@each
def test_a_response_means_its_text_and_calls(name, i):
    text, calls = CONVERSATIONS[i]
    answer = answer_of(parsed(name, [WRITERS[name](text, calls)]))
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == calls
    assert answer.content.strip() == text
    assert answer.reasoning == (THOUGHT if name in REASONING else "")


def pieces_of(raw):
    """The bytes of a text as a decoder shows them: incomplete characters wait."""
    held = b""
    for byte in raw.encode():
        held += bytes([byte])
        try:
            yield held.decode()
            held = b""
        except UnicodeDecodeError:
            continue


@each
def test_a_response_means_the_same_cut_at_every_byte(name, i):
    raw = WRITERS[name](*CONVERSATIONS[i])
    want = without_ids(parsed(name, [raw]))
    assert without_ids(parsed(name, pieces_of(raw))) == want
    for at in range(1, len(raw)):
        assert without_ids(parsed(name, [raw[:at], raw[at:]])) == want, raw[:at]


@pytest.mark.parametrize("name", WRITERS)
def test_a_response_that_is_cut_off_has_no_wrong_call(name):
    """Arguments that are complete are the model's; others are a beginning of these."""
    for text, calls in CONVERSATIONS:
        raw = WRITERS[name](text, calls)
        for at in random.Random(1).sample(range(len(raw)), 20):
            answer = answer_of(parsed(name, [raw[:at]]))
            want = [(called, json.dumps(given, ensure_ascii=False)) for called, given in calls]
            for call, (called, given) in zip(answer.calls, want, strict=False):
                assert call.name == called
                assert given.startswith(call.arguments) or json.loads(call.arguments)


@pytest.mark.parametrize("name", ["harmony", "kimi", "deepseek v3.1", "mistral", "hermes"])
def test_arguments_in_json_are_streamed(name):
    text, calls = CONVERSATIONS[5]
    parser = AnswerReader(formats_of(name), Wanted(TOOLS), "").parser()
    events = [event for piece in WRITERS[name](text, calls) for event in parser.push(piece)]
    assert sum(isinstance(event, CallArguments) for event in events) > 50


def test_ids_of_kimi_are_kept_because_its_template_needs_them():
    events = parsed("kimi", [WRITERS["kimi"](*CONVERSATIONS[3])])
    ids = [event.id for event in events if isinstance(event, CallBegin)]
    assert ids == ["functions.get_weather:0", "functions.get_weather:1"]


SOURCES = {  # what chat templates of these families contain
    "Qwen3-Coder": ("<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder", "none"),
    "Qwen3.5": ("<tool_call>\n<function=f>\n<parameter=a></think>", "qwen3_coder", "think"),
    "GLM-4.5": ("<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value></think>", "glm", "think"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "harmony", "template"),
    "Gemma 4": ("<|tool_call>call:", "gemma4", "template"),
    "LFM2": ("<|tool_call_start|>[f()]<|tool_call_end|>", "lfm2", "none"),
    "Granite 3": ("<|tool_call|>", "granite", "none"),
    "DeepSeek V3.1": ("<｜tool▁call▁begin｜></think>", "deepseek", "think"),
    "DeepSeek V3.2": ("<｜DSML｜invoke></think>", "deepseek_v32", "think"),
    "Kimi K2": ("<|tool_call_begin|>a<|tool_call_argument_begin|>", "kimi", "none"),
    "MiniMax M2": ("<minimax:tool_call></think>", "minimax", "think"),
    "Qwen3": ("<tool_call></think>", "hermes", "think"),
    "an unknown one": ("{{ tools }}", "generic", "none"),
}


@pytest.mark.parametrize(("source", "tools", "reasoning"), SOURCES.values(), ids=SOURCES)
def test_the_format_is_found_in_the_chat_template(source, tools, reasoning):
    found = find_formats("auto", "auto", source, ())
    assert (found.name, found.reasoning) == (tools, reasoning)


def test_every_family_can_be_chosen_by_name():
    assert {*FAMILIES} <= {*ToolParser.__args__}
    for name in FAMILIES:
        assert find_formats(name, "auto", "", ()).name == name
    assert family_of("{{ messages }}") is None


@pytest.mark.parametrize("name", [*FAMILIES, "pythonic", "generic", "hermes"])
def test_an_enforced_call_is_read_in_the_form_that_the_grammar_writes(name):
    formats = formats_of(name)
    grammar = CallGrammar(formats, TOOLS, {})
    before, after = grammar.written("now")
    assert quoted(before) in json.loads(grammar.enforced())["grammars"][0]["lark_grammar"]
    parser = AnswerReader(formats, Wanted(TOOLS, is_enforced=True), "").parser()
    answer = answer_of([*parser.push(f'{before}{{"a": 1}}{after}'), *parser.finish()])
    assert [(call.name, call.arguments) for call in answer.calls] == [("now", '{"a": 1}')]


def test_a_list_of_calls_may_be_the_whole_response():
    for text, calls in CONVERSATIONS:
        formats = find_formats("pythonic", "auto", "", ())
        raw = python_calls(calls) if calls else text
        events, _ = read(formats, "", raw)
        answer = answer_of(events)
        assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == calls
        assert answer.content == ("" if calls else text)
    for other in ("[1, 2]", "[f(1)]", "[f(a=b)]", "[f(", "[f(a=1)] and more", "[f(a={1})]", "["):
        events, _ = read(formats, "", other)
        assert answer_of(events).content == other


@pytest.mark.parametrize(
    "text", ["(" * 10_000, "-" * 100_000 + "1", "[f(a=" * 500, "f(a=1)," * MOST, "f(**{})", "f\0()"]
)
def test_hostile_calls_of_python_are_refused(text):
    with pytest.raises(ValueError):
        as_pythonic(text, {})


HOSTILE = (
    *("<tool_call>", "<function=f>", "<parameter=a>", "<arg_key>", "<|channel|>", "```tool_code"),
    *(
        "<|tool_call_begin|>a<|tool_call_argument_begin|>{",
        "<｜tool▁call▁begin｜>",
        "<invoke name=",
    ),
    *("[f(", "<|tool_call>call:f{", "<|tool_call|>[", "<｜DSML｜invoke name=", "a", " "),
)


@pytest.mark.parametrize("name", [*FAMILIES, "pythonic"])
def test_a_long_hostile_text_takes_no_time(name):
    opening = WRITERS[name]("", [("now", {})])[:40] if name in WRITERS else ""
    for unit in HOSTILE:
        text = (opening + unit * 50_000)[:50_000]
        began = time.process_time()
        parsed(name, [text[i : i + 100] for i in range(0, len(text), 100)])
        assert time.process_time() - began < 1, unit


def test_the_writers_differ():
    written = {name: writer("a", [("now", {})]) for name, writer in WRITERS.items()}
    assert len({*written.values()}) == len(written) - 1 and hermes is WRITERS["generic"]
