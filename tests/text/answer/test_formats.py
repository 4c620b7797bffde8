"""Which formats a model's files tell of."""

import pytest

from specserve.errors import ConfigError
from specserve.text.answer.formats import DEFAULT, AnswerReader, Formats, Wanted, find_formats
from specserve.text.answer.response_template import TemplateError, read_template
from tests.text.answer.outputs import JSON_TEMPLATE, LAX_TEMPLATE, TOOLS, XML_TEMPLATE

QWEN = "{% if tools %}<tool_call>{% endif %}"
SOURCES = {  # what chat templates of model families have in them
    "Qwen2.5": (QWEN, (), "hermes", "none"),
    "Qwen3": (QWEN + "<think></think>", ("<think>",), "hermes", "think"),
    "Mistral": ("{{ tools }}[TOOL_CALLS][ARGS]", ("[TOOL_CALLS]",), "mistral", "none"),
    "Command R": ("{{ tools }}Action: ```json {'tool_name'}", (), "command_r", "none"),
    "Command R7B": ('{{ tools }}<|START_ACTION|>{"tool_name"}', (), "command_r", "none"),
    "a plan": ("{{ tools }}Action: think", (), "generic", "none"),
    "Magistral": ("{{ tools }}[TOOL_CALLS][THINK][/THINK]", (), "mistral", "mistral_think"),
    "Hermes on Mistral": (QWEN, ("[TOOL_CALLS]",), "hermes", "none"),
    "Llama 3.1": ("{{ tools }}<|python_tag|>", ("<|python_tag|>",), "llama3_json", "none"),
    "Llama 3.2": ("{{ tools }}", ("<|python_tag|>",), "llama3_json", "none"),
    "Llama 3": ("{{ messages }}", (), "generic", "none"),
    "R1": ("{{ messages }}<think>\\n</think>", ("<think>",), "generic", "think"),
}


@pytest.mark.parametrize(("source", "tokens", "tools", "think"), SOURCES.values(), ids=SOURCES)
def test_formats_are_found(source, tokens, tools, think):
    found = find_formats("auto", "auto", source, tokens)
    assert (found.tools, found.reasoning) == (tools, think)
    assert find_formats("none", "none", source, tokens).words == "tool calls none, reasoning none"
    assert find_formats("mistral", "think", source, tokens).tools == "mistral"


def test_the_words_report_what_the_server_describes_itself():
    found = find_formats("auto", "auto", "{{ messages }}", ())
    assert found.words == "tool calls generic (described in the system text), reasoning none"
    assert find_formats("harmony", "auto", "", ()).words == (
        "tool calls harmony, reasoning template"
    )


def test_calls_of_command_r_are_enforced_in_another_format():
    assert Formats("command_r").enforced == DEFAULT
    assert {*AnswerReader(Formats("command_r", has_actions=True), Wanted(TOOLS), "").markers} == {
        "<|START_ACTION|>",
        "<|END_ACTION|>",
    }


def test_a_response_template_comes_first():
    found = find_formats("auto", "auto", QWEN, (), JSON_TEMPLATE)
    assert (found.tools, found.reasoning) == ("template", "template")
    assert find_formats("hermes", "auto", QWEN, (), JSON_TEMPLATE).reasoning == "none"


BROKEN = {
    "no object": ([], "object"),
    "a later version": (JSON_TEMPLATE | {"version": 2}, "version"),
    "an unknown key": (JSON_TEMPLATE | {"colour": 1}, "colour"),
    "no anchor": ({"fields": {"content": {}}}, "start_anchor"),
    "an unknown field": ({"start_anchor": "a", "fields": {"poem": {}}}, "poem"),
    "an unknown parser": ({"start_anchor": "a", "fields": {"content": {"content": "x"}}}, "x"),
    "content as JSON": ({"start_anchor": "a", "fields": {"content": {"content": "json"}}}, "json"),
    "calls everywhere": ({"start_anchor": "a", "fields": {"tool_calls": {}}}, "tool_calls"),
    "two defaults": ({"start_anchor": "a", "fields": {"content": {}, "thinking": {}}}, "two"),
    "a broken expression": (
        {"start_anchor": "a", "fields": {"content": {"open_pattern": "("}}},
        "expression",
    ),
}


@pytest.mark.parametrize(("written", "why"), BROKEN.values(), ids=BROKEN)
def test_a_template_that_cannot_be_used_is_named_or_passed_over(written, why):
    with pytest.raises(TemplateError, match=why):
        read_template(written)
    assert find_formats("auto", "auto", QWEN, (), written).tools == "hermes"
    with pytest.raises(ConfigError, match=why):
        find_formats("template", "auto", QWEN, (), written)


def test_a_missing_template_is_named():
    with pytest.raises(ConfigError, match="contains none"):
        find_formats("template", "auto", QWEN, ())


def test_calls_that_are_json_in_a_frame_can_be_enforced():
    templates = map(read_template, (JSON_TEMPLATE, XML_TEMPLATE, LAX_TEMPLATE))
    json, xml, lax = (Formats("template", "template", template) for template in templates)
    assert json.frame == ("<tool_call>", "</tool_call>") and json.enforced == "template"
    assert xml.frame is None and lax.frame is None
    assert xml.enforced == lax.enforced == Formats().enforced == DEFAULT


def test_plain_answers_are_not_parsed():
    assert AnswerReader(Formats("hermes"), Wanted(), "").is_plain
    assert not AnswerReader(Formats("hermes"), Wanted(TOOLS), "").is_plain
    assert not AnswerReader(Formats("none", "think"), Wanted(), "").is_plain


def test_the_special_tokens_that_parsers_need():
    mistral = AnswerReader(Formats("mistral", "think"), Wanted(TOOLS), "")
    assert {*mistral.markers} >= {"[TOOL_CALLS]", "[ARGS]", "<think>"}
    template = Formats("template", "template", read_template(JSON_TEMPLATE))
    assert AnswerReader(template, Wanted(), "").markers is None
