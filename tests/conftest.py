import gc
import itertools
import logging
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from specserve.logs import StderrHandler
from tests.pairs import leave_pairs
from tests.thorough import IN_CI, PATHS, mark_thorough, sort_by_length

# Else torch complains of cuBLAS in deterministic mode, in which unwritten memory holds NaN.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Triton decides at its import: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

REAL = Path(__file__).parent / "real"

# A shell starts background jobs with SIGINT ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the first example of a run compiles and allocates. Derandomized: a suite that every
# change must pass may not fail by chance.
settings.register_profile("specserve", deadline=None, derandomize=True)
settings.load_profile("specserve")


def pytest_ignore_collect(collection_path, config):
    """To collect a file takes time, so files without a test that was asked for are left out."""
    asked = config.option.markexpr
    left_out = PATHS - IN_CI if "ci or" in asked else PATHS
    if "not thorough" in asked and collection_path in left_out:
        return True
    if asked.startswith("ci ") and collection_path.suffix == ".py" and collection_path not in IN_CI:
        return True
    if "not real" in asked and collection_path == REAL:
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Garbage is collected before and after, not in between, where there is none: a fifth of the
    time; and later nobody looks for it among the tests and modules.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # by these marks items are left out afterwards
def pytest_collection_modifyitems(config, items):
    sort_by_length(items)
    leave_pairs(items)
    mark_thorough(items)
    may_rerun = config.pluginmanager.has_plugin("rerunfailures")
    for item in items:
        # A bound in seconds is broken by any busy neighbor, by a slow engine three times in a row.
        if may_rerun and item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=2))
        if not torch.cuda.is_available():
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: NOT checked here"))
        elif item.get_closest_marker("cuda"):  # libraries warn at their first use
            item.add_marker(pytest.mark.filterwarnings("default", "ignore:.*determin"))


@pytest.fixture(scope="session")
def test_models():
    """The folder of the trained pair: `code-target` and `code-draft`."""
    folder = os.environ.get("SPECSERVE_TEST_MODELS")
    if not folder or not Path(folder, "code-target", "config.json").is_file():
        pytest.skip("needs the trained pair of models: SPECSERVE_TEST_MODELS names its folder")
    return Path(folder)


@pytest.fixture(autouse=True)
def one_thread():
    """With tiny models threads mostly wait at barriers, for seconds on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_log():
    """What a command in this process sets for its log lasts no longer than the test."""
    yield
    for handler in [*logging.root.handlers]:
        if isinstance(handler, StderrHandler):
            logging.root.removeHandler(handler)


def pytest_terminal_summary(terminalreporter):
    """Seconds by part, a part being a file or a folder in tests/."""
    seconds = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.partition("::")[0]
            seconds[file.removeprefix("tests/").partition("/")[0]] += report.duration
    terminalreporter.section("seconds by part")
    for part, duration in seconds.most_common():
        terminalreporter.line(f"{duration:7.1f}  {part}")
