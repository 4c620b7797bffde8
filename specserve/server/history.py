"""Samples of the last 15 minutes, for the dashboard."""

import asyncio
from collections import Counter, deque
from time import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.server.metrics import Metrics, SampleCounts
from specserve.server.refusal import json_response

EVERY = 3.0  # seconds between two samples
NUM_SAMPLES = 300  # 15 minutes
QUERY: dict[str, tuple[dict[str, Any], str]] = {
    "since": (
        {"type": "number", "minimum": 0, "default": 0},
        "Return only samples after this Unix time in seconds",
    )
}


class MetricsSample(msgspec.Struct, frozen=True):
    """The load in the seconds before a time. Short requests count, too.

    at              Unix time in seconds
    running         maximum number of requests in the batch
    waiting         maximum number of requests in the queue
    kv_usage        maximum share of KV blocks in use, 0 to 1
    prefix_hit_rate share of looked-up prompt tokens in the prefix cache; null: no prompt
    tokens_per_second  output tokens of all requests
    tokens_per_step output tokens per request and step; null: no step
    ttft_ms_p50     median TTFT in ms; null: no request had its first token
    ttft_ms_p95     95th percentile of TTFT in ms
    tpot_ms_p50     median TPOT in ms; null: no request ended
    tpot_ms_p95     95th percentile of TPOT in ms
    errors          requests that ended with an error
    restarts        restarts of the engine process
    """

    at: float
    running: int
    waiting: int
    kv_usage: float
    prefix_hit_rate: float | None
    tokens_per_second: float
    tokens_per_step: float | None
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    errors: int
    restarts: int


class MetricsHistory(msgspec.Struct, frozen=True):
    """Samples of the last 15 minutes, in ascending order of time.

    now             Unix time of the server in seconds
    interval_seconds  time between two samples
    samples         the samples
    step_rows       rows of the latest steps: number of steps by number of rows
    """

    now: float
    interval_seconds: float
    samples: list[MetricsSample]
    step_rows: dict[int, int]


def percentile_ms(seconds: list[float], share: float) -> float | None:
    """The smallest value that `share` of the values do not exceed, in ms."""
    if not seconds:
        return None
    place = max(0, -int(-share * len(seconds) // 1) - 1)  # rounded up, from 0
    return round(1e3 * sorted(seconds)[place], 3)


class History:
    """Takes a sample of the metrics every few seconds."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.samples: deque[MetricsSample] = deque(maxlen=NUM_SAMPLES)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            self.take(time())

    def take(self, now: float) -> None:
        """Add a sample of the window since the last one."""
        metrics = self.metrics
        metrics.settle()
        window, metrics.window = metrics.window, SampleCounts()
        if metrics.report is not None:  # no later report: the load has not changed since then
            window.observe(metrics.report)
        sample = MetricsSample(
            at=round(now, 3),
            running=window.running,
            waiting=window.waiting,
            kv_usage=window.kv_usage,
            prefix_hit_rate=window.cached / window.looked_up if window.looked_up else None,
            tokens_per_second=round(window.tokens / EVERY, 2),
            tokens_per_step=1 + window.accepted / window.roots if window.roots else None,
            ttft_ms_p50=percentile_ms(window.ttft, 0.5),
            ttft_ms_p95=percentile_ms(window.ttft, 0.95),
            tpot_ms_p50=percentile_ms(window.tpot, 0.5),
            tpot_ms_p95=percentile_ms(window.tpot, 0.95),
            errors=window.errors,
            restarts=window.restarts,
        )
        self.samples.append(sample)

    def after(self, since: float) -> MetricsHistory:
        samples = [sample for sample in self.samples if sample.at > since]
        return MetricsHistory(time(), EVERY, samples, dict(Counter(self.metrics.step_rows)))


async def metrics_history(request: Request) -> Response:
    given = request.query_params.get("since", "0")
    try:
        since = float(given)
    except ValueError:
        message = f"since: {given[:40]!r} is not a number. Send a Unix time in seconds"
        raise RequestError(message, "since") from None
    return json_response(request.app.state.service.history.after(since))
