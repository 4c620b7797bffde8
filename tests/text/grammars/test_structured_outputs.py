"""What callers ask for: which texts each form allows, and what is refused by name."""

import json

import pytest

from specserve import RequestError, SamplingParams
from specserve.exchange.sampling_params import resolve
from specserve.text.defaults import GenerationDefaults
from specserve.text.grammars.compiled import GrammarError, compile_grammar
from specserve.text.grammars.structured_outputs import (
    MAX_BYTES,
    StructuredOutputsParams,
    grammar_of,
)
from tests.text.grammars.hostile import BEGINNINGS, deep, tags
from tests.text.grammars.matching import takes, tiny_vocabulary

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ALONE = A | {"additionalProperties": False}
NUMBER = {"type": "integer"}
LEGACY = {
    "structures": [
        {"begin": "<f=a>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=b>", "schema": ALONE, "end": "</f>"},
        {"begin": "<g>", "schema": True, "end": ""},
    ],
    "triggers": ["<f=", "<g"],
}


def tag(format):
    return {"structural_tag": {"type": "structural_tag", "format": format}}


TAG = {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"}


def parts(*elements):
    return tag({"type": "sequence", "elements": [*elements]})


def const(value):
    return {"type": "const_string", "value": value}


def triggered(**options):
    tags = [{"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}]
    return tag({"type": "triggered_tags", "triggers": ["<a"], "tags": tags} | options)


def compiled(asked):
    return compile_grammar(tiny_vocabulary(), grammar_of(StructuredOutputsParams(**asked)))


COMPACT, SPACED, LINES = '{"a":1}', '{"a": 1}', '{\n  "a": 1\n}'
JSON = {"type": "json_schema", "json_schema": NUMBER}
ALLOWED = {  # what is asked for, texts that it allows, and texts that it does not
    "schema": ({"json": ALONE}, [SPACED], [COMPACT, LINES, '{ "a": 1}', '{"a":  1}', "{}"]),
    "schema as text": ({"json": json.dumps(ALONE)}, [SPACED], [COMPACT, "1"]),
    "lines": ({"json": ALONE, "whitespace_pattern": r" |\n *"}, [COMPACT, SPACED, LINES], ["{}"]),
    "compact": ({"json": ALONE, "disable_any_whitespace": True}, [COMPACT], [SPACED, LINES]),
    "two spaces": ({"json": ALONE, "whitespace_pattern": " {2}"}, ['{"a":  1}', COMPACT], [SPACED]),
    "any value": ({"json": True}, ["1", "[{}]", '"x"'], ["", "x"]),
    "in order": (
        {"json": {"properties": {"b": NUMBER, "a": NUMBER}, "additionalProperties": False}},
        ['{"b": 1, "a": 2}', "{}"],
        ['{"a": 2, "b": 1}'],
    ),
    "object": ({"json_object": True}, ["{}", '{"x": [1, {"y": null}]}'], ["[]", "1", ""]),
    "regex": ({"regex": "^[ab]+/(x|y)$"}, ["a/x", "bb/y"], ["a/", "a/xy", "/x"]),
    "regex with a slash": ({"regex": r"a\/b"}, ["a/b"], [r"a\/b"]),
    "regex of lines": ({"regex": "a\nb"}, ["a\nb"], ["a", "ab"]),
    "regex of nothing": ({"regex": ""}, [""], ["a"]),
    "choice": ({"choice": ("yes", "no", 'q"\\\n')}, ["yes", "no", 'q"\\\n'], ["y", "yesno", ""]),
    "choice of beginnings": ({"choice": ("the", "the cat", "é")}, ["the", "the cat", "é"], ["th"]),
    "lark": ({"grammar": 'start: n ("+" n)*\nn: /[0-9]+/'}, ["1", "1+23"], ["", "1+"]),
    "lark with a schema": (
        {"grammar": 'start: "<" %json {"type": "null"} ">"'},
        ["<null>"],
        ["<>"],
    ),
    "older tags": (
        {"structural_tag": LEGACY},
        ["", "hi\n<f=a>12</f> and", '<f=b>{"a": 3}</f><f=a>1</f>', "<f <g>[1]x", "a < b"],
        ["<f=c>", "<f=a>x</f>", "<f=a>1", "<g"],
    ),
    "a tag of two triggers": (
        {"structural_tag": LEGACY | {"triggers": ["<", "<f="]}},
        ["<f=a>12</f> x <g>[1]", '<f=b>{"a": 3}</f>'],
        ["<f=a>x</f>", "<h"],
    ),
    "older tags as text": ({"structural_tag": json.dumps(LEGACY)}, ["<f=a>1</f>"], ["<f=a>1"]),
    "a sequence": (
        parts(
            const("n = "), {"type": "tag", "begin": "<", "content": JSON, "end": ">"}, const("!")
        ),
        ["n = <12>!"],
        ["n = 12!", "n = <12>"],
    ),
    "free text at last": (parts(const("so "), {"type": "any_text"}), ["so ", "so it is\n"], ["s"]),
    "tags": (triggered(), ["", "x<a>y</a>z", "<a></a><a>b</a>"], ["x<a>y", "<ab"]),
    "one tag at least": (
        triggered(at_least_one=True),
        ["<a>y</a>z", "<a></a>z<a>b</a>"],
        ["", "x", "x<a>y</a>z"],
    ),
    "one tag": (triggered(stop_after_first=True), ["x<a>y</a>", "x"], ["<a>y</a>z"]),
    "one tag and no more": (
        triggered(stop_after_first=True, at_least_one=True),
        ["<a>y</a>"],
        ["x", "x<a>y</a>", "<a>y</a>z"],
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_form_allows_its_texts_and_no_others(name):
    asked, good, bad = ALLOWED[name]
    matcher = compiled(asked)
    assert [text for text in good if not takes(matcher, text)] == []
    assert [text for text in bad if takes(matcher, text)] == []


REFUSED = {  # what is asked for, the field that is wrong, and words of the reason
    "nothing": ({}, "", "exactly one of json, regex"),
    "two forms": ({"regex": "a", "json_object": True}, "", "not regex and json_object"),
    "false": ({"json_object": False}, "", "not none"),
    "no json": ({"json": "{"}, "json", "not valid JSON"),
    "no schema": ({"json": "[]"}, "json", "a schema is a JSON object"),
    "nothing allowed": ({"json": False}, "json", "false allows no value"),
    "an infinity": ({"json": {"maximum": float("inf")}}, "json", "not JSON"),
    "our own options": ({"json": {"x-guidance": {"lenient": True}}}, "json", "x-guidance"),
    "a pattern": ({"json": {"items": {"pattern": "x(?<!a)"}}}, "json", "'x(?<!a)' has look-around"),
    "too deep": ({"json": {"const": eval("[" * 64 + "]" * 64)}}, "json", "nested more than 64"),
    "too large": ({"regex": "a" * MAX_BYTES}, "regex", "are allowed. Send a smaller one"),
    "gbnf": ({"grammar": 'root ::= "a"'}, "grammar", "Send Lark"),
    "an option": ({"grammar": "start[temperature=0.5]: /a/"}, "grammar", "option temperature"),
    "an option behind a space": ({"grammar": "start [max_tokens=1]: /a/"}, "grammar", "max_tokens"),
    "an option behind many": (
        {"grammar": "start: a\na[" * 99 + "stop=1"},
        "grammar",
        "option stop",
    ),
    "a stop": ({"grammar": 'start: a\na[lazy, stop="b"]: /.*/'}, "grammar", "option stop"),
    "whitespace of a regex": (
        {"regex": "a", "whitespace_pattern": " "},
        "whitespace_pattern",
        "to json and json_object, not to regex",
    ),
    "no whitespace of choices": (
        {"choice": ("a",), "disable_any_whitespace": True},
        "disable_any_whitespace",
        "not to choice",
    ),
    "whitespace and none": (
        {"json": A, "disable_any_whitespace": True, "whitespace_pattern": " "},
        "whitespace_pattern",
        "Send only one of the two",
    ),
    "an unknown format": (tag({"type": "regex", "pattern": "a"}), "structural_tag", "'regex'"),
    "an unknown option": (
        tag({"type": "any_text", "excludes": ["a"]}),
        "structural_tag",
        "unknown field `excludes`",
    ),
    "free text in the middle": (
        parts({"type": "any_text"}, const("x")),
        "structural_tag",
        "any_text: it may only end a text",
    ),
    "a tag without a trigger": (
        {"structural_tag": LEGACY | {"triggers": ["<f="]}},
        "structural_tag",
        "'<g>' begins with none of the triggers",
    ),
    "a trigger without a tag": (
        {"structural_tag": LEGACY | {"triggers": ["<", "<h"]}},
        "structural_tag",
        "no tag begins with the trigger '<h'",
    ),
    "a trigger without a tag, and one tag alone": (
        triggered(triggers=["<", "x"], stop_after_first=True, at_least_one=True),
        "structural_tag",
        "no tag begins with the trigger 'x'",
    ),
    "tags nested too deep": (
        tag(deep(490, const("a"), lambda inner: TAG | {"content": inner})),
        "structural_tag",
        "nested more than 64",
    ),
    "tags for too many triggers": (
        {"structural_tag": tags(BEGINNINGS, [True] * 256)},
        "structural_tag",
        "are allowed. Send a smaller one",
    ),
    "no structures": ({"structural_tag": {"a": 1}}, "structural_tag", "unknown field `a`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_by_itself_is_refused_by_name(name):
    asked, field, words = REFUSED[name]
    with pytest.raises(RequestError) as e:
        grammar_of(StructuredOutputsParams(**asked))
    assert e.value.param == ".".join(filter(None, ("structured_outputs", field)))
    assert words in str(e.value) and len(str(e.value)) < 500


WRONG = {  # what cannot be compiled, and words of the reason
    "a type": ({"json": {"type": "strin"}}, "Invalid type: strin"),
    "keywords": (
        {"json": {"if": {}, "not": {}, "uniqueItems": True}},
        "these keywords are not supported: if, not, uniqueItems",
    ),
    "oneOf": ({"json": {"oneOf": [NUMBER, {"minimum": 1}]}}, "oneOf: several of its"),
    "a format": ({"json": {"type": "string", "format": "isbn"}}, "Unknown format: isbn"),
    "a bound": ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable"),
    "another's schema": ({"json": {"$ref": "https://example.com/a"}}, "is not present"),
    "a regex": ({"regex": "(a"}, "unclosed group"),
    "a regex of no text": ({"regex": r"[^\x00-\u{10ffff}]"}, "it allows no text"),
    "a name for itself": ({"json": {"$ref": "#"}}, "it allows no text"),
    "lark": ({"grammar": "start: b"}, "b"),
    "half a character": ({"choice": ("\ud800",)}, ""),
}


def test_a_tag_of_many_triggers_is_written_once():
    asked = tags(BEGINNINGS[:40], [{"const": f"{i}{'x' * 2000}"} for i in range(40)])
    written = grammar_of(StructuredOutputsParams(structural_tag=asked))
    assert written.count("x" * 2000) == 40


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_compiled_is_reported(name):
    asked, words = WRONG[name]
    with pytest.raises(GrammarError) as e:
        compiled(asked)
    assert words in str(e.value) and "non-verbose" not in str(e.value)


DEFAULTS = GenerationDefaults(eos_token_ids=(7,))


def test_a_text_with_a_form_ends_though_the_end_is_to_be_ignored():
    params = SamplingParams(ignore_eos=True)
    assert resolve(params, DEFAULTS, 99).stop_ids == set()
    resolved = resolve(params.clone(structured_outputs={"regex": "a"}), DEFAULTS, 99)
    assert resolved.stop_ids == resolved.eos_ids == {7} and resolved.grammar


@pytest.mark.parametrize(
    ("more", "defaults", "param"),
    [
        ({"min_tokens": 1}, DEFAULTS, "min_tokens"),
        ({}, GenerationDefaults(), "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, DEFAULTS, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, DEFAULTS, "structured_outputs.choice"),
        ({"structured_outputs": {"regexp": "a"}}, DEFAULTS, "structured_outputs"),
        ({"structured_outputs": "a"}, DEFAULTS, "structured_outputs"),
    ],
    ids=str,
)
def test_parameters_that_contradict_a_form_are_refused(more, defaults, param):
    with pytest.raises(RequestError) as e:
        resolve(SamplingParams(**{"structured_outputs": {"regex": "a"}} | more), defaults, 99)
    assert e.value.param == param
