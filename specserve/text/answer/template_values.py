"""Values of the fields that a response template finds in a text."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import regex

SECONDS = 0.1  # for a template's own expression to go through a call
# A JSON string, complete or not, or a key without quotes.
UNQUOTED = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|(?<=[{,])(\s*)([A-Za-z_][\w.-]*)(?=\s*:)', re.S)
PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
TYPES: dict[str, Any] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": dict,
}
decode = msgspec.json.decode


def parsed(text: str, kind: str, args: Mapping[str, Any]) -> Any:
    """The text as a value of the kind; ValueError if it is none."""
    return PARSERS[kind](text, args)


def as_text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def as_json(text: str, args: Mapping[str, Any]) -> Any:
    """JSON, or a dialect of it, with strings in delimiters of their own or keys without quotes."""
    written = with_json_strings(text, dict(args.get("string_delims", ())))
    if args.get("unquoted_keys"):
        written = UNQUOTED.sub(quoted, written)
    try:
        return decode(written.strip())
    except msgspec.DecodeError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def quoted(match: re.Match[str]) -> str:
    return match[0] if match[2] is None else f'{match[1]}"{match[2]}"'


def with_json_strings(text: str, delimiters: Mapping[str, str]) -> str:
    """The text with its strings, which are in other delimiters, as those of JSON."""
    if not delimiters:
        return text
    opening, pieces, at = re.compile("|".join(map(re.escape, delimiters))), list[str](), 0
    while (found := opening.search(text, at)) is not None:
        end = text.index(delimiters[found[0]], found.end())
        pieces += text[at : found.start()], json.dumps(text[found.end() : end])
        at = end + len(delimiters[found[0]])
    return "".join([*pieces, text[at:]])


def as_xml(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Tags, by an expression with the groups key and value."""
    found = dict[str, Any]()
    for match in regex.finditer(args["tag_pattern"], text, regex.DOTALL, timeout=SECONDS):
        groups = match.groupdict()
        key, value = groups["key"], inner(groups.get("value") or "", args)
        if key in found and args.get("merge_duplicates"):
            before = found[key]
            value = [*before, value] if isinstance(before, list) else [before, value]
        found[key] = value
    return found


def as_lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """A key and a value in each line."""
    found = dict[str, Any]()
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = as_text(line, args).partition(args.get("kv_sep", ":"))
        if separator:
            found[as_text(key, args)] = inner(as_text(value, args), args)
    return found


def inner(text: str, args: Mapping[str, Any]) -> Any:
    its = args.get("value_parser")
    return text if its is None else parsed(text, its.get("name", "text"), its.get("args", {}))


PARSERS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "bool": lambda text, args: as_text(text, args).lower() in ("true", "1"),
    "float": lambda text, args: float(text),
    "int": lambda text, args: int(text),
    "json": as_json,
    "kv-lines": as_lines,
    "text": as_text,
    "xml-inline": as_xml,
}


def transformed(form: Any, values: Mapping[str, Any]) -> Any:
    """The form with each string {name} or {name.key} replaced by that value; KeyError or TypeError
    where there is none.
    """
    if isinstance(form, dict):
        return {key: transformed(item, values) for key, item in form.items()}
    if isinstance(form, list):
        return [transformed(item, values) for item in form]
    named = PLACEHOLDER.fullmatch(form) if isinstance(form, str) else None
    if named is None:
        return form
    value: Any = values
    for key in named[1].split("."):
        value = value[key]
    return value


def of_type(value: Any, schema: Any) -> Any:
    """A value that was written without a type, as its schema has it; as it is where it does not
    fit.
    """
    if not isinstance(value, str):
        return value
    for name in types_in(schema):
        given = value.strip()
        given = {"True": "true", "False": "false", "None": "null"}.get(given, given)
        try:
            read = decode(given)
        except (ValueError, RecursionError):
            continue
        is_number = name in ("integer", "number")
        if isinstance(read, TYPES.get(name, ())) and not (is_number and isinstance(read, bool)):
            return read
    return value


def types_in(schema: Any) -> list[str]:
    if not isinstance(schema, dict):
        return []
    own = schema.get("type", [])
    types = [own] if isinstance(own, str) else [*own] if isinstance(own, list) else []
    for each in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types += types_in(each)
    return [*types, *(["null"] if schema.get("nullable") else [])]
