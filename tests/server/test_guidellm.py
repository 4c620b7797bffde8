"""guidellm's benchmark of a server ends without errors, with the tokens that it asked for."""

import json
import subprocess

import pytest

from tests.server.asking import CHAT, COMPLETIONS
from tests.server.environments import python_with

REQUESTS, PROMPT, OUTPUT = 6, 32, 8
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_benchmark_counts_the_tokens_that_it_asked_for(server, folder, tmp_path, route):
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={server.url},model=tiny,request_format={route}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "tokenizer": f"kind=huggingface_auto,model={folder}",
        "output": f"kind=json,path={report}",
    }
    command = [python_with("guidellm", borrows_torch=True), "-m", "guidellm", "run"]
    command += [part for key, value in options.items() for part in (f"--{key}", value)]
    env = {"HOME": str(tmp_path), "PATH": "", "HF_HUB_OFFLINE": "1"}
    told = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180
    )
    assert told.returncode == 0, told.stdout + told.stderr
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    outputs = metrics["output_token_count"]["successful"]
    assert outputs["min"] == outputs["max"] == OUTPUT
    prompts = metrics["prompt_token_count"]["successful"]
    assert PROMPT <= prompts["min"] <= prompts["max"] <= 2 * PROMPT
    first = metrics["time_to_first_token_ms"]["successful"]
    assert 0 < first["median"] < metrics["request_latency"]["successful"]["max"] * 1000
