"""The id of a request, by which its answer and its log lines are found."""

import re
import secrets
from collections.abc import Iterable

HEADER = b"x-request-id"
TAKEN = re.compile(rb"[!-~]([ -~]{0,126}[!-~])?")  # 1 to 128 characters, no space at the ends


def id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own, if it can be shown anywhere; else a new one."""
    given = next((value for name, value in headers if name == HEADER), b"")
    return given.decode() if TAKEN.fullmatch(given) else f"req-{secrets.token_hex(16)}"
