"""Spans of requests, as a collector gets them over its socket, and the server without any."""

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specserve.logs import Seldom
from specserve.server import tracing
from specserve.server.tracing import start_tracing
from tests.server.asking import CHAT, COMPLETIONS, chat_body, saying, streaming
from tests.server.server_process import ServerProcess, eventually

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, INTERNAL = 2, 1  # kinds of spans
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.sent.append((self.path, dict(self.headers), body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def collecting():
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    collector.sent = []
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()


def url_of(collector):
    return f"http://127.0.0.1:{collector.server_address[1]}"


@pytest.fixture(scope="module")
def collector():
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(folder, collector):
    env = SOON | {"OTEL_EXPORTER_OTLP_ENDPOINT": url_of(collector)}
    env |= {"OTEL_SERVICE_NAME": "mine", "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=7"}
    with ServerProcess(folder, "--served-model-name=tiny", env=env) as server:
        yield server


@pytest.fixture
def spans(traced, collector):
    """Waits for the spans of the requests that were sent with a trace's id, the server's first."""

    def wait(trace=TRACE, number=1):
        def found():
            return [span for span in spans_of(collector) if span.trace_id.hex() == trace]

        eventually(lambda: len(found()) >= number)
        return sorted(found(), key=lambda span: (-span.kind, span.start_time_unix_nano))

    return wait


def asked(server, path, body, trace=TRACE, **headers):
    headers["traceparent"] = f"00-{trace}-{PARENT}-01"
    return server.post(path, body, headers=headers)


def batches(collector):
    sent = [ExportTraceServiceRequest.FromString(body) for _, _, body in collector.sent]
    return [spans for request in sent for spans in request.resource_spans]


def spans_of(collector):
    return [
        span for batch in batches(collector) for scope in batch.scope_spans for span in scope.spans
    ]


def plain(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, kind)


def attributes(span):
    return {each.key: plain(each.value) for each in span.attributes}


def test_an_answer_is_a_span_by_the_conventions_below_its_clients(traced, spans):
    body = saying(6, num_prompt=3, n=2, temperature=0.5, seed=7, top_p=0.9, top_k=5, stop=["qqqq"])
    body |= {"frequency_penalty": 0.25, "presence_penalty": -0.5, "model": "tiny"}
    started = time.time_ns()
    answer = asked(traced, COMPLETIONS, body, **{"X-Request-Id": "mine"})
    assert answer.status == 200, answer.body
    span, *children = spans(number=4)
    assert (span.name, span.kind) == ("text_completion tiny", SERVER)
    assert span.parent_span_id.hex() == PARENT
    assert started <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    told = attributes(span)
    milliseconds = "specserve.time_to_first_token_ms", "specserve.queue_time_ms"
    first, queued = map(told.pop, milliseconds)
    assert 0 <= queued < first < 1e-6 * (span.end_time_unix_nano - span.start_time_unix_nano)
    assert told.pop("specserve.drafted_tokens") >= told.pop("specserve.accepted_tokens") >= 0
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "specserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["qqqq"],
        "gen_ai.request.frequency_penalty": 0.25,
        "gen_ai.request.presence_penalty": -0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": answer.body["id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 12,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": COMPLETIONS,
        "server.address": "127.0.0.1",
        "server.port": traced.port,
        "specserve.cached_tokens": 0,
        "specserve.request_id": "mine",
    }
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    assert {child.parent_span_id for child in children} == {span.span_id}
    assert {child.kind for child in children} == {INTERNAL}
    ends = [(child.start_time_unix_nano, child.end_time_unix_nano) for child in children]
    assert all(begin <= end for begin, end in ends)
    assert span.start_time_unix_nano <= ends[0][0] and ends[2][1] <= span.end_time_unix_nano


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_chats_and_responses_are_operations_named_chat(traced, spans, path, stream):
    trace = uuid4().hex
    body = chat_body(max_tokens=2, stream=stream) if path == CHAT else {"input": "the cat"}
    body |= {"stream": stream} if path == CHAT else {"stream": stream, "max_output_tokens": 2}
    assert asked(traced, path, body, trace).status == 200
    span, *_ = spans(trace)
    told = attributes(span)
    assert span.name == "chat tiny" and told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.usage.output_tokens"] == 2
    assert told["gen_ai.response.id"].startswith("chatcmpl-" if path == CHAT else "resp_")


def test_a_refused_request_is_a_span_with_the_status_as_its_error(traced, spans):
    trace = "1" * 32
    assert asked(traced, COMPLETIONS, {"prompt": 5}, trace).status == 400
    [span] = spans(trace)
    told = attributes(span)
    assert span.name == "text_completion" and told["error.type"] == "400"
    assert not any(key.startswith("gen_ai.response") for key in told)


def test_a_client_that_left_is_warned_about(traced, collector):
    with streaming(traced, saying(400)):
        pass

    def errors():
        return [attributes(span).get("error.type") for span in spans_of(collector)]

    eventually(lambda: "client_left" in errors())


def test_nothing_but_generating_routes_has_spans_and_no_text_is_in_them(traced, collector, spans):
    trace = "2" * 32
    headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
    assert traced.get("/v1/models", headers=headers).status == 200
    asked(traced, COMPLETIONS, {"prompt": "SECRET", "max_tokens": 2}, trace)
    spans(trace, 4)
    time.sleep(0.2)
    found = [span for span in spans_of(collector) if span.trace_id.hex() == trace]
    assert len(found) == 4
    assert not any(b"SECRET" in body for _, _, body in collector.sent)


def test_the_sdks_own_variables_hold(traced, collector, spans):
    asked(traced, COMPLETIONS, saying(1), "3" * 32)
    spans("3" * 32)
    path, headers, _ = collector.sent[0]
    resource = attributes(batches(collector)[0].resource)
    assert path == "/v1/traces" and headers["x-tenant"] == "7"
    assert resource["service.name"] == "mine" and resource["service.version"]


@pytest.mark.slow  # a server of its own for what the SDK does
def test_a_sampler_that_takes_nothing_sends_nothing(folder):
    with collecting() as collector:
        env = SOON | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{url_of(collector)}/v1/traces"}
        env |= {"OTEL_TRACES_SAMPLER": "always_off"}
        with ServerProcess(folder, env=env) as server:
            server.post(COMPLETIONS, saying(1))
            server.signal()
            assert server.exit_code() == 0
        assert not collector.sent


def test_the_last_spans_are_sent_before_the_server_has_ended(folder):
    with collecting() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url_of(collector)}
        with ServerProcess(folder, env=env) as server:
            server.post(COMPLETIONS, saying(1))
            server.signal()
            assert server.exit_code() == 0
        assert len(spans_of(collector)) == 4
        names = [attributes(batch.resource)["service.name"] for batch in batches(collector)]
        assert set(names) == {"specserve"}


@pytest.mark.timed
@pytest.mark.parametrize("is_listening", [False, True], ids=["refuses", "accepts and is silent"])
def test_a_dead_collector_holds_up_neither_requests_nor_the_end(folder, is_listening):
    with socket.create_server(("127.0.0.1", 0)) as dead:
        endpoint = f"http://127.0.0.1:{dead.getsockname()[1]}"
        if not is_listening:
            dead.close()
        env = SOON | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        with ServerProcess(folder, env=env) as server:
            server.post(COMPLETIONS, saying(1))
            time.sleep(0.3)  # an export has begun
            start = time.monotonic()
            assert server.post(COMPLETIONS, saying(1)).status == 200
            assert time.monotonic() - start < 1
            start = time.monotonic()
            server.signal()
            assert server.exit_code() == 0
            assert time.monotonic() - start < 2  # what the server needs without one, and a second


def test_spans_that_cannot_be_sent_are_one_line_a_minute_that_says_so(folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as dead:
        host = f"127.0.0.1:{dead.getsockname()[1]}"
    log, env = tmp_path / "stderr", SOON | {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://u:pw@{host}"}
    with log.open("w") as stderr, ServerProcess(folder, env=env, stderr=stderr) as server:
        for _ in range(3):
            assert server.post(COMPLETIONS, saying(1)).status == 200
            time.sleep(0.3)  # longer than batches wait
        eventually(lambda: "traces cannot" in log.read_text())
    said = log.read_text()
    assert f"traces cannot be sent to http://{host} ([Errno 111] Connection refused). " in said
    assert said.count(host) == 1 and "Responses are not affected" in said
    assert "Transient" not in said and "pw" not in said


def test_failures_within_a_minute_are_counted_in_the_next_line(caplog, monkeypatch):
    monkeypatch.setattr(tracing.failures, "filters", [Seldom(60.0)])
    handler = tracing.Failures("http://a:1")
    for second in 0, 1, 59, 61:
        record = logging.makeLogRecord({"msg": "Failed: %s", "args": (404,)})
        monkeypatch.setattr(logging.time, "time", lambda at=second: 1e9 + at)
        handler.emit(record)
    first, second = caplog.messages
    assert first.startswith("traces cannot be sent to http://a:1 (Failed: 404). Resp")
    assert second.endswith(" (2 more since the last such line)")


def test_an_endpoint_without_a_scheme_is_one_warning_that_names_the_form(caplog):
    assert start_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"}, "tiny") is None
    [line] = caplog.messages
    assert "OTEL_EXPORTER_OTLP_ENDPOINT = 'localhost:4318'" in line and "http://HOST:PORT" in line


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
OFF = {
    "no endpoint": {},
    "an empty one": {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    "the SDK disabled": ENDPOINT | {"OTEL_SDK_DISABLED": "True"},
    "no exporter": ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"},
}


@pytest.mark.parametrize("environ", OFF.values(), ids=OFF)
def test_it_is_off(environ):
    assert start_tracing(environ, "tiny") is None


def test_off_it_imports_nothing():
    code = (
        "import sys, specserve.server.serve as serve\n"
        "assert serve.start_tracing({}, 'm') is None\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'google'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_the_packages_one_warning_says_which_extra_to_install(folder, tmp_path):
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry/__init__.py").write_text("raise ImportError('not there')")
    log, env = tmp_path / "stderr", ENDPOINT | {"PYTHONPATH": str(tmp_path)}
    with log.open("w") as stderr, ServerProcess(folder, env=env, stderr=stderr) as server:
        assert server.post(COMPLETIONS, saying(1)).status == 200
    assert log.read_text().count("pip install 'specserve[otel]'") == 1


WARNED = {
    "another exporter": ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER = 'zipkin'"),
    "another protocol": ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "'grpc'"),
}


@pytest.mark.parametrize(("environ", "words"), WARNED.values(), ids=WARNED)
def test_what_is_not_done_is_warned_of(environ, words, caplog):
    tracing.warn_of_unsupported(environ)
    assert words in caplog.text


def test_what_is_done_is_not_warned_of(caplog):
    asked = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    tracing.warn_of_unsupported(asked)
    assert not caplog.text
