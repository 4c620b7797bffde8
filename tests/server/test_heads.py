"""A head of the target guesses in a server: what is told of it, and that no text depends on it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import let_all_guess
from tests.models.eagle_heads import AUX_LAYER_IDS, LLAMA, write_head
from tests.models.mtp_layers import write_target
from tests.server.asking import CHAT, COMPLETIONS, chat_body, completion_body, streamed, whole
from tests.server.in_process import server_threads
from tests.server.server_process import ServerProcess

SPECULATION, DRAFT_MODEL = "/v1/speculation", "/v1/speculation/draft-model"
ADMIN = {"Authorization": "Bearer admin"}
DRAWN = {"temperature": 0.8, "seed": 5}
LONG = completion_body(**DRAWN, max_tokens=300)
MANY = {"max_tokens": 150}
ASKED = {
    "long": (COMPLETIONS, LONG),
    **{
        f"seed {i}": (COMPLETIONS, completion_body(**DRAWN | {"seed": i}, **MANY)) for i in range(4)
    },
    "greedy": (COMPLETIONS, completion_body(max_tokens=80, seed=1)),
    "drawn": (COMPLETIONS, completion_body(**DRAWN, max_tokens=80)),
    "four choices": (COMPLETIONS, completion_body(**DRAWN, max_tokens=40, n=4)),
    "a chat": (CHAT, chat_body(**DRAWN, max_tokens=60)),
    "a form": (
        COMPLETIONS,
        completion_body(**DRAWN, max_tokens=40, structured_outputs={"regex": "[a-z ,]{60,90}"}),
    ),
}
BLOCK_BYTES = 16 * 5 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, their size, float32
USUAL = ["ngram", "eagle", "grammar", "prediction"]
BESIDE = ["ngram", "model", "eagle", "grammar", "prediction"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_head(root / "head")
    write_head(root / "other", fields=LLAMA | {"eagle_aux_hidden_state_layer_ids": [0, 2]})
    write_target(root)
    (root / "target").rename(root / "mtp")
    for name, seed in {"target": 1, "same": 1, "small": 2}.items():
        tiny_checkpoint(root / name, seed=seed, num_hidden_layers=4)
    (root / "admin-keys").write_text("admin\n")
    return root


def of(folders, **parts):
    """Settings: the paths of some models, and who may change them."""
    paths = {f"drafter.{part}": str(folders / name) for part, name in parts.items()}
    return paths | {"server.admin_key_file": str(folders / "admin-keys")}


@pytest.fixture(scope="module")
def eager():
    with pytest.MonkeyPatch.context() as patch:
        let_all_guess(patch)
        yield


@pytest.fixture(scope="module")
def undisturbed(folders):
    """By target: the texts of all that is asked, without guesses."""

    def texts(target):
        with server_threads(folders / target, **{"drafter.name": "none"}) as server:
            return {name: whole(server, *asked) for name, asked in ASKED.items()}

    return {target: texts(target) for target in ("target", "mtp")}


def state(server):
    every = server.get(SPECULATION).body
    return {key: every[key] for key in ("drafter", "draft_model", "draft_head", "sources")}


def changed(server, **change):
    answer = server.ask("PATCH", SPECULATION, change)
    assert answer.status == 200, answer.body
    return state(server)


KINDS = {  # who guesses -> the target, settings, and what is told of the head
    "a head alone": ("target", {"model": "head"}, ["head", AUX_LAYER_IDS, 200]),
    "a head beside a draft model": (
        "target",
        {"model": "small", "head": "other"},
        ["other", [0, 2], 200],
    ),
    "MTP layers": ("mtp", {}, ["mtp", [2], 320]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_reported_and_no_text_depends_on_it(folders, undisturbed, eager, kind):
    target, parts, (name, aux_layer_ids, size) = KINDS[kind]
    with server_threads(folders / target, **of(folders, **parts)) as server:
        [card] = server.get("/v1/models").body["data"]
        of_head, is_beside = card["draft_head"], "head" in parts
        assert (of_head["name"], of_head["taps"]) == (name, aux_layer_ids)
        assert of_head["draft_vocab_size"] == size
        assert of_head["weights"]["maps"]
        assert card["sources"] == (BESIDE if is_beside else USUAL)
        assert ("draft_weights" in card) == is_beside
        seen = state(server)
        model = "small" if is_beside else None
        assert (seen["draft_head"], seen["draft_model"]) == (name, model)
        check_texts(server, undisturbed[target])
        assert server.metric("specserve_source_verified_tokens_total", source="eagle") > 0


def check_texts(server, texts):
    """Whole and as streams, side by side."""
    with ThreadPoolExecutor(16) as threads:
        asked = [(name, ask) for name in ASKED for ask in (whole, streamed)]
        answers = [threads.submit(ask, server, *ASKED[name]) for name, ask in asked]
        for (name, _), answer in zip(asked, answers, strict=True):
            assert answer.result() == texts[name], name
    server.wait_until_idle()


CHANGES = [  # in the order in which they come: what is asked for, and who may guess then
    ("PATCH", SPECULATION, {"sources": ["ngram"]}, ["ngram"]),
    ("PATCH", SPECULATION, {"sources": ["ngram", "eagle"], "max_nodes": 9}, ["ngram", "eagle"]),
    ("POST", DRAFT_MODEL, {"model": "small"}, ["ngram", "eagle", "model"]),
    ("PATCH", SPECULATION, {"drafter": "ngram"}, ["ngram"]),
    ("PATCH", SPECULATION, {"drafter": "eagle"}, ["eagle"]),
    ("PATCH", SPECULATION, {"drafter": "model"}, ["model"]),
    ("PATCH", SPECULATION, {"drafter": "none"}, []),
    ("PATCH", SPECULATION, {"drafter": "auto"}, BESIDE),
    ("POST", DRAFT_MODEL, {"model": "same", "quantize": "w8"}, BESIDE),
    ("DELETE", DRAFT_MODEL, None, USUAL),
    ("PATCH", SPECULATION, {"max_nodes": 0}, []),
    ("PATCH", SPECULATION, {"max_nodes": 63, "sources": ["eagle"]}, ["eagle"]),
]


@pytest.mark.parametrize("key", ["model", "head", None])
def test_who_draft_tokens_next_to_a_head_is_changed_while_texts_are_streamed(
    folders, undisturbed, eager, key
):
    """`key` names the head; the target has one of its own where it is None."""
    target, parts = ("target", {key: "head"}) if key else ("mtp", {})
    with (
        server_threads(folders / target, **of(folders, **parts)) as server,
        ThreadPoolExecutor(4) as threads,
    ):
        server.headers = ADMIN
        for method, path, body, sources in CHANGES:
            answers = [threads.submit(streamed, server, *ASKED["seed 1"]) for _ in range(2)]
            named = {"model": str(folders / body["model"])} if path == DRAFT_MODEL and body else {}
            answer = server.ask(method, path, body and body | named)
            assert (answer.status, answer.body.get("sources")) == (200, sources), answer.body
            assert answer.body["draft_head"] == (parts.get(key) or "mtp")
            assert all(answer.result() == undisturbed[target]["seed 1"] for answer in answers)
        server.wait_until_idle()


LATE = [
    ("PATCH", SPECULATION, {"drafter": "eagle"}, "no draft head was loaded at start-up"),
    ("PATCH", SPECULATION, {"sources": ["ngram", "eagle"]}, "(--draft-head)"),
    ("PATCH", SPECULATION, {"sources": ["eagle"]}, "(--draft-head)"),
]
NO_DRAFT_MODEL = [
    ("POST", DRAFT_MODEL, {"model": name}, "is a draft head, not a draft model")
    for name in ("head", "other")
]


def refused(server, folders, requests):
    """Ask for what cannot be: nothing is changed."""
    before = state(server)
    for method, path, body, words in requests:
        named = {"model": str(folders / body["model"])} if path == DRAFT_MODEL else {}
        answer = server.ask(method, path, body | named)
        assert answer.status == 400 and words in answer.body["error"]["message"], answer.body
        assert state(server) == before


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("target", {}),
        ("mtp", {"drafter.name": "ngram"}),
        ("mtp", {"drafter.options.sources": ["ngram"]}),
        ("mtp", {"speculation.max_nodes": 0}),
    ],
)
def test_a_head_that_was_not_there_at_the_start_is_refused(folders, undisturbed, target, settings):
    """But `auto` uses one only where there is one."""
    with server_threads(folders / target, **of(folders) | settings) as server:
        server.headers = ADMIN
        refused(server, folders, LATE[:1])
        told = changed(server, drafter="auto", max_nodes=8, options={})
        assert told["draft_head"] is None and "eagle" not in told["sources"]
        refused(server, folders, LATE + NO_DRAFT_MODEL)
        assert whole(server, *ASKED["greedy"]) == undisturbed[target]["greedy"]


@pytest.mark.parametrize("parts", [{}, {"model": "head"}, {"head": "head"}])
def test_a_head_is_refused_as_a_draft_model(folders, parts):
    with server_threads(folders / "target", **of(folders, **parts)) as server:
        server.headers = ADMIN
        refused(server, folders, NO_DRAFT_MODEL)


def test_a_head_alone_has_no_use_for_a_draft_model(folders):
    settings = of(folders, model="head") | {"drafter.name": "eagle"}
    with server_threads(folders / "target", **settings) as server:
        server.headers = ADMIN
        small = ("POST", DRAFT_MODEL, {"model": "small"}, "'eagle' uses no draft model")
        refused(server, folders, [small])
        assert server.ask("DELETE", DRAFT_MODEL).status == 200


def process(folders, *args, **settings):
    keys = f"--admin-key-file={folders / 'admin-keys'}"
    server = ServerProcess(folders / "target", keys, *args, **settings)
    server.headers = ADMIN
    return server


def test_texts_go_on_in_another_engine_process_with_the_same_head(folders, undisturbed):
    """Also after a change to others, with whom the next process begins."""
    settings = {"drafter.name": "eagle"}
    with process(folders, f"--draft-head={folders / 'head'}", **settings) as server:
        kill_in_the_middle(server, undisturbed["target"]["long"])
        assert state(server)["draft_head"] == "head"
        assert changed(server, drafter="ngram")["draft_head"] == "head"
        kill_in_the_middle(server, undisturbed["target"]["long"])
        assert (state(server)["sources"], state(server)["draft_head"]) == (["ngram"], "head")
        assert changed(server, drafter="eagle")["sources"] == ["eagle"]
        assert streamed(server, *ASKED["greedy"]) == undisturbed["target"]["greedy"]
        assert changed(server, drafter="auto")["sources"] == USUAL


def kill_in_the_middle(server, want):
    with server.open_stream(COMPLETIONS, LONG) as events:
        chunks = [next(events) for _ in range(20)]
        server.kill_engines(1)
        chunks += [*events][:-1]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    assert text == want[0][0][0]


def test_a_head_that_was_not_there_is_refused_by_another_engine_process_too(folders, undisturbed):
    with process(folders) as server:
        refused(server, folders, LATE)
        server.kill_engines(1)
        assert streamed(server, *ASKED["greedy"]) == undisturbed["target"]["greedy"]
        refused(server, folders, LATE)


def test_requests_that_lose_their_blocks_keep_their_texts_with_a_head(folders, undisturbed, eager):
    """A pool of 20 blocks, of which each of four requests needs 10."""
    settings = of(folders, model="head") | {"scheduler.max_model_len": 200, "drafter.name": "eagle"}
    settings["memory.kv_bytes"] = 20 * BLOCK_BYTES
    with server_threads(folders / "target", **settings) as server, ThreadPoolExecutor(4) as threads:
        names = [f"seed {i}" for i in range(4)]
        answers = [threads.submit(streamed, server, *ASKED[name]) for name in names]
        for name, answer in zip(names, answers, strict=True):
            assert answer.result() == undisturbed["target"][name]
        assert server.metric("vllm:num_preemptions_total") > 0
        server.wait_until_idle()


def test_a_prompt_that_is_found_in_the_cache_has_the_same_text_with_a_head(
    folders, undisturbed, eager
):
    prompt = "the cat sat on the mat, and the other cat sat on the other mat " * 3
    body = completion_body(**DRAWN, prompt=prompt, max_tokens=60)
    with server_threads(folders / "target", **{"drafter.name": "none"}) as server:
        want = whole(server, COMPLETIONS, body)
    with server_threads(folders / "target", **of(folders, model="head")) as server:
        server.headers = ADMIN
        assert whole(server, COMPLETIONS, body) == want
        assert cached(server, body) > 32
        changed(server, drafter="eagle")
        assert cached(server, body) > 32
        assert whole(server, COMPLETIONS, body) == want
        assert server.post("/v1/cache/reset", {}).status == 200
        assert whole(server, COMPLETIONS, body) == want


def cached(server, body):
    return server.post(COMPLETIONS, body).body["usage"]["prompt_tokens_details"]["cached_tokens"]
