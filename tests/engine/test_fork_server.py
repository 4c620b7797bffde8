"""Engine processes are forks of one process, which has read what they have in common."""

import signal
import subprocess

import pytest
import torch

from specserve.config import load_config
from specserve.engine import fork_server
from specserve.exchange.messages import (
    Add,
    EngineCommands,
    Failed,
    Frames,
    Ready,
    Report,
    decode_reply,
    frame,
    packed,
)
from specserve.exchange.sampling_params import Sampling
from specserve.exchange.spawn import ForkServer
from tests.checkpoints import tiny_checkpoint

GREEDY = Sampling(max_tokens=3, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
ASKED = Add(0, packed(range(5, 305)), GREEDY, [1])
SETTINGS = {"model.threads": 2, "memory.kv_bytes": 1 << 24, "scheduler.max_model_len": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("target"))


def config_of(folder, **settings):
    return load_config(None, SETTINGS | {"model.path": str(folder)} | settings)


def reply(sock):
    """The first that says whether the engine is ready."""
    frames = Frames()
    while data := sock.recv(1 << 16):
        for message in map(decode_reply, frames.feed(data)):
            if isinstance(message, Ready | Failed):
                return message
    return None


def test_the_weights_are_read_once_for_all_engines(folder):
    engines = ForkServer(config_of(folder))
    told = []
    for _ in range(2):
        process, sock = engines.start()
        with sock:
            told.append(reply(sock))
            process.kill()
            assert process.wait() == -signal.SIGKILL
    process.end()
    assert [*told[0].phases][:2] == ["kernels", "target"]
    assert not {"kernels", "target"} & told[1].phases.keys() and "pool" in told[1].phases


def test_a_fork_server_that_ends_takes_its_engine_along_and_another_one_begins_anew(folder):
    engines = ForkServer(config_of(folder))
    process, sock = engines.start()
    with sock:
        reply(sock)
        process.server.kill()
        assert process.wait() == -signal.SIGKILL
        while sock.recv(1 << 16):
            pass  # until it is closed, as the engine has ended
    process, sock = engines.start()
    with sock:
        assert "target" in reply(sock).phases
    process.end()


def test_an_engine_can_be_ended_before_and_after_it_is_there(folder):
    engines = ForkServer(config_of(folder))
    process, sock = engines.start()
    process.kill()  # while the fork server still imports
    assert process.wait() == -signal.SIGKILL
    sock.close()
    process, sock = engines.start()
    reply(sock)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    sock.close()  # an engine that nobody talks to ends by itself
    assert process.wait() == 0
    process.kill()
    process.end()
    assert process.wait() == 0


def test_what_is_wrong_with_a_model_is_reported_by_the_process_that_reads_it(folder):
    (folder / "model.safetensors").rename(folder / "kept")
    process, sock = ForkServer(config_of(folder)).start()
    with sock:
        assert "model.safetensors" in reply(sock).message
    process.end()
    (folder / "kept").rename(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("device", "cuda", "has_driver", "is_shared"),
    [
        ("cpu", "13.0", True, True),
        ("auto", None, True, True),
        ("auto", "13.0", False, True),
        ("auto", "13.0", True, False),
        ("cuda", None, False, False),
    ],
)
def test_engines_of_a_gpu_read_the_weights_by_themselves(
    folder, tmp_path, monkeypatch, device, cuda, has_driver, is_shared
):
    """A process that has used CUDA cannot be forked, so nothing here may ask it."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", None)
    monkeypatch.setattr(fork_server, "NVIDIA", tmp_path if has_driver else tmp_path / "none")
    assert fork_server.is_for_cpu(config_of(folder, **{"model.device": device})) is is_shared


def test_a_fork_computes_with_threads_of_its_own():
    """OpenMP would wait for ever for the threads of the process before, which are not in a fork."""
    config = load_config(None, {"model.threads": 2, "memory.kv_bytes": 1 << 28})
    process, sock = ForkServer(config).start()
    with sock:
        sock.settimeout(60)
        reply(sock)
        sock.sendall(frame(EngineCommands([ASKED], [])))
        frames, tokens = Frames(), []
        while len(tokens) < 3:
            for message in map(decode_reply, frames.feed(sock.recv(1 << 16))):
                if isinstance(message, Report):
                    tokens += [token for output in message.outputs for token in output.tokens]
        assert len(tokens) == 3
    process.end()
