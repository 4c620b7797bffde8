"""Prometheus series of the sources of guesses, read from the engine's sums at each scrape."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve.exchange.step_output import SourceStats

LABELS = ["model_name", "engine", "source"]


class SourceMetrics(Collector):
    """What several sources guess at once counts for each. `sums` are those of the last report."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.sums: Mapping[str, SourceStats] = {}

    def collect(self) -> Iterator[Metric]:
        counts = {
            "proposed_tokens": "Guesses proposed.",
            "verified_tokens": "Guesses verified.",
            "seconds": "Wall time of proposing.",
        }
        for name, words in counts.items():
            counter = CounterMetricFamily(f"specserve_source_{name}", words, labels=LABELS)
            for source, sums in self.sums.items():
                counter.add_metric(self.labels(source), getattr(sums, name.partition("_")[0]))
            yield counter
        yield self.accepted()
        yield self.saved()

    def accepted(self) -> Metric:
        words = "Guesses accepted, by depth in the tree from 0."
        name, labels = "specserve_source_accepted_tokens", [*LABELS, "position"]
        counter = CounterMetricFamily(name, words, labels=labels)
        for source, sums in self.sums.items():
            for depth, count in enumerate(sums.accepted):
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
