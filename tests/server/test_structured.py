"""Over HTTP: texts that have a form, and refusals of forms beside a stream that goes on."""

import json
import re
import threading
from itertools import pairwise
from time import perf_counter

import jsonschema
import pytest

from specserve import SamplingParams
from specserve.server.grammar_process import SECONDS
from tests.server.asking import CHAT, COMPLETIONS, chat_body, in_process, saying, streamed, whole
from tests.server.server_process import eventually
from tests.text.grammars.hostile import EVERY

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["circle", "square"]},
        "sides": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 8},
    },
    "required": ["kind", "sides"],
    "additionalProperties": False,
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}
OPEN = {"type": "object", "additionalProperties": {"type": "integer"}}
TAGS = {"structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}]}
SECOND = 1 + 0.5  # and what other load adds
PACE = 0.02  # seconds of a step


def obeys(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


FORMS = {
    "schema": ({"json": SCHEMA}, obeys),
    "schema as text": ({"json": json.dumps(SCHEMA)}, obeys),
    "regex": ({"regex": "(yes|no), it (is|was)!"}, re.compile("(yes|no), it (is|was)!").fullmatch),
    "choice": ({"choice": ["the cat", "the mat", "a"]}, ["the cat", "the mat", "a"].count),
    "lark": ({"grammar": 'start: ("ab" | "c"){5}'}, re.compile("(ab|c){5}").fullmatch),
    "tags": (
        {"structural_tag": TAGS | {"triggers": ["<n"]}},
        lambda text: "<n" not in text or re.search("<n>-?[0-9]+</n>", text),
    ),
}


def asking(**form):
    return {"prompt": "the cat", "max_tokens": 400, "temperature": 1, "seed": 5} | form


@pytest.mark.parametrize("name", FORMS)
def test_a_text_has_the_form_that_is_asked_for(server, llm, name):
    form, check = FORMS[name]
    for seed in range(3):
        asked = {"structured_outputs": form, "max_tokens": 400, "temperature": 1, "seed": seed}
        got = streamed(server, COMPLETIONS, {"prompt": "the cat"} | asked)
        assert got == in_process(llm.generate("the cat", SamplingParams(**asked)))
        [(text, reason, _)], _ = got
        assert check(text) and (reason == "stop" or name == "tags")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_response_format_is_the_same_form(server, path):
    body = chat_body(seed=1, temperature=1, max_tokens=400) if path == CHAT else asking()
    [(text, reason, _)], _ = want = whole(server, path, body | {"response_format": OPENAI})
    assert obeys(text) and reason == "stop"
    assert whole(server, path, body | {"structured_outputs": {"json": SCHEMA}}) == want
    [(text, *_)], _ = whole(server, path, body | {"response_format": {"type": "text"}})
    assert text != want[0][0][0]


FIRST_TAG = {  # a sequence: a text that begins with a number in tags
    "type": "sequence",
    "elements": [
        {
            "type": "tag",
            "begin": "<n>",
            "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
            "end": "</n>",
        },
        {"type": "const_string", "value": "."},
    ],
}


@pytest.mark.parametrize("tag", [TAGS | {"triggers": ["<n"]}, {"format": FIRST_TAG}])
def test_a_structural_tag_is_a_response_format_as_in_vllm(server, tag):
    kind = {"type": "structural_tag"}
    forms = {"response_format": kind | tag}, {"structured_outputs": {"structural_tag": kind | tag}}
    got, same = (whole(server, COMPLETIONS, asking(**form)) for form in forms)
    assert got == same
    [(text, *_)], _ = got
    assert "format" not in tag or re.fullmatch(r"<n>-?[0-9]+</n>\.", text)


def test_any_object_is_one_of_json(server):
    bias = {str(token): 5 for token in (ord("}") - ord("!") + 2, ord('"') - ord("!") + 2)}
    for path, body in ((CHAT, chat_body(temperature=1)), (COMPLETIONS, asking())):
        body |= {"response_format": {"type": "json_object"}, "max_tokens": 450, "seed": 1}
        [(text, reason, _)], _ = whole(
            server, path, body | {"logit_bias": bias, "ignore_eos": True}
        )
        assert reason == "stop" and isinstance(json.loads(text), dict)


def test_choices_have_forms_of_their_own_seeds(server):
    choices, _ = whole(server, COMPLETIONS, asking(structured_outputs={"regex": "[a-z]{9}"}, n=4))
    texts = [text for text, *_ in choices]
    assert all(re.fullmatch("[a-z]{9}", text) for text in texts) and len({*texts}) == 4


def schema(**given):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": given}}}


WRONG = {  # what is sent, the field that is wrong, words of the reason
    "a format": ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    "no schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "json_schema: required for the type json_schema, and only there",
    ),
    "an empty schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "schema: missing",
    ),
    "a schema for nothing": (
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format",
        "for the type json_schema",
    ),
    "an unknown field": (
        {"response_format": {"type": "text", "schema": {}}},
        "response_format.schema",
        "unknown field",
    ),
    "two forms": (
        {"response_format": OPENAI, "structured_outputs": {"regex": "a"}},
        "response_format",
        "Send one",
    ),
    "a tag of a schema": (
        {"response_format": {"type": "json_object", "format": {"type": "any_text"}}},
        "response_format",
        "format: only for the type structural_tag",
    ),
    "a tag of nothing": (
        {"response_format": {"type": "structural_tag"}},
        "response_format",
        "format",
    ),
    "half a tag": (
        {"response_format": {"type": "structural_tag", "triggers": ["<"]}},
        "response_format",
        "format",
    ),
    "keywords": (schema(uniqueItems=True), "response_format.json_schema.schema", "uniqueItems"),
    "a type": (schema(type="strin"), "response_format.json_schema.schema", "Invalid type: strin"),
    "depth": (
        schema(const=eval("[" * 70 + "]" * 70)),
        "response_format.json_schema.schema",
        "nested more than 64",
    ),
    "an open object": (
        {"response_format": OPENAI | {"json_schema": OPENAI["json_schema"] | {"schema": OPEN}}},
        "response_format.json_schema.schema",
        "additionalProperties: a strict schema",
    ),
    "look-around": (
        schema(type="string", pattern="^(?!a)b"),
        "response_format.json_schema.schema",
        "'^(?!a)b' has look-around",
    ),
    "a regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
    "two of them": (
        {"structured_outputs": {"regex": "a", "json_object": True}},
        "structured_outputs",
        "exactly one",
    ),
    "gbnf": (
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        "structured_outputs.grammar",
        "Send Lark",
    ),
    "another's name": (
        {"guided_json": {}, "structured_outputs": {"json": {}}},
        "guided_json",
        "Send only structured_outputs",
    ),
    "min_tokens": (
        {"structured_outputs": {"regex": "a"}, "min_tokens": 3},
        "min_tokens",
        "because a complete text ends",
    ),
}


def test_a_form_of_which_other_parameters_leave_nothing_is_refused(server):
    asked = {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [5, 6]}
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, asking())):
        answer = server.post(path, body | asked)
        error = answer.body["error"]
        assert (answer.status, error["param"]) == (400, "structured_outputs"), error


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_by_its_field(server, name):
    sent, param, words = WRONG[name]
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, asking())):
        answer = server.post(path, body | sent)
        error = answer.body["error"]
        assert (answer.status, error["param"]) == (400, param), error
        assert words in error["message"]


TAKEN = {"structured_outputs": {"regex": "[a-z]{3}"}}
HOSTILE = [  # of which each has to be refused
    "regex: counts in a count",
    "regex: deep groups",
    "json: 1 MB of names",
    "json: 900 lists in lists",
    "json: 1500 optional properties",
    "json: allOf of 200 patterns",
    "json: multiples of multiples",
    "json: names for each other",
    "grammar: a rule of itself",
    "grammar: 5000 rules at once",
    "grammar: nothing ends it",
    "grammar: nothing begins it",
]


@pytest.mark.timed
def test_hostile_forms_are_refused_within_a_second_and_a_stream_keeps_its_pace(paced):
    with paced() as server:
        eventually(lambda: server.children("specserve.server.grammar_process"))
        whole(server, COMPLETIONS, asking(**TAKEN))  # what checks grammars has started
        alone, _ = timed(server)
        times, beside = [], []
        stream = threading.Thread(target=lambda: beside.append(timed(server)))
        stream.start()
        for name in HOSTILE:
            answer, seconds = reported_for(server, EVERY[name])
            times.append(seconds)
            assert answer.status == 400, name
            assert answer.body["error"]["param"].startswith("structured_outputs"), name
        stream.join()
        assert max(times) < SECOND, dict(zip(HOSTILE, times, strict=True))
        [(text, gaps)] = beside
        assert text == alone and max(gaps) < 10 * PACE
        whole(server, COMPLETIONS, asking(**TAKEN))


def reported_for(server, form):
    """The answer to a form, and its seconds; asked again where the machine was too busy to tell."""
    for _ in range(5):
        start = perf_counter()
        answer = server.post(COMPLETIONS, asking(structured_outputs=form))
        seconds = perf_counter() - start
        if answer.status != 503:
            break
        assert seconds < SECOND and "Retry" in answer.body["error"]["message"]
    return answer, seconds


def timed(server):
    """A stream's text, and the seconds between its events."""
    text, times = "", []
    for event in server.stream(COMPLETIONS, saying(100, ms=int(1000 * PACE))):
        times.append(perf_counter())
        text += "" if event == "[DONE]" else "".join(c["text"] for c in event["choices"])
    return text, [b - a for a, b in pairwise(times)]


@pytest.mark.timed
def test_a_form_that_was_refused_is_not_compiled_again(server):
    body = asking(structured_outputs=EVERY["json: multiples of multiples"])
    times = []
    for _ in range(3):
        start = perf_counter()
        assert "compiling takes" in server.post(COMPLETIONS, body).body["error"]["message"]
        times.append(perf_counter() - start)
    assert times[0] > SECONDS and max(times[1:]) < SECONDS / 2
