"""HTTP/1.0, which has no chunks, and keeps a connection only where both sides say so."""

import json

import pytest

from tests.server.asking import COMPLETIONS, completion_body

BODY = json.dumps(completion_body(seed=1)).encode()
STREAM = json.dumps(completion_body(seed=1, stream=True)).encode()


def request(body, *headers, version="1.0"):
    lines = [f"POST {COMPLETIONS} HTTP/{version}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def until_closed(client):
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def split(reply):
    head, _, body = reply.partition(b"\r\n\r\n")
    return head.lower().split(b"\r\n"), body


def one(client):
    """One reply of a length that it tells: its headers and its body."""
    reply = b""
    while b"\r\n\r\n" not in reply:
        reply += client.recv(1)
    head, _ = split(reply)
    length = next(int(line.split(b":")[1]) for line in head if line.startswith(b"content-length"))
    body = b""
    while len(body) < length:
        body += client.recv(length - len(body))
    return head, body


@pytest.mark.parametrize("headers", [(), ("Connection: close",), ("Connection: keep-alive",)])
def test_a_stream_has_no_chunks_and_ends_with_its_connection(server, headers):
    with server.connect() as client:
        client.sendall(request(STREAM, *headers))
        head, body = split(until_closed(client))
    assert not any(line.startswith((b"transfer-encoding", b"connection: keep")) for line in head)
    events = body.split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events[:-1]) and events[-1] == b""
    assert events[-2] == b"data: [DONE]"
    want = server.stream(COMPLETIONS, json.loads(STREAM))
    texts = [json.loads(e[6:])["choices"][0]["text"] for e in events[:-2]]
    assert "".join(texts) == "".join(c["choices"][0]["text"] for c in want[:-1])


def test_a_stream_of_intervals_has_none_either(paced_threads):
    with paced_threads(**{"server.stream_flush": "interval"}) as server, server.connect() as client:
        client.sendall(request(STREAM))
        _, body = split(until_closed(client))
    assert body.endswith(b"data: [DONE]\n\n") and body.startswith(b"data: ")


def test_an_answer_is_whole_and_closes_the_connection(server):
    with server.connect() as client:
        client.sendall(request(BODY))
        head, body = split(until_closed(client))
    assert b"connection: close" in head and json.loads(body)["choices"]


def test_a_connection_is_kept_if_the_client_asks_for_that(server):
    with server.connect() as client:
        for _ in range(2):
            client.sendall(request(BODY, "Connection: Keep-Alive"))
            head, body = one(client)
            assert b"connection: keep-alive" in head and json.loads(body)["choices"]
        client.sendall(request(b"{}", "Connection: keep-alive"))  # refused, and kept too
        assert b"connection: keep-alive" in one(client)[0]
        client.sendall(request(STREAM, "Connection: keep-alive"))
        assert until_closed(client).endswith(b"data: [DONE]\n\n")


def test_no_continue_is_sent(server):
    with server.connect() as client:
        client.sendall(request(BODY, "Expect: 100-continue"))
        assert until_closed(client).startswith(b"HTTP/1.1 200 ")


def test_newer_clients_get_chunks_and_no_header_of_the_connection(server):
    with server.connect() as client:
        client.sendall(request(STREAM, version="1.1"))
        reply = b""
        while not reply.endswith(b"0\r\n\r\n"):
            reply += client.recv(1 << 16)
    head, _ = split(reply)
    assert b"transfer-encoding: chunked" in head
    assert not any(line.startswith(b"connection") for line in head)
