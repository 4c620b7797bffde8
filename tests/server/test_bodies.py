"""Any body gets an answer or an error in OpenAI's format, and disturbs no other client."""

import copy
import json
import shutil
import socket
import threading
import time
from http.client import HTTPResponse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.server_process import ServerProcess, eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
MAX_MODEL_LEN = 128
MAX_BODY = 1 << 18
SETTINGS = {
    "scheduler.max_model_len": MAX_MODEL_LEN,
    "server.max_body_bytes": MAX_BODY,
    "server.max_stop_strings": 4,
    "server.max_prompts": 8,
    "server.template_seconds": 0.5,
    "server.min_tpot_ms": 0.5,
}
TEMPLATE = """
{%- set said = messages[0].content -%}
{%- if said == "loop" -%}
  {%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif said == "classes" -%}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- elif said == "run" -%}{{ cycler.__init__.__globals__.os.system("touch CANARY") }}
{%- endif -%}
{%- for message in messages -%}{{ message.role }}: {{ message.content }}{%- endfor -%}
{{ mood }}
"""

ORDINARY = {
    CHAT: {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        "max_completion_tokens": 2,
        "add_generation_prompt": False,
        "add_special_tokens": True,
        "continue_final_message": False,
        "chat_template_kwargs": {"mood": ["a"]},
        "logprobs": True,
        "top_logprobs": 2,
    },
    COMPLETIONS: {"model": "tiny", "prompt": ["a", "b"], "n": 1, "echo": True, "logprobs": 2}
    | {"add_special_tokens": False},
    "/tokenize": {"prompt": "a", "messages": None, "add_special_tokens": True}
    | {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}},
    "/detokenize": {"model": "tiny", "tokens": [1, 2]},
}
SHARED = {
    "max_tokens": 2,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x", "y"],
    "stop_token_ids": [1],
    "ignore_eos": False,
    "stream": True,
    "stream_options": {"include_usage": True},
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [0, 2, 100],
    "bad_words": ["a"],
    "min_tokens": 1,
    "tools": None,
    "response_format": {"type": "text"},
    "user": "u",
    "speculation": {"enabled": True, "sources": [], "max_nodes": 2, "max_depth": 1},
    "slo": {"ttft_ms": 5, "tpot_ms": 0.5},
    "return_speculation_details": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "prompt_logprobs": 1,
    "best_of": 1,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}
OF_CHOICES = {  # what responses do not have
    *("max_tokens", "stream_options", "tools", "response_format", "return_token_ids", "best_of"),
    *("return_speculation_details", "return_tokens_as_token_ids", "prompt_logprobs"),
}
for path in (CHAT, COMPLETIONS):
    ORDINARY[path] |= SHARED
ORDINARY[RESPONSES] = {
    "input": [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "a", "summary": [], "content": []},
        {
            "type": "message",
            "id": "b",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": [1]}'},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "a"}],
        },
        {"role": "user", "content": "b"},
    ],
    "instructions": "be",
    "max_output_tokens": 2,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "none", "summary": "auto"},
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"mood": ["a"]},
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    ],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "include_reasoning": True,
    "store": False,
} | {name: value for name, value in SHARED.items() if name not in OF_CHOICES}

TEXTS = st.text(st.characters(), max_size=20)  # lone surrogates too
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
# What one field or another may well be; else hardly any mutant would be let in.
PLAUSIBLE = st.sampled_from(
    [None, True, False, 0, 1, 0.5, "a", "\n", [], ["a"], ["a", "b"], [1], [[1, 2], [3]], {}]
)


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    return tmp_path_factory.mktemp("canary") / "was-here"


@pytest.fixture(scope="module")
def small(folder, canary):
    """A server of short contexts, whose chat template does what it should not."""
    model = shutil.copytree(folder, canary.parent / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("CANARY", str(canary)))
    with ServerProcess(model, "--served-model-name=tiny", **SETTINGS) as server:
        yield server
        assert server.process.poll() is None, "a body has ended the server"


@pytest.fixture(scope="module")
def neighbor(small):
    with Neighbor(small) as neighbor:
        yield neighbor


@pytest.fixture(autouse=True)
def still_answers(small):
    yield
    answer = small.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    assert answer.status == 200 and answer.body["usage"]["completion_tokens"] == 2


class Neighbor(threading.Thread):
    """A client that streams the same answer again and again, and times its events."""

    def __init__(self, server):
        super().__init__()
        self.server, self.is_over = server, False
        self.gaps, self.texts = [], []

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.is_over = True
        self.join()

    def run(self):
        body = {"prompt": "a", "seed": 1, "ignore_eos": True}
        while not self.is_over:
            with self.server.open_stream(COMPLETIONS, body) as events:
                self.texts.append("".join(self.read(events)))

    def read(self, events):
        last = time.monotonic()
        for event in events:
            self.gaps.append(time.monotonic() - last)
            last = time.monotonic()
            yield event if event == "[DONE]" else event["choices"][0]["text"]

    def goes_on(self):
        """Events still come, and all of its answers are the same one, whole."""
        seen = len(self.gaps)
        eventually(lambda: len(self.gaps) > seen)
        assert len(set(self.texts)) <= 1 and all(t.endswith("[DONE]") for t in self.texts)


def check_refusal(response, status=400):
    assert response.status == status, response.body
    error = response.body["error"]
    assert response.body.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"]
    assert all(error[k] is None or isinstance(error[k], str) for k in ("param", "code"))
    assert len(json.dumps(error)) < 2000
    return error


def check_outcome(response):
    """An answer, or a refusal in its shape."""
    if response.status != 200:
        check_refusal(response, 404 if response.status == 404 else 400)
    elif isinstance(response.body, str) and "event: " in response.body:
        *_, name, data, _, _ = response.body.split("\n")
        assert name in ("event: response.completed", "event: response.incomplete"), name
        assert json.loads(data.removeprefix("data: "))["response"]["output"]
    elif isinstance(response.body, str):
        assert response.body.endswith("data: [DONE]\n\n") and '"error"' not in response.body


def places(value):
    """Everything that can be replaced inside a value: containers and their keys."""
    keys = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    for key in keys:
        yield value, key
        yield from places(value[key])


@st.composite
def mutants(draw, path):
    """An ordinary body with one or two of its parts replaced by anything."""
    body = copy.deepcopy(ORDINARY[path])
    for _ in range(draw(st.integers(1, 2))):
        container, key = draw(st.sampled_from(list(places(body))))
        container[key] = copy.deepcopy(draw(PLAUSIBLE | JSON))
    return body


@pytest.mark.parametrize("path", ORDINARY)
@given(data=st.data())
def test_any_json_is_answered_or_refused(small, path, data):
    keys = TEXTS | st.sampled_from(list(ORDINARY[path]))
    check_outcome(small.post(path, data.draw(JSON | st.dictionaries(keys, JSON, min_size=1))))


@pytest.mark.parametrize("path", ORDINARY)
@settings(max_examples=200)
@given(data=st.data())
def test_a_body_with_some_parts_replaced_is_answered_or_refused(small, path, data):
    check_outcome(small.post(path, data.draw(mutants(path))))


IDS = st.integers(0, 319)
RIGHT = {  # together, too
    "max_tokens": st.integers(2, 9),
    "temperature": st.just(0) | st.floats(1e-4, 1e4),
    "top_k": st.integers(-1, 2**31 - 1),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(1e-4, 1e4),
    "logit_bias": st.dictionaries(IDS.map(str), st.floats(-100, 100), max_size=9),
    "allowed_token_ids": st.lists(IDS, min_size=20, unique=True),
    "bad_words": st.lists(st.text("the cat", min_size=1).map("a".__add__), max_size=4),
    "min_tokens": st.integers(0, 2),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    | st.lists(st.text("the cat", min_size=1), max_size=4),
    "stop_token_ids": st.lists(IDS, max_size=4),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.just(-1) | st.integers(1, 100),
    "ignore_eos": st.booleans(),
    "n": st.integers(1, 3),
    "cache_salt": st.text("abc", max_size=5),
    "stream": st.booleans(),
    "return_token_ids": st.booleans(),
}
EXTREME = st.sampled_from(
    [
        *(0, -0.0, -1, 1e-45, 1e308, -1e308, 2**31, 2**63, -(2**63), 10**40, 319.5, "1", "", True),
        *([], [[]], [-1], [2**63], [""], {}, {"0": 1e308}, {"-1": 0}, {"": 0}, [1] * 5000),
    ]
)


def asking(path, fields):
    if path == RESPONSES:
        most = {"max_output_tokens": fields.get("max_tokens", 2)}
        return {"input": "a"} | most | {n: v for n, v in fields.items() if n not in NOT_RIGHT}
    subject = {"prompt": "a"} if path == COMPLETIONS else saying("a")[1]
    return subject | {"max_tokens": 2} | fields


NOT_RIGHT = OF_CHOICES | {"n"}


def run(test, number):
    settings(max_examples=number)(test)()


MANY = pytest.mark.parametrize("number", [20, pytest.param(2000, marks=pytest.mark.slow)])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@MANY
def test_right_parameters_are_answered_in_any_company(small, path, number):
    @given(st.fixed_dictionaries({}, optional=RIGHT) | st.fixed_dictionaries(RIGHT))
    def ask(fields):
        response = small.post(path, asking(path, fields))
        assert response.status == 200, response.body
        check_outcome(response)

    run(ask, number)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@MANY
def test_wrong_ones_among_right_ones_are_refused(small, path, number):
    wrong = st.dictionaries(st.sampled_from([*RIGHT]) | TEXTS, EXTREME | JSON, max_size=3)

    @given(st.fixed_dictionaries({}, optional=RIGHT), wrong)
    def ask(fields, wrong):
        check_outcome(small.post(path, asking(path, fields | wrong)))

    run(ask, number)


@pytest.mark.parametrize("path", ORDINARY)
def test_a_body_with_nothing_replaced_is_answered(small, path):
    assert small.post(path, ORDINARY[path]).status == 200


@given(st.binary(max_size=40))
def test_any_bytes_are_refused(small, raw):
    check_refusal(small.post(COMPLETIONS, raw))


NUMBERS = [-1, -(2**63), 2**63, 1e308, True, "1", [[]], {"a": 1}]
COUNTS = ["max_tokens", "seed", "top_k", "n", "best_of", "logprobs", "top_logprobs", "min_tokens"]
COUNTS += ["prompt_logprobs", "priority", "truncate_prompt_tokens", "thinking_token_budget"]
# More than fits is the rest of the context; -1 is off or left out, and cuts a prompt to what fits.
LEGAL = {
    "max_tokens": [-1, 2**63],
    "seed": [-1, -(2**63)],
    "top_k": [-1],
    "truncate_prompt_tokens": [-1],
}


@pytest.mark.timed
@pytest.mark.parametrize("field", COUNTS)
def test_no_number_goes_unchecked(small, neighbor, field):
    for value in NUMBERS:
        if value not in LEGAL.get(field, []):
            body = {"prompt": "a", "max_tokens": 1, field: value}
            assert check_refusal(ask_quickly(small, COMPLETIONS, body))["param"] == field
    check_refusal(ask_quickly(small, COMPLETIONS, b'{"prompt": "a", "%b": NaN}' % field.encode()))
    neighbor.goes_on()


@pytest.mark.timed
@pytest.mark.parametrize("value", [-1, -(2**63), 320, 2**31, 2**63, 1e308, True, "1", None])
def test_no_token_id_goes_unchecked(small, neighbor, value):
    for body in ({"prompt": [1, value]}, {"prompt": [[1, value]]}, {"prompt": [[1], [value, 1]]}):
        check_refusal(ask_quickly(small, COMPLETIONS, body))
    check_refusal(ask_quickly(small, COMPLETIONS, {"prompt": "a", "stop_token_ids": [value]}))
    check_refusal(ask_quickly(small, "/detokenize", {"tokens": [1, value]}))
    neighbor.goes_on()


def with_field(**fields):
    return COMPLETIONS, {"prompt": "a", "max_tokens": 1} | fields


def chat_with(**fields):
    return CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields


def saying(content):
    return CHAT, {"messages": [{"role": "user", "content": content}]}


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/cat.png"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "/etc/passwd"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BOMB = {
    "type": "json_schema",
    "json_schema": {"name": "b", "schema": eval('{"not":' * 80 + "{}" + "}" * 80)},
}

HOSTILE = {
    "a billion choices": (with_field(n=10**9), "1 to 128 choices"),
    "129 choices": (with_field(n=129), "1 to 128 choices"),
    "embeddings": (with_field(prompt_embeds="gASVAA=="), "prompt_embeds is refused"),
    "an image": (saying([IMAGE]), "is not supported: models read only text. Send text"),
    "audio": (saying([AUDIO]), "is not supported: models read only text. Send text"),
    "a file": (saying([FILE]), "is not supported: models read only text. Send text"),
    "a part of no type": (saying([{}]), "is not supported: models read only text. Send text"),
    "a part with more than text": (saying([{"type": "text", "text": "a", "x": 1}]), "unknown"),
    "guided json": (with_field(guided_json={"type": "object"}), "structured_outputs with json"),
    "guided regex": (with_field(guided_regex="(a+)+$"), "structured_outputs with regex"),
    "guided grammar": (
        with_field(guided_grammar="root ::= root"),
        "structured_outputs with grammar",
    ),
    "guided choice": (with_field(guided_choice=["a"]), "structured_outputs with choice"),
    "a schema": (chat_with(response_format=BOMB), "response_format.json_schema.schema: nested"),
    "structured outputs": (with_field(structured_outputs={"regex": "("}), "structured_outputs"),
    "tools": (chat_with(tools=[TOOL]), "server.tool_parser"),
    "tools of a completion": ((COMPLETIONS, {"prompt": "a", "tools": [TOOL]}), "tools"),
    "a forced tool": (chat_with(tool_choice="required"), "needs tools"),
    "a template": (chat_with(chat_template="{{ 7 * 7 }}"), "chat_template is refused"),
    "template arguments": (
        chat_with(chat_template_kwargs={"tokenize": True}),
        "chat_template_kwargs.tokenize: the model's chat template does not read this name",
    ),
    "deep template arguments": (
        chat_with(chat_template_kwargs={"mood": eval("[" * 40 + "]" * 40)}),
        "nested more than 32 levels deep",
    ),
    "a template argument of 70 bits": (
        chat_with(chat_template_kwargs={"mood": 2**70}),
        "chat_template_kwargs: not valid text",
    ),
    "a template's own argument": (
        chat_with(chat_template_kwargs={"messages": []}),
        "chat_template_kwargs.messages: the model's chat template does not read this name",
    ),
    "two ends of a chat": (
        chat_with(add_generation_prompt=True, continue_final_message=True),
        "continue_final_message: it excludes add_generation_prompt",
    ),
    "a user's message to continue": (chat_with(continue_final_message=True), "messages[0].role"),
    "a bias beyond all": (with_field(logit_bias={"5": 1e308}), "logit_bias: Expected"),
    "a bias of no id": (with_field(logit_bias={"99999": 1}), "99999 is not a token id"),
    "a bias of an id of 99 digits": (with_field(logit_bias={"9" * 99: 1}), "as a key"),
    "a bias of an id of 5000 digits": (with_field(logit_bias={"9" * 5000: 1}), "logit_bias"),
    "ten thousand biases": (
        with_field(logit_bias={str(i): 1 for i in range(10**4)}),
        "length <= 1024; send an object of up to 1024 token ids",
    ),
    "no allowed ids": (with_field(allowed_token_ids=[]), "allowed_token_ids"),
    "allowed ids that are none": (with_field(allowed_token_ids=[-1]), "-1 is not a token id"),
    "ten thousand allowed ids": (with_field(allowed_token_ids=[1] * 10**4), "length <= 4096"),
    "an end and no more, too early": (
        with_field(allowed_token_ids=[1], stop_token_ids=[1], min_tokens=1),
        "no token to sample",
    ),
    "thousands of bad words": (with_field(bad_words=["a"] * 10**4), "length <= 256"),
    "a long bad word": (with_field(bad_words=["a" * 257]), "bad_words[0]"),
    "a bad word of many tokens": (
        with_field(bad_words=["é🙂" * 30]),
        "Use a bad word of 1 to 64 tokens",
    ),
    "no penalty": (with_field(repetition_penalty=0), "repetition_penalty: Expected"),
    "a penalty beyond all": (with_field(repetition_penalty=1e308), "repetition_penalty: Expected"),
    "more tokens than at most": (with_field(min_tokens=2), "min_tokens = 2 is more than"),
    "more tokens than fit": (
        with_field(prompt=[1] * 100, max_tokens=None, min_tokens=29),
        "the 28 tokens that the context has left",
    ),
    "more tokens than fit after the longest prompt": (
        with_field(prompt=[[1], [1] * 100], max_tokens=None, min_tokens=29),
        "the 28 tokens that the context has left",
    ),
    "more tokens than none": (
        with_field(max_tokens=0, echo=True, min_tokens=1),
        "min_tokens = 1 is more than max_tokens = 0",
    ),
    "messages to complete": (with_field(messages=[]), "to /v1/chat/completions"),
    "a prompt for a chat": (chat_with(prompt="a"), "to /v1/completions"),
    "a chat's logprobs": (with_field(top_logprobs=3), "Send logprobs = 3"),
    "what is not built": (with_field(no_stop_trim=True), "no_stop_trim is not supported"),
    "a misspelt field": (with_field(temprature=0), "Did you mean temperature?"),
    "a text for a number": (
        with_field(temperature="hot"),
        "Expected a number or null, got a string",
    ),
    "fields for a client": (
        with_field(extra_body={"top_k": 3}),
        "Send its fields at the top level",
    ),
    "llama.cpp's grammar": (with_field(grammar="root ::= x"), "Send structured_outputs.grammar"),
    "a schema without a name": (
        chat_with(response_format={"type": "json_schema", "schema": {}}),
        "Send response_format.json_schema.schema, next to a name",
    ),
    "stop strings": (with_field(stop=["a"] * 5), "5 strings. At most 4"),
    "more stop strings": (with_field(stop=["a"] * 17), "stop"),
    "an empty stop string": (with_field(stop=""), "stop"),
    "a long stop string": (with_field(stop="a" * 1025), "stop"),
    "stop ids": (with_field(stop_token_ids=[1] * 1025), "stop_token_ids"),
    "a tiny temperature": (with_field(temperature=1e-30), "temperature"),
    "no nucleus": (with_field(top_p=0), "top_p"),
    "prompts": (with_field(prompt=["a"] * 9), "9 prompts. At most 8"),
    "no prompts": (with_field(prompt=[]), "prompt"),
    "an empty prompt": (with_field(prompt=""), "no tokens"),
    "an empty prompt of several": (with_field(prompt=[[1], []]), "no tokens"),
    "prompts of two kinds": (with_field(prompt=["a", [1]]), "prompt[1]"),
    "a prompt in a prompt": (with_field(prompt=[[[1]]]), "prompt[0][0]"),
    "no messages": ((CHAT, {"messages": []}), "messages"),
    "a message of no role": ((CHAT, {"messages": [{"content": "a"}]}), "messages[0].role"),
    "a role of its own": ((CHAT, {"messages": [{"role": "root", "content": "a"}]}), "role"),
    "a tool's message": ((CHAT, {"messages": [{"role": "tool", "content": "a"}]}), "tool_call_id"),
    "no content": ((CHAT, {"messages": [{"role": "user"}]}), "content"),
    "two limits": (chat_with(max_completion_tokens=2), "max_completion_tokens"),
    "obfuscation of no stream": (
        with_field(stream_options={"include_obfuscation": True}),
        "Set stream",
    ),
    "options of no stream": (with_field(stream_options={"include_usage": True}), "Set stream"),
    "a prompt longer than the model": (
        with_field(prompt=[1] * 300),
        "length is 128 tokens. However, the prompt has 300 tokens",
    ),
    "a text far too long": (with_field(prompt="the cat " * 30_000), "at least"),
    "a text of nothing but spaces": (with_field(prompt=" " * 250_000), "length is 128 tokens"),
    "a talk longer than the model": (saying("a" * 400), "length is 128 tokens"),
    "neither prompt nor messages": (("/tokenize", {}), "send one of them"),
    "a surrogate": (with_field(prompt="\ud800 and so on"), "not valid JSON"),
    "a surrogate as a key": (with_field(**{"\udfff and so on": 1}), "not valid JSON"),
}

DEEP = b"[" * 50_000
MALFORMED = {
    "nothing": b"",
    "no object": b"[]",
    "brackets": b"[[[[a(" * 17_000,
    "depth": DEEP,
    "depth in a field": b'{"prompt": ' + DEEP,
    "depth in a field that is read past": b'{"prompt": "a", "user": ' + DEEP,
    "depth that is well formed": b'{"prompt": ' + DEEP + b"]" * len(DEEP) + b"}",
    "no UTF-8": b'{"prompt": "a\xff"}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "half a character": b'{"prompt": "\xe2\x82"}',
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "a number like none": b'{"prompt": "a", "temperature": 1e999}',
    "a number of 5000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "two bodies": b'{"prompt": "a"}{"prompt": "a"}',
    "a form": b"prompt=a&max_tokens=1",
}


def ask_quickly(server, path, body):
    start = time.monotonic()
    response = server.post(path, body)
    assert time.monotonic() - start < 1
    return response


@pytest.mark.timed
@pytest.mark.parametrize("what", HOSTILE)
def test_a_refusal_says_what_is_wrong_at_once_and_nobody_else_notices(small, neighbor, what):
    (path, body), words = HOSTILE[what]
    error = check_refusal(ask_quickly(small, path, body))
    assert words in error["message"]
    neighbor.goes_on()


@pytest.mark.timed
@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_no_json_object_is_refused(small, neighbor, what):
    error = check_refusal(ask_quickly(small, COMPLETIONS, MALFORMED[what]))
    assert error["message"].startswith("the body ") and error["param"] is None
    neighbor.goes_on()


def test_of_a_key_given_twice_the_last_value_counts(small):
    body = b'{"prompt": "a", "max_tokens": %d, "max_tokens": %d, "ignore_eos": true}'
    assert small.post(COMPLETIONS, body % (-2, 3)).body["usage"]["completion_tokens"] == 3
    check_refusal(small.post(COMPLETIONS, body % (3, -2)))


MARK = "Z" * 5000
ECHOED = {
    "a model": with_field(model=MARK),
    "a field": with_field(**{MARK: 1}),
    "a field of a message": (CHAT, {"messages": [{"role": "user", "content": "a", MARK: 1}]}),
    "a role": (CHAT, {"messages": [{"role": MARK, "content": "a"}]}),
    "a part": saying([{"type": MARK}]),
    "a field of a part": saying([{"type": "text", "text": "a", MARK: 1}]),
    "a stop string": with_field(stop=MARK),
    "an option": with_field(stream=True, stream_options={MARK: 1}),
    "a number": with_field(seed=MARK),
    "a format": with_field(response_format={"type": MARK}),
    "a field of tokenize": ("/tokenize", {MARK: 1}),
    "an item": (RESPONSES, {"input": [{"type": MARK}]}),
    "a field of an item": (RESPONSES, {"input": [{"role": "user", "content": "a", MARK: 1}]}),
    "a part of an item": (RESPONSES, {"input": [{"role": "user", "content": [{"type": MARK}]}]}),
    "a route": (f"/v1/{MARK}", {}),
    "another's prompt": with_field(prompt=[MARK]),
}


@pytest.mark.parametrize("what", ECHOED)
def test_a_refusal_repeats_little_of_what_it_refuses(small, what):
    path, body = ECHOED[what]
    response = small.post(path, body)
    check_refusal(response, 404 if what in ("a model", "a route") else 400)
    assert json.dumps(response.body).count("Z") <= 200


def test_a_model_by_another_name_is_not_found(small):
    for path in (CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize"):
        error = check_refusal(small.post(path, ORDINARY[path] | {"model": "gpt-4o"}), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"


def test_a_body_that_says_it_is_too_large_is_refused_unread(small, neighbor):
    with small.connect() as client:
        client.sendall(head(f"Content-Length: {MAX_BODY + 1}"))
        check_refusal(response_of(client), 413)
    neighbor.goes_on()


def test_a_body_that_grows_too_large_is_refused_while_it_comes(small, neighbor):
    chunk = b"%x\r\n%b\r\n" % (1 << 16, b"[" * (1 << 16))
    with small.connect() as client:
        client.sendall(head("Transfer-Encoding: chunked") + chunk * (MAX_BODY // (1 << 16) + 1))
        check_refusal(response_of(client), 413)
    neighbor.goes_on()


def head(*headers):
    return "\r\n".join([f"POST {COMPLETIONS} HTTP/1.1", "Host: a", *headers, "", ""]).encode()


class Reply(HTTPResponse):
    """A response on a bare connection."""


def response_of(client: socket.socket):
    client.settimeout(20)
    reply = Reply(client)
    reply.begin()
    reply.body = json.loads(reply.read())
    return reply


@pytest.mark.timed
def test_a_template_that_runs_too_long_is_ended_and_stalls_nobody(small, neighbor):
    neighbor.goes_on()
    seen, start = len(neighbor.gaps), time.monotonic()
    error = check_refusal(small.post(*saying("loop")))
    assert 0.4 < time.monotonic() - start < 3
    assert "ran for more than 0.5 s" in error["message"]
    assert max(neighbor.gaps[seen:]) < 0.4
    neighbor.goes_on()


@pytest.mark.parametrize("what", ["classes", "run"])
def test_a_template_cannot_leave_its_sandbox(small, canary, what):
    error = check_refusal(small.post(*saying(what)))
    assert "unsafe" in error["message"] and not canary.exists()


def test_a_template_that_behaves_is_what_the_model_reads(small):
    count = small.post("/tokenize", saying("hello")[1]).body["count"]
    assert count == small.post("/tokenize", {"prompt": "user: hello"}).body["count"]
