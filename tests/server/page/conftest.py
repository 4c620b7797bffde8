"""One browser and one server of the demo models for all tests of the pages."""

import os
import shutil
import subprocess
import sys

import pytest

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from tests.server.environments import ENVIRONMENTS, python_with
from tests.server.page.visit import Visit
from tests.server.server_process import ServerProcess
from tests.server.test_node_clients import HERE as NODE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="package")
def browser(request):
    if CHROMIUM is None:
        pytest.skip("needs chromium: the pages are NOT checked here")
    is_quick = "slow" not in request.config.option.markexpr.replace("not slow", "")
    if is_quick and not (ENVIRONMENTS / "playwright/installed.txt").exists():
        pytest.skip("needs `make browser`: the pages are NOT checked here")
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    command = [python_with("playwright"), "-c", show]
    packages = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    sys.path.append(packages)  # its Python is this one
    try:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            flags = ["--no-sandbox"] if os.geteuid() == 0 else []
            started = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
            yield started
            started.close()
    finally:
        sys.path.remove(packages)


@pytest.fixture(scope="package")
def demo():
    flags = "--served-model-name=demo", f"--draft-model={DEMO_DRAFT}", "--drafter=model"
    with ServerProcess(DEMO_TARGET, *flags, **{"memory.kv_bytes": 1 << 28}) as server:
        yield server


@pytest.fixture
def visit(browser, demo):
    visits = []

    def begin(path="", server=demo, **context):
        visits.append(Visit(browser, server.url, path, **context))
        return visits[-1]

    yield begin
    for each in visits:
        each.close()


@pytest.fixture(scope="package")
def axe(tmp_path_factory):
    """The source of axe-core, from npm's registry."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm: axe-core does NOT check the pages here")
    folder = tmp_path_factory.mktemp("axe")
    version = (NODE / "package.json").read_text().partition('"axe-core": "')[2].partition('"')[0]
    command = ["npm", "pack", "--silent", f"axe-core@{version}"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if ran.returncode:
        pytest.skip("no package registry answers: axe-core does NOT check the pages here")
    [archive] = folder.glob("*.tgz")
    subprocess.run(["tar", "-xzf", archive, "package/axe.min.js"], cwd=folder, check=True)
    return (folder / "package/axe.min.js").read_text()
