"""Random JSON schemas of objects, and the same with closed objects in JSON Schema's own words."""

NAMES = "abcdefghijklmnop"
SCALARS = (
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "boolean"},
    {"enum": ["x", "yy", 1]},
    {"const": None},
    {"type": ["integer", "null"], "maximum": 3, "minimum": 0},
)


def random_schema(random):
    """With definitions that refer to each other; objects are open, closed or unspecified."""
    defs = {name: an_object(random, 1) for name in ("P", "Q")}
    defs["R"] = an_object(random, 0) | {"required": []}
    defs["R"]["properties"] |= {"next": a_value(random, 0, ["R"])}
    return composed(random, 3, [*defs]) | {"$defs": defs}


def a_value(random, depth, refs):
    kind = random.choice(["scalar", "scalar", "object", "composed", "list", "union", "ref"])
    match kind:
        case "object" if depth:
            return an_object(random, depth - 1, refs)
        case "composed" if depth:
            return composed(random, depth - 1, refs)
        case "list" if depth:
            first, rest = (a_value(random, depth - 1, refs) for _ in range(2))
            return {"type": "array", "prefixItems": [first], "items": rest, "maxItems": 2}
        case "union" if depth:
            return {"anyOf": [a_value(random, depth - 1, refs) for _ in range(2)], "title": "u"}
        case "ref" if refs:
            return {"$ref": f"#/$defs/{random.choice(refs)}", "description": "r"}
    return dict(random.choice(SCALARS))


def an_object(random, depth, refs=()):
    names = random.sample(NAMES, random.randint(1, 3))
    schema = {"type": "object", "properties": {n: a_value(random, depth, refs) for n in names}}
    schema["required"] = random.sample(names, random.randint(0, len(names)))
    if random.random() < 0.3:
        schema["additionalProperties"] = random.choice([False, True, dict(SCALARS[0])])
    elif random.random() < 0.2:
        schema["patternProperties"] = {f"^{random.choice(NAMES)}x": dict(random.choice(SCALARS))}
    return schema


def composed(random, depth, refs):
    """Several schemas of one object."""
    parts = [an_object(random, depth, refs) for _ in range(2)]
    if refs and random.random() < 0.4:
        parts[0] = {"$ref": f"#/$defs/{random.choice(refs)}"}
    match random.choice(["allOf", "beside", "anyOf", "ref"]):
        case "allOf":
            return {"allOf": parts}
        case "beside":
            return {"allOf": parts[:1], **parts[1]}
        case "anyOf":
            return {**an_object(random, depth, refs), "anyOf": parts}
    return {"$ref": f"#/$defs/{random.choice(refs)}", **parts[1]} if refs else parts[1]


def closed(schema, root=None):
    """The schema, in which unevaluatedProperties closes each object that names its properties."""
    root = schema if root is None else root
    if not isinstance(schema, dict):
        return schema
    inner = within(schema, root)
    if {*schema} & {"anyOf"} and not {*schema} & {"properties", "allOf", "$ref"}:
        return inner | {"anyOf": [closed(s, root) for s in schema["anyOf"]]}
    if names_properties(schema, root):
        return {"unevaluatedProperties": False} | inner
    return inner


def within(schema, root):
    """The schemas of other values that one has, closed; those of the same value as they are."""
    if not isinstance(schema, dict):
        return schema
    new = dict(schema)
    for key in schema:
        if key in ("properties", "patternProperties"):
            new[key] = {name: closed(s, root) for name, s in schema[key].items()}
        elif key == "$defs":
            new[key] = {name: within(s, root) for name, s in schema[key].items()}
        elif key in ("additionalProperties", "items"):
            new[key] = closed(schema[key], root)
        elif key == "prefixItems":
            new[key] = [closed(s, root) for s in schema[key]]
        elif key in ("allOf", "anyOf"):
            new[key] = [within(s, root) for s in schema[key]]
    return new


def names_properties(schema, root):
    if not isinstance(schema, dict):
        return False
    if schema.keys() & {"properties", "patternProperties"}:
        return True
    if "$ref" in schema:
        return names_properties(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    return any(names_properties(s, root) for s in schema.get("allOf", ()))


def shares_names(schema, root):
    """Whether several schemas of one object have a property in common: `closed` cannot merge it."""
    if isinstance(schema, list):
        return any(shares_names(item, root) for item in schema)
    if not isinstance(schema, dict):
        return False
    parts = [schema, *schema.get("allOf", ()), *schema.get("anyOf", ())]
    if "$ref" in schema and "properties" not in schema:
        parts = []
    names = [name for part in parts for name in property_names(part, root)]
    names += property_names({"$ref": schema["$ref"]}, root) if "$ref" in schema and parts else []
    is_shared = len(names) > len({*names})
    return is_shared or any(shares_names(value, root) for value in schema.values())


def property_names(schema, root):
    if not isinstance(schema, dict):
        return []
    if "$ref" in schema and "properties" not in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    return [*schema.get("properties", ())]
