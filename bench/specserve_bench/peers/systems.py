"""The engines that are compared, and the settings that each is tried with."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from specserve_bench.peers.protocol import DRAFT, LOOKUP, Guessing

SPECSERVE = "specserve"
UNQUANTIZED = "specserve, 16 bits"  # where others are quantized


class System(NamedTuple):
    """An engine: its name in tables, its adapter's module, and the Python that has it.

    threads   whether the suite chooses their number; otherwise the engine does
    lookups   guesses a step by prompt lookup that are tried
    drafts    guesses a step by a draft model that are tried
    quantize  w8a8, w8, w4, or None for the checkpoint's own weights
    """

    name: str
    adapter: str
    python: str
    threads: bool
    lookups: tuple[int, ...]
    drafts: tuple[int, ...]
    needs_gguf: bool = False
    quantize: str | None = None


class Choice(NamedTuple):
    """A point of a sweep."""

    threads: int | None
    guessing: Guessing | None

    def words(self) -> str:
        threads = "own threads" if self.threads is None else f"{self.threads} threads"
        if self.guessing is None:
            return threads
        return f"{threads}, {self.guessing.by} {self.guessing.tokens}"


def make_systems(pythons: Mapping[str, str], quantize: str | None = None) -> list[System]:
    """Those that have a Python. specserve is tried with one limit for each drafter.

    With quantized weights specserve comes a second time, with the checkpoint's own.
    """
    known = [
        ("specserve", SPECSERVE, False, (16,), (8,), False),
        ("llama.cpp", "llama", True, (2, 4, 8, 16), (2, 4, 8), True),
        ("vLLM", "vllm", True, (2, 4, 8), (2, 4, 8), False),
        ("transformers", "transformers", True, (2, 4, 8), (2, 4, 8), False),
    ]
    systems = [
        System(name, adapter, pythons[adapter], threads, lookups, drafts, needs_gguf, quantize)
        for name, adapter, threads, lookups, drafts, needs_gguf in known
        if adapter in pythons
    ]
    if quantize:
        systems.append(systems[0]._replace(name=UNQUANTIZED, quantize=None))
    return systems


def thread_choices(system: System, cores: int) -> list[Choice]:
    """1, 2, 4, ... and all cores."""
    if not system.threads:
        return [Choice(None, None)]
    powers = [1 << i for i in range(cores.bit_length())]
    return [Choice(n, None) for n in sorted({*powers, cores}) if n <= cores]


def guess_choices(system: System, threads: int | None, draft: str | None) -> list[Choice]:
    lookups: Iterable[Guessing] = (Guessing(LOOKUP, n) for n in system.lookups)
    drafts: Sequence[Guessing] = [Guessing(DRAFT, n, draft) for n in system.drafts]
    return [Choice(threads, g) for g in [*lookups, *(drafts if draft else [])]]
