"""A server that needs no keys listens where other machines reach it only if it is told to."""

import socket

import pytest

from specserve.cli import command as cli
from specserve.config import ServerConfig
from specserve.errors import ConfigError
from specserve.server.listen import listen
from tests.server.server_process import ServerProcess

OWN = "127.0.0.1", "127.8.9.1", "::1", "localhost"
OPEN = "0.0.0.0", "::", "192.0.2.1", "both.example"
NAMES = {  # to addresses, as a resolver tells them
    "both.example": ["127.0.0.1", "192.0.2.1"],
    "own.example": ["127.0.0.1", "::1"],
}


@pytest.fixture(autouse=True)
def resolver(monkeypatch):
    """Knows the names above, and asks nobody else."""
    known = socket.getaddrinfo

    def resolve(host, *args, **kw):
        found = [known(address, *args, **kw) for address in NAMES.get(host, [host])]
        return [address for addresses in found for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.parametrize("host", OPEN)
def test_a_host_that_others_reach_is_refused_with_both_remedies(host):
    with pytest.raises(ConfigError) as refusal:
        listen(ServerConfig(host=host, port=0))
    said = str(refusal.value)
    assert said.startswith(f"server.host = '{host}' lets other machines use the server")
    assert "--api-key-file" in said and "--allow-no-keys" in said


@pytest.mark.parametrize("settings", [{"allow_no_keys": True}, {"api_key_file": "keys"}])
def test_with_keys_or_where_it_is_allowed_all_addresses_are_listened_at(settings):
    with listen(ServerConfig(host="0.0.0.0", port=0, **settings)) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize("host", OWN)
def test_hosts_of_this_machine_alone_need_no_keys(host):
    with listen(ServerConfig(host=host, port=0)) as listener:
        assert listener.getsockname()[1] > 0


def test_a_name_is_of_this_machine_if_all_of_its_addresses_are(monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "create_server", lambda address, **kw: asked.append(address))
    listen(ServerConfig(host="own.example", port=1))
    assert asked == [("own.example", 1)]


def test_the_command_says_so_in_one_line_and_starts_nothing(folder, capsys):
    assert cli.main(["serve", str(folder), "--host=0.0.0.0", "--port=0"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: server.host = '0.0.0.0'") and said.count("\n") == 1


def test_the_flag_lets_it_serve_everybody(folder):
    with ServerProcess(folder, "--host=0.0.0.0", "--allow-no-keys") as server:
        assert server.get("/health").status == 200
