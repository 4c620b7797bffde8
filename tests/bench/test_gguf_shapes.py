"""GGUF files of published shapes, and their measurement next to other engines."""

import json
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from specserve import LLM, SamplingParams
from specserve.models import parse_config
from specserve.models.gguf.header import read_header
from specserve.models.loader import load_decoder
from specserve.models.source import open_source
from specserve_bench import gguf_shapes
from specserve_bench.bound import kv_token_bytes, state_bytes
from specserve_bench.gguf_shapes import SCALES, STD, blocks, has_more_bits, write_shape
from specserve_bench.peers import command
from specserve_bench.peers.adapters import llama, llama_server
from specserve_bench.peers.cases import EDITED, NUM_LONG, PeerCase
from specserve_bench.peers.comparison import Comparison, Lane, Limits, Pick
from specserve_bench.peers.gguf_table import gguf_caption, gguf_table
from specserve_bench.peers.protocol import LOOKUP, EngineError, PeerDrafting, Setup
from specserve_bench.peers.systems import PeerChoice, System
from specserve_kernels import reference
from tests.bench.fake_engine import fake_python
from tests.bench.test_peers import bench_peers, no_rates, starts, system, timed
from tests.bench.test_peers import two_cores as two_cores

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
TINY = {  # with layers of every kind, and rows of whole blocks
    "qwen3-0.6b": HEADS | {"num_hidden_layers": 3, "head_dim": 64},
    "qwen3.5-0.8b": HEADS
    | DELTA
    | {
        "num_hidden_layers": 2,
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2-1.2b": HEADS | {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]},
}


def tiny(name):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "max_position_embeddings": 40_960}
    return {**gguf_shapes.SHAPES[name], **TINY[name], **sizes}


@pytest.mark.parametrize("mixture", gguf_shapes.MIXTURES)
@pytest.mark.parametrize("name", TINY)
def test_a_file_has_the_shape_and_its_text_varies_and_repeats(name, mixture, tmp_path):
    file, fields = tmp_path / "model.gguf", tiny(name)
    write_shape(fields, mixture, file)
    source, want = open_source(file), parse_config.parse(fields)
    got = source.config()
    for field in ("num_layers", "hidden_size", "intermediate_size", "head_dim", "recurrent_layers"):
        assert getattr(got, field) == getattr(want, field), field
    assert (got.rope_parameters, got.norm_eps) == (want.rope_parameters, want.norm_eps)
    assert (got.max_positions, kv_token_bytes(got)) == (40_960, kv_token_bytes(want))
    text = "def main():\n    return [0]\n"
    prompt = source.tokenizer().encode(text)
    assert source.tokenizer().decode(prompt) == text
    settings = {"scheduler.max_model_len": 512, "drafter.name": "none"}
    settings["memory.kv_bytes"] = 1 << 26
    with LLM(str(file), set=settings, progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        response = llm.generate([prompt], params)[0].token_ids
        assert len(set(response)) > 4
        assert llm.generate([prompt + response + prompt], params)[0].token_ids == response


def test_types_of_weights_are_those_of_llama_cpps_quantizer(tmp_path):
    write_shape(tiny("qwen3-0.6b") | {"num_hidden_layers": 8}, "Q4_K_M", tmp_path / "m.gguf")
    types = {name: t.type.name for name, t in read_header(tmp_path / "m.gguf").tensors.items()}
    better = [0, 3, 6, 7]  # of eight layers
    assert [i for i in range(8) if has_more_bits(i, 8)] == better
    for name in ("attn_v", "ffn_down"):
        assert [i for i in range(8) if types[f"blk.{i}.{name}.weight"] == "Q6_K"] == better
    assert types["token_embd.weight"] == "Q6_K"
    assert {types[f"blk.{i}.attn_q.weight"] for i in range(8)} == {"Q4_K"}
    assert types["blk.0.attn_norm.weight"] == types["blk.0.attn_q_norm.weight"] == "F32"


@pytest.mark.parametrize("kind", SCALES)
def test_random_blocks_have_the_standard_deviation_and_no_mean(kind):
    made = blocks(kind, (64, 4096), STD, np.random.default_rng(0))
    values = gguf.quants.dequantize(made, gguf.GGMLQuantizationType[kind])
    assert values.shape == (64, 4096)
    assert values.std() == pytest.approx(STD, rel=0.05)
    assert abs(values.mean()) < STD / 30


def test_a_shape_without_whole_blocks_is_refused(tmp_path, capsys):
    with pytest.raises(gguf_shapes.ConfigError, match="which Q4_K does not divide"):
        write_shape(tiny("qwen3-0.6b") | {"intermediate_size": 800}, "Q4_K_M", tmp_path / "m.gguf")


def test_a_response_is_quoted_with_edits_between_equal_ends_of_a_prompt():
    case = PeerCase("drafting", [[*range(300)]], 64)
    response = [*range(1000, 1064)]
    [prompt] = case.quoting([response]).prompts
    assert prompt[:118] == prompt[-118:] == [*range(182, 300)]
    quoted = prompt[118:-118]
    places = [i for i in range(64) if quoted[i] != response[i]]
    assert places == [*range(EDITED - 1, 64, EDITED)]
    assert len(prompt) == 300


class Recorded:
    """A comparison whose engines do not run; `told` are the choices that a sweep is given."""

    def __init__(self, systems):
        limits = Limits(1, 2, 1, threads=2)
        self.comparison = Comparison(systems, None, None, limits, print, no_rates)
        self.comparison.decoding = {s: Pick(PeerChoice(2, None)) for s in systems}
        self.comparison.sweep = self
        self.told = []

    def pick(self, system, choices, case, figure):
        self.told.append((system.name, [c.words() for c in choices], case.prompts[0][118:124]))
        return Pick(choices[0])


def test_lookup_has_each_engines_own_response_and_a_peer_may_draft_nothing(tmp_path):
    python = fake_python(tmp_path)
    ours = System("specserve", "specserve", python, False, (16,), (), has_auto=True)
    peer, silent = (system(tmp_path, name=name) for name in ("own", "silent"))
    plain = system(tmp_path, name="plain")._replace(lookups=())
    case, recorded = PeerCase("drafting", [[*range(300)]], 64), Recorded([ours, peer])
    recorded.comparison.decoding |= {s: Pick(PeerChoice(2, None)) for s in (silent, plain)}
    told = {ours: [[1] * 64], peer: [[2] * 64], silent: [], plain: [[3] * 64]}
    lanes = [recorded.comparison.lookup(s, case, told) for s in told]
    both = ["2 threads, lookup 2", "2 threads, lookup 4", "2 threads"]
    assert recorded.told == [
        ("specserve", ["2 threads, lookup 16"], [1] * 6),
        ("own", both, [2] * 6),
        ("silent", both, [1] * 6),
    ]
    assert lanes[3].case is case and lanes[3].choice == PeerChoice(2, None)


def test_a_failed_plain_run_has_no_lookup(tmp_path):
    ours = System("specserve", "specserve", fake_python(tmp_path), False, (16,), (), has_auto=True)
    case, recorded = PeerCase("drafting", [[*range(300)]], 64), Recorded([ours])
    recorded.comparison.decoding = {ours: Pick(None, "no memory")}
    lane = recorded.comparison.lookup(ours, case, {ours: []})
    assert (lane.error, recorded.told) == ("no memory", [])


def test_responses_without_all_token_ids_are_none():
    lane = Lane(None, PeerCase("plain", [[1], [2]], 2), Pick(PeerChoice(1, None)))
    assert lane.responses == []
    lane.rounds = [[timed([1, 2], token_ids=[5, 6]), timed([1, 2], token_ids=[7, 8])]]
    assert lane.responses == [[5, 6], [7, 8]]
    lane.rounds[0][1].token_ids = []
    assert lane.responses == []


def test_a_table_of_results_has_rows_of_each_file_and_names_what_measured_them():
    def figure(name, drafter, **cells):
        ratio = {"peer": "llama.cpp", "median": 0.5, "low": 0.4, "high": 0.6}
        return {
            "figure": name,
            "drafter": drafter,
            "draft": None,
            "bound": None,
            "ratio": ratio,
            "systems": {n: {"median": m, "setting": s} for n, (m, s) in cells.items()},
        }

    peer = {"llama.cpp": (4, "2 threads, lookup 8")}
    machine = {"cores": 2, "cpu": "AMD", "commit": "abc", "date": "2026-11-28"}
    kept = {"versions": {"specserve": "1", "llama.cpp": "2"}, "machine": machine}
    plain = figure("TPOT ms", None, specserve=(2, "own threads"), **peer)
    failed = figure("TPOT ms", None, specserve=(1, "own threads"))
    failed |= {"ratio": None, "systems": failed["systems"] | {"llama.cpp": {"error": "no"}}}
    drafting = figure("TPOT with drafting ms", "lookup", specserve=(2, "lookup 16"), **peer)
    results = {
        "a.json": kept | {"model": "A", "rounds": 3, "figures": [plain, drafting]},
        "b.json": kept | {"model": "B", "rounds": 1, "figures": [failed]},
    }
    assert gguf_table(results).splitlines()[2:] == [
        "| A | TPOT, ms | 2 | 4 | - | 0.50 (0.40 to 0.60), llama.cpp |",
        "| A | TPOT, ms with lookup | 2 | 4, 8 | - | 0.50 (0.40 to 0.60), llama.cpp |",
        "| B | TPOT, ms | 1 | none | - | - |",
    ]
    told = " ".join(gguf_caption(results).split())
    assert (
        "- A was measured at commit abc, on 2026-11-28, on 2 cores of an AMD, in 3 rounds" in told
    )
    assert "in 1 round (`b.json`). Engines: specserve 1, llama.cpp 2." in told


@pytest.mark.parametrize("name", TINY)
def test_bytes_of_states_are_those_of_a_loaded_model(name, tmp_path):
    write_shape(tiny(name), "Q8_0", tmp_path / "m.gguf")
    model = load_decoder(tmp_path / "m.gguf", "bf16", reference, 64)
    size = sum(layout.num_pieces * layout.piece_bytes for layout in model.state_layouts())
    assert state_bytes(model.config) == size


class FakeMemory:
    """llama.cpp's API for a context, of which only a few states can be dropped."""

    def __getattr__(self, name):
        return lambda *args: 1

    def llama_context_default_params(self):
        self.params = SimpleNamespace()
        return self.params

    def llama_memory_seq_rm(self, memory, sequence, start, end):
        return start > 4


def test_llama_cpp_keeps_as_many_states_as_draft_tokens():
    api = FakeMemory()
    model = llama.LlamaModel(api, "m.gguf", 64, 1, 2, num_draft_tokens=8)
    assert api.params.n_rs_seq == 8
    model.cut(5)
    with pytest.raises(EngineError, match="cannot drop tokens"):
        model.cut(4)
    llama.LlamaModel(api, "m.gguf", 64, 1, 2)
    assert not hasattr(api.params, "n_rs_seq"), "snapshots take time"


def test_llama_server_looks_up_as_many_tokens_as_the_setting_has():
    setup = Setup("m.gguf", 64, 1, 0, 2, PeerDrafting(LOOKUP, 16), program="llama-server")
    flags = " ".join(llama_server.command(setup, 80))
    assert "--spec-type ngram-simple --spec-ngram-simple-size-m 16" in flags
    assert "--spec" not in " ".join(llama_server.command(setup._replace(drafting=None), 80))


def test_prompts_that_warm_up_are_no_longer_than_1000_tokens():
    warm = PeerCase("longest", [[*range(8000)]], 2).warm_up()
    assert warm.prompts == [[*range(NUM_LONG)]]


def test_the_command_measures_a_shape(two_cores, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "SHAPES", {"qwen3-0.6b": tiny("qwen3-0.6b")})
    args = ["--shape=qwen3-0.6b", "--mixture=Q8_0", "--longest=1", "--threads=2", "--long=1"]
    assert bench_peers(*args, f"--llama={fake_python(tmp_path / 'llama')}", "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["model"] == "qwen3-0.6b, random weights, Q8_0"
    figures = {figure["figure"]: figure for figure in result["figures"]}
    assert figures["TTFT 8000 ms"]["systems"].keys() == {"specserve", "llama.cpp"}
    drafting = figures["TPOT with drafting ms"]
    assert drafting["drafter"] == "lookup"
    assert drafting["systems"]["specserve"]["setting"] == "own threads, lookup 16"
    assert drafting["systems"]["llama.cpp"]["setting"] == "2 threads, lookup 16"
    assert {t["setting"] for t in result["sweep"] if t["system"] == "llama.cpp"} == {
        "2 threads",
        *(f"2 threads, lookup {n}" for n in (2, 4, 8, 16)),
    }
    setups = [json.loads(setup) for *_, setup in starts(tmp_path / "llama")]
    assert {s["threads"] for s in setups} == {2}
    assert max(s["max_len"] for s in setups) == 8002
