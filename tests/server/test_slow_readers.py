"""Streams of every API end if the client does not read them."""

import json
import socket
import time

import pytest

from tests.checkpoints import CHAT_TEMPLATE, tiny_tokenizer
from tests.server import scripted
from tests.server.asking import CHAT

USER = {"messages": [{"role": "user", "content": "a"}]}
STREAMS = {  # path -> body, and how a complete stream ends
    CHAT: (USER, b"[DONE]"),
    "/v1/messages": (USER | {"max_tokens": 1 << 16}, b"message_stop"),
    "/api/chat": (USER, b'"done":true'),
    "/api/generate": ({"prompt": "a"}, b'"done":true'),
}
NUM_WORDS = 25_000  # whose events are more than the buffers of a connection
STALL = 0.4  # seconds without progress until the server cuts a stream


@pytest.fixture(scope="module")
def server():
    tokenizer = scripted.with_template(tiny_tokenizer().backend_tokenizer, CHAT_TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted, "MAX_LEN", 1 << 18)
        settings = {"server.stall_seconds": STALL, "server.served_model_name": "m" * 100}
        with (
            scripted.scripted(tokenizer, **settings) as server,
            server.saying("the cat " * NUM_WORDS, 1),
        ):
            yield server


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_is_not_read_is_cut(server, path, is_read):
    body, ending = STREAMS[path]
    data = json.dumps(body | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.socket() as client:
        if not is_read:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head.encode() + data)
        received = b""
        while len(received) < 1000:  # with the first event
            received += client.recv(1000)
        time.sleep(0 if is_read else 2.5 * STALL)
        try:
            while not received.endswith(b"0\r\n\r\n") and (piece := client.recv(1 << 20)):
                received += piece
        except ConnectionResetError:
            assert not is_read
    assert received.startswith(b"HTTP/1.1 200") and (ending in received[-1000:]) == is_read
