"""Reading a request's body, within bytes and seconds."""

import asyncio

from starlette.requests import Request

from specserve.config import ServerConfig
from specserve.server.protocol import TimedOut, TooLarge


async def read_body(request: Request, limits: ServerConfig) -> bytes:
    """Refused as soon as it is too large, not once it has come."""
    most = limits.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_large(most)
    except TimeoutError as e:
        raise TimedOut(f"the body did not come within {limits.body_seconds:g} s") from e
    return bytes(body)


def too_large(most: int) -> TooLarge:
    return TooLarge(f"the body is larger than {most} bytes: send less (server.max_body_bytes)")
