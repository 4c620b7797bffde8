import os
from pathlib import Path

import huggingface_hub
import pytest

from specserve.errors import ConfigError
from specserve.models.folder import read_json, resolve
from specserve.models.source import Folder, open_source


def test_a_local_folder_is_itself(tmp_path):
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["/no/such", "./no/such", "~/no/such", "no/such/folder"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", pytest.fail)
    with pytest.raises(ConfigError, match="no such folder"):
        resolve(path)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"or the folder with config\.json"):
        resolve(str(tmp_path / "model.safetensors"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache that holds org/name, and a hub that cannot be reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    return snapshot


def test_a_hub_id_is_a_snapshot_of_the_cache(cache):
    assert resolve("org/name") == cache


@pytest.mark.parametrize("name", ["org/other", "name", "org/no name"])
def test_a_model_that_the_hub_does_not_give_is_refused(cache, name):
    with pytest.raises(ConfigError, match=r"neither a local folder nor .* Check the name"):
        resolve(name)


def test_nothing_that_can_run_is_downloaded(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda path, **kw: asked.update(kw) or tmp_path
    )
    (tmp_path / "model.safetensors").touch()
    resolve("org/name")
    wanted = ["config.json", "model-1-of-2.safetensors", "chat_template.jinja", "merges.txt"]
    there = [*wanted, "pytorch_model.bin", "modeling.py", "consolidated.safetensors", "a/b.json"]
    # The hub's client filters with this function.
    assert list(huggingface_hub.utils.filter_repo_objects(there, **asked)) == wanted


@pytest.mark.parametrize("text", ["{", "[]", "", "\xff", "[" * 100_000], ids=range(5))
def test_broken_json_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json is not .*Download the file again"):
        read_json(path)


def test_a_missing_json_file_says_what_a_model_is(tmp_path):
    with pytest.raises(ConfigError, match=r"is missing\. Name a folder"):
        read_json(Path(tmp_path / "config.json"))


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
        *("chat_template.jinja", "additional_chat_templates/default.jinja"),
    ],
)
def test_whatever_decides_the_text_is_in_the_identity(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    told = [list(Folder(tmp_path).identity())]
    for text in ("a", "b"):
        file.write_text(text)
        told.append(list(Folder(tmp_path).identity()))
    assert told[0] != told[1] != told[2]


def test_what_is_no_regular_file_is_no_part_of_the_identity(tmp_path):
    before = list(Folder(tmp_path).identity())
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "dangling.json").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert list(Folder(tmp_path).identity()) == before
    (tmp_path / os.fsdecode(b"\xff.json")).touch()
    assert list(Folder(tmp_path).identity()) != before


def test_where_a_file_lies_is_in_the_identity(tmp_path):
    told = []
    for folder in ("a", "b"):
        file = tmp_path / folder / "templates" / folder / "x.jinja"
        file.parent.mkdir(parents=True)
        file.write_text("1")
        told.append(b"".join(Folder(tmp_path / folder / "templates").identity()))
    assert told[0] != told[1]


@pytest.mark.parametrize("place", [0, 3 << 20, (6 << 20) - 1])
def test_weights_that_differ_anywhere_have_another_identity(tmp_path, place):
    """Large files are not read as a whole, but in pieces from all over them."""
    weights, content = tmp_path / "model.safetensors", bytearray(6 << 20)
    weights.write_bytes(content)
    before = list(Folder(tmp_path).identity())
    content[place : place + (16 << 10)] = b"\1" * len(content[place : place + (16 << 10)])
    weights.write_bytes(content)
    assert list(Folder(tmp_path).identity()) != before
    assert sum(map(len, before)) < 4 << 20


@pytest.mark.parametrize(
    "name", ["config.json", "x.safetensors", "additional_chat_templates/default.jinja", "notes"]
)
def test_a_pipe_or_a_device_among_the_files_is_refused_before_any_is_opened(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=f"{name} is a .*, not a regular file"):
        open_source(tmp_path)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{name} is a .*, not a regular file"):
        open_source(tmp_path)


def test_a_pipe_in_the_place_of_a_gguf_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"model\.gguf is a .*, not a regular file"):
        open_source(resolve(str(tmp_path)))
