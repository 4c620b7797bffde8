"""Objects have no properties but those that a schema names, unless the schema opens them."""

import pytest

from specserve import RequestError
from specserve.text.grammars.compiled import GrammarError, compile_grammar
from specserve.text.grammars.schemas import TOO_MUCH
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, grammar_of
from tests.text.grammars.matching import takes, tiny_vocabulary

NUMBER = {"type": "integer"}
STRINGS = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": NUMBER}


def an_object(*names, **more):
    return {"type": "object", "properties": {name: NUMBER for name in names}} | more


BASE = {"$defs": {"Base": an_object("a", required=["a"])}}
REF = {"$ref": "#/$defs/Base"}
SCHEMAS = {  # texts that a schema allows, and texts that it does not
    "properties": (an_object("a"), ["{}", '{"a": 1}'], ['{"b": 1}', '{"a": 1, "b": 1}']),
    "no type": ({"properties": {"a": NUMBER}}, ['{"a": 1}', "7"], ['{"b": 1}']),
    "no properties": ({"type": "object"}, ["{}", '{"x": [1]}'], ["1"]),
    "no property": (an_object(), ["{}"], ['{"x": 1}']),
    "opened": (an_object("a", additionalProperties=True), ['{"a": 1, "b": []}'], ['{"a": ""}']),
    "opened to numbers": (
        an_object("a", additionalProperties={"type": "null"}),
        ['{"a": 1, "b": null}'],
        ['{"b": 1}'],
    ),
    "a map": ({"type": "object", "additionalProperties": NUMBER}, ['{"x": 1}'], ['{"x": ""}']),
    "patterns": (
        {"type": "object", "patternProperties": {"^x": NUMBER}},
        ['{"x1": 1}', "{}"],
        ['{"y": 1}'],
    ),
    "an unnamed required property": (
        an_object("a", required=["b"]),
        ['{"a": 1, "b": {}}', '{"b": ""}'],
        ["{}", '{"b": 1, "c": 1}'],
    ),
    "items": ({"type": "array", "items": an_object("a")}, ['[{"a": 1}]'], ['[{"b": 1}]']),
    "first items": (
        {"type": "array", "prefixItems": [an_object("a")], "items": an_object("b")},
        ['[{"a": 1}, {"b": 1}]'],
        ['[{"b": 1}]', '[{"a": 1}, {"a": 1}]'],
    ),
    "a value of a map": (
        {"type": "object", "additionalProperties": an_object("a")},
        ['{"x": {"a": 1}}'],
        ['{"x": {"b": 1}}'],
    ),
    "a reference": (
        {"type": "object", "properties": {"x": REF}, **BASE},
        ['{"x": {"a": 1}}', "{}"],
        ['{"x": {"a": 1, "b": 1}}', '{"y": 1}'],
    ),
    "a reference to a definition of draft 7": (
        {"$ref": "#/definitions/Base", "definitions": BASE["$defs"]},
        ['{"a": 1}'],
        ['{"a": 1, "b": 1}'],
    ),
    "a reference to a property": (
        an_object("a") | {"properties": {"a": an_object("x"), "b": {"$ref": "#/properties/a"}}},
        ['{"b": {"x": 1}}'],
        ['{"b": {"y": 1}}'],
    ),
    "a reference into a union": (
        {"anyOf": [NUMBER, an_object("x")], "$defs": {"y": {"$ref": "#/anyOf/1"}}}
        | {"type": ["object", "integer"]},
        ["1", '{"x": 1}'],
        ['{"y": 1}'],
    ),
    "the schema itself": (
        {"type": "object", "properties": {"n": {"$ref": "#"}}},
        ['{"n": {"n": {}}}'],
        ['{"n": {"m": {}}}'],
    ),
    "an anchor": (
        {"$ref": "#p", "$defs": {"P": {"$anchor": "p", **an_object("a")}}},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    "allOf": (
        {"allOf": [an_object("a"), an_object("b", required=["b"])]},
        ['{"a": 1, "b": 2}', '{"b": 2}'],
        ['{"a": 1}', '{"b": 2, "a": 1}', '{"b": 2, "c": 1}'],
    ),
    "allOf of a base": (
        {"allOf": [REF, an_object("b")], **BASE},
        ['{"a": 1, "b": 2}', '{"a": 1}'],
        ['{"b": 2}', '{"a": 1, "c": 1}'],
    ),
    "a base next to properties": (
        {**REF, "properties": {"b": NUMBER}, **BASE},
        ['{"a": 1, "b": 2}'],
        ['{"b": 2}', '{"a": 1, "c": 1}'],
    ),
    "allOf of one": (
        {"allOf": [REF], "description": "as older versions of pydantic write", **BASE},
        ['{"a": 1}'],
        ['{"a": 1, "b": 1}'],
    ),
    "allOf in allOf": (
        {"allOf": [{"allOf": [an_object("a")]}, {"type": "object"}], "required": ["a"]},
        ['{"a": 1}'],
        ["{}", '{"a": 1, "b": 1}'],
    ),
    "allOf with an open one": (
        {"allOf": [an_object("a", additionalProperties=True), an_object("b")]},
        ['{"a": 1, "b": 1, "c": ""}'],
        ['{"b": ""}'],
    ),
    "allOf with a closed one": (
        {"allOf": [an_object("a", "b", additionalProperties=False), an_object("b", "c")]},
        ['{"a": 1, "b": 1}'],
        ['{"a": 1, "c": 1}'],
    ),
    "allOf of properties of one name": (
        {"allOf": [{"properties": {"x": an_object("a")}}, {"properties": {"x": an_object("b")}}]},
        ['{"x": {"a": 1, "b": 2}}'],
        ['{"x": {"c": 1}}'],
    ),
    "allOf of patterns": (
        {"allOf": [an_object("a"), {"patternProperties": {"^x": NUMBER}}]},
        ['{"a": 1, "xy": 2}'],
        ['{"y": 1}'],
    ),
    "allOf with patterns and other properties": (
        {
            "allOf": [
                {"patternProperties": {"^x": NUMBER}, "additionalProperties": {"type": "null"}},
                an_object("x1", "y", required=["x1"]),
            ]
        },
        ['{"x1": 1}', '{"x1": 1, "x2": 2, "z": null}'],
        ['{"x1": 1, "y": 1}', '{"x1": 1, "x2": null}', '{"x1": 1, "z": 1}'],
    ),
    "anyOf": (
        {"anyOf": [an_object("a", required=["a"]), an_object("b")]},
        ['{"a": 1}', '{"b": 1}', "{}"],
        ['{"a": 1, "b": 1}', '{"c": 1}'],
    ),
    "anyOf next to properties": (
        an_object("k", anyOf=[an_object("a", required=["a"]), {"required": ["k"]}]),
        ['{"k": 1, "a": 2}', '{"a": 2}', '{"k": 1}'],
        ["{}", '{"k": 1, "b": 1}'],
    ),
    "anyOf with an open one": (
        an_object("k", anyOf=[an_object("a", additionalProperties={}), an_object("b")]),
        ['{"k": 1, "a": 2, "z": ""}', '{"k": 1, "b": 2}'],
        ['{"k": ""}'],
    ),
    "two anyOf": (
        {"allOf": [{"anyOf": [an_object("a"), an_object("b")]}, {"anyOf": [an_object("c"), {}]}]},
        ['{"a": 1, "c": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 1}', '{"d": 1}'],
    ),
    "oneOf": (
        {"oneOf": [an_object("a", required=["a"]), an_object("b", required=["b"])]},
        ['{"a": 1}', '{"b": 1}'],
        ["{}", '{"a": 1, "b": 1}'],
    ),
    "a tree": (
        {"$ref": "#/$defs/Tree"}
        | {
            "$defs": {
                "Tree": {"allOf": [an_object("a"), {"properties": {"n": {"$ref": "#/$defs/Tree"}}}]}
            }
        },
        ['{"a": 1, "n": {"a": 2, "n": {}}}'],
        ['{"n": {"b": 1}}'],
    ),
    "a value or null": (
        {"type": ["object", "null"], "properties": {"a": NUMBER}},
        ["null", '{"a": 1}'],
        ['{"b": 1}'],
    ),
    "names of strings": (STRINGS, ['{"x": 1}', "{}"], ['{"x": ""}']),
    "any names": (STRINGS | {"propertyNames": {}}, ['{"x": 1}'], ['{"x": ""}']),
    "some names": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER},
        ['{"a": 1, "b": 2}', '{"b": 1}'],
        ['{"c": 1}'],
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^x"}},
        ['{"x": 1}'],
        ['{"y": 1}'],
    ),
    "names of a length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        ['{"xy": 1, "xyz": 1}'],
        ['{"x": 1}', '{"xyzu": 1}'],
    ),
    "lists that may repeat": ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["1"]),
    "order": (
        {"properties": {"z": NUMBER, "a": NUMBER}, "required": ["a", "z"]},
        ['{"z": 1, "a": 2}'],
        ['{"a": 2, "z": 1}'],
    ),
}
STRICT = {
    "no properties": ({"type": "object"}, ["{}"], ['{"x": 1}']),
    "in a list": ({"items": {"type": ["object", "null"]}}, ["[{}, null]"], ['[{"x": 1}]']),
    "closed schemas in allOf": (
        {"allOf": [an_object(n, additionalProperties=False, required=[n]) for n in "ab"]},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}'],
    ),
    "closed without names": (
        {"type": "object", "additionalProperties": False},
        ["{}"],
        ['{"x":1}'],
    ),
}


def compiled(schema, **options):
    asked = StructuredOutputsParams(json=schema, **options)
    return compile_grammar(tiny_vocabulary(), grammar_of(asked))


def check(matcher, good, bad):
    assert [text for text in good if not takes(matcher, text)] == []
    assert [text for text in bad if takes(matcher, text)] == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_object_has_no_properties_but_its_own(name):
    schema, good, bad = SCHEMAS[name]
    check(compiled(schema), good, bad)


@pytest.mark.parametrize("name", STRICT)
def test_a_strict_schema_is_closed(name):
    schema, good, bad = STRICT[name]
    check(compiled(schema, strict=True), good, bad)


@pytest.mark.parametrize("name", ["properties", "allOf of a base", "oneOf", "a tree", "some names"])
def test_a_strict_schema_that_is_closed_is_the_same(name):
    schema, good, bad = SCHEMAS[name]
    check(compiled(schema, strict=True), good, bad)


@pytest.mark.parametrize("more", [True, {}, NUMBER], ids=str)
def test_a_strict_schema_that_is_open_is_refused(more):
    schema = {"items": {"anyOf": [NUMBER, an_object("a", additionalProperties=more)]}}
    with pytest.raises(RequestError, match="additionalProperties: a strict schema") as e:
        compiled(schema, strict=True)
    assert e.value.param == "structured_outputs.json"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": NUMBER}, "required": ["a", "b"]},
        {"type": "object", "required": ["b"]},
        {"allOf": [an_object("a"), {"required": ["b"]}]},
    ],
    ids=("one", "no properties", "allOf"),
)
def test_a_strict_schema_that_requires_what_it_does_not_describe_is_refused(schema):
    with pytest.raises(RequestError, match="required: 'b' is not in properties of a strict"):
        compiled(schema, strict=True)
    compiled(schema)


def test_strict_without_a_schema_is_refused():
    with pytest.raises(RequestError, match="not to regex") as e:
        grammar_of(StructuredOutputsParams(regex="a", strict=True))
    assert e.value.param == "structured_outputs.strict"


UNSUPPORTED = {
    **{keyword: {keyword: {}} for keyword in ("if", "then", "else", "not", "contains")},
    **{keyword: {keyword: {"a": {}}} for keyword in ("dependentSchemas", "dependencies")},
    **{keyword: {keyword: 1} for keyword in ("minContains", "maxContains", "divisibleBy")},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "disallow": {"disallow": "string"},
    "extends": {"extends": {}},
    "propertyNames": {"propertyNames": {"pattern": "a", "minLength": 2}},
    "unevaluatedItems": {"unevaluatedItems": False},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "uniqueItems": {"uniqueItems": True},
}
PLACES = {
    "a property": lambda schema: an_object("a") | {"properties": {"a": schema}},
    "allOf": lambda schema: {"allOf": [an_object("a"), schema]},
    "a definition": lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": {"items": schema}}},
    "anyOf next to properties": lambda schema: an_object("a", anyOf=[NUMBER, schema]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_a_keyword_that_is_not_supported_is_named(keyword, place):
    with pytest.raises((RequestError, GrammarError), match=f"not supported: .*{keyword}"):
        compiled(PLACES[place](UNSUPPORTED[keyword]))


def test_a_composition_that_never_ends_is_refused():
    schema = {
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, an_object("b")]}},
        "$ref": "#/$defs/a",
    }
    with pytest.raises(RequestError, match=TOO_MUCH.split(".")[0]):
        compiled(schema)


def test_a_long_chain_of_compositions_is_written():
    defs = {
        f"d{i}": an_object(properties={"n": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {}]}})
        for i in range(400)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": defs | {"d400": an_object("a")}}
    check(compiled(schema), ['{"n": {"n": {}}}'], ['{"n": {"m": {}}}'])


def test_compositions_that_repeat_are_written_once():
    defs = {"d0": an_object("x")}
    for i in range(12):
        twice = {name: {"allOf": [{"$ref": f"#/$defs/d{i}"}, an_object("a")]} for name in "lr"}
        defs[f"d{i + 1}"] = {"type": "object", "properties": twice}
    schema = {"$ref": "#/$defs/d12", "$defs": defs}
    assert len(grammar_of(StructuredOutputsParams(json=schema))) < 10_000
    check(compiled(schema), ['{"r": {"l": {}, "a": 1}}'], ['{"r": {"a": 1, "b": {}}}'])
