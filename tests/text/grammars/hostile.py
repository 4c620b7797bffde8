"""Grammars that are meant to take time or memory, in the forms in which a caller can send them."""

import json
import string

LETTERS = string.ascii_lowercase


def deep(levels, inner, wrap):
    for _ in range(levels):
        inner = wrap(inner)
    return inner


def object_of(properties, **more):
    return {"type": "object", "properties": properties, "additionalProperties": False} | more


def chain(length):
    """Definitions, each of which refers to the next."""
    defs = {
        f"d{i}": object_of({"next": {"$ref": f"#/$defs/d{i + 1}"}}, required=["next"])
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{length}": {"type": "integer"}}}


def doubling(levels, keyword):
    """Definitions, each of which has the one before it twice."""
    defs = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, levels)}
    defs["d0"] = {"type": "string"}
    return {"$ref": f"#/$defs/d{levels - 1}", "$defs": defs}


def branching(depth, width):
    """anyOf of objects in anyOf of objects: width ** depth of them."""
    if depth == 0:
        return {"type": "string"}
    inner = branching(depth - 1, width)
    return {"anyOf": [object_of({f"p{depth}{i}": inner}, required=[]) for i in range(width)]}


REGEXES = {
    "a star of alternatives": "(a|a)*b{1000}",
    "counts in a count": "(x{1000}){1000}",
    "counts of words in a count": "(x{1000}y){1000}",
    "counts in counts in counts": "((x{100}){100}){100}",
    "ranges in ranges": "((a{0,100}b){0,100}c){0,100}",
    "many that may be empty": "(a?){5000}a{5000}",
    "the exponential automaton": "[ab]*a[ab]{30}",
    "two exponential automata": ".*a.{200}b.{200}c",
    "a long range": "[a-z]{0,1000000}",
    "300 counts": "|".join(f"(a|b){{{i}}}c" for i in range(300)),
    "any order of 16 letters": "|".join(f"[a-z]*{c}[a-z]*" for c in LETTERS[:16]),
    "words between anything": "(.*(the|of|and|to|in).*){40}",
    "deep groups": "(" * 5000 + "a" + ")" * 5000,
    "deep stars": "(" * 200 + "a" + ")*" * 200,
    "classes": r"(\p{L}|\p{N}|\p{P}){1,3000}\p{Lu}{500}",
    "256 kB of a regex": "|".join(f"{i:x}{'ab' * 8}" for i in range(12_000)),
}
SCHEMAS = {
    "1 MB of names": {"enum": [f"{i:06}{'x' * 90}" for i in range(10_000)]},
    "200 kB of names": {"enum": [f"{i:05}{'x' * 20}" for i in range(7_000)]},
    "900 lists in lists": deep(900, {"type": "integer"}, lambda s: {"type": "array", "items": s}),
    "25 lists in lists": deep(25, {"type": "integer"}, lambda s: {"type": "array", "items": s}),
    "anyOf in anyOf": branching(7, 3),
    "anyOf in anyOf, too large": branching(6, 6),
    "1500 optional properties": object_of({f"p{i}": {"type": "string"} for i in range(1500)}),
    "a type that has only itself": {
        "$ref": "#/$defs/a",
        "$defs": {"a": object_of({"a": {"$ref": "#/$defs/a"}}, required=["a"])},
    },
    "a name for itself": {"$ref": "#"},
    "names for each other": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "2000 names in a row": chain(2000),
    "20 doublings by anyOf": doubling(20, "anyOf"),
    "20 doublings by allOf": doubling(20, "allOf"),
    "allOf of 200 patterns": {
        "type": "string",
        "allOf": [{"pattern": f"^.*{c}{d}.*$"} for c in LETTERS[:8] for d in LETTERS],
    },
    "a pattern that is a bomb": {"type": "string", "pattern": "^(x{1000}){1000}$"},
    "a string of a million": {"type": "string", "minLength": 900_000, "maxLength": 1_000_000},
    "a list of a million": {"type": "array", "items": {}, "minItems": 900_000},
    "a list of lists of numbers": {
        "type": "array",
        "maxItems": 3000,
        "items": {"type": "array", "maxItems": 3000, "items": {"type": "number"}},
    },
    "many of many types": {
        "type": "array",
        "items": {"anyOf": [{"const": "x" * i + c} for i in range(1, 60) for c in LETTERS]},
    },
    "multiples": {"type": "integer", "multipleOf": 999_983, "minimum": 1, "maximum": 10**15},
    "multiples of multiples": {
        "allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]
    },
    "a number of many digits": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
}
LARK = {
    "a rule of itself": "start: start",
    "rules of each other": "start: a\na: b\nb: a",
    "the ambiguous sum": 'start: e\ne: e "+" e | e e | "a"',
    "the ambiguous empty": 'start: e\ne: e e | "a" | ',
    "ambiguous in many ways": "start: e\ne: " + " | ".join("e " * n + '"a"' for n in range(60)),
    "intersections": "start: A\nA: " + " & ".join(f"/.*{c}.*/" for c in LETTERS),
    "negations": "start: A\nA: " + " & ".join(f"~/(.*{c}.{{9}}.*)/" for c in LETTERS[:12]),
    "deep groups": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "20 kB of open groups": "start: " + "(" * 20_000,
    "deep rules": "\n".join(
        ["start: r0", *(f'r{i}: "a" r{i + 1} "b"' for i in range(3000)), 'r3000: "c"']
    ),
    "5000 rules at once": "start: "
    + " | ".join(f"r{i}" for i in range(5000))
    + "\n"
    + "\n".join(f"r{i}: /[a-z]+/ r{i}?" for i in range(5000)),
    "counts in counts of rules": 'start: a{900}\na: b{900}\nb: c{900}\nc: "x" | "y"',
    "nothing ends it": 'start: "a" start',
    "nothing begins it": "start: /[^\\x00-\\u{10ffff}]/",
    "100 kB of a substring": "start: %regex "
    + json.dumps({"substring_chars": "".join(LETTERS[i * i % 26] for i in range(100_000))}),
    "a schema within": 'start: "x" %json ' + json.dumps(branching(5, 4)),
}

EVERY = {
    **{f"regex: {name}": {"regex": given} for name, given in REGEXES.items()},
    **{f"json: {name}": {"json": given} for name, given in SCHEMAS.items()},
    **{f"grammar: {name}": {"grammar": given} for name, given in LARK.items()},
    "choice: 4096 of 50 letters": {"choice": tuple(f"{i:05}{'y' * 45}" for i in range(4096))},
}
ENDLESS = {  # compiled for minutes: only a deadline ends that
    "json: allOf of 200 patterns",
    "json: multiples of multiples",
}


def kind_of(strings, **more):
    """An object whose kind is one of these strings."""
    return {"type": "object", "properties": {"kind": strings}, "required": ["kind"]} | more


def referring(definition, count, *others):
    """So many times, in one union and in a union each, what is defined once, and others."""
    refs = [{"$ref": "#/$defs/a"}] * count
    unions = [{"oneOf": [{"$ref": "#/$defs/a"}, *others]}] * count
    return {"$defs": {"a": definition}, "oneOf": refs, "allOf": unions}


def tags(triggers, schemas):
    """Each schema in a tag that begins with all of the triggers."""
    structures = [
        {"begin": f"{triggers[-1]}{i}", "schema": schema, "end": ">"}
        for i, schema in enumerate(schemas)
    ]
    return {"structures": structures, "triggers": triggers}


def tag(inner):
    return {"type": "tag", "begin": "<", "content": inner, "end": ">"}


BEGINNINGS = ["<" * i for i in range(1, 257)]
MANY = [f"k{i}" for i in range(20_000)]
WRITTEN = {  # what takes long, or much memory, to write as a grammar unless care is taken
    "grammar: open options": {"grammar": "a[" * 131_000},
    "grammar: options of stop": {"grammar": "a [stop " * 32_000},
    "grammar: lines of another notation": {"grammar": "start\n" * 43_000 + "::="},
    "grammar: a line of another notation": {"grammar": "start " * 43_000 + "::="},
    "regex: slashes": {"regex": "/" * 260_000},
    "regex: 10 MB of slashes": {"regex": "/" * 10_000_000},
    "json: 1 MB of a union": {
        "json": {"oneOf": [kind_of({"const": f"x{i}"}) for i in range(14_000)]}
    },
    "json: 200 kB of a union": {
        "json": {"oneOf": [kind_of({"const": f"x{i}"}) for i in range(2400)]}
    },
    "json: allOf of many": {"json": {"allOf": [{"minLength": i} for i in range(8000)]}},
    "json: allOf of a thousand": {
        "json": {"allOf": [{"properties": {f"p{i}": {}}, "minProperties": i} for i in range(1000)]}
    },
    "json: a union of references": {"json": referring(kind_of({"enum": MANY}), 1200)},
    "json: unions of references": {
        "json": referring(kind_of({"enum": MANY}), 400, kind_of({"const": "x"}))
    },
    "json: unions of no strings": {
        "json": referring(kind_of({"enum": [0] * 50_000}), 600, kind_of({"const": "x"}))
    },
    "json: unions of a required name": {
        "json": referring(kind_of({"enum": MANY}, required=["kind"] * 5000), 20)
    },
    "structural_tag: tags of many triggers": {
        "structural_tag": tags(BEGINNINGS, [{"enum": ["x" * 200]}] * 256)
    },
    "structural_tag: beginnings of many triggers": {
        "structural_tag": tags(BEGINNINGS, [True] * 256)
    },
    "structural_tag: tags in tags": {
        "structural_tag": {"format": deep(490, {"type": "const_string", "value": "a"}, tag)}
    },
    "structural_tag: text of tags in tags": {
        "structural_tag": json.dumps(
            {"format": deep(190, {"type": "const_string", "value": "a"}, tag)}
        )
    },
}
