"""Texts of the model families, however they come in pieces."""

import itertools
import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from specserve.text.answer.events import CallBegin, Content, Reasoning, answer_of
from specserve.text.answer.formats import AnswerReader, Formats, Wanted
from specserve.text.answer.parsers import HermesParser
from tests.text.answer.outputs import (
    CASES,
    EACH,
    HERMES,
    JSON_TEMPLATE,
    LAX_TEMPLATE,
    PREFIX_TEMPLATE,
    THINK,
    TOOLS,
    XML_TEMPLATE,
    read,
    without_ids,
)

each = pytest.mark.parametrize(
    ("formats", "prompt", "text", "want"), [e[1:] for e in EACH], ids=[e[0] for e in EACH]
)
MARKERS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("Action: ```json\n[", '{"tool_name": "now"}', "```", "<|START_ACTION|>", "<|END_ACTION|>"),
    *("<|python_tag|>", "<|im_end|>", '{"name": "now", "arguments": {}}', '{"name": "now"'),
    *("<|channel|>final<|message|>", "<function=now>", "</function>", "<|tool_call>call:", "{}"),
    *(' "', "\\", ",", ";", "]", "[", "{", "}", ":", "\n", " ", "é", "now", "a"),
]
texts = st.lists(st.sampled_from(MARKERS), max_size=12).map("".join)


@each
def test_a_text_means_this(formats, prompt, text, want):
    assert without_ids(read(formats, prompt, [text])[0]) == want


def check_cuts(formats, prompt, text, want, longest):
    """Cut in any one place, and so that the middle one of three pieces is no longer than this."""
    for i, j in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        if j - i <= longest:
            events, _ = read(formats, prompt, [text[:i], text[i:j], text[j:]])
            assert without_ids(events) == want, (text[:i], text[i:j], text[j:])


@each
def test_a_text_means_the_same_cut_in_any_place(formats, prompt, text, want):
    check_cuts(formats, prompt, text, want, longest=6)


@pytest.mark.slow
@each
def test_a_text_means_the_same_cut_in_any_two_places(formats, prompt, text, want):
    check_cuts(formats, prompt, text, want, longest=len(text))


@each
def test_a_text_means_the_same_letter_by_letter(formats, prompt, text, want):
    assert without_ids(read(formats, prompt, text)[0]) == want


@pytest.mark.parametrize("name", CASES)
@given(text=texts, cuts=st.lists(st.integers(0, 200), max_size=5))
def test_any_text_means_the_same_in_any_pieces(name, text, cuts):
    formats, _, prompt = CASES[name]
    ends = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[i:j] for i, j in itertools.pairwise([0, *ends, len(text)])]
    whole, in_pieces = (read(formats, prompt, each)[0] for each in ([text], pieces))
    assert without_ids(whole) == without_ids(in_pieces)


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "command_r7b"])
@given(text=texts)
def test_no_character_is_lost_where_there_is_no_call(name, text):
    events, _ = read(CASES[name][0], "", [text])
    if not any(isinstance(event, CallBegin) for event in events):
        assert answer_of(events).content == text


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "unit",
    [
        *("[[[[a(", "<tool_call>", '<tool_call>{"name"', "[TOOL_CALLS][", "[TOOL_CALLS]a[", " "),
        *('<tool_call>{"name":"f","arguments":{"a":"', "<|python_tag|>{", "\\", '<|"|>', "<|tool"),
        *(
            '{"name":"now","parameters":{"',
            "<function=now><parameter=a>",
            "<think>",
            "</think",
            '"',
        ),
    ],
)
def test_a_long_hostile_text_takes_no_time(name, unit):
    formats, _, prompt = CASES[name]
    text = (unit * 100_000)[:100_000]
    began = time.process_time()
    read(formats, prompt, [text])
    read(formats, prompt, [text[i : i + 40] for i in range(0, len(text), 40)])
    assert time.process_time() - began < 1


def test_arguments_come_as_they_are_written():
    text = HERMES[0][0]
    parser_events, at = [], text.index('"city"')
    events, _ = read(Formats("hermes"), "", [text[:at]])
    assert without_ids(events)[-1].text == "{"
    for size in range(1, 20):
        events, _ = read(Formats("hermes"), "", [text[: at + size]])
        parser_events.append(without_ids(events)[-1].text)
    assert parser_events == [("{" + text[at:])[: 1 + size] for size in range(1, 20)]


@pytest.mark.parametrize("text", ["Hello", "Hello <tool_", "Hello \n\n", "a<t"])
def test_text_is_held_back_only_while_it_may_begin_a_marker(text):
    parser = HermesParser()
    [now] = parser.push(text)
    held = re.search(r"\s*(<(t(o(o(l(_)?)?)?)?)?)?$", text)[0]
    assert now == Content(text.removesuffix(held))
    assert parser.push("!") == [Content(held + "!")]


def test_ids_differ_and_are_as_clients_expect_them():
    ids = [e.id for e in read(Formats("hermes"), "", [HERMES[2][0]])[0] if isinstance(e, CallBegin)]
    assert len({*ids}) == 3 and all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids)


def test_ids_of_mistral_are_as_its_templates_demand():
    text = '[TOOL_CALLS][{"name": "now"}, {"name": "now"}]'
    ids = [e.id for e in read(Formats("mistral"), "", [text])[0] if isinstance(e, CallBegin)]
    assert len({*ids}) == 2 and all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in ids)
    events, _ = read(Formats("mistral"), "", ["[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}"])
    assert events[0].id == "123456789"


def test_unwanted_calls_and_reasoning_are_left_out():
    events, _ = read(Formats("hermes"), "", [HERMES[0][0]], most_calls=1)
    assert without_ids(events) == HERMES[0][1][:3]
    events, parser = read(Formats("hermes", "think"), "", [THINK[0][0]], has_reasoning=False)
    assert without_ids(events) == THINK[0][1][1:]
    assert parser.num_reasoning > 0


@pytest.mark.parametrize("name", ["think", "json"])
def test_the_end_of_reasoning_is_reported_in_characters(name):
    formats, cases, prompt = CASES[name]
    text = cases[0][0]
    end = text.index("</think>") + len("</think>")
    for size in range(len("<think>"), len(text) + 1):
        _, parser = read(formats, prompt, text[:size])
        assert parser.num_reasoning == min(size, end)
    assert read(formats, prompt, ["Yes."])[1].num_reasoning == 0


def test_what_a_prompt_has_of_a_templates_field_is_no_part_of_the_answer():
    formats, _, prompt = CASES["json"]
    events, parser = read(formats, prompt + "<think>\nHm", [", yes.</think>No."])
    assert events == [Reasoning(", yes."), Content("No.")]
    assert parser.num_reasoning == len(", yes.</think>")


def test_without_tools_a_templates_calls_are_content():
    formats, _, prompt = CASES["json"]
    text = '<think>Hm.</think><tool_call>{"name": "now"}</tool_call>'
    parser = AnswerReader(formats, Wanted(), prompt).parser()
    answer = answer_of([*parser.push(text), *parser.finish()])
    assert (answer.reasoning, answer.content) == ("Hm.", '<tool_call>{"name": "now"}</tool_call>')


@pytest.mark.parametrize(
    ("name", "written"),
    {
        "json": JSON_TEMPLATE,
        "xml": XML_TEMPLATE,
        "lax": LAX_TEMPLATE,
        "prefix": PREFIX_TEMPLATE,
    }.items(),
)
def test_a_template_means_what_it_means_to_transformers(name, written):
    formats, cases, prompt = CASES[name]
    for text, want in cases:
        if want is None:  # transformers raises where a call is none
            continue
        message = parse_response(text, written, prefix=prompt, tools=[*TOOLS])
        answer = answer_of(read(formats, prompt, [text])[0])
        calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in answer.calls]
        assert calls == [call["function"] for call in message.get("tool_calls", [])]
        assert answer.content == message.get("content", "")
        thought = message.get("reasoning_content", message.get("thinking", ""))
        assert answer.reasoning == thought
