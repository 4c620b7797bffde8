"""When an HTTP request came, and with which key."""

from time import perf_counter
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import Scope

TENANT = "specserve.tenant"  # in a scope


class Arrival(NamedTuple):
    at: float  # seconds, perf_counter
    tenant: int = 0  # the place of its API key in the file of keys; 0 where there are no keys


def set_tenant(scope: Scope, tenant: int) -> None:
    scope[TENANT] = tenant


def arrival(request: Request) -> Arrival:
    """Of a request that comes in this moment."""
    return Arrival(perf_counter(), request.scope.get(TENANT, 0))
