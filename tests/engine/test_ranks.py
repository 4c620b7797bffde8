"""The text of several ranks is the text of one process, with every drafter and every event."""

import os
from collections import Counter
from contextlib import closing, contextmanager
from socket import recv_fds, socketpair
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from specserve.config import load_config
from specserve.engine import build, ranks
from specserve.engine.build import assemble
from specserve.engine.loading import load_target
from specserve.engine.pool_plan import Models
from specserve.engine.rank_messages import RankFailed, RankReady
from specserve.engine.rank_process import KEPT, MOST, first_message
from specserve.engine.ranks import Follower, Followers, check_parallel
from specserve.errors import ConfigError
from specserve.exchange.messages import Link
from specserve.exchange.sampling_params import Sampling
from specserve.models.decoder import Connections
from specserve.models.eagle_head import load_eagle_head
from specserve.models.loader import load_decoder, weight_bytes
from specserve.models.shard import Shard
from specserve.models.weight import AS_STORED, Rounding
from specserve_kernels import RankLost, Ranks, cpu
from specserve_kernels.threads import topology
from tests.adapters import ALL, write_adapter
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import (
    MAX_LEN,
    OPS,
    Scripted,
    Watch,
    bush,
    each_choice,
    engine_for,
    load_small,
    plain,
)
from tests.engine.ranks import Shards
from tests.engine.test_adapters import asked, finish, load, told
from tests.engine.test_promise import scenarios, stretched, truth_by_id
from tests.models.eagle_heads import write_head
from tests.models.test_shards import STAGED

SEEN = Counter()
PLACES = {  # the target, how many ranks share columns and layers, and whether experts are whole
    "tensor 2": ("target", 2, 1, False),
    "tensor 4 of experts in w4": ("experts", 4, 1, False),
    "pipeline 2": ("target", 1, 2, False),
    "tensor 2, pipeline 2, whole experts": ("experts", 2, 2, True),
    "tensor 2 of short convolutions": ("lfm2", 2, 1, False),
    "tensor 2, pipeline 2 of gated DeltaNets": ("qwen3_5", 2, 2, False),
    "tensor 2 of Mamba-2": ("falcon_h1", 2, 1, False),
}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if "convolutions" in name else name
    for name in PLACES
]
OF_DELTA = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"
MODULES = {  # that adapters change
    "experts": ALL[:4],
    "lfm2": (*ALL[:3], "in_proj", "out_proj"),
    "qwen3_5": (*ALL, *OF_DELTA),
    "falcon_h1": (*ALL, "in_proj", "out_proj"),
}
ROUNDING = {"experts": Rounding.named("w4", "w8")}  # of other models: as stored
GREEDY = Sampling(max_tokens=20, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_checkpoint(root / "target", seed=1)
    tiny_checkpoint(root / "experts", "qwen3_moe", seed=1)
    for family in ("lfm2", "qwen3_5", "falcon_h1"):
        tiny_checkpoint(root / family, family, seed=1, **STAGED[family])
    tiny_checkpoint(root / "draft", seed=1, num_hidden_layers=1)
    write_head(root / "head", eagle_aux_hidden_state_layer_ids=[0, 1])
    return root


@pytest.fixture(scope="module", params=NAMES)
def place(request):
    return PLACES[request.param]


@pytest.fixture(scope="module")
def whole(folders, place):
    rounding = ROUNDING.get(place[0], AS_STORED)
    target = load_decoder(folders / place[0], "fp32", OPS, MAX_LEN, rounding=rounding)
    return target, load_small(folders / "draft")


@pytest.fixture(scope="module")
def shards(folders, place):
    name, *sizes = place
    return Shards(folders / name, *sizes, rounding=ROUNDING.get(name, AS_STORED))


@contextmanager
def running(shards, *args, **given):
    engine = engine_for(shards.target, *args, shards=shards, **given)
    try:
        yield engine
    finally:
        engine.followers.close()


@pytest.mark.parametrize("drafter", ["none", "model", "auto", "eagle", bush])
@settings(max_examples=4)
@given(**scenarios)
def test_text_is_that_of_one_process(folders, whole, shards, drafter, scenario, events, **limits):
    target, draft = whole
    want = plain(target, scenario)
    given, name = stretched(limits), drafter
    if drafter == "eagle":
        given |= {"head": load_eagle_head(folders / "head", shards.target)}
        given |= {"options": {"min_gain": 0.0, "min_value": 0.0}}
    if drafter is bush:
        name = Scripted(drafter, truth_by_id(scenario, want))
    with running(shards, draft if drafter in ("model", "auto") else None, name, **given) as engine:
        watch = Watch(engine)
        got = watch.run(scenario, events)
        SEEN.update(watch.seen)
        SEEN["accepted"] += engine.stats.num_accepted
    for (_, _, may_leave), request, text in zip(each_choice(scenario), got, want, strict=True):
        found = request.token_ids.tolist()
        assert found == (text[: len(found)] if may_leave else text)


@settings(max_examples=4)
@given(**scenarios)
def test_kv_of_8_bits_is_cut_by_heads(whole, shards, scenario, events, **limits):
    want = plain(whole[0], scenario, kv_dtype="int8")
    with running(shards, None, "ngram", kv_dtype="int8", **stretched(limits)) as engine:
        got = Watch(engine).run(scenario, events)
    for (_, _, may_leave), request, text in zip(each_choice(scenario), got, want, strict=True):
        found = request.token_ids.tolist()
        assert found == (text[: len(found)] if may_leave else text)


def test_the_runs_above_met_what_is_hard():
    for what in ("moved", "preempted", "copied", "found", "loaded", "accepted"):
        assert SEEN[what] >= 20, (what, SEEN)


def test_a_lost_rank_ends_the_engine(shards):
    with running(shards, None, "ngram") as engine:
        engine.add([1, 2, 3], GREEDY)
        engine.step()
        engine.followers.each[-1].link.sock.close()
        with pytest.raises(RankLost):
            while not engine.is_idle:
                engine.step()


def test_every_rank_has_the_adapters_of_its_columns(folders, place, whole, shards, tmp_path):
    modules = MODULES.get(place[0], ALL)
    for seed in range(3):
        write_adapter(tmp_path / str(seed), folders / place[0], seed, 4, modules, scale=0.3)
    given = {"lora.max_loras": 2, "lora.max_rank": 4, "memory.kv_bytes": 1 << 26}
    cases = [asked(seed) for seed in range(6)]
    texts = []
    for parts in (None, shards):
        target = whole[0] if parts is None else parts.target
        followers = None if parts is None else parts.followers(given)
        engine = assemble(load_config(None, given), Models(target), 288, followers=followers)
        refs = [load(engine, tmp_path / str(seed % 3)) for seed in range(6)]
        each = zip(cases, refs, strict=True)
        ids = [engine.add_choices(p, [s], adapter=ref)[0].id for (p, s), ref in each]
        outputs = finish(engine)
        texts.append([told(outputs[id]) for id in ids])
        engine.close()
    assert texts[0] == texts[1]
    assert len({tuple(tokens) for tokens, _ in texts[0]}) == 6


def test_a_rank_has_an_adapter_that_waited_for_a_slot_while_others_were_loaded(
    folders, place, shards, tmp_path
):
    modules = MODULES.get(place[0], ALL)
    for seed in range(KEPT + 3):
        write_adapter(tmp_path / str(seed), folders / place[0], seed, 4, modules, scale=0.3)
    given = {"lora.max_loras": 1, "lora.max_rank": 4, "memory.kv_bytes": 1 << 26}
    followers = shards.followers(given)
    engine = assemble(load_config(None, given), Models(shards.target), 288, followers=followers)
    refs = [load(engine, tmp_path / str(seed)) for seed in range(2)]
    sampling = replace(GREEDY, max_tokens=200)
    first = engine.add_choices([1, 2, 3], [sampling], adapter=refs[0])[0]
    engine.step()
    second = engine.add_choices([1, 2, 3], [GREEDY], adapter=refs[1])[0]
    engine.step()
    for seed in range(2, KEPT + 3):
        load(engine, tmp_path / str(seed))
    outputs = finish(engine)
    engine.close()
    assert first.num_output == 200 and len(told(outputs[second.id])[0]) == 20


READY = RankReady("1", "kernels", "cpu", "model", "bf16", 8)
REFUSALS = {
    "a rank's own reason": (RankFailed("No such file."), r"rank 1: No such file\."),
    "another version": (replace(READY, version="2"), "rank 1 has another version than rank 0: 2"),
    "another model": (replace(READY, model="other"), "rank 1 has another model than rank 0: other"),
    "another dtype": (replace(READY, dtype="fp32"), "rank 1 has another dtype than rank 0: fp32"),
    "another build": (replace(READY, arithmetic="avx2"), "rank 1 has another arithmetic"),
    "no answer": (None, r"rank 1 ended during start-up \(exit code 0\)"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_rank_that_cannot_run_the_model_is_named(case):
    answer, words = REFUSALS[case]
    ours, theirs = socketpair()
    if answer is not None:
        Link(theirs).send(answer)
    theirs.close()
    ended = SimpleNamespace(wait=lambda seconds=None: 0)
    nobody = Connections(Ranks(0, 1, {}), Ranks(0, 1, {}))
    each = [Follower(1, ended, Link(ours))]
    followers = Followers(Shard(0, 2), nobody, each)
    with pytest.raises(ConfigError, match=words):
        followers.wait_until_ready(READY, OPS)


def test_settings_without_support_for_ranks_are_refused(tmp_path):
    given = {"parallel.tensor": 2, "memory.host_bytes": 1 << 20}
    disk = {"memory.disk_path": str(tmp_path), "memory.disk_bytes": 1 << 20}
    remote = {"parallel.address": "a:1", "model.device": "cuda"}
    staged = {"parallel.pipeline": 2, "model.task": "embed"}
    for more, words in (
        (disk, r"memory\.disk_path"),
        (staged, r"Set parallel\.pipeline = 1"),
        (remote, "only within one machine"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_parallel(load_config(None, given | more))
    with pytest.raises(ConfigError, match=r"no effect with parallel\.tensor = 1"):
        load_config(None, {"parallel.expert": True, "parallel.pipeline": 2})


def test_each_rank_needs_a_gpu_unless_one_gpu_is_named(monkeypatch):
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranks.torch.cuda, "device_count", lambda: 2)
    for device, tensor, num_sharing in (("auto", 2, 1), ("cuda", 2, 1), ("cuda:1", 4, 4)):
        config = load_config(None, {"model.device": device, "parallel.tensor": tensor})
        check_parallel(config)
        assert ranks.num_sharing(config) == num_sharing
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"asks for 4 ranks, each with a GPU, .* has 2"):
            check_parallel(load_config(None, {"model.device": device, "parallel.tensor": 4}))


def test_ranks_of_one_machine_must_fit_into_its_memory_together(folders, monkeypatch):
    """Each alone would fit, and the system would kill one of them."""
    given = {"model.path": str(folders / "target"), "model.device": "cpu", "parallel.tensor": 2}
    alone = weight_bytes(folders / "target", "auto", cpu, shard=Shard(0, 2))
    monkeypatch.setattr(cpu, "free_memory", lambda: alone * 3 // 2)
    monkeypatch.setattr(build, "start_followers", pytest.fail)
    with pytest.raises(ConfigError, match=r"its weights need .* are free"):
        build.build(load_config(None, given))
    remote = {"parallel.address": "10.0.0.1:29500", "parallel.secret_file": "x"}
    build.check_ranks_memory(load_config(None, given | remote))


def test_the_memory_of_all_ranks_is_reported_once(folders, caplog):
    given = {"model.path": str(folders / "target"), "model.device": "cpu", "parallel.tensor": 2}
    config = load_config(None, given)
    with caplog.at_level("INFO", logger="specserve"):
        build.check_ranks_memory(config)
        for rank in range(2):
            load_target(config, OPS, Shard(rank, 2))
    assert sum("its weights need" in line for line in caplog.messages) == 1


@pytest.fixture
def two_nodes(monkeypatch):
    """A machine with two nodes of two CPUs each. Returns those that the process may use."""
    allowed = {0, 1, 2, 3}

    def bind(pid, cpus):
        allowed.clear()
        allowed.update(cpus)

    both = {0, 1}, {2, 3}
    nodes = lambda cpus: [node & set(cpus) for node in both if node & set(cpus)]  # noqa: E731
    monkeypatch.setattr(ranks, "numa_nodes", nodes)
    monkeypatch.setattr(ranks.os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(ranks.os, "sched_setaffinity", bind)
    ranks.first_cpus.cache_clear()
    yield allowed
    ranks.first_cpus.cache_clear()


def test_two_nodes_are_too_few_for_three_ranks(two_nodes):
    for size in (1, 3):
        ranks.placed(load_config(None, {"parallel.tensor": size}))
        assert two_nodes == {0, 1, 2, 3}


def test_each_rank_computes_on_a_node_of_its_own(two_nodes, folders, monkeypatch):
    """A rank that rank 0 starts inherits the CPUs of rank 0, and learns those of the machine."""
    given = {"model.path": str(folders / "target"), "model.device": "cpu", "parallel.tensor": 2}
    config = load_config(None, given)
    ours, theirs = socketpair()
    process = SimpleNamespace(wait=lambda timeout: 0)
    monkeypatch.setattr(ranks, "start_module", lambda module: (process, ours))
    for _ in range(2):  # an engine of other drafters is built by the same process
        threads = ranks.placed(config).model.threads
        assert two_nodes == {0, 1} and threads == topology().cores
    with closing(ranks.start_followers(config, ends_with_thread=True)), theirs:
        for descriptor in recv_fds(theirs, 1, MOST)[1]:
            os.close(descriptor)
        start = first_message(Link(theirs))
    ranks.placed(start.config, start.rank, start.cpus)
    assert two_nodes == {2, 3}
