"""JSON schemas in the words of llguidance, which refuses some that mean the same."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

VALUES = {"const", "default", "enum", "examples"}  # keywords whose values are no schemas
MAPS = {"$defs", "definitions", "patternProperties", "properties"}  # .. are schemas by name
NOTES = {"binary", "directory-path", "file-path", "password", "path"}  # formats of any string
# Read for all unions of a schema, which may refer to the same ones again and again. The largest
# schema has fewer of its own.
MAX_STRINGS = 1 << 17
MAX_REFERENCES = 8  # one after the other


def simplified(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema with anyOf in place of each oneOf of objects that a property tells apart: all of
    them require it, and each has other strings for it. Pydantic writes unions so. A oneOf behind
    the first `MAX_STRINGS` strings stays. Formats that any string has are left out.
    """
    return Simplifier(root).simplified(schema)


class Simplifier:
    """The schema that references are within, and how many strings may still be read to tell the
    schemas of unions apart.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.num_left = MAX_STRINGS

    def simplified(self, schema: Any) -> Any:
        if isinstance(schema, Sequence) and not isinstance(schema, str):
            return [self.simplified(item) for item in schema]
        if not isinstance(schema, Mapping):
            return schema
        is_union = "anyOf" not in schema and self.are_apart(schema.get("oneOf"))
        return {
            "anyOf" if key == "oneOf" and is_union else key: self.value_of(key, value)
            for key, value in schema.items()
            if not (key == "format" and isinstance(value, str) and value in NOTES)
        }

    def value_of(self, key: str, value: Any) -> Any:
        """A keyword's value, with the schemas in it simplified."""
        if key in MAPS and isinstance(value, Mapping):
            return {name: self.simplified(schema) for name, schema in value.items()}
        return value if key in VALUES else self.simplified(value)

    def are_apart(self, schemas: Any) -> bool:
        if not isinstance(schemas, Sequence) or isinstance(schemas, str):
            return False
        each = [self.strings_of(target(schema, self.root)) for schema in schemas]
        return any(
            are_disjoint([strings[name] for strings in each])
            for name in (each[0] if each else ())
            if all(name in strings for strings in each)
        )

    def strings_of(self, schema: Any) -> dict[str, set[str]]:
        """The strings that each property may be, of those that an object has to have and that may
        be only certain strings.
        """
        if self.num_left < 0 or not isinstance(schema, Mapping) or schema.get("type") != "object":
            return {}
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
            return {}
        self.num_left -= len(required)
        names = (name for name in required if isinstance(name, str))
        found = {name: self.values_of(properties.get(name)) for name in names}
        return {name: {*values} for name, values in found.items() if values is not None}

    def values_of(self, schema: Any) -> list[str] | None:
        """All that a value may be, if these are strings."""
        if not isinstance(schema, Mapping):
            return None
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            return None
        self.num_left -= len(values)
        is_known = self.num_left >= 0 and all(isinstance(value, str) for value in values)
        return values if is_known else None


def are_disjoint(sets: Sequence[set[str]]) -> bool:
    return len(set().union(*sets)) == sum(map(len, sets))


def target(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema refers to within the root, or itself. A pointer's escapes are those of RFC 6901
    in a URI: %7E, ~1 for a slash, ~0 for a tilde.
    """
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        schema = root
        for part in unquote(reference.removeprefix("#/")).split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return None
