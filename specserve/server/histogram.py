"""A Prometheus histogram that one thread fills, as cheaply as a step of every stream needs it."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """The library's own takes two locks and walks through its buckets for each value."""

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
