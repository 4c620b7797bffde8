"""Look-around: what pydantic and zod write is taken, and other patterns are named."""

import json
import re
from datetime import date
from decimal import Decimal
from enum import Enum
from itertools import product
from typing import Annotated, Literal
from uuid import UUID

import jsonschema
import msgspec
import pytest
from openai.lib._parsing._completions import type_to_response_format_param
from pydantic import BaseModel, Field

from specserve import RequestError
from specserve.server.body import ResponseFormat
from specserve.text.grammars.compiled import GrammarError, compile_grammar
from specserve.text.grammars.patterns import string_form, without_look_around
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, grammar_of
from tests.text.grammars.matching import END, draw, takes, tiny_vocabulary
from tests.text.grammars.test_random_schemas import Chance

EMAIL = (
    r"^(?!\.)(?!.*\.\.)([a-zA-Z0-9_'+\-\.]*)[a-zA-Z0-9_+-]"
    r"@([a-zA-Z0-9][a-zA-Z0-9\-]*\.)+[a-zA-Z]{2,}$"
)
DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
HOSTNAME = (
    r"^(?=.{1,9}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
)
IBAN = r"^[A-Z]{2}(?!00|01|99)\d{2}[A-Z0-9]{11,30}$"
FORMS = {  # a pattern, and pieces of which all short strings are made to compare it
    "email": (EMAIL, ("a", "Z", ".", "'", "_-", "@", "b.co", "c")),
    "email of zod 4": (EMAIL.replace("a-zA-Z", "A-Za-z"), ("a", ".", "'", "@", "b.co", "..")),
    "email of zod 3.22": (
        r"^(?!\.)(?!.*\.\.)([A-Z0-9_+-\.]*)[A-Z0-9_+-]@([A-Z0-9][A-Z0-9\-]*\.)+[A-Z]{2,}$",
        ("A", ".", "+", "@", "B.CO"),
    ),
    "duration": (DURATION, ("P", "T", "1Y", "2M", "3D", "4H", "5", "6S", "7W")),
    "hostname": (HOSTNAME, ("a", "-", ".", "bcd", "efgh")),
    "iban": (IBAN, ("DE", "0", "1", "2", "99", "X" * 10)),
}


def decimals(digits, places):
    """As pydantic before 2.14 writes them, but that whole numbers also end."""
    start = r"^(?!^[-+.]*$)[+-]?0*"
    whole = max(0, (digits or 0) - (places or 0))
    ahead = rf"(?=[\d.]{{1,{(digits or 0) + 1}}}0*$)"
    if digits is None:
        return start + (r"\d*\.?\d*$" if places is None else rf"\d*\.?\d{{0,{places}}}0*$")
    if places is None:
        return start + rf"(?:\d{{0,{digits}}}|{ahead}\d*\.\d*0*$)"
    return start + rf"(?:\d{{0,{whole}}}|{ahead}\d{{0,{whole}}}\.\d{{0,{places}}}0*$)"


def texts(pieces, most=6):
    return ("".join(chosen) for n in range(most) for chosen in product(pieces, repeat=n))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_zod_means_the_same_without_look_around(name):
    pattern, pieces = FORMS[name]
    form = string_form(pattern)
    matched = 0
    for text in texts(pieces):
        is_within = form.get("minLength", 0) <= len(text) <= form.get("maxLength", 99)
        is_match = bool(re.search(form["pattern"], text)) and is_within
        assert is_match <= bool(re.search(pattern, text)), text
        if is_match != bool(re.search(pattern, text)):  # a class from + to . and a dot at the end
            assert "," in pattern or text.endswith(".") or name == "email of zod 3.22", text
        matched += is_match
    assert matched > 20
    assert "(?=" not in form["pattern"] and "(?!" not in form["pattern"]


@pytest.mark.parametrize("places", [None, 0, 1, 2, 4])
@pytest.mark.parametrize("digits", [None, 1, 2, 3])
def test_decimals_of_pydantic_are_the_same_numbers(digits, places):
    pattern = decimals(digits, places)
    same = re.compile(without_look_around(pattern))
    ended = re.compile(pattern.replace("}|(?=", "}$|(?="))
    for text in texts("-.07", 7):
        assert bool(same.search(text)) == bool(ended.search(text)), text
        if same.search(text):
            Decimal(text)


OTHERS = [
    *("(?=a)b", "a(?!b)", "(?<=a)b", "[(](?<!a)", r"\\(?=a)", "^(?!a).*$"),
    EMAIL.replace(r"(?!.*\.\.)", "(?!x)"),
    decimals(None, None).replace("0*", "7*"),
    decimals(1000, None),
]


@pytest.mark.parametrize("pattern", OTHERS)
def test_another_pattern_with_look_around_is_named(pattern):
    with pytest.raises(GrammarError, match="look-around") as e:
        without_look_around(pattern)
    assert repr(pattern)[:100] in str(e.value)


@pytest.mark.parametrize("place", ["pattern", "patternProperties", "propertyNames", "regex"])
def test_a_pattern_is_named_wherever_it_is(place):
    schema = {
        "pattern": {"pattern": "x(?!a)"},
        "patternProperties": {"patternProperties": {"x(?!a)": {}}},
        "propertyNames": {"type": "object", "propertyNames": {"pattern": "x(?!a)"}},
        "regex": {},
    }[place]
    asked = (
        {"regex": "x(?!a)"} if place == "regex" else {"json": {"allOf": [{"items": schema}, {}]}}
    )
    with pytest.raises(RequestError, match=re.escape("'x(?!a)' has look-around")) as e:
        grammar_of(StructuredOutputsParams(**asked))
    assert e.value.param == f"structured_outputs.{next(iter(asked))}"


@pytest.mark.parametrize("pattern", [r"a\(?=b", "[(?=a]", r"\(?!", "(?:a)", "(?P<n>a)"])
def test_a_pattern_without_look_around_stays(pattern):
    assert without_look_around(pattern) == pattern


ZOD = {  # of z.toJSONSchema, and of zod-to-json-schema
    "email": {"type": "string", "format": "email", "pattern": EMAIL},
    "duration": {"type": "string", "format": "duration", "pattern": DURATION},
    "hostname": {"type": "string", "format": "hostname", "pattern": HOSTNAME},
    "cuid": {"type": "string", "format": "cuid", "pattern": "^[cC][0-9a-z]{6,}$"},
    "e164": {"type": "string", "format": "e164", "pattern": r"^\+[1-9]\d{6,14}$"},
    "mac": {"type": "string", "format": "mac", "pattern": "^(?:[0-9A-F]{2}:){5}[0-9A-F]{2}$"},
    "starts with": {
        "type": "string",
        "format": "includes",
        "allOf": [{"pattern": "^a.*"}, {"pattern": "b"}],
    },
    "a record": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "number"},
        "required": ["a", "b"],
    },
    "an intersection": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ]
    },
    "a discriminated union": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"t": {"type": "string", "const": t}, t: {"type": "boolean"}},
                "required": ["t", t],
                "additionalProperties": False,
            }
            for t in ("a", "b")
        ]
    },
}


def drawn(schema, seeds, **options):
    """Complete texts that a schema allows."""
    asked = StructuredOutputsParams(json=schema, **options)
    matcher = compile_grammar(tiny_vocabulary(), grammar_of(asked))
    found = (draw(matcher, Chance(seed), 500) for seed in range(seeds))
    return [text for text, last in found if last == END]


@pytest.mark.parametrize("name", ZOD)
def test_schemas_of_zod_are_taken_and_texts_obey_them(name):
    found = drawn(ZOD[name], 6)
    assert found
    for text in found:
        jsonschema.validate(json.loads(text), ZOD[name])


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    """A part of an order."""

    color: Color = Color.RED
    size: Annotated[int, Field(ge=1, le=9)] | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    friend: "Dog | None" = None


class Order(BaseModel):
    id: UUID
    day: date
    parts: list[Part] = Field(max_length=2, description="none or a few")
    main: Part = Field(description="a reference with a description")
    pair: tuple[bool, Literal["x", 1]]
    pet: Cat | Dog = Field(discriminator="kind")


@pytest.mark.parametrize("model", [Order, Dog, Part])
def test_models_of_pydantic_are_answered_as_openais_client_sends_them(model):
    sent = msgspec.json.decode(msgspec.json.encode(type_to_response_format_param(model)))
    form = msgspec.convert(sent, ResponseFormat).asked
    assert form.strict
    found = drawn(form.json, 6, strict=True) + drawn(model.model_json_schema(), 6)
    assert len(found) > 6
    for text in found:
        model.model_validate_json(text)


def test_a_decimal_of_older_pydantic_is_a_number():
    schema = {"anyOf": [{"type": "string", "pattern": decimals(4, 2)}, {"type": "null"}]}
    matcher = compile_grammar(tiny_vocabulary(), grammar_of(StructuredOutputsParams(json=schema)))
    good, bad = ['"12.50"', '"-.5"', '"7"'], ['""', '"."', '"123"', '"1.234"', '"12a"']
    assert [text for text in good if not takes(matcher, text)] == []
    assert [text for text in bad if takes(matcher, text)] == []
