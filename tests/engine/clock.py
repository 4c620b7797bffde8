"""Engines whose time goes on only as a test says."""

from time import perf_counter

from specserve.engine import admission, engine, tuning
from specserve.engine.runner import Runner
from specserve.scheduling import request, scheduler
from specserve.speculation import (
    adaptive_speculator,
    draft_depth,
    head_model,
    recycler,
    speculator,
)

# modules that read the time
TIMED = (
    adaptive_speculator,
    admission,
    draft_depth,
    engine,
    head_model,
    recycler,
    request,
    scheduler,
    speculator,
)


class Clock:
    """The time of all engines: launches take what `target` and `draft` say of their rows, and
    everything else takes none, unless a test moves `now`. No costs are kept from such a time.
    """

    def __init__(self, patch, target=lambda rows: 0.01, draft=lambda rows: 0.001):
        self.now = float(int(perf_counter()))  # sums with fractions of powers of two are exact
        self.target, self.draft = target, draft
        launch = Runner.launch
        patch.setattr(tuning, "kept_file", lambda *key: None)

        def timed(runner, step, residual=None):
            seconds = self.draft if step.draws is None else self.target
            self.now += seconds(step.num_rows)
            return launch(runner, step, residual)

        patch.setattr(Runner, "launch", timed)
        for module in TIMED:
            patch.setattr(module, "perf_counter", lambda: self.now)
