"""The recipes of docs/clients.md run against a server, each in the environment that it names."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.server.environments import python_with
from tests.server.test_node_clients import MISSING, folder_of_clients

__all__ = ["folder_of_clients"]  # a fixture
PAGE = (Path(__file__).parents[2] / "docs/clients.md").read_text()
HERE, NAME = "http://127.0.0.1:8000", "specserve-demo"
PYTHON = re.findall(r"```python\n# (\w+)\n(.*?)```", PAGE, re.DOTALL)
SCRIPTS = re.findall(r"```js\n// ([\w ]+)\n(.*?)```", PAGE, re.DOTALL)
LINES = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = {
    line.split(" ", 1)[0]: line
    for block in LINES
    for line in block.replace("\\\n", "").strip().splitlines()
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("client, code", PYTHON, ids=lambda text: text[:12])
def test_a_recipe_in_python_prints_an_answer(server, tmp_path, client, code):
    if client == "openai":
        return  # tests/server/test_readme.py
    (tmp_path / "recipe.py").write_text(code.replace(HERE, server.url).replace(NAME, "tiny"))
    env = {"HOME": str(tmp_path), "PATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [python_with(client), "-I", "recipe.py"]
    told = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip()


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
@pytest.mark.parametrize("client, code", SCRIPTS, ids=lambda text: text[:12])
def test_a_recipe_in_javascript_prints_an_answer(server, folder_of_clients, client, code):
    code = code.replace(HERE, server.url).replace(NAME, "tiny")
    (folder_of_clients / "recipe.mjs").write_text(code)
    command = ["node", "recipe.mjs"]
    told = subprocess.run(command, cwd=folder_of_clients, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip()


def test_guidellm_runs_as_it_is_written(server, folder, tmp_path):
    line = COMMANDS["guidellm"].replace(HERE, f"{server.url},model=tiny")
    line = line.replace("path/to/model", str(folder)).replace("count=100", "count=8")
    python = python_with("guidellm", borrows_torch=True)
    env = {"HOME": str(tmp_path), "PATH": "", "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", *shlex.split(line)]
    told = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize(
    "name, environment, module",
    [
        ("lm_eval", "lm_eval", "lm_eval"),
        ("vllm-router", "vllm_router", "vllm_router.launch_router"),
    ],
)
def test_options_of_programs_that_need_more_than_a_server_exist(name, environment, module):
    """lm-eval downloads its tasks, and a router wants two servers: test_router has them."""
    python = python_with(environment, borrows_torch=name == "lm_eval")
    command = [python, "-m", module, *(["run"] if name == "lm_eval" else []), "--help"]
    told = subprocess.run(command, capture_output=True, text=True)
    for option in re.findall(r" (--[\w-]+)", COMMANDS[name]):
        assert option in told.stdout, told.stdout + told.stderr
