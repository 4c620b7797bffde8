"""`specserve bench` against a specserve server: the texts and counts of an engine in process."""

from specserve_bench.hosted import Hosted
from specserve_bench.local import Local
from specserve_bench.results import Load
from specserve_bench.workloads import workload


def test_a_server_and_an_engine_in_this_process_are_measured_alike(server, llm):
    for name in ("questions", "random"):
        asked = workload(name, 3, 0)
        here = Local(llm).run(asked, Load(concurrency=1))
        there = Hosted(server.url).run(asked, Load(concurrency=3))
        assert not [a.error for a in there.requests if a.error]
        assert there.output_hash == here.output_hash
        assert counts(there) == counts(here)
        told, known = there.speculation, here.speculation
        assert told.tokens == sum(a.completion_tokens - 1 for a in there.requests) == known.tokens
        assert sum(told.accepted) == told.steps
        assert there.draft_seconds + there.verify_seconds < there.step_seconds


def counts(round):
    return [(a.prompt_tokens, a.completion_tokens) for a in round.requests]
