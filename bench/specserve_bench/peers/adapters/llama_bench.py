"""llama.cpp's own `llama-bench`: its times of a prompt of that length, and of tokens after it.

It takes no prompts. It computes random token ids, samples nothing, and returns no text.
"""

import json
import subprocess

from specserve_bench.peers.protocol import EngineError, Setup, Timed, ends_with_parent, serve


class LlamaBench:
    def __init__(self, setup: Setup) -> None:
        assert setup.program is not None
        threads = [] if setup.threads is None else ["--threads", str(setup.threads)]
        self.command = [setup.program, "--model", setup.model, *threads]
        self.version = told_version(setup.program)

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        return [self.measure(len(prompt), num_tokens) for prompt in prompts]

    def measure(self, num_prompt: int, num_tokens: int) -> Timed:
        """The first token comes with the prompt; the others take equal times."""
        first = self.seconds(num_prompt, 0)
        timed = Timed(0.0)
        timed.times = [first]
        if num_tokens > 1:
            step = self.seconds(0, num_tokens - 1, num_prompt) / (num_tokens - 1)
            timed.times += [first + i * step for i in range(1, num_tokens)]
        timed.counts = [1] * num_tokens
        return timed

    def seconds(self, num_prompt: int, num_generated: int, depth: int = 0) -> float:
        """The time of one test, which a warm-up precedes; `depth` tokens have KV before it."""
        sizes = {"n-prompt": num_prompt, "n-gen": num_generated, "n-depth": depth}
        flags = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
        fixed = ["--repetitions", "1", "--output", "json"]
        done = subprocess.run(
            [*self.command, *flags, *fixed],
            capture_output=True,
            text=True,
            errors="replace",
            preexec_fn=ends_with_parent,
        )
        if done.returncode != 0:
            words = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
            raise EngineError(f"llama-bench: {words}")
        [test] = json.loads(done.stdout)
        return float(test["samples_ns"][0]) / 1e9


def told_version(program: str) -> str:
    """The build of a program of llama.cpp, from the first line that names it."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, errors="replace")
    lines = (done.stderr + done.stdout).splitlines()
    named = [line for line in lines if line.startswith("version: ")]
    return named[0].removeprefix("version: ") if named else "unknown build"


if __name__ == "__main__":
    serve(LlamaBench)
