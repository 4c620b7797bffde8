"""Which adapters requests have, under vLLM's name, by which routers choose a replica."""

from collections.abc import Collection, Iterator
from time import time

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve.server.live_completion import LiveCompletion

LABELS = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]


class AdapterMetrics(Collector):
    """Empty where there are no adapters."""

    def __init__(self, num_slots: int, completions: Collection[LiveCompletion]) -> None:
        self.num_slots, self.completions = num_slots, completions

    def collect(self) -> Iterator[Metric]:
        if self.num_slots == 0:
            return
        words = "Adapters of running and of waiting requests; the value is the time."
        gauge = GaugeMetricFamily("vllm:lora_requests_info", words, labels=LABELS)
        waiting, running = self.names(False), self.names(True)
        gauge.add_metric([str(self.num_slots), waiting, running], time())
        yield gauge

    def names(self, has_tokens: bool) -> str:
        """Of the adapters of completions that have had tokens, or of the others."""
        each = (c.arrived.adapter for c in self.completions if c.has_tokens == has_tokens)
        return ",".join(sorted({adapter.name for adapter in each if adapter is not None}))
