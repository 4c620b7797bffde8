"""Arguments of functions, as models are given them to call."""

from specserve_bench.schemas.parts import (
    Schema,
    any_of,
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
    row,
    text,
    whole,
)

CURRENCY = match("^[A-Z]{3}$")

FUNCTIONS: dict[str, Schema] = {
    "get_weather": record(city=text(16, 1), unit=maybe(one("celsius", "fahrenheit"))),
    "convert_currency": record(amount=number(0, 10_000), source=CURRENCY, target=CURRENCY),
    "send_email": record(
        to=many(match("^[a-z]{1,8}@[a-z]{1,8}\\.(com|org)$"), 2, 1),
        subject=text(20),
        body=text(40),
        urgent=maybe(flag()),
    ),
    "create_event": record(title=text(16, 1), date=form("date"), guests=many(text(8, 1), 3)),
    "search": record(query=text(24, 1), page=maybe(whole(1, 20)), safe=maybe(flag())),
    "calculate_tip": record(bill=number(0, 500), percent=whole(0, 30)),
    "book_flight": record(
        origin=match("^[A-Z]{3}$"),
        destination=match("^[A-Z]{3}$"),
        depart=form("date"),
        back=maybe(form("date")),
        cabin=one("economy", "premium", "business", "first"),
        passengers=whole(1, 9),
    ),
    "translate": record(text=text(30), language=one("de", "en", "es", "fr", "ja", "zh")),
    "play_song": record(title=text(16), artist=maybe(text(12)), shuffle=flag()),
    "set_timer": record(hours=whole(0, 23), minutes=whole(0, 59), seconds=maybe(whole(0, 59))),
    "random_number": record(least=whole(-100, 0), most=whole(1, 100)),
    "find_route": record(
        start=row(number(-90, 90), number(-180, 180)),
        goal=row(number(-90, 90), number(-180, 180)),
        by=one("car", "bike", "foot", "train"),
    ),
    "order_pizza": record(
        size=one("S", "M", "L"),
        toppings=many(one("ham", "olives", "onions", "basil"), 3),
        address=record(street=text(16, 1), number=whole(1, 300)),
    ),
    "add_contact": record(
        name=text(14, 1), phone=match("^\\+[0-9]{6,12}$"), email=maybe(form("email"))
    ),
    "body_mass_index": record(height=number(0.5, 2.5), weight=number(20, 300)),
    "run_query": record(table=match("^[a-z_]{1,12}$"), limit=or_null(whole(1, 100))),
    "resize_image": record(width=whole(1, 8000), height=whole(1, 8000), keep_ratio=maybe(flag())),
    "turn_on_light": record(
        room=one("kitchen", "hall", "bedroom"), color=maybe(match("^#[0-9a-f]{6}$"))
    ),
    "stock_price": record(symbol=match("^[A-Z]{1,5}$"), at=maybe(form("date-time"))),
    "pay": record(
        account=match("^DE[0-9]{20}$"), cents=whole(1, 1_000_000), note=or_null(text(20))
    ),
    "encode": record(
        value=any_of(text(10), whole(), flag()), base=one(2, 8, 10, 16), upper=maybe(flag())
    ),
    "rate_film": record(film=text(16, 1), stars=one(1, 2, 3, 4, 5), spoilers=maybe(flag())),
    "generate_password": record(
        length=whole(8, 64), symbols=flag(), exclude=maybe(many(text(1, 1), 3))
    ),
    "track_parcel": record(carrier=one("dhl", "ups", "fedex"), id=match("^[0-9A-Z]{10}$")),
    "schedule": record(
        days=many(one("mon", "tue", "wed", "thu", "fri"), 3, 1), at=match("^[0-2][0-9]:[0-5][0-9]$")
    ),
    "no_arguments": record(),
    "delete_files": record(paths=many(match("^/[a-z]{1,8}(/[a-z]{1,8}){0,2}$"), 3, 1), dry=flag()),
    "classify": record(label=one("spam", "ham"), score=number(0, 1), why=maybe(text(30))),
    "make_request": record(
        method=one("GET", "PUT", "POST"),
        path=match("^/[a-z0-9/]{0,16}$"),
        headers=maybe(record({"Accept": maybe(text(12)), "X-Id": maybe(form("uuid"))})),
        body=maybe(or_null(text(20))),
    ),
    "two_tools": any_of(
        record(tool=const("add"), a=whole(), b=whole()),
        record(tool=const("repeat"), text=text(8), times=whole(1, 5)),
    ),
    "three_tools": any_of(
        record(name=const("open"), arguments=record(path=text(12, 1))),
        record(name=const("close"), arguments=record()),
        record(name=const("seek"), arguments=record(offset=whole(-9, 9), whence=one(0, 1, 2))),
    ),
    "list_of_calls": many(record(name=one("up", "down", "left"), steps=whole(1, 9)), 4, 1),
    "loan": record(principal=whole(1000, 900_000), rate=number(0, 15), years=one(10, 15, 20, 30)),
    "recipe": record(
        ingredients=many(record(name=text(10, 1), grams=whole(1, 2000)), 3, 1), vegan=flag()
    ),
    "plot": record(
        kind=one("line", "bar"), x=many(whole(-9, 9), 4, 1), y=many(number(-1, 1), 4, 1)
    ),
    "thermostat": record(target=number(5, 30), mode=one("heat", "cool", "off", None)),
    "age": record(born=form("date"), today=maybe(form("date"))),
    "hash": record(data=match("^[A-Za-z0-9+/]{4,16}={0,2}$"), by=one("md5", "sha1", "sha256")),
    "remind": record(what=text(20, 1), at=form("time"), every=maybe(form("duration"))),
    "vote": record(choices=row(text(6, 1), text(6, 1), text(6, 1)), winner=whole(0, 2)),
}
