"""JSON schemas in the words of llguidance, with closed objects."""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from specserve.text.grammars.compiled import GrammarError
from specserve.text.grammars.keywords import Node, mapping, rewritten
from specserve.text.grammars.objects import closed, joined
from specserve.text.grammars.unions import Unions

MAPS = {"patternProperties", "properties"}  # keywords whose values are schemas by name
WITHIN = {"additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf"} | {
    "prefixItems"  # keywords whose values are schemas, or lists of schemas
}
DEFINITIONS = {"$defs", "definitions"}
UNIONS = {"anyOf", "oneOf"}
COMPOSERS = {"$ref", "allOf", *UNIONS}
NOTES = DEFINITIONS | {  # keywords that change no value
    *("$anchor", "$comment", "$id", "$schema", "$vocabulary", "default", "deprecated"),
    *("description", "discriminator", "example", "examples", "externalDocs", "id"),
    *("nullable", "readOnly", "title", "writeOnly", "xml"),
}
MAX_WORK = 1 << 22  # characters of composed schemas, and SCHEMA or PART for each that is read
SCHEMA, PART = 32, 512
MAX_INLINE = 8  # composed schemas, each within the one before
MAX_PARTS = 1000  # schemas that describe one value
MAX_DEPTH = 200  # of schemas that describe one value
NO_SCHEMA = "a schema is an object or a boolean"
TOO_MUCH = "it is too complex: use fewer allOf, anyOf and $ref together"


def simplified(schema: Node, is_strict: bool = False) -> dict[str, Any]:
    """The schema, whose objects have no properties but those that it names:

    - `additionalProperties` of the schema opens an object, unless `is_strict`;
    - an object without `properties` and `patternProperties` stays open, unless `is_strict`;
    - allOf, anyOf, oneOf, $ref and the keywords next to them describe one object together.

    oneOf becomes anyOf if no two of its schemas fit the same value. References are to `$defs`.
    GrammarError for what cannot be said so.
    """
    return Simplifier(schema, is_strict).whole()


class Simplifier:
    """Writes each schema that is referred to as a definition, and each that is composed where it
    stands, but for repetitions: llguidance drops a property that nothing fits, but no reference.
    """

    def __init__(self, root: Node, is_strict: bool) -> None:
        self.root, self.is_strict = root, is_strict
        self.num_left = MAX_WORK
        self.unions = Unions(self.options)
        self.own = {**mapping(root.get("definitions")), **mapping(root.get("$defs"))}
        self.names: dict[str, str] = {}  # of definitions, by the reference or the schema as JSON
        self.pending: list[tuple[str, Any]] = []  # definitions that are not written yet
        self.seen: set[str] = set()  # composed schemas, as JSON
        self.depth = 0  # of composed schemas, each within the one before
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
        """The schema of a value, or a list of schemas."""
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

    def written(self, schema: Node) -> dict[str, Any]:
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
        """A keyword's value, with the schemas in it simplified."""
        if key in MAPS and isinstance(value, Mapping):
            return {name: self.simplified(schema) for name, schema in value.items()}
        return self.simplified(value) if key in WITHIN else value

    def referring(self, schema: Node) -> dict[str, Any]:
        """A schema that is not composed, whose reference is to a definition."""
        node = closed(rewritten(schema, self.is_strict), self.is_strict)
        target = self.target(schema)
        return node if target is None else {**node, **self.reference(node["$ref"], target)}

    def reference(self, key: str, schema: Any) -> dict[str, str]:
        """To the definition of a schema."""
        if key not in self.names:
            number = len(self.names)
            self.names[key] = next(n for n in (f"{number}", f"{number}-") if n not in self.own)
            self.pending.append((self.names[key], schema))
        return {"$ref": f"#/$defs/{self.names[key]}"}

    def composed(self, schema: Node) -> dict[str, Any]:
        """A union of schemas that are not written yet, or a schema without compositions."""
        members, unions = self.parts(schema)
        if len(members) > MAX_PARTS:
            raise GrammarError(TOO_MUCH)
        if not unions:
            return joined(members, self.is_strict)
        (key, choices), *others = sorted(unions, key=lambda union: union[0])  # anyOf, then oneOf
        rest = [*members, *({key: choices} for key, choices in others)]
        return {key: [{"allOf": [*rest, choice]} for choice in choices]}

    def parts(self, schema: Any, depth: int = 0) -> tuple[list[Node], list[tuple[str, Any]]]:
        """The schemas, without compositions, and the unions that a value has to obey."""
        self.spend(PART)
        if depth > MAX_DEPTH or not isinstance(schema, Mapping | bool):
            raise GrammarError(TOO_MUCH if depth > MAX_DEPTH else NO_SCHEMA)
        if isinstance(schema, bool):
            return ([] if schema else [{"enum": []}]), []
        own: dict[str, Any] = {}
        members: list[Node] = []
        unions: list[tuple[str, Any]] = []
        for key, value in rewritten(schema, self.is_strict).items():
            if key in UNIONS and is_list(value):
                unions.append((key, value))
            elif (inner := self.inner(schema, key, value)) is not None:
                for each in inner:
                    more, choices = self.parts(each, depth + 1)
                    members += more
                    unions += choices
            elif key not in NOTES:
                if not own:
                    members.append(own)
                own[key] = value
        return members, unions

    def inner(self, schema: Node, key: str, value: Any) -> Sequence[Any] | None:
        """The schemas of a keyword that the same value has to obey."""
        if key == "allOf" and is_list(value):
            return [*value]
        target = self.target(schema) if key == "$ref" else None
        return None if target is None else [target]

    def target(self, schema: Node) -> Any:
        """What a schema refers to within the root; None if that does not exist. A pointer's escapes
        are those of RFC 6901 in a URI: %7E, ~1 for a slash, ~0 for a tilde.
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
        """Whether no two schemas of a oneOf fit the same value; GrammarError if objects may."""
        return is_list(choices) and self.unions.are_apart(choices)

    def options(self, schema: Any) -> list[Node]:
        """The schemas without compositions that one stands for."""
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


def is_composed(schema: Node) -> bool:
    """Whether several schemas describe one value; a union or reference alone does not."""
    if not schema.keys() & COMPOSERS:
        return False
    return "allOf" in schema or len(schema.keys() - NOTES) > 1
