"""What the adapters of the peers ask of each engine: the same text with any draft tokens."""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specserve.errors import ConfigError
from specserve_bench.peers.adapters import ik, llama, transformers, vllm
from specserve_bench.peers.adapters.specserve import Specserve
from specserve_bench.peers.gguf_file import write_gguf
from specserve_bench.peers.peer import Peer
from specserve_bench.peers.protocol import (
    AUTO,
    DRAFT,
    LOOKUP,
    EngineError,
    PeerDrafting,
    Setup,
    read_setup,
    write_setup,
)
from specserve_bench.peers.systems import System
from tests.checkpoints import tiny_checkpoint

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 8, 7, 6, 5, 9, 8, 7, 6, 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every token would end the text, if an engine let it."""
    ends = {"eos_token_id": [*range(320)]}
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), dtype=torch.bfloat16, **ends))


def setup_of(folder, drafting=None, threads=1):
    return Setup(folder, 64, 2, 1 << 22, threads, drafting)


def ways(folder):
    return [None, PeerDrafting(LOOKUP, 4), PeerDrafting(DRAFT, 3, folder)]


def alone(engine, prompt, num_tokens):
    [timed] = engine.together([prompt], num_tokens)
    return timed


def texts_are_the_same(engines, num_tokens=12):
    texts = [[alone(e, p, num_tokens).token_ids for p in PROMPTS] for e in engines]
    assert all(text == texts[0] for text in texts)
    assert [len(text) for text in texts[0]] == [num_tokens] * 2
    together = engines[0].together(PROMPTS, num_tokens)
    assert [each.token_ids for each in together] == texts[0]
    return texts[0]


def counts_and_times_fit(timed):
    assert sum(timed.counts) == len(timed.token_ids)
    assert len(timed.counts) == len(timed.times)
    assert timed.times == sorted(timed.times)
    assert timed.times[0] > 0


def test_specserve_and_transformers_say_the_same_with_any_drafter(folder):
    autos = [PeerDrafting(AUTO, 0, draft) for draft in (None, folder)]
    each = [*ways(folder), *autos]
    ours = texts_are_the_same([Specserve(setup_of(folder, way)) for way in each])
    engines = [transformers.Transformers(setup_of(folder, way)) for way in ways(folder)]
    assert texts_are_the_same(engines) == ours
    for engine in engines:
        timed = alone(engine, PROMPTS[0], 12)
        counts_and_times_fit(timed)
    assert len(timed.counts) < 12, "a draft that is the target has its draft tokens accepted"


def test_specserve_computes_every_prompt_anew(folder, monkeypatch):
    engine = Specserve(setup_of(folder))
    seen = []
    start = engine.llm.start
    monkeypatch.setattr(engine.llm, "start", lambda *args: seen.extend(start(*args)) or seen[-1:])
    for _ in range(2):
        alone(engine, [*range(10, 50)], 4)
    assert [generation.num_cached for generation in seen] == [0, 0]


def test_an_adapter_runs_in_a_process_of_its_own(folder):
    ours = System("specserve", "specserve", sys.executable, False, (), ())
    with Peer(ours, setup_of(folder), 60) as peer:
        [timed] = peer.run(PROMPTS[:1], 8, is_batch=False)
    assert timed.token_ids == alone(Specserve(setup_of(folder)), PROMPTS[0], 8).token_ids
    counts_and_times_fit(timed)


def test_a_setup_survives_the_command_line(folder):
    for drafting in ways(folder):
        setup = setup_of(folder, drafting)._replace(quantize="w4")
        assert read_setup(write_setup(setup)) == setup


class Tool:
    """llama.cpp's own quantization, of which only the calls are seen."""

    def __init__(self, code=0):
        self.code, self.made = code, []

    def llama_model_quantize_default_params(self):
        return SimpleNamespace(ftype=None)

    def llama_model_quantize(self, source, target, params):
        self.made.append((source.decode(), params.ftype))
        Path(target.decode()).write_bytes(b"GGUF")
        return self.code


def test_llama_cpp_quantizes_a_file_once(tmp_path, monkeypatch):
    tool, file = Tool(), str(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "llama_cpp", tool)
    assert llama.quantized(file, None) == file
    for quantize, name in [("w4", "q4_0"), ("w8", "q8_0"), ("w4", "q4_0")]:
        assert llama.quantized(file, quantize) == str(tmp_path / f"model.{name}.gguf")
    assert tool.made == [(file, 2), (file, 7)]


def test_a_file_that_llama_cpp_cannot_quantize_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", Tool(code=1))
    for _ in range(2):  # what was begun is not taken for the file
        with pytest.raises(EngineError, match="llama_model_quantize returned 1"):
            llama.quantized(str(tmp_path / "model.gguf"), "w4")


class Toy:
    """A model whose next token depends on all tokens before it and on their places."""

    def __init__(self, salt=0):
        self.salt, self.texts, self.rows = salt, {}, []

    def clear(self):
        self.texts = {}

    def cut(self, length):
        self.texts[0] = self.texts.get(0, [])[:length]

    def decode(self, rows):
        self.rows.append(len(rows))
        answers = []
        for row in rows:
            text = self.texts.setdefault(row.sequence, [])
            assert row.position == len(text), "KV is missing, or left of a rejected draft token"
            text.append(row.token)
            if row.is_read:
                answers.append(self.after(text))
        return answers

    def after(self, text):
        return sum((i + 3) * (t + self.salt) ** 2 for i, t in enumerate(text)) % 50


class Scripted:
    """Drafts the toy's own words, wrong from some draft token on."""

    def __init__(self, num_right, num_draft_tokens):
        self.num_right, self.num_draft_tokens = num_right, num_draft_tokens

    def draft(self, text):
        known = list(text)
        for i in range(self.num_draft_tokens):
            right = Toy().after(known)
            known.append(right if i < self.num_right else right + 1)
        return known[len(text) :]


GUESSERS = {
    "none": None,
    "right": Scripted(4, 4),
    "wrong": Scripted(0, 4),
    "right, then wrong": Scripted(2, 5),
    "the target's twin": llama.DraftModelDrafter(Toy(), 3),
    "another model": llama.DraftModelDrafter(Toy(salt=1), 3),
}


@pytest.mark.parametrize("name", GUESSERS)
def test_llama_cpp_says_the_same_with_any_drafter(name):
    toy = Toy()
    texts = texts_are_the_same([llama.Llama(toy, GUESSERS[name], "0")])
    assert texts == [own_text(prompt, 12) for prompt in PROMPTS]


def own_text(prompt, num_tokens):
    text = list(prompt)
    while len(text) < len(prompt) + num_tokens:
        text.append(Toy().after(text))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", ["right", "the target's twin"])
def test_accepted_draft_tokens_save_steps_of_llama_cpp(name):
    timed = alone(llama.Llama(Toy(), GUESSERS[name], "0"), PROMPTS[0], 12)
    draft_tokens = 4 if name == "right" else 3
    assert timed.counts[:3] == [1, draft_tokens + 1, draft_tokens + 1]
    counts_and_times_fit(timed)


def test_ik_llama_cpp_clears_its_kv_by_another_name():
    cleared = []
    model = ik.IkModel.__new__(ik.IkModel)
    model.api, model.context = SimpleNamespace(llama_kv_cache_clear=cleared.append), "context"
    model.clear()
    assert cleared == ["context"]


def test_a_long_prompt_of_llama_cpp_is_cut_into_batches():
    toy = Toy()
    llama.extend(toy, [1] * (2 * llama.BATCH + 5), 0)
    assert toy.rows == [llama.BATCH, llama.BATCH, 5]


def request_output(name, tokens):
    return SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens)])


class FakeVLLM:
    """The parts of vLLM that the adapter uses; a step gives each request one token, then two."""

    __version__ = "0.1"
    SamplingParams = staticmethod(lambda **fields: SimpleNamespace(**fields))
    sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))

    def LLM(self, model, **options):
        self.options = options
        return SimpleNamespace(llm_engine=self)

    def __init__(self):
        self.left = {}

    def add_request(self, name, prompt, params):
        assert (params.temperature, params.ignore_eos, params.output_kind) == (0, True, "delta")
        first = prompt["prompt_token_ids"][0]
        self.left[name] = [
            [first],
            *([first + i] * 2 for i in range(1, params.max_tokens // 2 + 1)),
        ]

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        done = [request_output(name, bursts.pop(0)) for name, bursts in self.left.items()]
        self.left = {name: bursts for name, bursts in self.left.items() if bursts}
        return done


def test_vllm_adds_up_what_each_step_brings(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", FakeVLLM())
    engine = vllm.VLLM(setup_of("m", PeerDrafting(DRAFT, 4, "d")))
    both = engine.together([[10], [20]], 5)
    assert [t.token_ids for t in both] == [[10, 11, 11, 12, 12], [20, 21, 21, 22, 22]]
    assert [t.counts for t in both] == [[1, 2, 2]] * 2
    assert alone(engine, [30], 3).token_ids == [30, 31, 31]
    assert engine.engine.options["speculative_config"] == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 4,
    }
    assert engine.engine.options["enable_prefix_caching"] is False


@pytest.mark.parametrize(("threads", "cores"), [(2, "3,5"), (None, "3,5,6")])
def test_vllm_gets_the_first_cores_that_there_are(monkeypatch, threads, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {6, 5, 3})
    found = vllm.environment(setup_of("m", threads=threads)._replace(kv_bytes=(1 << 30) + 1))
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == cores
    assert found["OMP_NUM_THREADS"] == str(len(cores.split(",")))
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_vllm_starts_anew_once_with_its_environment(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    restarted = []
    monkeypatch.setattr("os.execv", lambda *args: restarted.append(args))
    for _ in range(2):
        vllm.restart(setup_of("m"))
    assert restarted == [(sys.executable, sys.orig_argv)]


@contextmanager
def written(folder, file):
    write_gguf(folder, file)
    reader = gguf.GGUFReader(file)
    yield {tensor.name: tensor for tensor in reader.tensors}, reader.fields
    del reader


def bf16(tensor):
    return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm"])
def test_a_gguf_file_has_every_tensor_and_the_shape(family, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16)
    source = load_file(folder / "model.safetensors")
    with written(folder, tmp_path / "m.gguf") as (tensors, fields):
        assert len(tensors) == len(source)
        assert torch.equal(bf16(tensors["blk.1.ffn_down.weight"]), source[DOWN])
        norm = torch.from_numpy(np.array(tensors["output_norm.weight"].data))
        assert torch.equal(norm, source["model.norm.weight"].float())
        name = fields["general.architecture"].contents()
        assert fields[f"{name}.attention.head_count_kv"].contents() == 2
        assert fields[f"{name}.rope.freq_base"].contents() == 10000
        assert fields["tokenizer.ggml.model"].contents() == "no_vocab"
        assert fields[f"{name}.vocab_size"].contents() == 320


DOWN = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_llamas_rotary_pairs_lie_side_by_side_in_a_gguf_file(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    source = load_file(folder / "model.safetensors")[QUERY]
    with written(folder, tmp_path / "m.gguf") as (tensors, _):
        found = bf16(tensors["blk.0.attn_q.weight"])
    for head in range(4):
        for i in range(8):
            assert torch.equal(found[16 * head + 2 * i], source[16 * head + i])
            assert torch.equal(found[16 * head + 2 * i + 1], source[16 * head + i + 8])


def test_qwens_rotary_pairs_stay_where_they_are(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    with written(folder, tmp_path / "m.gguf") as (tensors, _):
        found = bf16(tensors["blk.0.attn_q.weight"])
    assert torch.equal(found, load_file(folder / "model.safetensors")[QUERY])


def test_what_a_gguf_file_would_lose_is_refused(tmp_path):
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    folder = tiny_checkpoint(tmp_path / "model", rope_parameters=scaled)
    with pytest.raises(ConfigError, match=r"rope_parameters scale positions. Measure without"):
        write_gguf(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_without_gguf_the_error_says_what_to_install(tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'specserve\[bench\]'"):
        write_gguf(folder, tmp_path / "m.gguf")
