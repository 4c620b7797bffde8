"""Tools as text, for chat templates that do not show them."""

import json

import pytest

from specserve.errors import RequestError
from specserve.text.chat_template import ChatOptions, ChatTemplate
from specserve.text.tool_prompt import with_tools_as_text

TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"zone": "é"}}}
USER = {"role": "user", "content": "What time?"}
ASKING = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "noon"}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
)
SHOWN = "{{ tools }}" + PLAIN
WRITTEN = '<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'


def test_the_system_text_describes_the_tools():
    told, user = with_tools_as_text([USER], TOOLS)
    assert told["role"] == "system" and json.dumps(TOOLS[0]["function"]) in told["content"]
    assert '{"name": "NAME", "arguments": {...}}' in told["content"] and user == USER
    own, _ = with_tools_as_text([{"role": "system", "content": "Be."}, USER], TOOLS)
    assert own["content"] == f"Be.\n\n{told['content']}"
    other, _ = with_tools_as_text([USER], TOOLS, "CALL %s %s")
    assert "CALL NAME {...}" in other["content"]


def test_calls_and_results_are_texts_of_alternating_roles():
    chat = [USER, ASKING, RESULT, RESULT, {"role": "user", "content": "And?"}, ASKING, RESULT]
    _, *rest = with_tools_as_text(chat, TOOLS)
    assert [m["role"] for m in rest] == ["user", "assistant", "user", "assistant", "user"]
    assert rest[1]["content"] == f"I look.\n{WRITTEN}\n{WRITTEN}" and "tool_calls" not in rest[1]
    result = "<tool_response>\nnoon\n</tool_response>"
    assert rest[2]["content"] == f"{result}\n{result}\nAnd?"
    assert chat[1]["tool_calls"], "the caller's messages are unchanged"


@pytest.mark.parametrize("source", [PLAIN, STRICT])
def test_a_template_that_does_not_show_tools_gets_them_as_text(source):
    text = ChatTemplate(source, {}).render([USER, ASKING, RESULT], ChatOptions(tools=TOOLS))
    assert "You can call these functions" in text and "What time?" in text and WRITTEN in text
    assert text.startswith("[system]") == (source == PLAIN)
    assert "You can call" not in ChatTemplate(source, {}).render([USER])


def test_a_template_that_shows_tools_does_so_itself_unless_its_format_is_unknown():
    template, options = ChatTemplate(SHOWN, {}), ChatOptions(tools=TOOLS)
    assert "You can call these functions" not in template.render([USER], options)
    text = template.render([USER], ChatOptions(tools=TOOLS, are_tools_text=True))
    assert "You can call these functions" in text and text.startswith("None[system]")


def test_a_template_that_rejects_the_messages_for_another_reason_reports_that():
    broken = "{{ raise_exception('never') }}"
    with pytest.raises(RequestError, match="never"):
        ChatTemplate(broken, {}).render([USER], ChatOptions(tools=TOOLS))
