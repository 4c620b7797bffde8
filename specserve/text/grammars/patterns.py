"""Rewriting regexes of JSON schemas without look-around, which automata cannot express."""

import re
from collections.abc import Callable
from typing import Any

from specserve.text.grammars.compiled import GrammarError

MOST_DIGITS = 64  # maximum digits of a decimal number; its pattern has a part per digit
# An escape, a class, or the beginning of a look-around. A class may lack its end, so that the
# search is linear.
PIECE = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]?|(?P<look>\(\?<?[=!])", re.DOTALL)

EMAIL = re.compile(
    r"\^\(\?!\\\.\)\(\?!\.\*\\\.\\\.\)\(\[(?P<local>[\w'+\\-]+)\\\.\]\*\)"
    r"(?P<rest>\[[\w+-]+\]@\((?:\?:)?\[[\w-]+\]\[[\w\\-]+\]\*\\\.\)\+\[[\w-]+\]\{2,\}\$)"
)
LENGTH = re.compile(
    r"\^\(\?=\.\{(?P<least>\d{1,9}),(?P<most>\d{1,9})\}(?:\\\.\?)?\$\)(?P<rest>.*\$)", re.DOTALL
)
DECIMAL = r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
ANY_DECIMAL = re.compile(DECIMAL + r"\\d\*\\\.\?\\d(?:\*|\{0,(?P<places>\d{1,9})\}0\*)\$")
DIGITS = (
    DECIMAL + r"\(\?:\\d\{0,(?P<whole>\d{1,9})\}\|\(\?=\[\\d\.\]\{1,(?P<length>\d{1,9})\}0\*\$\)"
)
SOME_DIGITS = re.compile(DIGITS + r"\\d\*\\\.\\d\*0\*\$\)")
SOME_PLACES = re.compile(DIGITS + r"\\d\{0,(?P=whole)\}\\\.\\d\{0,(?P<places>\d{1,9})\}0\*\$\)")

DATE = r"\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D"
SECONDS = r"\d+(?:[.,]\d+)?S"
TIME = rf"T(?:\d+H(?:\d+M)?(?:{SECONDS})?|\d+M(?:{SECONDS})?|{SECONDS})"
EMOJI = r"[\p{Extended_Pictographic}\p{Emoji_Component}]"
ONE_EMOJI = r"[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3]"
SAME = {  # zod's pattern -> equivalent without look-around
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (rf"^P(?:\d+W|(?:{DATE})(?:{TIME})?|{TIME})$"),
    rf"^(?=[\s\S]*{ONE_EMOJI}){EMOJI}+$": f"^{EMOJI}*{ONE_EMOJI}{EMOJI}*$",
    r"^[A-Z]{2}(?!00|01|99)\d{2}[A-Z0-9]{11,30}$": (
        r"^[A-Z]{2}(?:0[2-9]|[1-8]\d|9[0-8])[A-Z0-9]{11,30}$"
    ),
}


def without_look_around(pattern: str) -> str:
    """Return a pattern without look-around: known patterns of pydantic and zod are rewritten.

    A rewritten pattern matches the same strings; for decimals, the same numbers. GrammarError for
    other look-around.
    """
    if not any(piece["look"] for piece in PIECE.finditer(pattern)):
        return pattern
    for form, write in FORMS.items():
        if (found := form.fullmatch(pattern)) and (same := write(found)):
            return same
    if pattern in SAME:
        return SAME[pattern]
    raise GrammarError(
        f"the pattern {pattern!r:.300} has look-around, which is not supported. Write it without "
        "(?=, (?!, (?<= and (?<!."
    )


def string_form(pattern: str) -> dict[str, Any]:
    """Return schema keywords for a pattern: a pattern without look-around, and length limits.

    A length look-ahead at the beginning becomes `minLength` and `maxLength`.
    """
    if found := LENGTH.fullmatch(pattern):
        rest = without_look_around("^" + found["rest"])
        return {
            "pattern": rest,
            "minLength": int(found["least"]),
            "maxLength": int(found["most"]),
        }
    return {"pattern": without_look_around(pattern)}


def email(found: re.Match[str]) -> str:
    local = f"[{found['local']}]"
    return f"^(?:{local}+\\.)*{local}*{found['rest']}"


def any_decimal(found: re.Match[str]) -> str:
    places = found["places"]
    if places is None:
        return decimal(r"\d+(?:\.\d*)?", r"\.\d+")
    return decimal(rf"\d+(?:\.\d{{0,{places}}}0*)?", fraction(int(places)))


def some_places(found: re.Match[str]) -> str:
    """Return a pattern for limited digits and limited decimal places."""
    whole, places = int(found["whole"]), min(int(found["places"]), int(found["length"]) - 1)
    integer = rf"0*\d{{1,{whole}}}" if whole else "0+"
    return decimal(rf"{integer}(?:\.\d{{0,{places}}}0*)?", "0*" + fraction(places))


def some_digits(found: re.Match[str]) -> str:
    """Return a pattern for limited digits with the point at any place."""
    most = int(found["whole"])
    if not 0 < most <= MOST_DIGITS:
        return ""
    with_point = (rf"0*\d{{{n}}}\.\d{{0,{most - n}}}0*" for n in range(1, most + 1))
    return decimal(rf"0*\d{{1,{most}}}", *with_point, "0*" + fraction(most))


def fraction(places: int) -> str:
    return rf"\.\d{{1,{places}}}0*" if places else r"\.0+"


def decimal(*forms: str) -> str:
    return f"^[+-]?(?:{'|'.join(forms)})$"


FORMS: dict[re.Pattern[str], Callable[[re.Match[str]], str]] = {
    EMAIL: email,
    ANY_DECIMAL: any_decimal,
    SOME_PLACES: some_places,
    SOME_DIGITS: some_digits,
}
