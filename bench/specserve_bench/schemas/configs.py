"""Configuration files of tools, as repositories have them."""

from specserve_bench.schemas.parts import (
    Schema,
    all_of,
    any_of,
    const,
    defining,
    flag,
    form,
    many,
    mapping,
    match,
    maybe,
    number,
    one,
    or_null,
    record,
    ref,
    row,
    text,
    whole,
)

VERSION = match("^[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,2}$")
GLOB = match("^[a-z*/.]{1,12}$")
LEVEL = one("off", "warn", "error")

CONFIGS: dict[str, Schema] = {
    "package": record(
        name=match("^[a-z][a-z0-9-]{0,12}$"),
        version=VERSION,
        private=maybe(flag()),
        dependencies=maybe(mapping(match("^[~^]?[0-9]{1,2}\\.[0-9]{1,2}$"))),
    ),
    "linter": record(
        extends=any_of(text(12), many(text(12), 2)),
        rules=mapping(any_of(LEVEL, row(LEVEL, whole(0, 9)))),
        root=maybe(flag()),
    ),
    "compiler": record(
        target=one("es5", "es2020", "esnext"),
        strict=flag(),
        paths=maybe(mapping(many(GLOB, 2, 1), "^@[a-z]{1,6}$")),
        lib=maybe(many(one("dom", "es2020"), 2)),
    ),
    "formatter": record(
        width=whole(60, 140),
        tabs=maybe(flag()),
        quotes=one("single", "double"),
        end=one("lf", "crlf"),
    ),
    "workflow": record(
        name=text(12),
        on=any_of(one("push", "pull_request"), many(one("push", "release"), 2, 1)),
        jobs=mapping(
            record({"runs-on": one("linux", "macos"), "steps": many(record(run=text(16, 1)), 2, 1)})
        ),
    ),
    "compose": record(
        services=mapping(
            record(
                image=match("^[a-z]{1,8}:[0-9]{1,2}$"),
                ports=maybe(many(match("^[0-9]{2,4}:[0-9]{2,4}$"), 2)),
                restart=maybe(one("no", "always", "on-failure")),
            )
        )
    ),
    "logging": record(
        level=one("DEBUG", "INFO", "WARNING", "ERROR"),
        handlers=many(
            any_of(
                record(type=const("file"), path=text(12, 1)),
                record(type=const("stream"), to=one("stdout", "stderr")),
            ),
            2,
            1,
        ),
    ),
    "editor": record({"editor.tabSize": whole(1, 8), "editor.rulers": many(whole(40, 160), 2)}),
    "theme": record(
        name=text(10, 1), colors=mapping(match("^#[0-9A-F]{6}$")), dark=flag(), alpha=number(0, 1)
    ),
    "server": record(
        host=any_of(form("ipv4"), const("localhost")),
        port=whole(1, 65_535),
        tls=maybe(record(cert=text(12, 1), key=text(12, 1))),
    ),
    "database": record(
        url=match("^postgres://[a-z]{1,8}:[0-9]{4}/[a-z]{1,8}$"),
        pool=whole(1, 50),
        ssl=maybe(flag()),
    ),
    "cache": record(ttl=whole(0, 86_400), backend=one("memory", "redis"), prefix=or_null(text(8))),
    "cron": record(
        jobs=many(record(at=match("^[0-9*]{1,2} [0-9*]{1,2} \\*$"), run=text(16, 1)), 2)
    ),
    "bot": record(stale=record(days=whole(1, 90), labels=many(text(8, 1), 2)), only=maybe(text(8))),
    "coverage": record(thresholds=record(lines=whole(0, 100), branches=maybe(whole(0, 100)))),
    "snippets": mapping(
        record(prefix=text(8, 1), body=many(text(16), 3, 1), description=maybe(text(16)))
    ),
    "keys": many(
        record(key=match("^(ctrl|alt)\\+[a-z]$"), command=text(12, 1), when=maybe(text(8)))
    ),
    "tasks": record(
        version=const("2.0.0"), tasks=many(record(label=text(8, 1), type=one("shell", "process")))
    ),
    "menu": defining(
        ref("item"),
        item=record(title=text(8, 1), items=maybe(many(ref("item"), 1))),
    ),
    "nested_filter": defining(
        ref("filter"),
        filter=any_of(
            record(field=match("^[a-z]{1,6}$"), equals=whole(0, 9)), record({"not": ref("filter")})
        ),
    ),
    "chain": defining(
        record(first=ref("node")),
        node=record(value=whole(0, 99), next=or_null(ref("node"))),
    ),
    "boards": record(
        boards=many(record(id=match("^[a-z]{2}[0-9]{2}$"), mhz=whole(1, 600), flash=maybe(whole())))
    ),
    "fonts": many(record(family=text(10, 1), weight=one(400, 700), italic=maybe(flag())), 2, 1),
    "manifest": record(
        manifest_version=one(2, 3),
        name=text(12, 1),
        version=VERSION,
        permissions=maybe(many(one("tabs", "storage", "cookies"), 3)),
    ),
    "localization": mapping(text(16), "^[a-z]{2}(-[A-Z]{2})?$", 3),
    "feature_flags": mapping(any_of(flag(), record(percent=whole(0, 100))), most=3),
    "proxy": record(rules=many(row(match("^/[a-z]{1,6}$"), form("ipv4"), whole(1, 65_535)), 2)),
    "matrix": record(rows=many(many(whole(-9, 9), 3, 3), 3, 1)),
    "limits": record(cpu=match("^[0-9]{1,3}m?$"), memory=match("^[0-9]{1,3}(Ki|Mi|Gi)$")),
    "license": record(
        spdx=one("MIT", "Apache-2.0", "GPL-3.0-only"), years=many(whole(1990, 2030), 2, 1)
    ),
    "renamed": all_of(
        {"type": "object", "properties": {"old": text(6)}, "required": ["old"]},
        {"type": "object", "properties": {"new": text(6)}, "required": ["new"]},
    )
    | {"properties": {"old": {}, "new": {}}, "additionalProperties": False},
    "types": record(
        a={"type": ["string", "null"], "maxLength": 6}, b={"type": ["integer", "boolean"]}
    ),
    "draft_7": {"$schema": "http://json-schema.org/draft-07/schema#"}
    | {"definitions": {"size": whole(0, 9)}, "type": "object", "additionalProperties": False}
    | {"properties": {"w": {"$ref": "#/definitions/size"}}, "required": ["w"]},
    "release": record(tag=match("^v[0-9]\\.[0-9]$"), at=form("date-time"), notes=maybe(text(24))),
    "mirrors": many(match("^https://[a-z]{1,8}\\.(org|net)/$"), 3, 1),
    "screen": record(size=row(whole(1, 4000), whole(1, 4000)), scale=one(1, 1.5, 2)),
    "robots": record(agents=mapping(record(allow=many(GLOB, 2), delay=maybe(number(0, 9))))),
    "spelling": record(words=many(match("^[a-z]{1,9}$"), 5), language=const("en")),
    "budget": record(
        limits=many(record(bytes=whole(0, 10**9), of=one("js", "css"))), strict=flag()
    ),
    "plugin": record(
        id=form("uuid"), api={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}
    ),
}
