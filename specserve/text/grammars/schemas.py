"""Rewriting JSON schemas to llguidance's keywords, with closed objects."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from specserve.text.grammars.compiled import ONE_OF, GrammarError
from specserve.text.grammars.patterns import string_form, without_look_around

SchemaNode = Mapping[str, Any]  # one schema with its nested schemas

MAPS = {"patternProperties", "properties"}  # keywords whose values are schemas by name
WITHIN = {  # keywords whose values are schemas, or lists of schemas
    *("additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"),
}
DEFINITIONS = {"$defs", "definitions"}
UNIONS = {"anyOf", "oneOf"}
COMPOSERS = {"$ref", "allOf", *UNIONS}
ANNOTATIONS = DEFINITIONS | {  # keywords that do not restrict values
    *("$anchor", "$comment", "$id", "$schema", "$vocabulary", "default", "deprecated"),
    *("description", "discriminator", "example", "examples", "externalDocs", "id"),
    *("nullable", "readOnly", "title", "writeOnly", "xml"),
}
MAX_WORK = 1 << 22  # maximum work: characters of composed schemas, and SCHEMA or PART per visit
SCHEMA, PART = 32, 512
MAX_INLINE = 8  # maximum nesting of inlined composed schemas
MAX_PARTS = 1000  # maximum schemas that describe one value
MAX_DEPTH = 200  # maximum nesting of schemas that describe one value
TOO_MUCH = "it is too complex. Combine fewer allOf, anyOf and $ref."
FORMAT_NOTES = {
    "binary",
    "directory-path",
    "file-path",
    "password",
    "path",
}  # formats that any string has
# Formats that zod writes next to an equivalent pattern.
PATTERNED = {
    *("base64", "base64url", "cidrv4", "cidrv6", "cuid", "cuid2", "e164", "emoji", "ends_with"),
    *("hex", "includes", "ksuid", "lowercase", "mac", "nanoid", "starts_with", "ulid"),
    *("uppercase", "xid"),
}
# Maximum strings that are read to compare the unions of a schema, including repeated references.
# The largest schema has fewer strings.
MAX_STRINGS = 1 << 17
MAX_OPTIONS = 64  # maximum schemas of a union without a tag; all pairs are compared


def simplified(schema: SchemaNode, is_strict: bool = False) -> dict[str, Any]:
    """Rewrite a schema so that its objects only have the properties that it names.

    The schema's `additionalProperties` opens an object, unless `is_strict`. An object without
    `properties` and `patternProperties` stays open, unless `is_strict`. The keywords allOf, anyOf,
    oneOf, $ref and their neighbors together describe one object.

    oneOf becomes anyOf if no two of its schemas match the same value. References point to `$defs`.
    GrammarError for schemas that cannot be rewritten.
    """
    return Simplifier(schema, is_strict).whole()


class Simplifier:
    """Rewrites referenced schemas as definitions, and composed schemas inline.

    Repeated composed schemas become definitions. llguidance drops an unsatisfiable property only if
    it is inline.
    """

    def __init__(self, root: SchemaNode, is_strict: bool) -> None:
        self.root, self.is_strict = root, is_strict
        self.num_left = MAX_WORK
        self.num_strings_left = MAX_STRINGS  # remaining budget of strings
        self.own = {**mapping(root.get("definitions")), **mapping(root.get("$defs"))}
        self.names: dict[str, str] = {}  # names of definitions, by reference or JSON
        self.pending: list[tuple[str, Any]] = []  # definitions to be written
        self.seen: set[str] = set()  # composed schemas as JSON
        self.depth = 0  # nesting of composed schemas
        self.has_other_references = False

    def whole(self) -> dict[str, Any]:
        node, defs = self.written(self.root), dict[str, Any]()
        while self.pending:
            name, schema = self.pending.pop()
            defs[name] = self.written(schema) if isinstance(schema, Mapping) else schema
        if self.has_other_references:  # by $anchor or $id
            defs |= {name: self.simplified(schema) for name, schema in self.own.items()}
        return {**node, "$defs": defs} if defs else node

    def simplified(self, schema: Any) -> Any:
        """Simplify the schema of a value, or a list of schemas."""
        self.spend(SCHEMA)
        if is_list(schema):
            return [self.simplified(item) for item in schema]
        if not isinstance(schema, Mapping):
            return schema
        if not is_composed(schema):
            return self.written(schema)
        key = json.dumps(schema)
        self.spend(len(key))
        if key in self.seen or self.depth > MAX_INLINE:
            return self.reference(key, schema)
        self.seen.add(key)
        return self.written(schema)

    def written(self, schema: SchemaNode) -> dict[str, Any]:
        self.depth += is_composed(schema)
        node = self.composed(schema) if is_composed(schema) else self.referring(schema)
        is_apart = self.are_apart(node.get("oneOf"))
        simple = {
            "anyOf" if key == "oneOf" and is_apart else key: self.value_of(key, value)
            for key, value in node.items()
            if key not in DEFINITIONS
        }
        self.depth -= is_composed(schema)
        return simple

    def value_of(self, key: str, value: Any) -> Any:
        """Simplify the schemas in a keyword's value."""
        if key in MAPS and isinstance(value, Mapping):
            return {name: self.simplified(schema) for name, schema in value.items()}
        return self.simplified(value) if key in WITHIN else value

    def referring(self, schema: SchemaNode) -> dict[str, Any]:
        """Rewrite a schema that is not composed; its reference points to a definition."""
        node = closed(rewritten(schema, self.is_strict), self.is_strict)
        target = self.target(schema)
        return node if target is None else {**node, **self.reference(node["$ref"], target)}

    def reference(self, key: str, schema: Any) -> dict[str, str]:
        """Return a reference to a schema's definition."""
        if key not in self.names:
            number = len(self.names)
            self.names[key] = next(n for n in (f"{number}", f"{number}-") if n not in self.own)
            self.pending.append((self.names[key], schema))
        return {"$ref": f"#/$defs/{self.names[key]}"}

    def composed(self, schema: SchemaNode) -> dict[str, Any]:
        """Return a union of unwritten schemas, or a schema without compositions."""
        members, unions = self.parts(schema)
        if len(members) > MAX_PARTS:
            raise GrammarError(TOO_MUCH)
        if not unions:
            return joined(members, self.is_strict)
        (key, choices), *others = sorted(unions, key=lambda union: union[0])  # anyOf, then oneOf
        rest = [*members, *({key: choices} for key, choices in others)]
        return {key: [{"allOf": [*rest, choice]} for choice in choices]}

    def parts(self, schema: Any, depth: int = 0) -> tuple[list[SchemaNode], list[tuple[str, Any]]]:
        """Return the schemas without compositions and the unions that apply to a value."""
        self.spend(PART)
        if depth > MAX_DEPTH or not isinstance(schema, Mapping | bool):
            is_deep = depth > MAX_DEPTH
            raise GrammarError(TOO_MUCH if is_deep else "a schema is an object or a boolean")
        if isinstance(schema, bool):
            return ([] if schema else [{"enum": []}]), []
        own: dict[str, Any] = {}
        members: list[SchemaNode] = []
        unions: list[tuple[str, Any]] = []
        for key, value in rewritten(schema, self.is_strict).items():
            if key in UNIONS and is_list(value):
                unions.append((key, value))
            elif (inner := self.inner(schema, key, value)) is not None:
                for each in inner:
                    more, choices = self.parts(each, depth + 1)
                    members += more
                    unions += choices
            elif key not in ANNOTATIONS:
                if not own:
                    members.append(own)
                own[key] = value
        return members, unions

    def inner(self, schema: SchemaNode, key: str, value: Any) -> Sequence[Any] | None:
        """Return a keyword's schemas that apply to the same value."""
        if key == "allOf" and is_list(value):
            return [*value]
        target = self.target(schema) if key == "$ref" else None
        return None if target is None else [target]

    def target(self, schema: SchemaNode) -> Any:
        """Return the target of a schema's reference within the root; None if it does not exist.

        Pointers have the escapes of RFC 6901 in a URI: %7E, ~1 for a slash, ~0 for a tilde.
        """
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            self.has_other_references |= reference not in (None, "#")
            return self.root if reference == "#" else None
        found: Any = self.root
        for part in unquote(reference.removeprefix("#/")).split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(name)
            else:
                is_index = isinstance(found, list) and name.isdecimal() and int(name) < len(found)
                found = found[int(name)] if is_index else None
        return found

    def are_apart(self, choices: Any) -> bool:
        """Whether no two schemas of a oneOf match the same value, so that anyOf is equivalent.

        False if llguidance must decide. GrammarError if two object schemas may match the same
        object, because closing the objects would change the meaning.
        """
        if not is_list(choices):
            return False
        each = [self.options(choice) for choice in choices]
        if all(len(options) == 1 for options in each):
            first, *others = [self.strings_of(options[0]) for options in each] or [{}]
            tags = [name for name in first if all(name in found for found in others)]
            for name in tags:
                sets = [found[name] for found in (first, *others)]
                if len(set().union(*sets)) == sum(map(len, sets)):  # the sets are disjoint
                    return True
        if sum(map(len, each)) > MAX_OPTIONS:
            raise GrammarError(ONE_OF)
        pairs = ((a, b) for x, y in combinations(each, 2) for a in x for b in y)
        unknown = [(a, b) for a, b in pairs if not self.differ(a, b)]
        if any(may_be_object(a) and may_be_object(b) for a, b in unknown):
            raise GrammarError(ONE_OF)
        return not unknown

    def differ(self, a: SchemaNode, b: SchemaNode) -> bool:
        if (x := kinds(a)) and (y := kinds(b)) and not x & y:
            return True
        if (p := self.values_of(a)) is not None and (q := self.values_of(b)) is not None:
            has_containers = any(isinstance(value, Mapping | list) for value in (*p, *q))
            return not has_containers and {*p}.isdisjoint(q)
        if kinds(a) != {"object"} or kinds(b) != {"object"}:
            return False
        shared = required(a) & required(b) & names(a) & names(b)
        return any(
            self.differ(mapping(a["properties"][name]), mapping(b["properties"][name]))
            for name in shared
        ) or (lacks(a, b) and lacks(b, a))

    def strings_of(self, schema: SchemaNode) -> dict[str, set[str]]:
        """Return the allowed strings of each required property that only allows listed strings."""
        if schema.get("type") != "object":
            return {}
        properties = mapping(schema.get("properties"))
        found = {name: self.values_of(properties.get(name)) for name in required(schema)}
        return {
            name: {*values}
            for name, values in found.items()
            if values is not None and all(isinstance(value, str) for value in values)
        }

    def values_of(self, schema: Any) -> list[Any] | None:
        """Return all values that a schema allows, if it lists them."""
        if not isinstance(schema, Mapping):
            return None
        composed = schema["allOf"] if is_list(schema.get("allOf")) else ()
        each = [schema, *(s for s in composed if isinstance(s, Mapping))]
        lists = ([s["const"]] if "const" in s else s.get("enum") for s in each)
        values = next((found for found in lists if isinstance(found, list)), None)
        self.num_strings_left -= len(values or ()) + 1
        return values if self.num_strings_left >= 0 else None

    def options(self, schema: Any) -> list[SchemaNode]:
        """Expand a schema to the alternatives without compositions."""
        if not isinstance(schema, Mapping):
            return [{}]
        node = self.composed(schema)
        choices = node.get("anyOf", node.get("oneOf"))
        return [node] if choices is None else [o for c in choices for o in self.options(c)]

    def spend(self, work: int) -> None:
        self.num_left -= work
        if self.num_left < 0:
            raise GrammarError(TOO_MUCH)


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


# Types of the values that this module reads. llguidance checks the other keywords.
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "allOf": (is_list, "a list of schemas"),
    "required": (is_list, "a list of names"),
    "minLength": (is_number, "a number"),
    "maxLength": (is_number, "a number"),
}


def is_composed(schema: SchemaNode) -> bool:
    """Whether several schemas describe one value. A single union or reference is not composed."""
    if not schema.keys() & COMPOSERS:
        return False
    return "allOf" in schema or len(schema.keys() - ANNOTATIONS) > 1


def kinds(schema: SchemaNode) -> set[str]:
    """Return the allowed types of values; empty if the schema does not list them."""
    given = schema.get("type")
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
        return set()
    return {"number" if kind == "integer" else kind for kind in listed}


def names(schema: SchemaNode) -> set[str]:
    return {*mapping(schema.get("properties"))}


def required(schema: SchemaNode) -> set[str]:
    given = schema.get("required")
    return {name for name in given if isinstance(name, str)} if isinstance(given, list) else set()


def lacks(a: SchemaNode, b: SchemaNode) -> bool:
    """Whether closed objects of `a` lack a property that `b` requires."""
    is_closed = a.get("additionalProperties") is False and not a.get("patternProperties")
    return is_closed and bool(required(b) - names(a))


def may_be_object(schema: SchemaNode) -> bool:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and not any(isinstance(value, Mapping) for value in values):
        return False
    return not kinds(schema) or "object" in kinds(schema)


def mapping(value: Any) -> SchemaNode:
    """Return the value, or an empty object if it is not an object."""
    return value if isinstance(value, Mapping) else {}


def rewritten(schema: SchemaNode, is_strict: bool) -> dict[str, Any]:
    """Rewrite a schema with equivalent keywords. `is_strict` rejects open objects.

    GrammarError for look-around, for such objects, and for keywords that llguidance ignores.
    """
    old = "disallow", "divisibleBy", "extends"  # keywords of JSON Schema draft 3
    if unsupported := [keyword for keyword in schema if keyword in old]:
        raise GrammarError(f"these keywords are not supported: {', '.join(unsupported)}")
    for keyword, (is_kind, words) in KINDS.items():
        if keyword in schema and not is_kind(schema[keyword]):
            raise GrammarError(f"{keyword} is {words}, not {schema[keyword]!r:.40}")
    node = with_names(with_pattern(without_notes(schema)))
    return strict(node) if is_strict else node


def without_notes(schema: SchemaNode) -> dict[str, Any]:
    """Drop keywords without effect, and formats that any string has or that a pattern repeats."""
    format = schema.get("format")
    has_pattern = "pattern" in schema or "allOf" in schema
    known = FORMAT_NOTES | PATTERNED if has_pattern else FORMAT_NOTES
    is_note = isinstance(format, str) and format in known
    no_effect = {"propertyNames": True, "uniqueItems": False}
    dropped = {k for k, off in no_effect.items() if k in schema and schema[k] is off}
    return {k: v for k, v in schema.items() if k not in dropped and (k != "format" or not is_note)}


def with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove look-around from patterns."""
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
    """Replace `propertyNames` for any string, some names, a pattern or a length."""
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


def pattern_of(names: SchemaNode) -> str | None:
    """Return a string schema as a pattern, if a pattern can express it."""
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        return without_look_around(names["pattern"])
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    is_length = names.keys() <= {"minLength", "maxLength"} and isinstance(least, int)
    return f"^[\\s\\S]{{{least},{most}}}$" if is_length and isinstance(most, int | str) else None


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Close an object that the schema leaves open.

    All closed objects then have the same form, so that `allOf` can merge them.
    """
    if schema.get("additionalProperties", False) is not False:
        raise GrammarError(
            "additionalProperties: a strict schema allows only its own properties. Send false, or "
            "omit strict."
        )
    kind = schema.get("type")
    is_object = kind == "object" or (isinstance(kind, list) and "object" in kind)
    if is_object or "additionalProperties" in schema:
        schema.setdefault("properties", {})
    schema.pop("additionalProperties", None)
    return schema


def closed(node: SchemaNode, is_strict: bool = False) -> dict[str, Any]:
    """Close the object of a schema, unless it has `additionalProperties` or names no properties.

    GrammarError for a strict schema that requires a property without describing it.
    """
    names = node.get("properties")
    is_open = "properties" not in node and "patternProperties" not in node
    if is_open or "additionalProperties" in node or not isinstance(names, Mapping | None):
        return {**node}
    required = node.get("required")
    more = required if isinstance(required, Sequence) and not isinstance(required, str) else ()
    unnamed = {name: True for name in more if isinstance(name, str) and name not in (names or {})}
    if unnamed and is_strict:
        raise GrammarError(
            f"required: {next(iter(unnamed))!r:.100} is not in properties of a strict schema. Add "
            "it to properties, or omit strict."
        )
    own = {"properties": {**(names or {}), **unnamed}} if names or unnamed else {}
    return {**node, **own, "additionalProperties": False}


def joined(members: Sequence[SchemaNode], is_strict: bool = False) -> dict[str, Any]:
    """Return one schema that matches what all these schemas match; merge their objects."""
    whole = [m for m in members if len(members) > 1 and is_whole(m)]
    parts = [m for m in members if m not in whole]
    own = {"additionalProperties", "patternProperties", "properties", "required"}
    rests = [{k: v for k, v in m.items() if k not in own} for m in parts]
    first, *others = distinct([rest for rest in rests if rest]) or [{}]
    more = [*others, *whole]
    node = first | merged(parts)
    if whole:  # these decide about additional properties
        node.setdefault("additionalProperties", True)
    return closed(node | ({"allOf": more} if more else {}), is_strict)


def is_whole(member: SchemaNode) -> bool:
    """Whether a schema cannot be merged: its own names and patterns limit additional properties."""
    is_limit = member.get("additionalProperties", True) not in (True, {})
    return is_limit and bool(member.get("patternProperties"))


def merged(members: Sequence[SchemaNode]) -> dict[str, Any]:
    """Merge the object keywords of all members."""
    named: dict[str, list[Any]] = {}
    matched: dict[str, list[Any]] = {}
    for member in members:
        for name, schema in mapping(member.get("properties")).items():
            named.setdefault(name, []).append(schema)
        for pattern, schema in mapping(member.get("patternProperties")).items():
            matched.setdefault(pattern, []).append(schema)
    limits = [m for m in members if m.get("additionalProperties", True) is not True]
    for member in limits:
        for names, key in ((named, "properties"), (matched, "patternProperties")):
            for name in names.keys() - mapping(member.get(key)).keys():
                names[name].append(member["additionalProperties"])
    return keywords(members, named, matched)


def keywords(
    members: Sequence[SchemaNode], named: dict[str, list[Any]], matched: dict[str, list[Any]]
) -> dict[str, Any]:
    """Combine object keywords in one schema; omit keywords that no member has."""
    node: dict[str, Any] = {}
    for key, found in (("properties", named), ("patternProperties", matched)):
        if found or any(key in member for member in members):
            node[key] = {name: both(schemas) for name, schemas in found.items()}
    if required := [name for m in members for name in m.get("required", ())]:
        node["required"] = [*dict.fromkeys(required)]
    if others := [m["additionalProperties"] for m in members if "additionalProperties" in m]:
        node["additionalProperties"] = both(others)
    return node


def distinct(schemas: Sequence[Any]) -> list[Any]:
    return [schema for i, schema in enumerate(schemas) if schema not in schemas[:i]]


def both(schemas: Sequence[Any]) -> Any:
    """Return a schema that matches what all these schemas match."""
    if False in schemas:
        return False
    rules = distinct([schema for schema in schemas if schema is not True])
    return (rules[0] if len(rules) == 1 else {"allOf": rules}) if rules else True
