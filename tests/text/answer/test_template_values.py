"""Values in the texts of a response template's fields."""

import pytest

from specserve.text.answer.response_template import of_type, parsed, transformed

TAG = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>[^<]*)"}
DIALECT = {"unquoted_keys": True, "string_delims": [["<<", ">>"]]}


@pytest.mark.parametrize(
    ("kind", "args", "text", "value"),
    [
        ("text", {}, " a ", "a"),
        ("text", {"strip": False}, " a ", " a "),
        ("int", {}, " 3 ", 3),
        ("float", {}, "3.5", 3.5),
        ("bool", {}, " True", True),
        ("bool", {}, "no", False),
        ("json", {}, ' {"a": 1} ', {"a": 1}),
        ("json", {"allow_non_json": True}, " a ", "a"),
        (
            "json",
            DIALECT,
            '{a:<<"b": {c:1}>>,"d:":{ e-f : "g:h"}}',
            {"a": '"b": {c:1}', "d:": {"e-f": "g:h"}},
        ),
        ("xml-inline", TAG, "<a>1<b>2<a>3", {"a": "3", "b": "2"}),
        ("xml-inline", TAG | {"merge_duplicates": True}, "<a>1<a>2<a>3", {"a": ["1", "2", "3"]}),
        ("xml-inline", TAG | {"value_parser": {"name": "int"}}, "<a>1", {"a": 1}),
        ("kv-lines", {}, "a: 1\n\nb: 2: 3\nc", {"a": "1", "b": "2: 3"}),
        ("kv-lines", {"line_sep": ";", "kv_sep": "="}, "a=1; b=2", {"a": "1", "b": "2"}),
    ],
)
def test_a_text_is_this_value(kind, args, text, value):
    assert parsed(text, kind, args) == value


@pytest.mark.parametrize(
    ("kind", "args", "text"),
    [("json", {}, "{a: 1}"), ("json", DIALECT, "{a: <<b}"), ("int", {}, "a"), ("json", {}, "NaN")],
)
def test_other_texts_are_no_value(kind, args, text):
    with pytest.raises(ValueError):
        parsed(text, kind, args)


def test_a_hostile_text_does_not_hold_up_an_expression_for_long():
    args = {"tag_pattern": r"<p>(?P<key>a)(?P<value>.*?)</p>"}
    with pytest.raises(TimeoutError):
        parsed("<p>a" * 25_000, "xml-inline", args)


def test_a_form_is_filled_in():
    values = {"name": "f", "content": {"a": [1]}}
    form = {"function": {"name": "{name}", "all": ["{content.a}", "{content}", "is {name}"]}}
    filled = {"function": {"name": "f", "all": [[1], {"a": [1]}, "is {name}"]}}
    assert transformed(form, values) == filled
    with pytest.raises(KeyError):
        transformed("{content.b}", values)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "integer"}, 7),
        ("7", {"type": "string"}, "7"),
        ("7", None, "7"),
        ("7.5", {"type": "number"}, 7.5),
        ("7.5", {"type": "integer"}, "7.5"),
        ("true", {"type": "integer"}, "true"),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        ("[1]", {"type": "array"}, [1]),
        ("{}", {"anyOf": [{"type": "array"}, {"type": "object"}]}, {}),
        ("[1", {"type": "array"}, "[1"),
        ("1", {"oneOf": [{"type": "array"}]}, "1"),
        (1.5, {"type": "integer"}, 1.5),
    ],
)
def test_a_value_gets_the_type_of_its_schema(text, schema, value):
    found = of_type(text, schema)
    assert (type(found), found) == (type(value), value)
