"""The call and the tenant of a request, by which fair shares are counted."""

import msgspec


class Caller(msgspec.Struct, frozen=True, array_like=True):
    """A call is one HTTP request or one `LLM.generate`, with all its prompts and choices."""

    call: int  # the id of its first request, so that an earlier call has a smaller one
    tenant: int = 0  # index of the API key in the key file; 0 without keys
    request_id: str = ""  # of an HTTP request, for log lines
