"""Who a request is served for: what fair shares are counted by."""

import msgspec


class Caller(msgspec.Struct, frozen=True, array_like=True):
    """The requests of one call came together: in one HTTP request, or in one `generate`."""

    call: int  # the id of its first request, so that an earlier call has a smaller one
    tenant: int = 0  # the place of its API key in the file of keys; 0 where there are no keys
