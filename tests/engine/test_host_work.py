"""How much Python runs in a plain step: small models' steps take hardly longer."""

import sys
from statistics import median

import pytest

from specserve.exchange.sampling_params import Sampling
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import engine_for, load_small

GREEDY = Sampling(max_tokens=40, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def calls_per_step(engine, num_requests):
    """The median number of calls, of Python functions and of C, in steps with a root of each."""
    for i in range(num_requests):
        engine.add([3, 4, 5 + i], GREEDY)
    while any(request.num_output < 3 for request in engine.requests.values()):
        engine.step()
    calls = [0]

    def count(frame, event, arg):
        calls[-1] += event in ("call", "c_call")

    for _ in range(15):
        sys.setprofile(count)
        outputs = engine.step()
        sys.setprofile(None)
        assert len(outputs) == num_requests and all(o.is_verified for o in outputs)
        calls.append(0)
    return median(calls[:-1])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3))


def test_a_plain_step_makes_few_calls(target):
    one, many = (calls_per_step(engine_for(target, max_nodes=0), n) for n in (1, 33))
    per_request = (many - one) / 32
    assert one <= 300 and per_request <= 60, (one, per_request)
