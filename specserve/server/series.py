"""Series of measured values: a histogram for Prometheus, and a window for the history."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf

import msgspec
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """A histogram for a single thread. It is cheap, because each step of each stream updates it.

    The library's histogram takes two locks and walks through its buckets for each value.
    """

    def __init__(
        self, name: str, words: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self.name, self.words, self.labels = name, words, labels
        self.bounds = [*buckets, inf]
        self.counts, self.sum = [0] * len(self.bounds), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.words, labels=list(self.labels))
        counts = zip(map(floatToGoString, self.bounds), accumulate(self.counts), strict=True)
        family.add_metric([*self.labels.values()], [*counts], self.sum)
        yield family


class Window(msgspec.Struct):
    """Sums since the last sample of the history; times are in seconds."""

    tokens: int = 0  # emitted
    roots: int = 0  # steps of requests
    accepted: int = 0  # draft tokens
    looked_up: int = 0  # prompt tokens looked up in the prefix cache
    cached: int = 0  # prompt tokens found in the prefix cache
    errors: int = 0  # requests that ended with an error
    restarts: int = 0  # of the engine process
    ttft: list[float] = []
    tpot: list[float] = []
