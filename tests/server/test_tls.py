"""HTTPS by certificate files, which are checked at start-up and may be renewed later."""

import contextlib
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from http.client import HTTPSConnection

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from specserve.cli import command as cli
from specserve.config import ServerConfig
from specserve.errors import ConfigError
from specserve.server.serve import raise_file_limit
from specserve.server.tls import tls_of
from tests.server.server_process import ServerProcess, eventually
from tests.server.test_connections import received

HEADER_SECONDS = 1.0


class Files:
    """An authority, and the two files of a server's certificate."""

    def __init__(self, folder):
        self.authority = trustme.CA()
        self.ca, self.certificate, self.key = (folder / f"{n}.pem" for n in ("ca", "cert", "key"))
        self.authority.cert_pem.write_to_path(self.ca)
        self.issue()

    def issue(self):
        made = self.authority.issue_cert("127.0.0.1", "localhost")
        self.certificate.write_bytes(b"".join(b.bytes() for b in made.cert_chain_pems))
        self.key.write_bytes(made.private_key_pem.bytes())
        return made

    @property
    def settings(self):
        return {"tls_certificate_file": str(self.certificate), "tls_key_file": str(self.key)}

    @property
    def flags(self):
        return [f"--ssl-certfile={self.certificate}", f"--ssl-keyfile={self.key}"]


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    """A server of HTTPS, and its files and log."""
    top = tmp_path_factory.mktemp("tls")
    files, log = Files(top), top / "stderr"
    settings = {"server.header_seconds": HEADER_SECONDS}
    with log.open("w") as stderr:
        server = ServerProcess(folder, *files.flags, stderr=stderr, **settings)
        with server:
            yield server, files, log
            assert server.process.poll() is None, "a client has ended the server"


def ask(server, files, path, **versions):
    """The status, and the certificate's number."""
    context = ssl.create_default_context(cafile=files.ca)
    for name, value in versions.items():
        setattr(context, name, value)
    connection = HTTPSConnection("127.0.0.1", server.port, timeout=20, context=context)
    with contextlib.closing(connection):
        connection.request("GET", path)
        number = connection.sock.getpeercert()["serialNumber"]
        return connection.getresponse().status, number


@pytest.mark.slow  # test_ending.py has it without TLS
def test_a_signal_ends_the_server_as_without_tls(folder, files):
    with ServerProcess(folder, *files.flags) as server:
        assert ask(server, files, "/health")[0] == 200
        server.signal()
        assert server.exit_code() == 0 and "Traceback" not in server.process.stderr.read()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("path", ["/health", "/", "/dashboard"])
def test_routes_and_pages_are_served(served, path, version):
    server, files, _ = served
    status, _ = ask(server, files, path, minimum_version=version, maximum_version=version)
    assert status == 200


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_older_versions_of_tls_are_refused(served):
    server, files, _ = served
    old = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):
        ask(server, files, "/health", minimum_version=old, maximum_version=old)


def test_the_lines_at_the_start_say_https_and_the_curl_line_works(served):
    server, files, _ = served
    assert server.url.startswith("https://127.0.0.1:")
    curl = next(line for line in server.said if line.startswith("curl"))
    env = os.environ | {"CURL_CA_BUNDLE": str(files.ca)}
    done = subprocess.run(curl, shell=True, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_a_chat_works_with_the_authority_in_ssl_cert_file(served):
    server, files, _ = served
    command = [sys.executable, "-m", "specserve", "chat", f"--url={server.url}", "--max-tokens=3"]

    def chat(env):
        told = {"input": "hello\n", "capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, env=os.environ | env, check=False, **told)

    trusting = chat({"SSL_CERT_FILE": str(files.ca)})
    assert trusting.returncode == 0 and " tokens | TTFT" in trusting.stderr, trusting
    complaint = chat({"SSL_CERT_FILE": os.devnull}).stderr
    assert f"the certificate of {server.url} is not trusted (unable to get" in complaint
    assert "SSL_CERT_FILE" in complaint and "specserve serve" not in complaint


def test_broken_handshakes_cost_nobody_anything(served):
    server, files, log = served
    said = log.read_text()
    for sent in (
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x00\x05hello",
        b"\0" * 99,
    ):
        fail(server, sent)
        assert ask(server, files, "/health")[0] == 200
    assert log.read_text() == said


def fail(server, sent):
    """Send what is no handshake, up to the end of the connection; returns the client's port."""
    with server.connect() as client:
        client.sendall(sent)
        received(client)
        return client.getsockname()[1]


@pytest.mark.timed
def test_handshakes_are_bounded_and_those_that_stand_still_make_room_in_time(folder, files):
    settings = {"server.header_seconds": HEADER_SECONDS, "server.max_connections": 20}
    with contextlib.ExitStack() as stack, ServerProcess(folder, *files.flags, **settings) as server:
        before = num_files(server)
        for _ in range(300):
            stack.enter_context(server.connect())
        time.sleep(HEADER_SECONDS / 4)
        assert num_files(server) <= before + 40
        eventually(lambda: num_files(server) <= before + 2)
        assert ask(server, files, "/health")[0] == 200


def num_files(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def test_a_limit_on_open_files_that_is_too_low_is_reported_at_the_start(caplog, monkeypatch):
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    for hard, is_reported in ((1000, True), (5000, False), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (100, hard))
        caplog.clear()
        raise_file_limit(2048)
        assert ("ulimit -n" in caplog.text) is is_reported


def test_handshakes_that_fail_are_lines_with_address_and_reason_at_most_one_a_second(
    folder, files, tmp_path
):
    log = tmp_path / "stderr"
    settings = {"server.header_seconds": HEADER_SECONDS, "server.access_log": "true"}

    def told(port):
        eventually(lambda: f"127.0.0.1 port {port} failed: " in log.read_text())
        return next(line for line in log.read_text().splitlines() if f"port {port} " in line)

    with (
        log.open("w") as stderr,
        ServerProcess(folder, *files.flags, stderr=stderr, **settings) as server,
    ):
        assert "plain HTTP" in told(fail(server, b"GET /health HTTP/1.1\r\n\r\n"))
        time.sleep(1)
        with pytest.raises(ssl.SSLError), server.connect() as client:
            port = client.getsockname()[1]
            ssl.create_default_context().wrap_socket(client, server_hostname="localhost")
        assert "unknown ca" in told(port)
        for _ in range(20):
            fail(server, b"\0" * 99)
        line = told(fail(server, b"\x16\x03\x01"))  # after a second without an end
        assert f"not complete within {HEADER_SECONDS:g} s" in line
        assert "more since the last such line)" in line
        assert ask(server, files, "/health")[0] == 200
    assert log.read_text().count("TLS handshake") <= 5


@pytest.mark.timed
def test_half_of_a_handshake_is_cut_when_headers_would_be(served):
    server, files, _ = served
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(50)]
        for client in clients[::2]:
            client.sendall(b"\x16\x03\x01")
        begin = time.monotonic()
        assert ask(server, files, "/health")[0] == 200
        for client in clients:
            client.settimeout(10)
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""
        assert 0.5 * HEADER_SECONDS < time.monotonic() - begin < HEADER_SECONDS + 1


@pytest.mark.slow
def test_a_renewed_certificate_is_taken_up_while_the_server_runs(served):
    server, files, log = served
    _, before = ask(server, files, "/health")
    with socket.create_connection(("127.0.0.1", server.port)):
        key = files.key.read_bytes()
        files.issue()
        made = files.key.read_bytes()
        files.key.write_bytes(key)  # the old one's
        eventually(lambda: "is not renewed" in log.read_text())
        assert ask(server, files, "/health") == (200, before)
        files.key.write_bytes(made)
        eventually(lambda: ask(server, files, "/health")[1] != before)


def test_a_changed_file_is_loaded_once_and_a_broken_one_changes_nothing(files, caplog):
    caplog.set_level("INFO", "specserve")
    tls = tls_of(ServerConfig(**files.settings))
    before = number_of(tls.context, files)
    tls.renew_once()
    assert number_of(tls.context, files) == before
    files.certificate.write_text("nonsense")
    with pytest.raises(ConfigError):
        tls.renew_once()
    tls.renew_once()  # what is wrong is told once
    assert number_of(tls.context, files) == before
    files.certificate.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        tls.renew_once()
    assert not caplog.messages
    files.issue()
    tls.renew_once()
    tls.renew_once()
    assert number_of(tls.context, files) != before
    assert caplog.messages == [f"the certificate is renewed from {files.certificate}"]


def number_of(context, files):
    """The number of the certificate that a context shows to a client."""
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=files.ca)
    sides = (
        context.wrap_bio(ours, theirs, server_side=True),
        client.wrap_bio(theirs, ours, server_hostname="localhost"),
    )
    for _ in range(4):
        for side in sides[::-1]:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return sides[1].getpeercert()["serialNumber"]


def rsa_key():
    made = trustme.CA().issue_cert("localhost", key_type=trustme.KeyType.RSA)
    return made.private_key_pem.bytes()


def encrypt(files):
    key = load_pem_private_key(files.key.read_bytes(), None)
    kinds = Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(*kinds))


WRONG = {
    "missing": (lambda files: files.certificate.unlink(), "cert.pem cannot be read (No such file"),
    "no key file": (lambda files: files.key.unlink(), "key.pem cannot be read (No such file"),
    "a folder": (
        lambda files: (files.key.unlink(), files.key.mkdir()),
        "key.pem cannot be read (Is a directory",
    ),
    "no certificate": (
        lambda files: files.certificate.write_text("a"),
        "cert.pem contains no certificate in PEM",
    ),
    "half a certificate": (
        lambda files: os.truncate(files.certificate, 200),
        "cert.pem contains no certificate in PEM",
    ),
    "no key": (lambda files: files.key.write_text("a"), "key.pem contains no key in PEM"),
    "exchanged": (
        lambda files: files.certificate.write_bytes(files.key.read_bytes()),
        "cert.pem contains no certificate in PEM",
    ),
    "of another key": (
        lambda files: files.key.write_bytes(files.authority.private_key_pem.bytes()),
        "key.pem is not the key of the certificate",
    ),
    "of a key of another algorithm": (
        lambda files: files.key.write_bytes(rsa_key()),
        "key.pem is not the key of the certificate",
    ),
    "encrypted": (encrypt, "key.pem: the key is encrypted"),
}


@pytest.mark.parametrize(("spoil", "complaint"), WRONG.values(), ids=WRONG)
def test_files_that_cannot_be_used_are_reported_in_one_line_at_the_start(
    files, folder, capsys, spoil, complaint
):
    spoil(files)
    assert cli.main(["serve", str(folder), *files.flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and complaint in said
    assert "_ssl.c" not in said


def test_config_check_finds_a_certificate_and_a_key_that_do_not_match(files, capsys):
    check = ["config", "check"]
    for key, file in files.settings.items():
        check += ["--set", f"server.{key}={file}"]
    assert cli.main(check) == 0
    files.key.write_bytes(files.authority.private_key_pem.bytes())
    assert cli.main(check) == 1
    assert "key.pem is not the key of the certificate" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [0, 1])
def test_one_file_needs_the_other(files, capsys, flag):
    assert cli.main(["serve", files.flags[flag]]) == 1
    said = capsys.readouterr().err
    key, other = ("tls_certificate_file", "tls_key_file")[:: 1 if flag == 0 else -1]
    assert f"server.{key} = " in said and f"needs server.{other}. Set both, or none" in said
