"""Articles and what is in them, like a newspaper's: types with a name, elements of many kinds."""

from typing import Any

from specserve_bench.schemas.parts import (
    Maybe,
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

TRAIT = record(_id=maybe(match("^[A-Z0-9]{4}$")), created=maybe(form("date")))
LANGUAGE = match("^[a-z]{2}(-[A-Z]{2})?$")
WHERE = record(latitude=number(-90, 90), longitude=number(-180, 180))


def typed(name: str, /, **fields: Schema | Maybe) -> Schema:
    """An object that says what it is, and may have what all of them may have."""
    head: dict[str, Any] = {"type": const(name), "_id": maybe(match("^[A-Z0-9]{4}$"))}
    return record(head, **fields)


TEXT_ELEMENT = typed("text", content=text(24))
IMAGE = typed(
    "image",
    url=match("^https://img\\.example/[a-z0-9]{1,8}$"),
    width=maybe(whole(1, 4000)),
    height=maybe(whole(1, 4000)),
    caption=maybe(text(16)),
)
QUOTE = typed("quote", content=text(24, 1), citation=maybe(text(12)))
AUTHOR = typed("author", name=text(12, 1), twitter=maybe(match("^@[a-z]{1,10}$")))
HEADER = typed("header", level=one(1, 2, 3), content=text(16, 1))

CONTENT: dict[str, Schema] = {
    "text": TEXT_ELEMENT,
    "image": IMAGE,
    "quote": QUOTE,
    "author": AUTHOR,
    "header": HEADER,
    "story": typed(
        "story",
        headlines=record(basic=text(20, 1), mobile=maybe(text(12))),
        credits=maybe(record(by=many(AUTHOR, 1))),
        content_elements=many(any_of(TEXT_ELEMENT, IMAGE, QUOTE, HEADER), 2, 1),
        language=maybe(LANGUAGE),
    ),
    "gallery": typed("gallery", images=many(IMAGE, 2, 1), lead=maybe(or_null(IMAGE))),
    "video": typed(
        "video",
        duration=whole(0, 10_000),
        streams=many(record(kind=one("mp4", "ts"), bitrate=whole(100, 9000)), 2, 1),
        live=maybe(flag()),
    ),
    "audio": typed("audio", url=match("^/audio/[0-9]{1,6}$"), seconds=number(0, 7200)),
    "table": typed("table", header=many(text(6), 3, 1), rows=many(many(or_null(text(6)), 3, 1), 2)),
    "list": defining(
        ref("list"),
        list=typed(
            "list", style=one("ordered", "unordered"), items=many(any_of(text(8), ref("list")), 1)
        ),
    ),
    "comments": defining(
        record(comments=many(ref("comment"), 2)),
        comment=record(by=text(6, 1), text=text(12), reply=maybe(or_null(ref("comment")))),
    ),
    "taxonomy": record(
        tags=many(record(slug=match("^[a-z-]{1,10}$"), score=maybe(number(0, 1))), 3),
        section=maybe(record(name=text(8, 1), parent=or_null(match("^/[a-z]{0,8}$")))),
    ),
    "section": defining(
        ref("section"), section=record(name=text(8, 1), only=maybe(ref("section")))
    ),
    "geo": record(place=text(10, 1), at=WHERE, radius=maybe(number(0, 100))),
    "address": typed(
        "address",
        lines=many(text(12, 1), 2, 1),
        zip=match("^[0-9]{5}$"),
        country=match("^[A-Z]{2}$"),
    ),
    "restrictions": record(
        embargo=maybe(record(until=form("date-time"), active=flag())),
        geo=maybe(many(record(country=match("^[A-Z]{2}$"), allow=flag()), 2)),
    ),
    "planning": record(
        budget_line=text(12),
        length=maybe(record(words=whole(0, 5000), inches=maybe(number(0, 100)))),
        due=or_null(form("date-time")),
        priority=one("standard", "breaking", "watch"),
    ),
    "workflow": record(status=whole(1, 6), note=or_null(text(12)), assignee=maybe(text(8))),
    "revision": record(
        id=form("uuid"),
        parent=or_null(form("uuid")),
        editions=maybe(many(text(6), 2)),
        published=flag(),
    ),
    "label": mapping(record(text=text(8, 1), display=flag()), "^(basic|kicker|teaser)$"),
    "poll": typed(
        "poll", question=text(20, 1), answers=many(record(text=text(8, 1), votes=whole()), 3, 2)
    ),
    "recipe": typed(
        "recipe",
        serves=any_of(whole(1, 12), row(whole(1, 12), whole(1, 12))),
        steps=many(text(16, 1), 3, 1),
        time=form("duration"),
    ),
    "review": typed(
        "review",
        rating={"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 5},
        of=text(12, 1),
    ),
    "obituary": record(name=text(12, 1), born=form("date"), died=form("date"), age=whole(0, 120)),
    "match": typed(
        "match", home=text(8, 1), away=text(8, 1), score=row(whole(0, 9), whole(0, 9)), over=flag()
    ),
    "standings": many(row(text(6, 1), whole(0, 99), number(0, 1)), 3, 1),
    "election": record(
        year={"enum": [2016, 2020, 2024]},
        results=many(record(party=one("A", "B", "C"), percent=number(0, 100)), 3, 1),
    ),
    "weather": record(
        days=many(record(high=whole(-30, 45), low=whole(-40, 30), sky=text(8)), 3, 1)
    ),
    "crossword": record(
        clues=many(row(whole(1, 40), one("across", "down"), text(10, 1)), 3),
        grid=many(match("^[A-Z#]{3}$"), 3, 3),
    ),
    "newsletter": record(
        to=match("^[a-z]{1,6}@[a-z]{1,6}\\.[a-z]{2,3}$"),
        topics=many(one("world", "arts"), 2),
        weekly=flag(),
    ),
    "link": any_of(
        typed("link", url=form("uri")), typed("reference", id=match("^[A-Z0-9]{4}$"), rel=text(6))
    ),
    "oembed": typed(
        "oembed",
        provider=one("youtube", "vimeo"),
        html=maybe(text(20)),
        width=or_null(whole(1, 2000)),
    ),
    "divider": typed("divider"),
    "code": typed("code", language=one("python", "c", "sh"), content=text(30)),
    "correction": typed("correction", text=text(20, 1), kind=one("correction", "clarification")),
    "traits": all_of(TRAIT | {"additionalProperties": True}, {"required": ["created"]})
    | {"properties": {"_id": {}, "created": {}}, "additionalProperties": False},
    "either": any_of(
        record(story=record(headline=text(12, 1))),
        record(image=record(url=text(12, 1))),
        {"type": "null"},
    ),
    "tuple_then_more": {
        "type": "array",
        "prefixItems": [const("v1"), whole(0, 9)],
        "items": text(4),
        "minItems": 2,
        "maxItems": 4,
    },
    "distribution": record(
        category=one("staff", "wires", "freelance"),
        name=maybe(text(8)),
        mode=const("reference"),
        channels=mapping(flag(), "^(web|app|print)$", 3),
    ),
}
