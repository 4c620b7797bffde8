"""oneOf: taken if no two of its schemas fit the same value, else refused; and formats that any
string has.
"""

import json
import random

import jsonschema
import pytest

from specserve import RequestError
from specserve.text.grammars.compiled import GrammarError, compile_grammar
from specserve.text.grammars.schemas import simplified
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, grammar_of
from tests.text.grammars.matching import END, draw, tiny_vocabulary

NUMBER = {"type": "integer", "maximum": 99}


def animal(kind, **more):
    properties = {"kind": kind} | more
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


CAT, DOG = animal({"const": "cat"}, lives=NUMBER), animal({"enum": ["dog", "wolf"]}, age=NUMBER)
PET = {  # as Pydantic writes a union with a discriminator
    "$defs": {"Cat": CAT, "Dog": DOG},
    "discriminator": {"propertyName": "kind"},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
}
APART = [
    PET,
    PET | {"$defs": {"Cat": {"$ref": "#/$defs/A"}, "A": CAT, "Dog": DOG}},
    {"oneOf": [CAT, DOG]},
    {"type": "array", "items": {"oneOf": [CAT, DOG]}, "maxItems": 2},
    {"oneOf": [{"type": "string", "maxLength": 3}, NUMBER]},  # as llguidance finds out
]


def without(key, schema):
    return {k: v for k, v in schema.items() if k != key}


OPEN = without("additionalProperties", CAT)
NOT_APART = [
    {"oneOf": [OPEN, without("additionalProperties", animal({"enum": ["cat", "lion"]}))]},
    {"oneOf": [OPEN, without("additionalProperties", animal({"type": "string"}))]},
    {"oneOf": [without("additionalProperties", animal({"enum": ["cat", "lion"]})), OPEN]},
    {"oneOf": [animal({"const": 1}), animal({"const": 1.0})]},
    {"oneOf": [{"$ref": "#/$defs/None"}, CAT]},
    {  # a pointer's ~1 is a slash, so that both are cats
        "$defs": {"a/b": CAT, "a~1b": DOG, "c": CAT},
        "oneOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c"}],
    },
    {  # and %20 a space
        "$defs": {"a b": CAT, "a%20b": DOG, "c": CAT},
        "oneOf": [{"$ref": "#/$defs/a%20b"}, {"$ref": "#/$defs/c"}],
    },
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "oneOf": [{"$ref": "#/$defs/a"}, CAT]},
]


def compiled(schema):
    grammar = grammar_of(StructuredOutputsParams(json=schema))
    return compile_grammar(tiny_vocabulary(), grammar)


@pytest.mark.parametrize("schema", APART, ids=range(len(APART)))
def test_what_is_apart_is_taken_and_texts_obey_it(schema):
    for seed in range(8):
        text, last = draw(compiled(schema), random.Random(seed), 500)
        assert last == END
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("schema", NOT_APART, ids=range(len(NOT_APART)))
def test_what_may_overlap_is_refused(schema):
    with pytest.raises(RequestError, match=r"oneOf|too complex"):
        compiled(schema)


def test_values_and_names_are_left_as_they_are():
    union = {"oneOf": [CAT, DOG]}
    schema = {"const": union, "properties": {"oneOf": {"type": "null"}}, "default": [union]}
    assert simplified(schema) == schema | {"additionalProperties": False}


@pytest.mark.parametrize("format", ["path", "file-path", "directory-path", "binary", "password"])
def test_a_format_that_any_string_has_changes_nothing(format):
    string = {"type": "string", "maxLength": 4}
    noted = {"properties": {"format": string | {"format": format}}}
    plain = {"properties": {"format": string}}
    assert simplified(noted) == simplified(plain)
    draw(compiled(noted), random.Random(0), 500)


@pytest.mark.parametrize("name", ["const", "enum", "default", "format", "oneOf", "properties"])
def test_a_propertys_name_is_no_keyword(name):
    string = {"type": "string", "maxLength": 4}
    noted = {"$defs": {name: string | {"format": "path"}}, "properties": {name: {"oneOf": [CAT]}}}
    plain = {"$defs": {name: string}, "properties": {name: {"anyOf": [CAT]}}}
    assert simplified(noted) == simplified(plain)


def test_other_formats_are_refused_by_name():
    with pytest.raises(GrammarError, match=r"format.*phone"):
        compiled({"type": "string", "format": "phone"})


@pytest.mark.parametrize("keyword", ["allOf", "required", "minLength", "maxLength"])
@pytest.mark.parametrize("value", ["#", {"a": 1}, None])
@pytest.mark.parametrize("place", ["root", "property", "union"])
def test_a_keyword_with_a_value_of_another_kind_is_refused_by_name(keyword, value, place):
    wrong = {"type": "string", "pattern": r"^(?!\.)[a-z.]{1,9}$", keyword: value}
    schema = {
        "root": wrong | {"anyOf": [{}]},
        "property": {"type": "object", "properties": {"a": wrong}, "anyOf": [{"type": "object"}]},
        "union": {"anyOf": [wrong, {"type": "integer"}], "required": ["a"]},
    }[place]
    with pytest.raises(GrammarError, match=keyword):
        simplified(schema)


def test_numbers_with_a_point_and_tuples_are_taken():
    written = {"type": "string", "pattern": "^[a-z]{1,9}$", "maxLength": 5.0}
    schema = {"type": "object", "properties": {"a": written}, "required": ("a",), "anyOf": [{}]}
    assert "required" in json.dumps(simplified(schema))


def test_required_that_is_a_number_is_refused_by_name():
    with pytest.raises(GrammarError, match="required is a list of names, not 1e"):
        simplified({"type": "object", "required": 1e308, "anyOf": [{}]})
