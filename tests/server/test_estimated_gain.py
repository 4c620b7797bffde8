"""The gain that the pages estimate: measured steps without draft tokens are its base."""

import json
import shutil
import subprocess
from importlib.resources import files

import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")

SCRIPT = """
import { Answer, plainSeconds } from "./chat/answer.js";
const { measured, context } = JSON.parse(process.argv[1]);
const answer = new Answer();
answer.last = {
  timings: { predicted_n: 101, predicted_ms: 500, predicted_per_second: 202 },
  usage: { prompt_tokens: context - 50.5 },
  metrics: {},
};
answer.first = 1;
const { gain } = answer.figures((at) => plainSeconds(measured, at));
console.log(gain?.toFixed(2) ?? "none");
"""
SHORT, LONG = {"context": 300, "seconds": 0.004}, {"context": 5000, "seconds": 0.01}
SHOWN = {
    "about the same context": ([SHORT, LONG], 250, "0.80"),
    "the nearest is longer": ([SHORT, LONG], 3000, "2.00"),
    "only far shorter ones": ([SHORT], 3000, "none"),
    "only far longer ones": ([LONG], 300, "none"),
    "none was measured": ([], 300, "none"),
    "the server did not say": (None, 300, "none"),
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page's parts, as modules of node."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("chat/answer.js", "shared/api.js"):
        (folder / name).parent.mkdir()
        (folder / name).write_text((files("specserve.server") / "page" / name).read_text())
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


@pytest.mark.parametrize(("measured", "context", "shown"), SHOWN.values(), ids=SHOWN)
def test_the_gain_is_that_over_measured_steps(page, measured, context, shown):
    given = json.dumps({"measured": measured, "context": context})
    command = ["node", "--input-type=module", "-e", SCRIPT, given]
    found = subprocess.run(command, cwd=page, capture_output=True, text=True, timeout=60)
    assert (found.stdout.strip(), found.stderr) == (shown, "")
