"""What `make dist` makes holds all that it needs, and serves where there is no checkout."""

import hashlib
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from specserve.version import VERSION
from tests.installing import install, run
from tests.server.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "specserve/",
    "kernels/specserve_kernels/",
    "drafters/specserve_drafters/",
    "bench/specserve_bench/",
)
LEFT_OUT = "bench/specserve_bench/demo/evaluation/"  # other people's source
pytestmark = pytest.mark.slow


def make_dist(folder):
    """As `make dist` does, with the Python that runs this and without its set-up."""
    run("make", "-o", "setup", "dist", f"DIST={folder}", f"PY={sys.executable}", cwd=ROOT)
    [wheel], [source] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    return make_dist(tmp_path_factory.mktemp("dist"))


def tracked(*folders):
    return set(run("git", "ls-files", *folders, cwd=ROOT).splitlines())


def test_two_builds_of_a_commit_have_the_same_bytes(dist, tmp_path):
    for first, second in zip(dist, make_dist(tmp_path), strict=True):
        assert first.name == second.name and f"-{VERSION}" in first.name
        same = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)}
        assert len(same) == 1, first.name


def test_files_have_the_date_of_the_commit(dist):
    [date] = run("git", "log", "-1", "--format=%ct", cwd=ROOT).split()
    with tarfile.open(dist[1]) as archive:
        assert {member.mtime for member in archive} == {int(date)}


def test_the_wheel_has_every_file_of_the_packages_and_nothing_but_its_kernels_beside(dist):
    names = set(zipfile.ZipFile(dist[0]).namelist())
    files = {path for path in tracked(*PACKAGES) if not path.startswith(LEFT_OUT)}
    for folder in "kernels/", "drafters/", "bench/":
        files = {path.removeprefix(folder) for path in files}
    assert files - names == set()
    others = {name for name in names - files if ".dist-info/" not in name}
    assert all(name.startswith("specserve_kernels/cpu/prebuilt/") for name in others)
    assert {n.split("/")[0] for n in names if n.endswith("/py.typed")} == {
        folder.rstrip("/").rpartition("/")[2] for folder in PACKAGES
    }


def test_the_source_distribution_has_every_file_but_those_of_the_repository_itself(dist):
    with tarfile.open(dist[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() - names == {".ci/run"}
    assert names - tracked() == {"PKG-INFO"}


@pytest.mark.parametrize("kind", [0, 1], ids=["wheel", "source"])
def test_what_is_installed_answers_a_question_in_an_empty_home(kind, dist, tmp_path):
    python = install(dist[kind], tmp_path / "venv")

    class Installed(ServerProcess):
        program = (python.with_name("specserve"),)

    home = tmp_path / "home"
    home.mkdir()
    env = {"HOME": str(home), "XDG_CACHE_HOME": "", "PATH": "/nowhere"}  # and no compiler
    with (
        open(tmp_path / "stderr", "w+") as stderr,
        Installed(None, env=env, stderr=stderr) as server,
    ):
        question = {"role": "user", "content": "What does shutil.copytree do?"}
        asked = {"messages": [question], "max_tokens": 16, "temperature": 0}
        answer = server.post("/v1/chat/completions", asked).body["choices"][0]["message"]
        assert answer["content"].strip()
        assert server.get("/").status == server.get("/dashboard").status == 200
    assert any(line.startswith(f"serving {tmp_path}/venv/") for line in server.said)
    assert "kernels" not in (tmp_path / "stderr").read_text().replace("│ kernels", "")


def shown(path, lines):
    """Whether a file is in the context of an image: the last line of .dockerignore that fits."""
    is_shown = True
    for line in lines:
        pattern = line.removeprefix("!")
        if pattern.startswith("**/"):
            fits = any(Path(part).match(pattern[3:]) for part in path.split("/"))
        else:
            fits = pattern == "*" or path == pattern or path.startswith(f"{pattern}/")
        is_shown = line.startswith("!") if fits else is_shown
    return is_shown


def test_the_context_of_the_images_makes_the_same_wheel(dist, tmp_path):
    """The command of the Dockerfiles, in a folder with what .dockerignore leaves to them."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    for path in tracked():
        if shown(path, lines):
            (tmp_path / "src" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "src" / path).write_bytes((ROOT / path).read_bytes())
    wheels = tmp_path / "wheels"
    flags = "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, "."
    run(sys.executable, "-m", "pip", "wheel", *flags, cwd=tmp_path / "src")
    [wheel] = wheels.iterdir()
    assert wheel.name == dist[0].name
    assert {*zipfile.ZipFile(wheel).namelist()} == {*zipfile.ZipFile(dist[0]).namelist()}


def test_the_images_run_that_command():
    command = "pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ."
    for path in ROOT.glob("deploy/docker/*.Dockerfile"):
        assert command in path.read_text(), path.name
