"""Real coding agents read a file, edit it and run a command, through each of the APIs.

`make agents` installs them into `.clients/agents` and runs these tests. The engine is a real one,
with speculation; grammars force what its random model writes.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.coding import BROKEN, LAST, RIGHT, coding_server
from tests.server.environments import ENVIRONMENTS

PINNED = Path(__file__).parent / "agents" / "package.json"
INSTALLED = ENVIRONMENTS / "agents"
MODULES = INSTALLED / "node_modules"
PROGRAMS = {  # agent -> its program, below MODULES
    "claude": "@anthropic-ai/claude-code-linux-*/claude",
    "codex": "@openai/codex/bin/codex.js",
    "opencode": "opencode-linux-*/bin/opencode",
    "qwen": "@qwen-code/qwen-code/cli.js",
}
OLD, NEW = "17 +* 25", "17 + 25"
PYTHON = "python3 sum.py"
pytestmark = pytest.mark.slow


def is_installed():
    file = INSTALLED / "package.json"
    return shutil.which("node") and file.exists() and file.read_text() == PINNED.read_text()


needs_agents = pytest.mark.skipif(not is_installed(), reason="run `make agents` to install them")


def claude(url, file):
    calls = {
        "read": ("Read", {"file_path": file}),
        "edit": ("Edit", {"file_path": file, "old_string": OLD, "new_string": NEW}),
        "run": ("Bash", {"command": PYTHON, "description": "Run it"}),
    }
    tools = ["--tools", "Read,Edit,Bash", "--allowedTools", "Read,Edit,Bash"]
    env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "DISABLE_AUTOUPDATER": "1"}
    env |= {"ANTHROPIC_MODEL": "tiny", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return calls, ["-p", "Fix sum.py", "--output-format", "json", *tools], env


def qwen(url, file):
    calls = {
        "read": ("read_file", {"file_path": file}),
        "edit": ("edit", {"file_path": file, "old_string": OLD, "new_string": NEW}),
        "run": ("run_shell_command", {"command": PYTHON, "is_background": False}),
    }
    to = ["--auth-type", "openai", "--openai-api-key", "none", "--openai-base-url", f"{url}/v1"]
    return calls, ["-p", "Fix sum.py", "--yolo", "-m", "tiny", "-o", "json", *to], {}


def opencode(url, file):
    calls = {
        "read": ("read", {"filePath": file}),
        "edit": ("edit", {"filePath": file, "oldString": OLD, "newString": NEW}),
        "run": ("bash", {"command": PYTHON, "description": "Run it"}),
    }
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options}
    provider |= {"models": {"tiny": {"name": "tiny"}}}
    config = {"provider": {"own": provider}, "model": "own/tiny", "small_model": "own/tiny"}
    config |= {"share": "disabled", "autoupdate": False, "permission": "allow"}
    env = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return calls, ["run", "--format", "json", "Fix sum.py"], env


def codex(url, file):
    replaced = f"sed -i 's/17 +\\* 25/{NEW}/' sum.py"
    commands = {"read": "cat sum.py", "edit": replaced, "run": PYTHON}
    calls = {kind: ("exec_command", {"cmd": command}) for kind, command in commands.items()}
    provider = f'{{name = "own", base_url = "{url}/v1", wire_api = "responses"}}'
    settings = [
        f"model_providers.own={provider}",
        'model_provider="own"',
        'web_search="disabled"',
        "features.multi_agent=false",
    ]
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    more = [part for each in settings for part in ("-c", each)]
    return calls, ["exec", *flags, *more, "-m", "tiny", "Fix sum.py"], {}


@needs_agents
@pytest.mark.parametrize("agent", [claude, codex, opencode, qwen], ids=lambda agent: agent.__name__)
def test_a_coding_agent_repairs_a_program(agent, tmp_path):
    work, home, model = (tmp_path / name for name in ("work", "home", "model"))
    work.mkdir()
    home.mkdir()
    (work / "sum.py").write_text(BROKEN)
    calls = {}
    with coding_server(model, calls) as (server, prompts):
        own_calls, arguments, env = agent(server.url, str(work / "sum.py"))
        calls |= own_calls
        told = run(agent.__name__, arguments, env, work, home)
        hits = server.metric("vllm:prefix_cache_hits_total")
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert LAST in told and (work / "sum.py").read_text() == RIGHT
    turns = [len(prompt) for prompt in prompts if "<tool_call>" in prompt]
    assert len(turns) == 4  # read, edit, run, end
    # Each turn extends the cached turn before it. Tokens have 1.2 characters.
    assert hits > 0.7 * sum(turns[:-1]) and accepted > 0


def run(agent, arguments, env, work, home):
    """The output of an agent, without the environment of this process: that could have keys."""
    program = sorted(MODULES.glob(PROGRAMS[agent]))[0]
    start = ["node", program] if program.suffix == ".js" else [program]
    env |= {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    options = {"cwd": work, "env": env, "stdin": subprocess.DEVNULL, "timeout": 180}
    told = subprocess.run([*start, *arguments], capture_output=True, text=True, **options)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout
