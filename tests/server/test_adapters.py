"""LoRA adapters over HTTP: chosen by `model`, loaded and unloaded while the server runs."""

import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from specserve.cli import command as cli
from specserve.config import LoraConfig
from specserve.errors import ConfigError
from specserve.server import adapters
from tests.adapters import write_adapter
from tests.checkpoints import tiny_checkpoint
from tests.server.asking import CHAT, COMPLETIONS, chat_body, completion_body, streamed
from tests.server.in_process import server_threads
from tests.server.server_process import ServerProcess

RESPONSES = "/v1/responses"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADMIN = {"Authorization": "Bearer admin"}
LONG = completion_body(max_tokens=100, temperature=0.0, prompt=[*range(5, 60)])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model, adapters that callers may load, and one that they may not."""
    root = tmp_path_factory.mktemp("lora")
    base = tiny_checkpoint(root / "tiny", seed=1)
    for seed in range(4):
        write_adapter(root / "adapters" / f"adapter-{seed}", base, seed)
    write_adapter(root / "outside", base, 9)
    (root / "admin-keys").write_text("admin\nspeculator speculation\n")
    return root


def settings_of(root, **others):
    return {
        "lora.folder": str(root / "adapters"),
        "lora.modules": {"sql": str(root / "outside")},
        "lora.max_loras": 2,
        "server.admin_key_file": str(root / "admin-keys"),
    } | others


@pytest.fixture(scope="module")
def server(root):
    with server_threads(root / "tiny", **settings_of(root)) as server:
        server.headers = ADMIN
        yield server


@pytest.fixture(autouse=True)
def only_sql(server):
    """Each test begins and ends with the adapter of the start alone."""
    yield
    for name in names(server)[2:]:
        server.post(UNLOAD, {"lora_name": name})


def names(server):
    return [card["id"] for card in server.get("/v1/models").body["data"]]


def load(server, name, path, **others):
    return server.post(LOAD, {"lora_name": name, "lora_path": str(path)} | others)


def text(server, model=None, **others):
    body = LONG | others | ({} if model is None else {"model": model})
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 200, answer.body
    return answer.body["choices"][0]["text"]


def streamed_text(server, model):
    [[own, _, _]], _ = streamed(server, COMPLETIONS, LONG | {"model": model})
    return own


def test_an_adapter_of_the_start_is_listed_with_its_model_and_answers_by_its_name(server):
    base, own = server.get("/v1/models").body["data"]
    assert (base["id"], base["parent"]) == ("tiny", None)
    assert (own["id"], own["parent"], own["root"]) == ("sql", "tiny", "outside")
    assert own["adapter"]["rank"] == 4 and len(own["adapter"]["digest"]) == 64
    assert server.get("/v1/models/sql").body == own
    assert text(server, "sql") != text(server, "tiny") == text(server)
    told = [server.post(COMPLETIONS, LONG | {"model": name}).body for name in ("tiny", "sql")]
    assert [answer["model"] for answer in told] == ["tiny", "sql"]
    assert told[0]["system_fingerprint"] != told[1]["system_fingerprint"]


def test_every_route_takes_an_adapter(server):
    chat = [
        server.post(CHAT, chat_body(model=name, temperature=0)).body for name in ("tiny", "sql")
    ]
    assert chat[0]["choices"] != chat[1]["choices"] and chat[1]["model"] == "sql"
    asked = {"input": "Hello", "max_output_tokens": 20, "temperature": 0}
    made = [server.post(RESPONSES, asked | {"model": name}).body for name in ("tiny", "sql")]
    assert made[0]["output"][0]["content"] != made[1]["output"][0]["content"]
    assert made[1]["model"] == "sql"
    assert streamed_text(server, "sql") == text(server, "sql")
    assert server.post("/tokenize", {"model": "sql", "prompt": "a"}).status == 200


def test_an_adapter_is_loaded_used_and_unloaded(server):
    answer = load(server, "one", "adapter-1")
    assert answer.status == 200 and answer.body["parent"] == "tiny"
    assert names(server) == ["tiny", "sql", "one"]
    assert len({text(server, name) for name in ("tiny", "sql", "one")}) == 3
    answer = server.post(UNLOAD, {"lora_name": "one"})
    assert answer.status == 200 and answer.body["deleted"] is True
    assert names(server) == ["tiny", "sql"]
    answer = server.post(COMPLETIONS, LONG | {"model": "one"})
    error = answer.body["error"]
    assert answer.status == 404 and error["code"] == "model_not_found"
    assert error["message"].endswith("'tiny' and the adapters sql")
    assert server.post(UNLOAD, {"lora_name": "one"}).status == 404


def test_an_absolute_path_below_the_folder_is_as_good(server, root):
    assert load(server, "one", root / "adapters" / "adapter-1").status == 200


def test_a_name_stands_for_one_adapter_unless_it_is_replaced(server):
    load(server, "one", "adapter-1")
    before = text(server, "one")
    answer = load(server, "one", "adapter-2")
    assert answer.status == 400 and "load_inplace" in answer.body["error"]["message"]
    assert text(server, "one") == before
    assert load(server, "one", "adapter-2", load_inplace=True).status == 200
    load(server, "two", "adapter-2")
    assert before != text(server, "one") == text(server, "two")


def test_other_content_at_the_same_path_and_name_is_another_adapter(server, root):
    folder = shutil.copytree(root / "adapters" / "adapter-0", root / "adapters" / "changing")
    load(server, "one", "changing")
    text(server, "one")
    shutil.copytree(root / "adapters" / "adapter-3", folder, dirs_exist_ok=True)
    load(server, "one", "changing", load_inplace=True)
    load(server, "three", "adapter-3")
    body = LONG | {"model": "one"}
    answer = server.post(COMPLETIONS, body).body
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["choices"][0]["text"] == text(server, "three")


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("x", "../outside", "not a folder below lora.folder"),
        ("x", "/etc", "not a folder below lora.folder"),
        ("x", "missing", "not a folder below lora.folder"),
        ("x", ".", "not a folder below lora.folder"),
        ("x", "link", "not a folder below lora.folder"),
        ("x", "org/name", "not a folder below lora.folder"),
        ("x", "a\0b", "not a folder below lora.folder"),
        ("x", "a" * 4000, "File name too long"),
        ("tiny", "adapter-0", "belongs to the model"),
        ("sql", "adapter-0", "belongs to another adapter"),
        ("a\nb", "adapter-0", "printable characters"),
        ("a,b", "adapter-0", "has a comma"),
        ("x", "strange", "not a folder below lora.folder"),
        ("pickled", "pickled", "a pickle, which can run code"),
        ("wide", "wide", "rank 32, and the maximum is 16"),
        ("wrong", "wrong", "has the shape"),
        ("unknown", "unknown", "changes an unsupported module"),
        ("dora", "dora", "use_dora = True is not supported"),
        ("biased", "biased", "bias = 'all' is not supported"),
        ("saving", "saving", r"modules_to_save = \['lm_head'\] is not supported"),
        ("forever", "forever", "takes too long"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_cannot_be_loaded_is_refused_and_changes_nothing(server, root, name, path, message):
    home, base = root / "adapters", root / "tiny"
    makes = {
        "pickled": lambda at: pickled(at, base),
        "wide": lambda at: write_adapter(at, base, rank=32),
        "wrong": lambda at: write_adapter(at, tiny_checkpoint(root / "other", hidden_size=96)),
        "unknown": lambda at: write_adapter(at, tiny_checkpoint(root / "l3", num_hidden_layers=3)),
        "dora": lambda at: write_adapter(at, base, use_dora=True),
        "biased": lambda at: write_adapter(at, base, bias="all"),
        "saving": lambda at: write_adapter(at, base, modules_to_save=["lm_head"]),
        "forever": lambda at: write_adapter(at, base, rank_pattern={"(.*)" * 9 + r"\3\4[!?]": 2}),
        "strange": lambda at: strange(at, base),
        "link": lambda at: at.symlink_to(root / "outside"),
    }
    if path in makes and not (home / path).exists():
        makes[path](home / path)
    before = names(server)
    answer = load(server, name, path)
    assert answer.status == 400
    error = answer.body["error"]
    assert error["type"] == "invalid_request_error"
    is_of_name = path == "adapter-0"
    assert error["param"] == ("lora_name" if is_of_name else "lora_path")
    assert re.search(message, error["message"]), error["message"]
    assert names(server) == before
    assert text(server, "sql")


def strange(link, base):
    """A link to a folder whose name is no text."""
    folder = Path(os.fsdecode(os.fsencode(link.parent) + b"/\xff"))
    write_adapter(folder, base)
    link.symlink_to(folder)


def test_a_hub_id_is_never_a_folder(root, monkeypatch):
    monkeypatch.chdir(root)
    asked = []
    monkeypatch.setattr(adapters, "download", lambda path: asked.append(path) or Path("hub"))
    lora = LoraConfig(allow_hub=True)
    assert adapters.find_folder(lora, "adapters/adapter-0") == Path("hub")
    assert asked == ["adapters/adapter-0"]
    for path in ("../tiny", "adapters/..", "/etc/x", "a/b/c", "a", "~/b", "a/b\n"):
        with pytest.raises(ConfigError, match="or a hub id"):
            adapters.find_folder(lora, path)


def pickled(folder, base):
    write_adapter(folder, base)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "x"}, "lora_path is missing"),
        ({"lora_path": "x"}, "lora_name is missing"),
        ({"lora_name": 1, "lora_path": "x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "x", "lora_int_id": 3}, "unknown field 'lora_int_id'"),
    ],
)
def test_a_body_that_is_wrong_is_refused_by_its_field(server, body, message):
    answer = server.post(LOAD, body)
    assert answer.status == 400 and message in answer.body["error"]["message"]


def test_only_keys_with_the_scope_may_load(server):
    body = {"lora_name": "x", "lora_path": "adapter-0"}
    for headers in ({"Authorization": "Bearer speculator"}, {"Authorization": "Bearer other"}):
        assert server.post(LOAD, body, headers=headers).status == 403
        assert server.post(UNLOAD, {"lora_name": "sql"}, headers=headers).status == 403
    assert names(server) == ["tiny", "sql"]


def test_the_running_request_keeps_what_was_unloaded(server):
    load(server, "one", "adapter-1")
    want = text(server, "one")
    with server.open_stream(COMPLETIONS, LONG | {"model": "one"}) as events:
        got = next(events)["choices"][0]["text"]
        server.post(UNLOAD, {"lora_name": "one"})
        for event in events:
            if event != "[DONE]":
                got += event["choices"][0]["text"]
    assert got == want


def test_adapters_of_requests_are_reported_to_routers(server):
    with server.open_stream(COMPLETIONS, LONG | {"model": "sql", "max_tokens": 400}) as events:
        next(events)
        told = {"max_lora": "2", "running_lora_adapters": "sql", "waiting_lora_adapters": ""}
        assert server.metric("vllm:lora_requests_info", **told) > 0


def test_many_at_once_have_their_own_texts(server):
    for i in range(4):
        load(server, f"a{i}", f"adapter-{i}")
    models = ["tiny", "sql", "a0", "a1", "a2", "a3", "sql", "a0"]
    want, got = [text(server, model) for model in models], [None] * len(models)

    def ask(i):
        got[i] = streamed_text(server, models[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == want


def test_a_server_without_slots_says_how_to_have_some(root):
    with server_threads(
        root / "tiny", **{"server.admin_key_file": str(root / "admin-keys")}
    ) as plain:
        plain.headers = ADMIN
        answer = load(plain, "x", "adapter-0")
    assert answer.status == 400 and "--max-loras" in answer.body["error"]["message"]


def test_another_engine_process_goes_on_with_adapters(root):
    keys = f"--admin-key-file={root / 'admin-keys'}"
    module = f"--lora-modules=sql={root / 'outside'}"
    with ServerProcess(root / "tiny", keys, module) as server:
        server.headers = ADMIN
        want = text(server, "sql", max_tokens=300)
        with server.open_stream(COMPLETIONS, LONG | {"model": "sql", "max_tokens": 300}) as events:
            got = next(events)["choices"][0]["text"]
            os.kill(server.engine_pid, 9)
            for event in events:
                if event != "[DONE]":
                    got += event["choices"][0]["text"]
        assert got == want


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-modules", "sql"], "--lora-modules sql is not NAME=PATH"),
        (["--lora-modules", "a=b", "a=c"], "repeats the name 'a'"),
        (["--lora-modules", "a=/missing"], "/missing: no such folder"),
        (["--lora-modules", "tiny=."], "belongs to the model"),
        (["--lora-modules", "a=.", "--max-loras", "0"], "lora.modules has no effect"),
        (["--max-lora-rank", "0"], "lora.max_rank = 0 is invalid"),
        (["--enable-lora", "--max-loras", "0"], "--enable-lora contradicts lora.max_loras = 0"),
        (["--set", "lora.folder=/missing"], "lora.folder = '/missing': no such folder"),
    ],
)
def test_flags_that_are_wrong_are_one_line(root, capsys, flags, message):
    assert cli.main(["serve", str(root / "tiny"), *flags]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_an_adapter_of_the_start_that_is_broken_ends_the_start_with_one_line(root, capfd):
    pickled(root / "broken", root / "tiny")
    flags = ["--lora-modules", f"sql={root / 'broken'}", "--port=0", "--set=model.threads=1"]
    process = ServerProcess(root / "tiny", *flags)
    _, said = process.process.communicate(timeout=60)
    assert process.process.returncode == 1
    assert said.strip().splitlines()[-1].startswith("error: ") and "a pickle" in said


@pytest.mark.slow
def test_loading_and_unloading_200_times_under_eight_streams_leaves_memory_flat(root):
    flags = [f"--admin-key-file={root / 'admin-keys'}", f"--lora-modules=sql={root / 'outside'}"]
    settings = {"lora.folder": str(root / "adapters"), "lora.max_loras": 2}
    with ServerProcess(root / "tiny", *flags, **settings) as server:
        server.headers = ADMIN
        want = {name: text(server, name) for name in ("tiny", "sql")}
        done, wrong, sizes = threading.Event(), [], []

        def ask_on(name):
            while not done.is_set():
                if streamed_text(server, name) != want[name]:
                    wrong.append(name)

        threads = [threading.Thread(target=ask_on, args=(n,)) for n in ["tiny", "sql"] * 4]
        for thread in threads:
            thread.start()
        for turn in range(200):
            assert load(server, "one", f"adapter-{turn % 4}").status == 200
            assert text(server, "one", max_tokens=2)
            assert server.post(UNLOAD, {"lora_name": "one"}).status == 200
            if turn % 50 == 49:
                pids = server.engine_pid, server.process.pid
                sizes.append([resident_mib(pid) for pid in pids])
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
    growth = [after - before for before, after in zip(sizes[1], sizes[-1], strict=True)]
    assert max(growth) < 8, f"MiB of engine and HTTP process: {sizes}"


def resident_mib(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
