"""Prometheus series of the sources of guesses, read from the engine's sums at each scrape."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve.exchange.messages import SourceStats

LABELS = ["model_name", "engine", "source"]


class SourceMetrics(Collector):
    """What several sources guess at once counts for each. `sums` are those of the last report."""

    def __init__(self, model: str, max_nodes: int) -> None:
        self.model, self.max_nodes = model, max_nodes
        self.sums: Mapping[str, SourceStats] = {}

    def collect(self) -> Iterator[Metric]:
        yield self.counter("source_proposed_tokens", "Guesses proposed.", "proposed")
        yield self.counter("source_verified_tokens", "Guesses verified.", "verified")
        yield self.counter("source_seconds", "Wall time of proposing.", "seconds")
        yield self.counter("drafter_errors", "Exceptions of a drafter.", "errors")
        yield self.accepted()
        yield self.saved()

    def counter(self, name: str, words: str, field: str) -> Metric:
        counter = CounterMetricFamily(f"specserve_{name}", words, labels=LABELS)
        for source, sums in self.sums.items():
            counter.add_metric(self.labels(source), getattr(sums, field))
        return counter

    def accepted(self) -> Metric:
        words = "Guesses accepted, by depth in the tree from 0."
        name, labels = "specserve_source_accepted_tokens", [*LABELS, "position"]
        counter = CounterMetricFamily(name, words, labels=labels)
        for source, sums in self.sums.items():
            for depth in range(self.max_nodes):
                count = sums.accepted[depth] if depth < len(sums.accepted) else 0
                counter.add_metric([*self.labels(source), str(depth)], count)
        return counter

    def saved(self) -> Metric:
        words = "Estimated time saved so far, less the time of proposing."
        gauge = GaugeMetricFamily("specserve_source_saved_seconds", words, labels=LABELS)
        for source, sums in self.sums.items():
            gauge.add_metric(self.labels(source), sums.saved_seconds)
        return gauge

    def labels(self, source: str) -> list[str]:
        return [self.model, "0", source]
