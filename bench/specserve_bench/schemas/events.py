"""Flat events of web analytics, like Snowplow's: many optional fields with tight bounds."""

from specserve_bench.schemas.parts import (
    Maybe,
    Schema,
    const,
    flag,
    form,
    many,
    match,
    maybe,
    number,
    one,
    or_null,
    record,
    text,
    whole,
)

ID = match("^[0-9a-f]{8}$")
COUNTRY = match("^[A-Z]{2}$")
WORD = match("^[a-z_]{1,12}$")


def event(name: str, /, **fields: Schema | Maybe) -> Schema:
    """With the head that such schemas have."""
    version = {"vendor": "com.example", "name": name, "format": "jsonschema", "version": "1-0-0"}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "description": f"The event {name}",
        "self": version,
    } | record(**fields)


def nullable(schema: Schema) -> Schema:
    """In the way of such schemas: a second type."""
    return schema | {"type": [schema["type"], "null"]}


FIELDS: dict[str, dict[str, Schema | Maybe]] = {
    "link_click": {"targetUrl": form("uri"), "elementId": maybe(nullable(text(8)))},
    "page_ping": {"minX": whole(0, 9999), "maxX": whole(0, 9999), "idle": maybe(flag())},
    "ad_click": {
        "clickId": ID,
        "costModel": maybe(one("cpa", "cpc", "cpm")),
        "cost": maybe(number(0, 10)),
    },
    "ad_impression": {"impressionId": ID, "zone": maybe(text(8)), "banner": maybe(text(8))},
    "add_to_cart": {
        "sku": match("^[A-Z]{2}[0-9]{4}$"),
        "quantity": whole(1, 99),
        "unitPrice": maybe(number(0, 999)),
        "currency": maybe(match("^[A-Z]{3}$")),
    },
    "remove_from_cart": {"sku": match("^[A-Z]{2}[0-9]{4}$"), "quantity": whole(1, 99)},
    "site_search": {
        "terms": many(text(8, 1), 3, 1),
        "filters": maybe(record(color=maybe(WORD), inStock=maybe(flag()))),
        "totalResults": maybe(whole(0, 9999)),
    },
    "social": {"action": one("like", "share"), "network": WORD, "target": maybe(text(10))},
    "form_change": {
        "formId": WORD,
        "elementId": WORD,
        "nodeName": one("INPUT", "TEXTAREA", "SELECT"),
        "value": or_null(text(10)),
    },
    "form_submit": {
        "formId": WORD,
        "elements": many(record(name=WORD, value=or_null(text(8))), 2),
    },
    "timing": {"category": WORD, "variable": WORD, "timing": whole(0, 60_000)},
    "screen_view": {"name": text(12, 1), "id": form("uuid"), "previous": maybe(text(8))},
    "geolocation": {
        "latitude": number(-90, 90),
        "longitude": number(-180, 180),
        "bearing": maybe(or_null(number(0, 360))),
        "timestamp": maybe(or_null(whole(0, 10**12))),
    },
    "mobile": {
        "osType": one("ios", "android"),
        "osVersion": match("^[0-9]{1,2}(\\.[0-9])?$"),
        "carrier": maybe(nullable(text(8))),
        "networkType": maybe(one("mobile", "wifi", "offline")),
    },
    "session": {
        "userId": form("uuid"),
        "sessionIndex": whole(0, 2**31 - 1),
        "previousSessionId": or_null(form("uuid")),
        "storageMechanism": one("SQLITE", "COOKIE_1", "LOCAL_STORAGE"),
    },
    "web_page": {"id": form("uuid")},
    "performance": {
        "navigationStart": whole(0, 10**12),
        "fetchStart": maybe(whole(0, 10**12)),
        "domLoading": maybe(whole(0, 10**12)),
        "loadEventEnd": maybe(whole(0, 10**12)),
    },
    "client_hints": {
        "isMobile": flag(),
        "brands": many(record(brand=text(8, 1), version=match("^[0-9]{1,3}$")), 2),
    },
    "campaign": {
        "source": maybe(WORD),
        "medium": maybe(one("cpc", "email", "social")),
        "term": maybe(nullable(text(10))),
    },
    "error": {
        "message": text(24),
        "lineNumber": maybe(whole(0, 99_999)),
        "isFatal": maybe(flag()),
        "className": maybe(match("^[A-Z][A-Za-z]{1,12}$")),
    },
    "consent": {
        "documentId": text(8, 1),
        "version": text(4, 1),
        "expiry": maybe(form("date-time")),
    },
    "experiment": {"id": ID, "variation": or_null(whole(0, 9)), "holdback": maybe(flag())},
    "media_play": {
        "position": number(0, 9999),
        "volume": whole(0, 100),
        "muted": maybe(flag()),
    },
    "media_player": {
        "ended": flag(),
        "loop": flag(),
        "playbackRate": one(0.5, 1, 1.25, 1.5, 2),
        "duration": or_null(number(0, 9999)),
    },
    "transaction": {
        "orderId": match("^[0-9]{6}$"),
        "totalValue": number(0, 10_000),
        "tax": maybe(number(0, 1000)),
        "city": maybe(text(10)),
        "country": maybe(COUNTRY),
    },
    "transaction_item": {
        "orderId": match("^[0-9]{6}$"),
        "price": number(0, 999),
        "name": text(8),
    },
    "refund": {"orderId": match("^[0-9]{6}$"), "amount": number(0, 999), "method": maybe(WORD)},
    "user": {
        "plan": one("free", "pro", "team"),
        "seats": maybe(whole(1, 500)),
        "roles": maybe(many(one("owner", "admin", "reader"), 2)),
        "referrer": maybe(nullable(text(10))),
    },
    "login": {
        "method": one("password", "sso", "passkey"),
        "success": flag(),
        "ip": form("ipv4"),
    },
    "signup": {"email": match("^[a-z]{1,8}@example\\.com$"), "source": maybe(WORD)},
    "heartbeat": {"sequence": whole(0, 10**6), "battery": maybe(number(0, 1))},
    "desktop": {"osType": const("Linux"), "is64bit": maybe(flag()), "model": maybe(text(8))},
    "beacon": {"uuid": form("uuid"), "major": whole(0, 65_535), "minor": whole(0, 65_535)},
    "weather": {
        "main": record(temp=number(-60, 60), humidity=maybe(whole(0, 100))),
        "wind": record(speed=number(0, 100), deg=number(0, 360)),
        "weather": many(record(id=whole(200, 900), main=WORD), 1, 1),
    },
    "iglu_context": {
        "schema": match("^iglu:[a-z]{1,6}/[a-z]{1,6}/jsonschema/1-0-[0-9]$"),
        "data": record(n=maybe(whole())),
    },
    "call": {"started": form("date-time"), "seconds": whole(0, 9999), "hold": maybe(flag())},
    "ticket": {
        "id": whole(1, 10**6),
        "status": one("new", "open", "solved"),
        "tags": maybe(many(WORD, 3)),
        "priority": or_null(one("low", "high")),
    },
    "delivery": {"to": COUNTRY, "weightGrams": whole(1, 30_000), "express": maybe(flag())},
    "inventory": {"sku": ID, "stock": {"type": "integer", "multipleOf": 12, "maximum": 600}},
    "click_path": {"steps": many(WORD, 5, 2), "converted": flag(), "ms": many(whole(), 4)},
}
EVENTS: dict[str, Schema] = {name: event(name, **fields) for name, fields in FIELDS.items()}
