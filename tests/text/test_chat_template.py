"""Chat templates: the text that transformers would make of them, and nothing beside text."""

import json
import sys
from subprocess import run

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from specserve.errors import ConfigError, RequestError
from specserve.text.chat_template import ChatOptions, ChatTemplate
from specserve.text.tokenizer import load_tokenizer

CHAT = [
    {"role": "system", "content": ' be\n"brief" <b>&amp;</b> é🙂 '},
    {"role": "user", "content": "what?", "name": None},
    {"role": "assistant", "content": "that", "reasoning_content": "hm"},
    {"role": "user", "content": ["a", {"type": "text", "text": "b"}], "n": 1.5, "is": True},
]
LOOP = "{% for message in messages %}{BODY}{% endfor %}"
TEMPLATES = {
    "empty": "",
    "plain": LOOP.replace("{BODY}", "{{ message.role }}: {{ message['content'] }}\n"),
    "blocks lose their lines": """
{%- for message in messages %}
    {% if message.role == 'user' %}
  user
    {% endif %}
  end
{% endfor %}
""",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ 'é<' | tojson(true) }}",
    "json with separators": "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
    "escapes": "{{ messages[0].content | e }}{{ '<' }}",
    "loop controls": LOOP.replace(
        "{BODY}", "{% if loop.index == 2 %}{% continue %}{% endif %}{{ message.role }}{% break %}"
    ),
    "namespace": "{% set ns = namespace(n=0) %}"
    + LOOP.replace("{BODY}", "{% set ns.n = ns.n + loop.index %}")
    + "{{ ns.n }}",
    "namespace of self": "{% set ns = namespace({'b': 2}, self=1) %}{{ ns.self }}{{ ns.b }}",
    "dict": "{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}{{ dict([('x', 2)]).x }}",
    "generation": LOOP.replace(
        "{BODY}",
        "{% generation %}{% set x = 1 %}{{ loop.index }}{% endgeneration %}{{ x }}",
    ),
    "reasoning": LOOP.replace("{BODY}", "[{{ message.reasoning_content }}{{ message.thinking }}]"),
    "fields": "{{ messages[1].name is defined }}{{ messages[3].n }}{{ messages[3].is }}",
    "parts": "{% for part in messages[3].content %}{{ part is string }}{{ part.text }}{% endfor %}",
    "what is not given": "{{ tools is none }}{{ documents is none }}{{ xyz is defined }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}",
    "prompt": "{% if add_generation_prompt %}assistant:{% endif %}",
    "date": "{{ strftime_now('%Y %B') }}",
    "macro": "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages | length) }}",
    "a system message": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0].content | trim %}{% endif %}{{ system }}{{ rest | length }}",
}


def write(folder, config, files=()):
    (folder / "tokenizer.json").write_text(Tokenizer(models.BPE()).to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in dict(files).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def transformers_text(folder, messages):
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("template", [t for t in TEMPLATES.values() if t], ids=[*TEMPLATES][1:])
def test_the_text_is_that_of_transformers(tmp_path, template):
    write(tmp_path, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    text = load_tokenizer(tmp_path).chat_template.render(CHAT)
    assert text == transformers_text(tmp_path, CHAT)


OPTIONS = {  # options, whether the last message is an assistant's
    "a prompt": ({"add_generation_prompt": True}, False),
    "no prompt": ({"add_generation_prompt": False}, False),
    "continued": ({"continue_final_message": True}, True),
    "a name of its own": ({"chat_template_kwargs": {"mood": ["a", None, 1]}}, False),
    "none": ({"chat_template_kwargs": {"mood": None}}, False),
}
ENDS = "{% if add_generation_prompt %}assistant:{% endif %}{{ mood is defined }}{{ mood }}"
SHOWN = [  # what a template shows of a message, and its content
    ("{{ message.content }}", "so "),
    ("{{ message.content }}", ""),
    ("{{ message.content | trim }}", " a\n"),
    ("{{ message.content | trim }}", "so"),
    ("{% for part in message.content %}{{ part.text or part }}{% endfor %}", "so "),
    (
        "{% for part in message.content %}{{ part.text or part }}{% endfor %}",
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}],
    ),
]


@pytest.mark.parametrize(("shown", "content"), SHOWN)
@pytest.mark.parametrize(("options", "is_answered"), OPTIONS.values(), ids=OPTIONS)
def test_options_mean_what_they_do_to_transformers(tmp_path, shown, content, options, is_answered):
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    said = said if is_answered else [*said, {"role": "user", "content": "?"}]
    template = "{% for message in messages %}<{{ message.role }}>" + shown + "</>\n{% endfor %}"
    write(tmp_path, {"chat_template": template + (ENDS if not is_answered else "")})
    text = load_tokenizer(tmp_path).chat_template.render(said, ChatOptions(**options))
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    asked = {"add_generation_prompt": not is_answered} | options
    asked |= asked.pop("chat_template_kwargs", {})
    assert text == theirs.apply_chat_template(said, tokenize=False, **asked)


NOT_CONTINUED = {  # messages, template -> reason, field
    "a user's": ([{"role": "user", "content": "a"}], LOOP, "the role user", "messages[0].role"),
    "one of no text": (
        [{"role": "user", "content": "a"}, {"role": "assistant"}],
        LOOP,
        "no text to continue",
        "messages[1].content",
    ),
    "one that is not shown": (
        [{"role": "assistant", "content": "a"}],
        "x",
        "omits or changes the last message",
        "continue_final_message",
    ),
    "one that is changed": (
        [{"role": "assistant", "content": "a"}],
        "{{ messages[0].content | replace('a', 'b') }}",
        "omits or changes the last message",
        "continue_final_message",
    ),
}


@pytest.mark.parametrize(
    ("messages", "template", "reason", "param"), NOT_CONTINUED.values(), ids=NOT_CONTINUED
)
def test_what_cannot_be_continued_is_refused(messages, template, reason, param):
    with pytest.raises(RequestError, match=reason) as e:
        ChatTemplate(template, {}).render(messages, ChatOptions(continue_final_message=True))
    assert e.value.param == param


def test_a_chat_has_one_end():
    both = ChatOptions(add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(RequestError, match="Send only one of the two") as e:
        ChatTemplate(LOOP, {}).render(CHAT, both)
    assert e.value.param == "continue_final_message"


READS = (
    "{% if not date is defined %}{% set date = strftime_now('%Y') %}{% endif %}{{ date }}{{ mood }}"
    "{% set mine = 1 %}{{ mine }}{{ bos_token }}{{ image_token }}{{ pad_token }}{{ tools }}"
    "{% for m in messages %}{{ loop.index }}{{ namespace(a=m) }}{% endfor %}{{ range(2) }}"
)


def test_a_template_is_given_what_it_reads_itself():
    template = ChatTemplate(READS, {"bos_token": "<s>", "image_token": "<i>"})
    given = ChatOptions(chat_template_kwargs={"date": "in May", "mood": "glad"})
    assert template.render(CHAT, given).startswith("in Mayglad1<s><i>")


@pytest.mark.parametrize(
    "name",
    [
        "tokenize",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "image_token",
        "pad_token",
        "mine",
        "m",
        "loop",
        "range",
        "namespace",
        "self",
        "strftime_now",
        "raise_exception",
        "chat_template",
        "continue_final_message",
    ],
)
def test_no_other_name_is_given_to_a_template(name):
    template = ChatTemplate(READS, {"bos_token": "<s>", "image_token": "<i>"})
    with pytest.raises(RequestError, match=r"It reads: date, mood\.$") as e:
        template.render(CHAT, ChatOptions(chat_template_kwargs={"mood": 1, name: 1}))
    assert e.value.param == f"chat_template_kwargs.{name}"


def test_values_for_a_template_are_plain_data_too():
    class Tricky(str):
        def leak(self):
            return "leaked"

    options = ChatOptions(chat_template_kwargs={"mood": [Tricky("a")]})
    assert ChatTemplate("{{ mood[0].leak }}{{ mood[0] }}", {}).render(CHAT, options) == "a"


PLACES = {  # chat_template of tokenizer_config.json, files -> what is rendered
    "the config": ("config", {}, "config"),
    "a file first": ("config", {"chat_template.jinja": "file"}, "file"),
    "by name": (
        [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}],
        {},
        "one",
    ),
    "a folder": (
        None,
        {
            "additional_chat_templates/default.jinja": "one",
            "additional_chat_templates/rag.jinja": "two",
        },
        "one",
    ),
    "a folder beside the file": (
        "config",
        {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "two"},
        "file",
    ),
    "a default in the folder too": (
        None,
        {"chat_template.jinja": "file", "additional_chat_templates/default.jinja": "folder"},
        "folder",
    ),
}


@pytest.mark.parametrize(("config", "files", "want"), PLACES.values(), ids=PLACES)
def test_the_template_is_taken_from_where_transformers_takes_it(tmp_path, config, files, want):
    write(tmp_path, {"chat_template": config}, files)
    assert load_tokenizer(tmp_path).chat_template.render(CHAT) == want
    assert transformers_text(tmp_path, CHAT) == want


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (None, {}),
        ("", {}),
        ([{"name": "rag", "template": "two"}], {}),
        ("config", {"additional_chat_templates/rag.jinja": "two"}),
    ],
)
def test_without_a_default_there_is_no_template(tmp_path, config, files):
    assert load_tokenizer(write(tmp_path, {"chat_template": config}, files)).chat_template is None


BOTH = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "one"}]
TOOL_PLACES = {  # chat_template of tokenizer_config.json, files -> what a request with tools gets
    "a list": (BOTH, {}, "two"),
    "names": ({each["name"]: each["template"] for each in BOTH}, {}, "two"),
    "none of its own": ([BOTH[1], {"name": "rag", "template": "three"}], {}, "one"),
    "a folder": (
        "config",
        {"chat_template.jinja": "one", "additional_chat_templates/tool_use.jinja": "file"},
        "file",
    ),
    "a file hides the config's": (BOTH, {"chat_template.jinja": "one"}, "one"),
}


@pytest.mark.parametrize(("config", "files", "want"), TOOL_PLACES.values(), ids=TOOL_PLACES)
def test_the_template_for_tools_is_the_one_that_transformers_takes(tmp_path, config, files, want):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = load_tokenizer(write(tmp_path, {"chat_template": config}, files)).chat_template
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for asked in (tools, None):
        text = template.render(CHAT, ChatOptions(tools=asked))
        assert text == theirs.apply_chat_template(CHAT, tools=asked, tokenize=False)
        assert text == (want if asked else "one")


def test_a_template_file_that_is_no_text_is_refused_by_name(tmp_path):
    write(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: the chat template cannot"):
        load_tokenizer(tmp_path)


REFUSED = {  # template -> reason
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    "{% if %}": "rejects these messages",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ cycler.__init__.__globals__ }}": "unsafe",
    "{{ dict.update(messages[0], role='x') }}": "no attribute",
    "{% set ns = namespace(_a=1) %}": "begins with _",
    "{% set ns = namespace() %}{% set ns._a = 1 %}": "begins with _",
    "{{ range(10 ** 9) | list }}": "Range too big",
    "{{ 1 / 0 }}": "division",
}


@pytest.mark.parametrize(("template", "reason"), REFUSED.items(), ids=REFUSED)
def test_what_a_template_may_not_do_refuses_the_messages(template, reason):
    with pytest.raises(RequestError, match=reason):
        ChatTemplate(template, {}).render(CHAT)


@pytest.mark.parametrize("messages", [[], [5], ["user"], [["role", "user"]]])
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(RequestError, match=r"messages: the list is empty|a message is a mapping"):
        ChatTemplate("x", {}).render(messages)


def test_a_template_sees_nothing_but_plain_data():
    class Tricky(str):
        def leak(self):
            return "leaked"

    given = {"role": "user", "content": Tricky("hi"), "n": np.int64(3), "f": np.float32(0.5)}
    given |= {"tuple": (1, Tricky("b")), "object": object(), "bytes": b"x"}
    text = ChatTemplate("{{ messages[0] | tojson }}{{ messages[0].content.leak }}", {}).render(
        [given]
    )
    assert json.loads(text) == {
        "role": "user",
        "content": "hi",
        "n": 3,
        "f": 0.5,
        "tuple": [1, "b"],
        "object": "<object>",
        "bytes": "<bytes>",
    }


def test_a_template_leaves_the_messages_as_they_were():
    given = [{"role": "user", "content": "hi", "reasoning": "hm", "name": None}]
    ChatTemplate("{{ messages[0].thinking }}", {}).render(given)
    assert given == [{"role": "user", "content": "hi", "reasoning": "hm", "name": None}]


def test_a_model_that_is_only_loaded_needs_no_jinja(tmp_path):
    write(tmp_path, {"chat_template": "x"})
    code = (
        "import sys; from pathlib import Path; sys.modules['jinja2'] = None;"
        "from specserve.text.tokenizer import load_tokenizer;"
        f"assert load_tokenizer(Path({str(tmp_path)!r})).chat_template.source == 'x'"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
