"""oneOf: whether no two of its schemas fit the same value, so that anyOf means the same."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from specserve.text.grammars.compiled import ONE_OF, GrammarError
from specserve.text.grammars.keywords import Node, mapping

# Read for all unions of a schema, which may refer to the same ones again and again. The largest
# schema has fewer of its own.
MAX_STRINGS = 1 << 17
MAX_OPTIONS = 64  # schemas of a union without a tag; each is compared with the others


class Unions:
    """Compares schemas; `options` are the schemas without compositions that one stands for."""

    def __init__(self, options: Callable[[Any], list[Node]]) -> None:
        self.options = options
        self.num_left = MAX_STRINGS  # strings that may still be read

    def are_apart(self, choices: Sequence[Any]) -> bool:
        """False where llguidance has to find out. GrammarError if two objects may be the same, as
        closed objects differ where the schemas do not.
        """
        each = [self.options(choice) for choice in choices]
        if all(len(options) == 1 for options in each):
            strings = [self.strings_of(options[0]) for options in each]
            if have_a_tag(strings):
                return True
        unknown = [(a, b) for a, b in self.pairs(each) if not self.differ(a, b)]
        if any(may_be_object(a) and may_be_object(b) for a, b in unknown):
            raise GrammarError(ONE_OF)
        return not unknown

    def pairs(self, each: Sequence[list[Node]]) -> list[tuple[Node, Node]]:
        """Options of two different choices."""
        if sum(map(len, each)) > MAX_OPTIONS:
            raise GrammarError(ONE_OF)
        return [(a, b) for x, y in combinations(each, 2) for a in x for b in y]

    def differ(self, a: Node, b: Node) -> bool:
        if (x := kinds(a)) and (y := kinds(b)) and not x & y:
            return True
        if (p := self.values_of(a)) is not None and (q := self.values_of(b)) is not None:
            return are_scalars(p) and are_scalars(q) and {*p}.isdisjoint(q)
        if kinds(a) != {"object"} or kinds(b) != {"object"}:
            return False
        shared = required(a) & required(b) & names(a) & names(b)
        return any(
            self.differ(mapping(a["properties"][name]), mapping(b["properties"][name]))
            for name in shared
        ) or (lacks(a, b) and lacks(b, a))

    def strings_of(self, schema: Node) -> dict[str, set[str]]:
        """The strings that each property may be, of those that an object has to have and that may
        be only certain strings.
        """
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
        """All that a value may be, if the schema lists them."""
        if not isinstance(schema, Mapping):
            return None
        each = [schema, *(s for s in schema.get("allOf", ()) if isinstance(s, Mapping))]
        lists = ([s["const"]] if "const" in s else s.get("enum") for s in each)
        values = next((found for found in lists if isinstance(found, list)), None)
        self.num_left -= len(values or ()) + 1
        return values if self.num_left >= 0 else None


def have_a_tag(strings: Sequence[Mapping[str, set[str]]]) -> bool:
    """Whether a property has other strings in each of the objects."""
    return any(
        are_disjoint([found[name] for found in strings])
        for name in (strings[0] if strings else ())
        if all(name in found for found in strings)
    )


def are_disjoint(sets: Sequence[set[str]]) -> bool:
    return len(set().union(*sets)) == sum(map(len, sets))


def are_scalars(values: Sequence[Any]) -> bool:
    return not any(isinstance(value, Mapping | list) for value in values)


def kinds(schema: Node) -> set[str]:
    """The types of values that fit; none where the schema does not list them."""
    given = schema.get("type")
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
        return set()
    return {"number" if kind == "integer" else kind for kind in listed}


def names(schema: Node) -> set[str]:
    return {*mapping(schema.get("properties"))}


def required(schema: Node) -> set[str]:
    given = schema.get("required")
    return {name for name in given if isinstance(name, str)} if isinstance(given, list) else set()


def lacks(a: Node, b: Node) -> bool:
    """Whether no object of one fits the other, as the other requires a property that it lacks."""
    is_closed = a.get("additionalProperties") is False and not a.get("patternProperties")
    return is_closed and bool(required(b) - names(a))


def may_be_object(schema: Node) -> bool:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and not any(isinstance(value, Mapping) for value in values):
        return False
    return not kinds(schema) or "object" in kinds(schema)
