"""One schema without those within it: keywords that llguidance lacks, in words that it has."""

from collections.abc import Mapping
from typing import Any

from specserve.text.grammars.compiled import GrammarError
from specserve.text.grammars.patterns import string_form, without_look_around

Node = Mapping[str, Any]

OLD = "disallow", "divisibleBy", "extends"  # keywords of JSON Schema's draft 3
NO_EFFECT = {"propertyNames": True, "uniqueItems": False}
NOTES = {"binary", "directory-path", "file-path", "password", "path"}  # formats of any string
# Formats that zod writes next to a pattern, which says the same.
PATTERNED = {
    *("base64", "base64url", "cidrv4", "cidrv6", "cuid", "cuid2", "e164", "emoji", "ends_with"),
    *("hex", "includes", "ksuid", "lowercase", "mac", "nanoid", "starts_with", "ulid"),
    *("uppercase", "xid"),
}


def mapping(value: Any) -> Node:
    """The value, or an empty object if the value is no object."""
    return value if isinstance(value, Mapping) else {}


def rewritten(schema: Node, is_strict: bool) -> dict[str, Any]:
    """The schema with equivalent keywords. `is_strict` refuses objects that are open.

    GrammarError for look-around, for an open object, and for keywords that llguidance reads past.
    """
    if unsupported := [keyword for keyword in schema if keyword in OLD]:
        raise GrammarError(f"these keywords are not supported: {', '.join(unsupported)}")
    node = with_names(with_pattern(without_notes(schema)))
    return strict(node) if is_strict else node


def without_notes(schema: Node) -> dict[str, Any]:
    """Drop keywords without effect, and a format that any string has or that a pattern repeats."""
    format = schema.get("format")
    has_pattern = "pattern" in schema or "allOf" in schema
    known = NOTES | PATTERNED if has_pattern else NOTES
    is_note = isinstance(format, str) and format in known
    dropped = {k for k, off in NO_EFFECT.items() if k in schema and schema[k] is off}
    return {k: v for k, v in schema.items() if k not in dropped and (k != "format" or not is_note)}


def with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace look-around in patterns."""
    if isinstance(pattern := schema.get("pattern"), str):
        form = string_form(pattern)
        if "maxLength" in form:
            form["minLength"] = max(form["minLength"], schema.get("minLength", 0))
            form["maxLength"] = min(form["maxLength"], schema.get("maxLength", form["maxLength"]))
        schema = schema | form
    if isinstance(patterns := schema.get("patternProperties"), Mapping):
        schema["patternProperties"] = {without_look_around(p): s for p, s in patterns.items()}
    return schema


def with_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Write `propertyNames` in other keywords: any string, some names, a pattern or a length."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return schema
    kept = {k: v for k, v in schema.items() if k != "propertyNames"}
    rule = {k: v for k, v in names.items() if k not in ("type", "title", "description")}
    has_own = schema.keys() & {"properties", "patternProperties"}
    value = schema.get("additionalProperties", True)
    closed = {"additionalProperties": False}
    if not rule:
        return kept
    if (pattern := pattern_of(rule)) is not None and not has_own:
        return kept | {"patternProperties": {pattern: value}} | closed
    allowed = [rule["const"]] if "const" in rule else rule.get("enum")
    if len(rule) == 1 and isinstance(allowed, list) and not has_own:
        return kept | {"properties": {n: value for n in allowed if isinstance(n, str)}} | closed
    return schema


def pattern_of(names: Node) -> str | None:
    """The pattern of names that a schema of strings allows, if that is all that it says."""
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        return without_look_around(names["pattern"])
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    is_length = names.keys() <= {"minLength", "maxLength"} and isinstance(least, int)
    return f"^[\\s\\S]{{{least},{most}}}$" if is_length and isinstance(most, int | str) else None


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Close an object that the schema itself leaves open. All closed objects look alike then, so
    that `allOf` can merge them.
    """
    if schema.get("additionalProperties", False) is not False:
        raise GrammarError(
            "additionalProperties: a strict schema allows no properties but its own: send false, "
            "or leave out strict"
        )
    kind = schema.get("type")
    is_object = kind == "object" or (isinstance(kind, list) and "object" in kind)
    if is_object or "additionalProperties" in schema:
        schema.setdefault("properties", {})
    schema.pop("additionalProperties", None)
    return schema
