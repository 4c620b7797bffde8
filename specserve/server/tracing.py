"""OpenTelemetry spans of the generating routes, with its conventions for generative AI."""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from threading import Thread
from typing import Any

from starlette.requests import Request

from specserve.logs import Seldom
from specserve.server.completion import EndedRequest, LiveCompletion
from specserve.version import VERSION

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
ENDPOINTS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
OFF = {  # parameters -> values without effect, which spans omit
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "top_k": 0,
    "top_p": 1.0,
}


log = logging.getLogger("specserve")
failures = logging.getLogger("specserve.traces")
failures.addFilter(Seldom(60.0))


class Tracer:
    """Creates the spans of a request after its end, from times that are always recorded."""

    def __init__(self, provider: Any, model: str) -> None:
        """`provider` is a TracerProvider of OpenTelemetry's SDK."""
        from opentelemetry import propagate, trace

        self.provider, self.model, self.trace = provider, model, trace
        self.extract: Callable[[Mapping[str, str]], Any] = propagate.extract
        self.tracer = provider.get_tracer("specserve", VERSION)

    def record(self, ended: EndedRequest) -> None:
        """Create the spans of a request. An observer of `Observed`."""
        operation = OPERATIONS.get(ended.scope["path"])
        if operation is None or ended.scope["method"] != "POST":
            return
        completion = ended.asked[0] if ended.asked else None
        now = time.time_ns(), time.perf_counter()

        def at(seconds: float) -> int:
            """Convert seconds of perf_counter to nanoseconds since 1970."""
            return now[0] - int(1e9 * (now[1] - seconds))

        span = self.tracer.start_span(
            f"{operation} {self.model}" if completion is not None else operation,
            context=self.extract(Request(ended.scope).headers),
            kind=self.trace.SpanKind.SERVER,
            attributes=dict(self.attributes(ended, operation, completion)),
            start_time=at(ended.received_at),
        )
        if ended.status >= 500 or (completion is not None and completion.error is not None):
            span.set_status(self.trace.StatusCode.ERROR)
        if completion is not None and completion.has_tokens and span.is_recording():
            parent = self.trace.set_span_in_context(span)
            for name, begin, end in phases(completion):
                child = self.tracer.start_span(name, context=parent, start_time=at(begin))
                child.end(at(end))
        span.end(now[0])

    def attributes(
        self, ended: EndedRequest, operation: str, completion: LiveCompletion | None
    ) -> Iterator[tuple[str, Any]]:
        host, port = ended.scope["server"]
        yield "gen_ai.operation.name", operation
        yield "gen_ai.provider.name", "specserve"
        yield "server.address", host
        yield "server.port", port
        yield "http.request.method", ended.scope["method"]
        yield "http.route", ended.scope["path"]
        yield "http.response.status_code", ended.status
        error = error_type(ended, completion)
        if error is not None:
            yield "error.type", error
        if completion is not None:
            yield "specserve.request_id", completion.caller.request_id
            yield "gen_ai.request.model", self.model
            yield from asked_attributes(completion)
            yield from answer_attributes(completion, self.model)

    def close(self) -> None:
        """Send the last spans, for at most 0.8 s."""
        closing = Thread(target=self.provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(0.8)


def error_type(ended: EndedRequest, completion: LiveCompletion | None) -> str | None:
    """Return the reason of an incomplete response, else its error status; None for a success."""
    if completion is not None and completion.has_left:
        return "client_left"
    if completion is not None and completion.error is not None:
        return type(completion.error).__name__
    return str(ended.status) if ended.status >= 400 else None


def asked_attributes(completion: LiveCompletion) -> Iterator[tuple[str, Any]]:
    """Yield the resolved parameters of a request."""
    sampling = completion.firsts[0].sampling
    yield "gen_ai.request.max_tokens", sampling.max_tokens
    yield "gen_ai.request.temperature", sampling.temperature
    yield "gen_ai.request.seed", sampling.seed
    for name, off in OFF.items():
        if (value := getattr(sampling, name)) != off:
            yield f"gen_ai.request.{name}", value
    if sampling.stop:
        yield "gen_ai.request.stop_sequences", sampling.stop
    num_choices = len(completion.generations) // len(completion.firsts)
    if num_choices > 1:
        yield "gen_ai.request.choice.count", num_choices


def answer_attributes(completion: LiveCompletion, model: str) -> Iterator[tuple[str, Any]]:
    generations = completion.generations
    yield "gen_ai.response.id", completion.response_id
    yield "gen_ai.response.model", model
    yield "gen_ai.response.finish_reasons", [*map(completion.reason, generations)]
    yield "gen_ai.usage.input_tokens", completion.num_prompt_tokens
    yield "gen_ai.usage.output_tokens", completion.num_tokens
    yield "specserve.cached_tokens", sum(g.num_cached for g in completion.firsts)
    yield "specserve.drafted_tokens", sum(g.num_drafted for g in generations)
    yield "specserve.accepted_tokens", sum(g.num_accepted for g in generations)
    if completion.has_tokens:
        _, (_, admitted, first), _ = phases(completion)
        yield "specserve.time_to_first_token_ms", 1e3 * (first - completion.arrived.at)
        yield "specserve.queue_time_ms", 1e3 * (admitted - completion.arrived.at)


def phases(completion: LiveCompletion) -> list[tuple[str, float, float]]:
    """Return phases of a completion with tokens: names, and [begin, end) of perf_counter."""
    started = [g for g in completion.generations if g.first_token_at]
    arrived, admitted = completion.arrived.at, min(g.admitted_at for g in started)
    first, last = min(g.first_token_at for g in started), max(g.last_token_at for g in started)
    admitted = max(arrived, admitted)
    return [("queue", arrived, admitted), ("prefill", admitted, first), ("decode", first, last)]


def is_asked(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's environment variables turn spans on."""
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_none = environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not is_disabled and not is_none and any(environ.get(name) for name in ENDPOINTS)


def start_tracing(environ: Mapping[str, str], model: str) -> Tracer | None:
    """Return a tracer; None if spans are off, or (with a warning) if packages are missing."""
    if not is_asked(environ):
        return None
    warn_of_unsupported(environ)
    name, where = endpoint_of(environ)
    if not where.lower().startswith(("http://", "https://")):
        log.warning("%s = %r: not a URL, so no traces are sent. Use http://HOST:PORT", name, where)
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as e:
        log.warning("no traces are sent (%s). Run pip install 'specserve[otel]'", e)
        return None
    report_failures(where)
    own = Resource({"service.name": "specserve", "service.version": VERSION})
    environment = Resource.create()
    is_named = not str(environment.attributes["service.name"]).startswith("unknown_service")
    resource = own.merge(environment) if is_named else environment.merge(own)
    # shutdown_on_exit would wait for a dead collector at the end of the process.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracer(provider, model)


class Failures(logging.Handler):
    """Replaces the log lines of OpenTelemetry's exporter, which writes several per batch."""

    def __init__(self, where: str) -> None:
        super().__init__(logging.WARNING)
        self.where = where

    def emit(self, record: logging.LogRecord) -> None:
        error = next((a for a in record.args or () if isinstance(a, Exception)), None)
        why = record.getMessage() if error is None else root_of(error)
        failures.warning(
            "traces cannot be sent to %s (%s). Responses are not affected. Start a collector, or "
            "set OTEL_TRACES_EXPORTER=none",
            *(self.where, why),
        )


def root_of(error: BaseException) -> BaseException:
    """Return the first error of a chain, which has the shortest message."""
    before = error.__cause__ or error.__context__
    return error if before is None else root_of(before)


def report_failures(where: str) -> None:
    exporter = logging.getLogger("opentelemetry.exporter")
    exporter.handlers, exporter.propagate = [Failures(where)], False


def endpoint_of(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable with the collector's URL, and the URL without secrets."""
    name = next(name for name in ENDPOINTS if environ.get(name))
    return name, re.sub(r"[^/]*@|\?.*", "", environ[name])  # without user, password and query


def warn_of_unsupported(environ: Mapping[str, str]) -> None:
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter != "otlp":
        log.warning(
            "OTEL_TRACES_EXPORTER = %r: sending with otlp instead. Set otlp or none", exporter
        )
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        log.warning(
            "%s = %r: sending with http/protobuf instead. Use its port at the collector, e.g. 4318",
            PROTOCOLS[1],
            protocol,
        )
