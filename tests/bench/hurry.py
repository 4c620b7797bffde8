"""Processes whose limit comes as soon as they are stuck, so that no test waits for it."""

import subprocess
import time


def hurried(is_stuck):
    """A Popen of which `wait` is out of time once `is_stuck(args)`; the clock is put on by that."""
    monotonic, skipped = time.monotonic, 0.0

    class Hurried(subprocess.Popen):
        def wait(self, timeout=None):
            nonlocal skipped
            while timeout is not None and self.poll() is None:
                if is_stuck(self.args):
                    skipped += timeout
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.02)
            return super().wait()

    return Hurried, lambda: monotonic() + skipped
