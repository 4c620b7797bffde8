"""Prometheus metrics, with vLLM's names if vLLM has the metric, so that its dashboards work."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from time import time
from typing import TypeVar

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from specserve.api.outputs import Generation
from specserve.exchange.messages import Ready, Report, SourceStats, Stats
from specserve.exchange.sleep import AWAKE, STATES, SleepState
from specserve.memory.disk_tier import TierStats

# Starts at half a millisecond, because a step of a small model is below vLLM's smallest bucket.
FAST = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08)
SLOW = (0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
SECONDS = FAST + SLOW
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
LABELS = ["model_name", "engine", "source"]
NUM_STEP_ROWS = 256  # latest steps whose rows are kept
M = TypeVar("M", bound=MetricWrapperBase)

# Would add a second series to every counter, which no dashboard reads.
disable_created_metrics()  # type: ignore[no-untyped-call]


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


class SampleCounts(msgspec.Struct):
    """Sums and maxima since the last sample of the history; times are in seconds."""

    tokens: int = 0  # emitted
    roots: int = 0  # steps of requests
    accepted: int = 0  # draft tokens
    looked_up: int = 0  # prompt tokens looked up in the prefix cache
    cached: int = 0  # prompt tokens found in the prefix cache
    errors: int = 0  # requests that ended with an error
    restarts: int = 0  # of the engine process
    running: int = 0  # maximum number of requests in the batch
    waiting: int = 0  # maximum number of requests in the queue
    kv_usage: float = 0.0  # maximum share of KV blocks in use
    ttft: list[float] = []
    tpot: list[float] = []

    def observe(self, report: Report) -> None:
        self.running = max(self.running, report.num_running)
        self.waiting = max(self.waiting, report.num_waiting)
        self.kv_usage = max(self.kv_usage, report.kv_usage)


class SourceMetrics(Collector):
    """Counters per draft source, from the `sums` of the last report.

    A draft token of several sources counts for each source.
    """

    def __init__(self, model: str, max_nodes: int) -> None:
        self.model, self.max_nodes = model, max_nodes
        self.sums: Mapping[str, SourceStats] = {}

    def collect(self) -> Iterator[Metric]:
        yield self.counter("source_proposed_tokens", "Draft tokens proposed.", "proposed")
        yield self.counter("source_verified_tokens", "Draft tokens verified.", "verified")
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
        words = "Draft tokens accepted, by depth in the tree, from 0."
        name, labels = "specserve_source_accepted_tokens", [*LABELS, "position"]
        counter = CounterMetricFamily(name, words, labels=labels)
        for source, sums in self.sums.items():
            for depth in range(self.max_nodes):
                count = sums.accepted_at[depth] if depth < len(sums.accepted_at) else 0
                counter.add_metric([*self.labels(source), str(depth)], count)
        return counter

    def saved(self) -> Metric:
        words = "Estimated time saved so far, minus the time of proposing."
        gauge = GaugeMetricFamily("specserve_source_saved_seconds", words, labels=LABELS)
        for source, sums in self.sums.items():
            gauge.add_metric(self.labels(source), sums.saved_seconds)
        return gauge

    def labels(self, source: str) -> list[str]:
        return [self.model, "0", source]


class TierMetrics(Collector):
    """Counters per KV tier, from the `sums` of the last report; absent without tiers."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.sums: Mapping[str, TierStats] = {}

    def collect(self) -> Iterator[Metric]:
        if not self.sums:
            return
        labels = ["model_name", "engine", "tier"]
        words = {
            "hits": "KV blocks that came back to the pool.",
            "stores": "KV blocks that a tier got.",
            "evictions": "KV blocks that a tier evicted.",
            "skips": "Evicted KV blocks that were not stored, because the tier was busy.",
            "failures": "KV blocks that could not be written or read.",
        }
        for field, text in words.items():
            counter = CounterMetricFamily(f"specserve_kv_tier_{field}", text, labels=labels)
            for tier, sums in self.sums.items():
                counter.add_metric([self.model, "0", tier], getattr(sums, field))
            yield counter
        gauge = GaugeMetricFamily("specserve_kv_tier_bytes", "Bytes in a tier.", labels=labels)
        for tier, sums in self.sums.items():
            gauge.add_metric([self.model, "0", tier], sums.num_bytes)
        yield gauge


class AdapterMetrics(Collector):
    """Adapters of running and waiting requests. Routers use vLLM's metric to choose a replica.

    `names` returns the adapters of completions with output tokens (true) or without (false). The
    metric is absent if adapters are off.
    """

    def __init__(self, num_slots: int, names: Callable[[bool], set[str]]) -> None:
        self.num_slots, self.names = num_slots, names

    def collect(self) -> Iterator[Metric]:
        if self.num_slots == 0:
            return
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        words = "Adapters of running and of waiting requests; the value is the time."
        gauge = GaugeMetricFamily("vllm:lora_requests_info", words, labels=labels)
        waiting, running = (",".join(sorted(self.names(has))) for has in (False, True))
        gauge.add_metric([str(self.num_slots), waiting, running], time())
        yield gauge


class Metrics:
    """Counts engine reports and ended requests; `text` is the body of /metrics.

    Updates of every step are collected first. `settle` adds them to the counters.
    """

    def __init__(
        self,
        model: str,
        max_nodes: int,
        num_adapter_slots: int = 0,
        adapters: Callable[[bool], set[str]] = lambda has_tokens: set(),
    ) -> None:
        self.registry, self.model = CollectorRegistry(), model
        self.report: Report | None = None  # the last one
        self.stats = Stats()  # of the last report
        self.seen = Stats()  # already in the counters
        self.window = SampleCounts()  # for the history, which replaces it
        self.step_rows = deque[int](maxlen=NUM_STEP_ROWS)  # of the latest steps
        self.num_preempted = 0
        self.num_generated = self.num_drafts = 0  # not yet in the counters
        self.num_accepted = list[int]()  # by depth, not yet in the counters
        self.running = self.gauge("vllm:num_requests_running", "Requests in the batch.")
        self.waiting = self.gauge("vllm:num_requests_waiting", "Requests in the queue.")
        self.usage = self.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.")
        self.blocks = Gauge(
            "specserve_kv_blocks",
            "KV blocks by holder.",
            ["model_name", "engine", "holder"],
            registry=self.registry,
        )
        self.drafter = Gauge(
            "specserve_drafter_info",
            "The drafter in use.",
            ["model_name", "drafter"],
            registry=self.registry,
        )
        self.sleep_state = Gauge(
            "vllm:engine_sleep_state",
            "1 for the state that the engine is in, 0 for the others.",
            ["model_name", "engine", "sleep_state"],
            registry=self.registry,
        )
        self.on_sleep(AWAKE)
        self.looked_up = self.counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.cached = self.counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self.checkpoints = self.gauge(
            "specserve_state_checkpoints", "Recurrent states in the prefix cache."
        )
        self.checkpoint_hits = self.counter(
            "specserve_state_checkpoint_hits", "Prompts that found a recurrent state."
        )
        self.restarts = self.counter(
            "specserve_engine_restarts",
            "Restarts of the engine process.",
        )
        self.preemptions = self.counter("vllm:num_preemptions", "Requests put back in the queue.")
        self.prompt_tokens = self.counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self.generation_tokens = self.counter("vllm:generation_tokens", "Tokens emitted.")
        self.drafts = self.counter("vllm:spec_decode_num_drafts", "Drafts verified.")
        self.drafted = self.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted = self.counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted."
        )
        per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by depth in the tree, from 0.",
            ["model_name", "engine", "position"],
            registry=self.registry,
        )
        self.per_position, self.accepted_at = per_position, list[Counter]()
        self.sources = SourceMetrics(model, max_nodes)
        self.registry.register(self.sources)
        self.tiers = TierMetrics(model)
        self.registry.register(self.tiers)
        self.make_room(max_nodes)
        self.rows = self.counter("specserve_rows", "Rows that the target model computed.")
        by_kind = Counter(
            "specserve_step_rows",
            "Rows that the target model computed: prompts, last tokens (roots) and draft tokens.",
            ["model_name", "engine", "kind"],
            registry=self.registry,
        )
        self.kinds = [by_kind.labels(model, "0", kind) for kind in ("prompts", "roots", "guesses")]
        self.wasted = self.counter("specserve_wasted_rows", "Rows of rejected draft tokens.")
        self.fallbacks = self.counter(
            "specserve_draft_fallbacks",
            "Drafts without the draft model, because it had not caught up.",
        )
        self.step_seconds = self.histogram("specserve_step_seconds", "Wall time of a step.")
        self.draft_seconds = self.histogram("specserve_draft_seconds", "Drafting time of a step.")
        self.verify_seconds = self.histogram(
            "specserve_verify_seconds", "Time of the target model's forward pass in a step."
        )
        self.step_tokens = self.histogram("vllm:iteration_tokens_total", "Rows of a step.", TOKENS)
        self.add_request_series()
        self.registry.register(AdapterMetrics(num_adapter_slots, adapters))

    def add_request_series(self) -> None:
        self.ttft = self.histogram("vllm:time_to_first_token_seconds", "Arrival to first token.")
        self.gap = self.histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two steps of a request that emit tokens.",
        )
        self.tpot = self.histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token after the first.",
        )
        self.latency = self.histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.")
        self.queue = self.histogram("vllm:request_queue_time_seconds", "Arrival to admission.")
        self.prefill = self.histogram(
            "vllm:request_prefill_time_seconds", "Admission to first token."
        )
        self.decode = self.histogram(
            "vllm:request_decode_time_seconds", "First token to last token."
        )
        self.inference = self.histogram(
            "vllm:request_inference_time_seconds", "Admission to last token."
        )
        self.num_prompt = self.histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS
        )
        self.num_output = self.histogram(
            "vllm:request_generation_tokens", "Output tokens of a request.", TOKENS
        )
        self.max_tokens = self.histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request.", TOKENS
        )
        self.success = Counter(
            "vllm:request_success",
            "Requests ended, by reason.",
            ["model_name", "engine", "finished_reason"],
            registry=self.registry,
        )
        for reason in "stop", "length", "abort", "error", "timeout":
            self.success.labels(self.model, "0", reason)  # starts at 0, so that rates see the first
        self.rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused before they were queued, by reason.",
            ["model_name", "engine", "reason"],
            registry=self.registry,
        )

    def gauge(self, name: str, words: str) -> Gauge:
        return self.bound(Gauge(name, words, ["model_name", "engine"], registry=self.registry))

    def counter(self, name: str, words: str) -> Counter:
        return self.bound(Counter(name, words, ["model_name", "engine"], registry=self.registry))

    def histogram(self, name: str, words: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        labels = {"model_name": self.model, "engine": "0"}
        histogram = Histogram(name, words, labels, buckets)
        self.registry.register(histogram)
        return histogram

    def bound(self, metric: M) -> M:
        return metric.labels(self.model, "0")

    def on_ready(self, ready: Ready) -> None:
        info = Gauge(
            "vllm:cache_config_info",
            "Block size and number of blocks of the KV pool.",
            ["model_name", "engine", "block_size", "num_gpu_blocks"],
            registry=self.registry,
        )
        info.labels(self.model, "0", str(ready.block_size), str(ready.num_blocks)).set(1)
        self.on_drafter(ready.drafter)

    def on_drafter(self, name: str) -> None:
        """Set the drafter in use."""
        self.drafter.clear()
        self.drafter.labels(self.model, name).set(1)

    def on_sleep(self, state: SleepState) -> None:
        for level, name in enumerate(STATES):
            self.sleep_state.labels(self.model, "0", name).set(level == state.level)

    def on_report(self, report: Report) -> None:
        before, stats = self.stats, report.stats
        self.report, self.stats = report, stats
        self.window.observe(report)
        if stats.num_steps > before.num_steps:
            self.step_tokens.observe(stats.num_rows - before.num_rows)
            self.step_rows.append(stats.num_rows - before.num_rows)
            self.step_seconds.observe(stats.step_seconds - before.step_seconds)
            self.draft_seconds.observe(stats.draft_seconds - before.draft_seconds)
            self.verify_seconds.observe(stats.verify_seconds - before.verify_seconds)
        for output in report.outputs:
            self.num_drafts += output.num_drafted > 0
            for position in range(output.num_accepted):
                self.num_accepted[position] += 1

    def make_room(self, max_nodes: int) -> None:
        """Extend the counters by depth to `max_nodes` draft tokens per request and step."""
        for position in range(len(self.accepted_at), max_nodes):
            self.accepted_at.append(self.per_position.labels(self.model, "0", str(position)))
            self.num_accepted.append(0)
        self.sources.max_nodes = len(self.accepted_at)

    def settle(self) -> None:
        """Update the counters."""
        self.generation_tokens.inc(self.num_generated)
        self.window.tokens += self.num_generated
        self.drafts.inc(self.num_drafts)
        for position, count in enumerate(self.num_accepted):
            self.accepted_at[position].inc(count)
        self.num_generated = self.num_drafts = 0
        self.num_accepted = [0] * len(self.num_accepted)
        if self.report is not None:
            self.settle_report(self.report)

    def settle_report(self, report: Report) -> None:
        self.running.set(report.num_running)
        self.waiting.set(report.num_waiting)
        self.usage.set(report.kv_usage)
        for holder, count in report.blocks.items():
            self.blocks.labels(self.model, "0", holder).set(count)
        self.preemptions.inc(report.num_preempted - self.num_preempted)
        self.num_preempted = report.num_preempted
        self.on_stats(report.stats)

    def on_restart(self) -> None:
        """Prepare for a new engine process, which counts from zero."""
        self.settle()
        self.restarts.inc()
        self.window.restarts += 1
        self.report, self.stats, self.seen, self.num_preempted = None, Stats(), Stats(), 0

    def on_stats(self, stats: Stats) -> None:
        """Add the difference to the last sums."""
        before, self.seen = self.seen, stats
        drafted = stats.num_drafted - before.num_drafted
        accepted = stats.num_accepted - before.num_accepted
        self.drafted.inc(drafted)
        self.accepted.inc(accepted)
        self.wasted.inc(drafted - accepted)
        rows, roots = stats.num_rows - before.num_rows, stats.num_roots - before.num_roots
        self.rows.inc(rows)
        # Rows of requests that ended meanwhile are neither roots nor draft tokens.
        for kind, count in zip(self.kinds, (rows - roots - drafted, roots, drafted), strict=True):
            kind.inc(max(0, count))
        self.fallbacks.inc(stats.num_fallbacks - before.num_fallbacks)
        looked_up = stats.num_looked_up - before.num_looked_up
        cached = stats.num_cached - before.num_cached
        self.looked_up.inc(looked_up)
        self.cached.inc(cached)
        window = self.window
        window.roots += roots
        window.accepted += accepted
        window.looked_up += looked_up
        window.cached += cached
        self.checkpoints.set(stats.num_checkpoints)
        self.checkpoint_hits.inc(stats.num_checkpoint_hits - before.num_checkpoint_hits)
        self.sources.sums, self.tiers.sums = stats.sources, stats.tiers

    def on_tokens(self, generation: Generation, num_before: int, last_token_at: float) -> None:
        """Count a step's tokens. `last_token_at` is the time of earlier tokens; 0: none."""
        now = generation.last_token_at
        self.num_generated += len(generation.token_ids) - num_before
        if last_token_at:
            self.gap.observe(now - last_token_at)
        else:
            first = generation.first_token_at
            self.ttft.observe(first - generation.arrived)
            self.window.ttft.append(first - generation.arrived)
            self.queue.observe(max(0.0, generation.admitted_at - generation.arrived))
            self.prefill.observe(first - generation.admitted_at)

    def on_end(self, generation: Generation, reason: str, is_first: bool) -> None:
        """Count a choice as a request. A prompt only counts with its first choice."""
        self.success.labels(self.model, "0", reason).inc()
        self.window.errors += reason == "error"
        self.prompt_tokens.inc(len(generation.prompt) if is_first else 0)
        self.num_prompt.observe(len(generation.prompt))
        self.num_output.observe(len(generation.token_ids))
        self.max_tokens.observe(generation.sampling.max_tokens)
        if not generation.first_token_at:  # without tokens: when the prompt was computed
            return
        last, first = generation.last_token_at, generation.first_token_at
        self.latency.observe(last - generation.arrived)
        self.decode.observe(last - first)
        self.inference.observe(last - generation.admitted_at)
        if generation.tpot is not None:
            self.tpot.observe(generation.tpot)
            self.window.tpot.append(generation.tpot)

    def on_rejection(self, reason: str) -> None:
        self.rejections.labels(self.model, "0", reason).inc()

    def text(self) -> bytes:
        self.settle()
        return generate_latest(self.registry)
