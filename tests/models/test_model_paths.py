"""Paths that lead to no model: each is an error that names the path."""

import errno

import pytest

from specserve.cli import command as cli
from specserve.config import LoraConfig
from specserve.errors import ConfigError
from specserve.models import folder
from specserve.models.folder import not_written
from specserve.models.weight_files import check_is_at_home
from specserve.server.adapters import find_folder


@pytest.fixture
def links(tmp_path, monkeypatch):
    """The working folder, with links that lead to themselves, to each other and to nothing."""
    monkeypatch.chdir(tmp_path)
    for name, target in {"self": "self", "a": "b", "b": "a", "gone": "nowhere"}.items():
        (tmp_path / name).symlink_to(target)
    return tmp_path


PATHS = {
    "~nobody-of-this-name/model": "unknown user",
    "self": "is a broken link",
    "b": "is a broken link",
    "./self/model": "no such folder",
    "gone": "is a broken link",
    "x" * 300: "File name too long",
    "gone.gguf": "no such file",
}


@pytest.mark.parametrize(("path", "words"), PATHS.items())
def test_a_path_that_leads_to_no_model_is_named(links, path, words):
    with pytest.raises(ConfigError, match=words) as e:
        folder.resolve(path)
    assert str(e.value).startswith(path)


@pytest.mark.parametrize("flag", ["--model", "--draft-model", "--draft-head"])
@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "self"])
def test_the_command_names_the_path_too(links, capsys, flag, path):
    assert cli.main(["generate", "a", f"{flag}={path}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {path}")


def test_a_target_that_is_a_link_to_itself_is_there(links, capsys, tmp_path):
    (tmp_path / "model").mkdir()
    assert cli.main(["quantize", "model", "self", "--to=w8"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("path", ["self", "a", "self/x", "../self", "~nobody-of-this-name"])
def test_an_adapter_is_no_link_to_itself(links, path):
    with pytest.raises(ConfigError, match=r"lora_path: .* is not a folder below lora\.folder"):
        find_folder(LoraConfig(folder=str(links)), path)


def test_a_file_that_is_a_link_to_itself_leaves_its_folder_to_no_other(links):
    check_is_at_home(links, links / "self")
    with pytest.raises(ConfigError, match="outside of the folder"):
        check_is_at_home(links / "other", links / "self")


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    RuntimeError("Data processing error: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=range(3))
def test_a_download_to_a_full_disk_asks_for_space(monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(
        ConfigError, match="Free some space on the disk of the hub cache, or set HF_HOME"
    ):
        folder.download("org/model")
    with pytest.raises(
        ConfigError, match=r"cannot be written .*\. Free some space, or use another disk"
    ):
        raise not_written("x", error)


def test_another_failure_asks_for_another_place():
    error = PermissionError(errno.EACCES, "Permission denied")
    assert (
        str(not_written("x", error))
        == "x: cannot be written (Permission denied). Name another path"
    )
