"""Messages with tool calls, as templates of model families expect them."""

import json

import pytest

from specserve.errors import RequestError
from specserve.text.chat_template import ChatOptions, ChatTemplate
from specserve.text.template_messages import Needs
from specserve.text.template_sandbox import needs_of

# What the templates of families do with calls, in a shorter form.
HERMES = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}"""
HERMES_OR_TEXT = HERMES.replace(
    "{{ c.function.arguments | tojson }}",
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
)
LLAMA = """
{%- for m in messages %}{% if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call") }}{% endif %}
{%- set c = m.tool_calls[0].function %}{"name": "{{ c.name }}", "parameters": {{ c.arguments |
tojson }}}<|eot_id|>{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"""
ID_TEST = """{% if not c.id is defined or c.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}"""
MISTRAL = f"""
{{%- for m in messages %}}{{% if m.tool_calls is defined %}}[TOOL_CALLS][
{{%- for c in m.tool_calls %}}{ID_TEST}
{{{{- c.function | tojson }}}} {{{{ c.id }}}}{{% endfor %}}]</s>
{{%- elif m.role == "tool" %}}[TOOL_RESULTS]{{{{ m.content }}}} {{{{ m.tool_call_id }}}}
{{%- if m.tool_call_id | length != 9 %}}{{{{ raise_exception("length 9") }}}}{{% endif %}}
{{%- else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"""
MISTRAL_7 = MISTRAL.replace(
    "c.function | tojson", 'c.function.name ~ "[ARGS]" ~ (c.function.arguments | tojson)'
)
R1 = """
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for c in message['tool_calls'] %}<call>{{ c['function']['name'] + '\n```json\n' +
c['function']['arguments'] + '\n```' }}</call>{% endfor %}
{%- elif message['role'] == 'assistant' and message['content'] is not none %}
{{- '<A>' + message['content'] }}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"""
XML = """
{%- for m in messages %}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>
{%- for name, value in c.function.arguments | items %}<{{ name }}>{{ value }}{% endfor %}
{%- endfor %}{{ m.content }}{% endfor %}"""
XML_METHOD = XML.replace("arguments | items", "arguments.items()")
XML_KEYS = """
{%- for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}
{%- for name in a %}<{{ name }}>{{ a[name] }}{% endfor %}{% endfor %}{% endfor %}"""
TEMPLATES = {
    "hermes": HERMES,
    "hermes or text": HERMES_OR_TEXT,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral 7": MISTRAL_7,
    "r1": R1,
    "xml": XML,
    "xml by its method": XML_METHOD,
    "xml by keys": XML_KEYS,
}
CUT = '{"street": "Söder \\"5'  # max_tokens came


def rendered(template, messages):
    return ChatTemplate(template, {}).render(messages, ChatOptions(add_generation_prompt=False))


def conversation(arguments, content=None, id="a1b2c3d4e", **more):
    call = {"id": id, "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": content, "tool_calls": [call]} | more,
        {"role": "tool", "tool_call_id": id, "content": "Oslo"},
    ]


@pytest.mark.parametrize("arguments", [CUT, "", "null", "[1]", "street"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_arguments_that_are_no_object_stay_as_they_were_written(template, arguments):
    text = rendered(template, conversation(arguments))
    if template in (MISTRAL,):  # it writes name and arguments as one JSON
        assert json.dumps(arguments, ensure_ascii=False) in text
    else:
        assert arguments in text and json.dumps(arguments) not in text.replace(': ""', "")


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_template_gets_arguments_in_the_form_that_it_can_read(template):
    text = rendered(template, conversation({"street": "Söder", "number": 5}))
    assert "Söder" in text and "number" in text and "\\u" not in text


@pytest.mark.parametrize("content", [None, "", "missing"])
def test_a_call_without_content_is_shown(content):
    messages = conversation({"a": 1}, content)
    if content == "missing":
        del messages[1]["content"]
    for template in TEMPLATES.values():
        text = rendered(template, messages)
        assert "None" not in text
        assert ("find" in text) or template == XML_KEYS


def test_a_content_that_a_template_does_not_test_is_no_null():
    shown = "{% for m in messages %}[{{ m.content is none }}{{ m.content }}]{% endfor %}"
    assert needs_of(shown).null_content
    for part in ("{{ m.content }}", "{{ 'a' + m.content }}", "{{ m.content | trim }}"):
        template = f"{{% for m in messages %}}[{part}]{{% endfor %}}"
        assert "None" not in rendered(template, conversation({}))


def test_a_content_stays_next_to_calls():
    assert "Let me see" in rendered(HERMES, conversation({"a": 1}, "Let me see"))


NEEDS = {
    "{{ m.content is none }}": Needs(null_content=True),
    "{{ m['content'] is not none }}": Needs(null_content=True),
    "{{ m.get('content') is none }}": Needs(null_content=True),
    "{{ m.content == none }}": Needs(null_content=True),
    "{% set content = m.content %}{{ content != None }}": Needs(null_content=True),
    "{{ tools is none }}{{ m.content }}": Needs(),
    "{{ m.content is string }}{{ m.content is defined }}": Needs(),
    "{{ c.id | length != 9 }}": Needs(short_ids=True),
    "{{ c.id | length == 8 }}{{ n == 9 }}": Needs(),
    "{{ c.id | count == 9 }}": Needs(short_ids=True),
}


@pytest.mark.parametrize(("source", "want"), NEEDS.items())
def test_what_a_template_needs_is_read_from_its_code(source, want):
    assert needs_of(source) == want


def ids_in(text):
    return [word for word in text.replace("[", " ").replace("]", " ").split() if len(word) == 9]


def test_ids_of_other_servers_become_nine_letters_and_digits():
    messages = conversation({}, id="call_4f2e") + conversation({}, id="toolu-1")
    first, second = rendered(MISTRAL, messages[:3]), rendered(MISTRAL, messages)
    assert second.startswith(first)  # so that its KV is found again
    for foreign in ("call_4f2e", "toolu-1"):
        assert foreign not in second
    call, result = [word for word in first.replace("]", " ").split() if word.isalnum()][-2:]
    assert (call in second, len(result)) == (True, 9)


def test_each_id_has_one_short_form_and_no_two_share_one(monkeypatch):
    fitting = "abcdefghi"
    forms = {"0 x": "same00000", "0 y": "same00000", "1 y": fitting, "2 y": "yyyyyyyyy"}
    monkeypatch.setattr("specserve.text.template_messages.short_id", forms.__getitem__)
    messages = [m for id in ("x", "y", fitting) for m in conversation({}, id=id)]
    text = rendered(MISTRAL_7, messages)
    for id in ("same00000", "yyyyyyyyy", fitting):
        assert text.count(id) == 2


def test_ids_stay_where_the_template_takes_all():
    shown = "{% for m in messages %}{{ m.tool_call_id }}{% endfor %}"
    assert rendered(shown, conversation({}, id="call_1")) == "call_1"


def test_what_a_template_refuses_in_both_forms_is_refused_for_the_first_reason():
    with pytest.raises(RequestError, match="one call"):
        messages = conversation({"a": 1})
        messages[1]["tool_calls"] *= 2
        rendered(LLAMA, messages)


@pytest.mark.parametrize("calls", [[5], "x", [{"function": 5}], [{}]])
def test_calls_of_other_forms_reach_the_template(calls):
    messages = [{"role": "assistant", "content": "a", "tool_calls": calls}]
    shown = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    assert json.loads(rendered(shown, messages)) == calls


TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]


def test_requests_with_tools_are_written_by_their_own_template():
    template = ChatTemplate("plain {{ mood }}", {}, tool_use="{{ tools | length }} tools")
    said = [{"role": "user", "content": "hi"}]
    assert template.render(said, ChatOptions(tools=TOOLS)) == "1 tools"
    assert template.render(said, ChatOptions(tools=[])) == template.render(said) == "plain "
    with pytest.raises(RequestError, match="It reads: none"):
        template.render(said, ChatOptions(chat_template_kwargs={"mood": 1}, tools=TOOLS))
