"""The engines that `bench peers --gguf` adds: llama.cpp's programs, mistral.rs, OpenVINO GenAI."""

import json
import sys
from types import SimpleNamespace

import pytest

from specserve_bench.peers.adapters import llama_bench, llama_server, mistralrs, openvino
from specserve_bench.peers.cases import agreement
from specserve_bench.peers.peer import Peer, PeerError, read_timed
from specserve_bench.peers.protocol import EngineError, Setup
from specserve_bench.peers.systems import make_systems
from tests.bench.fake_engine import fake_python
from tests.bench.fake_programs import HELD, fake_programs
from tests.bench.test_peers import bench_peers, gets_to, starts, timed
from tests.bench.test_peers import two_cores as two_cores
from tests.models import gguf_files


def setup_of(model="model.gguf", program=None, tokenizer=None):
    return Setup(model, 64, 1, 1 << 20, 2, None, program=program, tokenizer=tokenizer)


def system_of(folder, name):
    programs = {name: str(fake_programs(folder) / name)}
    return make_systems({"specserve": sys.executable}, programs=programs)[1]


@pytest.fixture
def server(tmp_path):
    setup = setup_of(program=str(fake_programs(tmp_path) / "llama-server"))
    engine = llama_server.LlamaServer(setup)
    yield engine
    engine.process.kill()
    engine.process.wait()
    engine.connection.close()


def test_llama_server_streams_one_request_after_the_other(server):
    both = server.together([[5, 6], [7]], 4)
    assert [one.token_ids for one in both] == [[1, 2, 3, 4]] * 2
    assert [one.counts for one in both] == [[1, 1, 1, 1]] * 2
    assert server.version == "42 (abcdef)"
    with pytest.raises(EngineError, match="llama-server returned 400"):
        server.together([[]], 1)


def test_tokens_that_llama_server_holds_back_count_with_the_next_and_have_no_ids(server):
    [one] = server.together([[HELD]], 5)
    assert (one.counts, one.token_ids) == ([1, 1, 2, 1], [])
    [cut] = server.together([[HELD]], HELD)
    assert sum(cut.counts) == HELD, "the last event counts them"


def test_tokens_that_llama_server_adds_to_complete_a_character_do_not_count():
    told = [{"tokens": [n], "tokens_predicted": n} for n in (1, 2, 3)]
    one = timed([])
    llama_server.read_events(iter(told), 2, one)
    assert (one.counts, one.token_ids) == ([1, 1], [1, 2])
    with pytest.raises(EngineError, match="llama-server: too long"):
        llama_server.read_events(iter([{"error": {"message": "too long"}}]), 2, one)


@pytest.mark.parametrize("name", ["llama-server", "llama-bench"])
def test_programs_run_and_end_as_engines(name, tmp_path):
    with Peer(system_of(tmp_path, name), setup_of(program=str(tmp_path / name)), 30) as peer:
        [one] = peer.run([[1] * 30], 3, is_batch=False)
        assert sum(one.counts) == 3
        children = f"/proc/{peer.process.pid}/task/{peer.process.pid}/children"
        with open(children) as file:
            running = file.read().split()
        assert len(running) == (name == "llama-server")
        assert all(gets_to(pid, "T") for pid in running), "it is stopped with its adapter"
    assert all(gets_to(pid, "Z") for pid in running)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-server", r"llama-server cannot load the model \(exit code 1\)"),
        ("llama-bench", "llama-bench: error: no weights"),
    ],
)
def test_a_model_that_a_program_cannot_load_is_its_line(name, words, tmp_path):
    setup = setup_of("broken.gguf", str(tmp_path / name))
    with pytest.raises(PeerError, match=f"^{words}$"):  # noqa: SIM117, either may raise
        with Peer(system_of(tmp_path, name), setup, 30) as peer:
            peer.run([[1, 2]], 3, is_batch=False)


def test_llama_bench_measures_tokens_after_a_prompt_of_that_length(tmp_path):
    program = str(fake_programs(tmp_path) / "llama-bench")
    [one] = llama_bench.LlamaBench(setup_of(program=program)).together([[1] * 30], 4)
    assert one.times == pytest.approx([0.3, 0.33, 0.36, 0.39])
    assert (one.counts, one.token_ids) == ([1] * 4, [])


def test_tokens_without_ids_count_and_are_compared_with_no_text():
    fields = {"token_ids": [], "times": [1, 2], "counts": [1, 2]}
    assert read_timed(fields, 3).token_ids == []
    with pytest.raises(PeerError, match="3 tokens came where 4 were asked for"):
        read_timed(fields, 4)
    silent, ours = timed([1]), timed([1], [2], [7, 8])
    silent.token_ids = []
    assert agreement([silent], [ours]) is None
    assert agreement([silent, timed([1], [2], [7, 9])], [ours, ours]) == 0.5


class FakeMistral:
    """mistralrs, whose tokens are characters; it streams a text for each token."""

    ChatCompletionRequest = staticmethod(lambda **fields: SimpleNamespace(**fields))
    Which = SimpleNamespace(GGUF=lambda *args, **fields: (args, fields))

    def __init__(self, num_added=0, merges=False):
        self.num_added, self.merges = num_added, merges

    def Runner(self, **fields):
        self.fields = fields
        return self

    def detokenize_text(self, tokens, skip_special_tokens):
        return "".join(map(chr, tokens))

    def tokenize_text(self, text, add_special_tokens, enable_thinking):
        return [ord(c) for c in text][: -1 if self.merges else None]

    def send_chat_completion_request(self, request):
        assert (request.temperature, request.ignore_eos, request.stream) == (0, True, True)
        for n in range(request.max_tokens):
            is_last = n == request.max_tokens - 1
            count = len(request.messages) + self.num_added
            yield SimpleNamespace(usage=SimpleNamespace(prompt_tokens=count) if is_last else None)


def mistral_of(monkeypatch, fake):
    monkeypatch.setitem(sys.modules, "mistralrs", fake)
    monkeypatch.setattr(mistralrs, "version", lambda name: "9")
    monkeypatch.setattr("os.environ", {})
    return mistralrs.MistralRs(setup_of("folder/m.gguf", tokenizer="t.json"))


def test_mistral_rs_gets_text_of_the_same_token_ids(monkeypatch):
    engine = mistral_of(monkeypatch, FakeMistral())
    [one] = engine.together([[65, 66]], 3)
    assert (one.counts, one.token_ids, engine.version) == ([1, 1, 1], [], "9")
    assert engine.runner.fields["which"] == (("folder", "m.gguf"), {"tokenizer_json": "t.json"})
    assert engine.runner.fields["prefix_cache_n"] == 0
    assert mistralrs.os.environ == {"RAYON_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (FakeMistral(num_added=1), "reads the prompt as 3 token ids, not 2"),
        (FakeMistral(merges=True), "reads the text of the prompt as other token ids"),
    ],
)
def test_other_token_ids_of_mistral_rs_are_an_error(monkeypatch, fake, words):
    with pytest.raises(EngineError, match=words):
        mistral_of(monkeypatch, fake).together([[65, 66]], 3)


class FakeOpenVINO:
    """openvino and openvino_genai; the streamer gets one token, then the others at once."""

    GenerationConfig = StreamerBase = SimpleNamespace
    StreamingStatus = SimpleNamespace(RUNNING="running")
    Tensor = staticmethod(lambda ids: ids)

    def __init__(self, error=None):
        self.error = error

    def LLMPipeline(self, model, device, **properties):
        self.properties = properties
        if self.error:
            raise RuntimeError(self.error)
        return self

    def generate(self, ids, config, streamer):
        assert (ids.shape, config.do_sample, config.ignore_eos) == ((1, 2), False, True)
        assert streamer.write(4) == "running"
        streamer.write([*range(5, 4 + config.max_new_tokens)])
        streamer.end()


def openvino_of(monkeypatch, fake):
    for name in ("openvino", "openvino_genai"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(openvino, "version", lambda name: "9")
    return openvino.OpenVINO(setup_of())


def test_openvino_takes_and_gives_token_ids(monkeypatch):
    engine = openvino_of(monkeypatch, FakeOpenVINO())
    [one] = engine.together([[65, 66]], 3)
    assert (one.counts, one.token_ids) == ([1, 2], [4, 5, 6])
    assert engine.pipeline.properties == {"ATTENTION_BACKEND": "SDPA", "INFERENCE_NUM_THREADS": 2}


def test_a_file_that_openvino_cannot_read_is_one_line(monkeypatch):
    with pytest.raises(EngineError, match=r"^OpenVINO GenAI: \[load_gguf\] no such type$"):
        openvino_of(monkeypatch, FakeOpenVINO("Check failed:\n[load_gguf] no such type\n"))


def test_all_engines_are_compared_on_a_gguf_file(two_cores, tmp_path, capsys):
    file = gguf_files.write(tmp_path / "model", "smollm").file
    engines = ("llama", "ik", "mistralrs", "openvino")
    args = [f"--{name}={fake_python(tmp_path / name)}" for name in engines]
    (tmp_path / "bin").mkdir()
    args.append(f"--llama-programs={fake_programs(tmp_path / 'bin')}")
    assert bench_peers("--gguf", file, *args, "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ["specserve", "llama.cpp", "ik_llama.cpp", "mistral.rs", "OpenVINO GenAI"]
    assert [*result["figures"][0]["systems"]] == [*names, "llama-server", "llama-bench"]
    [setup] = {starts(tmp_path / "mistralrs")[0][2]}
    assert json.loads(setup)["tokenizer"].endswith("tokenizer.json")
    [program] = (
        {json.loads(s)["program"] for *_, s in starts(tmp_path / "ours")}
        - {None, ""}
        - {str(tmp_path / "bin" / "llama-bench")}
    )
    assert program == str(tmp_path / "bin" / "llama-server")


@pytest.mark.parametrize("flag", ["--mistralrs=a", "--openvino=a", "--llama-programs=a"])
def test_engines_of_gguf_files_need_one(flag, capsys):
    assert bench_peers(flag) == 1
    name = flag.partition("=")[0]
    assert f"{name}: this engine is measured only on a GGUF file" in capsys.readouterr().err


def test_a_folder_without_llama_cpps_programs_is_refused(two_cores, tmp_path, capsys):
    assert bench_peers("--gguf=x.gguf", f"--llama-programs={tmp_path}") == 1
    assert "there is no program llama-server. Name the folder" in capsys.readouterr().err
