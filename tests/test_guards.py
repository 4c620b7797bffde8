"""What would fail only after installation: a clash of package names, files missing in the wheel."""

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROBE = """
import sys
from importlib.util import find_spec
sys.path.insert(0, {root!r})
import transformers
from transformers import LlamaForCausalLM
spec = find_spec("kernels")
assert spec is None or spec.origin is None, spec
ours = [
    name
    for name, module in sys.modules.items()
    if name.startswith(("specserve", "kernels")) and getattr(module, "__file__", None)
]
assert not ours, ours
"""


def run(*args, **options):
    done = subprocess.run(list(map(str, args)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_transformers_finds_nothing_of_ours_to_import():
    run(sys.executable, "-c", PROBE.format(root=str(ROOT)), cwd=ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=ROOT)
    [path] = folder.iterdir()
    return path


def test_the_wheel_has_four_packages_the_cpp_sources_and_the_demo_pair_without_its_evaluation(
    wheel,
):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "specserve",
        "specserve_bench",
        "specserve_drafters",
        "specserve_kernels",
    }
    sources = {f"specserve_kernels/cpu/{p.name}" for p in ROOT.glob("kernels/*/cpu/*.cpp")}
    assert sources
    assert sources <= set(names)
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    demo = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("specserve/demo/**/*") if p.is_file()}
    assert demo <= set(names)
    assert not [name for name in names if "/evaluation/" in name or name.endswith(".jsonl")]


def install(wheel, folder):
    """A fresh environment with the wheel; everything else it borrows from this one."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    run(*pip, wheel)
    # A .pth file's folder is searched last, and its own .pth files, our editable install among
    # them, are not read: so `specserve` can only be the wheel's.
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_the_wheel_installs_and_generates_two_tokens(wheel, tmp_path):
    python = install(wheel, tmp_path / "venv")
    home = run(python, "-c", "import specserve; print(specserve.__file__)", cwd=tmp_path)
    assert home.startswith(str(tmp_path))
    flags = ["--max-tokens", "2", "--temperature", "0", "--json"]
    output = run(python, "-m", "specserve", "generate", "def read", *flags, cwd=tmp_path)
    assert len(json.loads(output)["token_ids"]) == 2
    assert "bench" in run(python, "-m", "specserve", "--help", cwd=tmp_path)
