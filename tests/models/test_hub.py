"""GGUF files of hub repositories and of Ollama's store are found by name."""

import json
import logging
from fnmatch import fnmatch

import huggingface_hub
import pytest
from huggingface_hub import ModelInfo
from huggingface_hub.errors import OfflineModeIsEnabled

from specserve.errors import ConfigError
from specserve.models import hub
from specserve.models.folder import name_of, resolve
from specserve.models.hub import choose, parts_of, type_of
from specserve.models.ollama import WEIGHTS
from tests.models.gguf_files import write

TYPES = {
    "Qwen3-0.6B-Q8_0.gguf": "Q8_0",
    "model.Q4_K_M.gguf": "Q4_K_M",
    "gemma-3-270m-it-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
    "Qwen3-30B-A3B-IQ2_XXS.gguf": "IQ2_XXS",
    "gpt-oss-20b-mxfp4.gguf": "MXFP4",
    "BF16/Llama-70B-BF16-00001-of-00003.gguf": "BF16",
    "Q6_K/model-00001-of-00002.gguf": "Q6_K",
    "ggml-model-f16.gguf": "F16",
    "Q4-model-TQ2_0.gguf": "TQ2_0",
    "model.gguf": "",
}


@pytest.mark.parametrize(("file", "type"), TYPES.items(), ids=TYPES)
def test_the_type_is_in_the_name(file, type):
    assert type_of(file) == type


MANY = [
    "README.md",
    "config.json",
    "m-Q8_0.gguf",
    "m-Q4_K_M.gguf",
    "m-IQ3_XXS.gguf",
    "F16/m-F16-00001-of-00002.gguf",
    "F16/m-F16-00002-of-00002.gguf",
    "mmproj-F16.gguf",
    "m.imatrix.gguf",
]
CHOICES = {  # files, what is asked for -> the files of the model
    "the usual type": (MANY, "", ["m-Q4_K_M.gguf"]),
    "a type": (MANY, "Q8_0", ["m-Q8_0.gguf"]),
    "a type in other letters": (MANY, "iq3_xxs", ["m-IQ3_XXS.gguf"]),
    "a split model in a folder": (MANY, "F16", MANY[5:7]),
    "a file": (MANY, "m-Q8_0.gguf", ["m-Q8_0.gguf"]),
    "the first part": (MANY, MANY[5], MANY[5:7]),
    "the best type": (["m-Q2_K.gguf", "m-Q6_K.gguf", "m-F16.gguf"], "", ["m-Q6_K.gguf"]),
    "the only file": (["model.gguf"], "", ["model.gguf"]),
    "plain weights": (["m-F16.gguf", "m-BF16.gguf"], "", ["m-F16.gguf"]),
    "no GGUF file": (["config.json"], "", []),
}


@pytest.mark.parametrize(("files", "asked", "want"), CHOICES.values(), ids=CHOICES)
def test_a_type_or_a_file_is_chosen(files, asked, want):
    assert choose("org/m", files, asked) == tuple(want)


REFUSALS = {  # files, what is asked for -> the complaint
    "another type": (MANY, "Q5_0", "org/m:Q5_0 is not in the repository. It has F16, IQ3_XXS, Q4"),
    "another file": (MANY, "x.gguf", "org/m:x.gguf is not in the repository"),
    "no GGUF file": (["a.safetensors"], "Q8_0", "the repository has no GGUF file. Use org/m"),
    "two models": (["a-Q8_0.gguf", "b-Q8_0.gguf"], "", "2 models of type Q8_0 .* like org/m:a-Q8"),
}


@pytest.mark.parametrize(("files", "asked", "complaint"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_there_is_named(files, asked, complaint):
    with pytest.raises(ConfigError, match=complaint):
        choose("org/m", files, asked)


def test_a_type_that_was_not_asked_for_is_reported(caplog):
    caplog.set_level(logging.INFO, "specserve")
    choose("org/m", ["m-Q6_K.gguf"], "")
    assert caplog.messages == ["org/m: loading type Q6_K (m-Q6_K.gguf)"]


def test_all_parts_are_downloaded():
    assert parts_of("a/m-00001-of-00003.gguf")[2] == "a/m-00003-of-00003.gguf"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A hub whose repository org/m is a folder."""
    folder, asked = tmp_path / "org" / "m", []
    hub.fetch.cache_clear()

    def snapshot(repo, local_files_only=False, allow_patterns=None, **others):
        asked.append(allow_patterns)
        if repo != "org/m":
            raise FileNotFoundError("404")
        return str(folder)

    def files(self, repo):
        if repo != "org/m":
            raise FileNotFoundError("404")
        found = (str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
        return ModelInfo(id=repo, siblings=[{"rfilename": name} for name in found])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", files)
    monkeypatch.asked = asked
    monkeypatch.folder = folder
    yield monkeypatch
    hub.fetch.cache_clear()


def test_a_model_of_the_hub_is_its_file(store):
    file = write(store.folder / "Q8_0", "llama", parts=8).file
    for path in ("org/m", "org/m:q8_0", "org/m:Q8_0/model-00001-of-00003.gguf"):
        assert resolve(path) == file
    assert store.asked[1] == [f"Q8_0/model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert name_of("org/m:q8_0") == "org/m:q8_0"


def test_a_file_name_is_no_pattern(store):
    file = write(store.folder, "llama").file
    file = file.rename(file.with_name("m[1]-Q8_0.gguf"))
    assert resolve("org/m:Q8_0") == file
    assert fnmatch(file.name, store.asked[-1][0])


def test_a_repository_with_safetensors_is_a_folder(store):
    folder = write(store.folder).plain.parent
    (folder / "model.safetensors").touch()
    assert resolve("org/m") == folder


def test_without_the_hub_the_cache_is_searched(store):
    def unreachable(self, repo):
        raise OfflineModeIsEnabled("offline")

    store.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    file = write(store.folder).file
    assert resolve("org/m:model.gguf") == file
    with pytest.raises(ConfigError, match=r"org/m:Q8_0 is not in the repository\. It has model"):
        resolve("org/m:Q8_0")


def test_a_part_that_is_not_in_the_cache_is_reported(store):
    first = write(store.folder, "llama", parts=8).file
    first.with_name("model-00002-of-00003.gguf").unlink()
    with pytest.raises(ConfigError, match=r"00002-of-00003\.gguf is not in the hub cache"):
        resolve("org/m")


def test_a_repository_that_is_not_there_is_reported(store):
    for path in ("org/other", "org/other:Q8_0"):
        with pytest.raises(ConfigError, match=r"neither a local folder nor .*404"):
            resolve(path)


@pytest.fixture
def ollama(tmp_path, monkeypatch):
    """A store with llama3.2:1b, and the file of its weights."""
    file = write(tmp_path / "model").file
    (tmp_path / "blobs").mkdir()
    blob = file.rename(tmp_path / "blobs" / "sha256-ab12")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.blob, monkeypatch.folder = blob, tmp_path / "manifests"
    add(monkeypatch.folder / "registry.ollama.ai" / "library" / "llama3.2" / "1b")
    return monkeypatch


def add(manifest, kinds=("model",)):
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": "sha256:ab12"}
        for kind in ("license", *kinds)
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    return manifest


def test_a_model_of_ollama_is_the_file_of_its_manifest(ollama):
    registry = ollama.folder / "registry.ollama.ai"
    add(registry / "library" / "llama3.2" / "latest")
    add(registry / "user" / "own" / "v1")
    add(ollama.folder / "hf.co" / "org" / "m-GGUF" / "Q8_0")
    add(ollama.folder / "hub.local:5000" / "org" / "m" / "latest")
    paths = (
        "llama3.2:1b",
        "llama3.2",
        "user/own:v1",
        "hf.co/org/m-GGUF:Q8_0",
        "hub.local:5000/org/m",
    )
    for path in paths:
        assert resolve(f"ollama:{path}") == ollama.blob
    assert name_of("ollama:llama3.2:1b") == "llama3.2:1b"
    with pytest.raises(ConfigError) as e:
        resolve("ollama:qwen")
    known = "llama3.2:1b, llama3.2:latest, user/own:v1"
    others = "hf.co/org/m-GGUF:Q8_0, hub.local:5000/org/m:latest"
    assert f"It has {others}, {known}. Run `ollama pull qwen`" in str(e.value)


def test_what_is_wrong_with_ollamas_store_is_reported(ollama, tmp_path):
    library = ollama.folder / "registry.ollama.ai" / "library"
    add(library / "adapted" / "latest", ("model", "adapter"))
    add(library / "empty" / "latest", ())
    (library / "empty" / "odd").write_text("[]")
    (library / "empty" / "deep").write_text("[" * 100_000)
    outside = {"layers": [{"mediaType": WEIGHTS, "digest": "sha256:../../outside"}]}
    (library / "empty" / "outside").write_text(json.dumps(outside))
    (tmp_path.parent / "outside").write_bytes(b"GGUF")
    (tmp_path / "elsewhere").write_text(json.dumps(outside))
    complaints = {
        "adapted": "has an adapter, which is not supported",
        "empty": "has no weights",
        "empty:odd": "odd is not a manifest of Ollama",
        "empty:deep": "deep is not a manifest of Ollama",
        "empty:outside": "blobs/outside is missing",
        "": r"ollama: names no model\. It has .* Write e\.g\. ollama:llama3\.2:1b",
        "../../../etc/passwd": "Ollama does not have this model",
        f"x:{tmp_path}/elsewhere": "Ollama does not have this model",
    }
    for name, complaint in complaints.items():
        with pytest.raises(ConfigError, match=complaint):
            resolve(f"ollama:{name}")
    ollama.blob.unlink()
    with pytest.raises(ConfigError, match=r"sha256-ab12 is missing, but ollama:llama3\.2:1b"):
        resolve("ollama:llama3.2:1b")
    ollama.setenv("OLLAMA_MODELS", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"There are no models in .*nothing"):
        resolve("ollama:llama3.2:1b")
