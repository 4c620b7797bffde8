"""Schemathesis finds no answer that /openapi.json does not describe, and no crash."""

import subprocess

import pytest

from tests.server.environments import python_with
from tests.server.server_process import ServerProcess

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",  # a body that the schema excludes is refused
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
    # Not positive_data_acceptance: a schema cannot say that ids are the model's, or that fields
    # agree with each other.
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def schemathesis():
    return [python_with("schemathesis"), "-m", "schemathesis.cli", "run"]


@pytest.mark.parametrize("has_key", [False, True])
def test_schemathesis_finds_nothing(folder, tmp_path, schemathesis, has_key):
    keys = tmp_path / "keys"
    keys.write_text("known")
    flags = ["--served-model-name=tiny", *([f"--api-key-file={keys}"] if has_key else [])]
    short = {"scheduler.max_model_len": 128}
    with ServerProcess(folder, *flags, **short) as server:
        asked = ["--phases=examples,coverage,fuzzing", f"--checks={','.join(CHECKS)}"]
        asked += ["--max-examples=100", "--seed=1", "--continue-on-failure", "--no-color"]
        asked += ["--header=Authorization: Bearer known"] if has_key else []
        url = f"{server.url}/openapi.json"
        env = {"HOME": str(tmp_path), "PATH": ""}
        said = subprocess.run(
            [*schemathesis, url, *asked], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert said.returncode == 0, said.stdout[-10_000:] + said.stderr
        assert "passed" in said.stdout and server.process.poll() is None
        assert server.get("/health/live").status == 200
