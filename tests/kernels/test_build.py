"""Which library of kernels a process uses: one that came in the wheel, or one compiled here."""

import shutil

import pytest
import torch

from specserve_kernels import load, reference
from specserve_kernels.cpu import build


@pytest.fixture(autouse=True)
def choose_again(monkeypatch, tmp_path):
    """A cache folder of this test's own, and no library chosen yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.kernels.cache_clear()
    yield
    build.kernels.cache_clear()


COMPILERS = {
    "there is none": ("no-such-compiler", "no C++ compiler found"),
    "it refuses the kernels": (shutil.which("false"), "could not compile the kernels"),
}


@pytest.mark.parametrize(("compiler", "complaint"), COMPILERS.values(), ids=COMPILERS)
def test_without_a_compiler_the_reference_serves_and_says_so(
    compiler, complaint, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("CXX", compiler)
    assert load(torch.device("cpu")) is reference
    (line,) = caplog.messages
    assert complaint in line and "the reference kernels serve" in line
    assert list(tmp_path.rglob("*.so")) == []


def test_kernels_are_compiled_once(monkeypatch):
    build.library()
    monkeypatch.setattr(build, "compile_to", None)  # not to be called
    build.kernels.cache_clear()
    assert build.library().specserve_sample
