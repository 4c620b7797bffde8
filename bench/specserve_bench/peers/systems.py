"""The engines that are compared, the settings that each is tried with, and the models."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.models.folder import read_json
from specserve_bench.demo.scaled_model import SHAPES
from specserve_bench.pairs import shape_folder
from specserve_bench.peers.protocol import AUTO, DRAFT, LOOKUP, PeerDrafting
from specserve_bench.scale import scale_model

SPECSERVE = "specserve"
MISTRAL_RS = "mistral.rs"
SERVER = "llama-server"
PROGRAMS = (SERVER, "llama-bench")  # of llama.cpp
UNQUANTIZED = "specserve, 16 bits"  # where others are quantized
LIKE = "qwen3-0.6b"
# Two layers of the target's width, with an MLP that makes a tenth of its weights.
TENTH = {"num_hidden_layers": 2, "intermediate_size": 3840}


class System(NamedTuple):
    """An engine: its name in tables, its adapter's module, and the Python that has it.

    threads   whether the suite chooses their number; otherwise the engine does
    lookups   draft tokens per step that are tried with n-gram lookup
    drafts    draft tokens per step that are tried with a draft model
    has_auto  whether the engine can choose drafters and draft tokens itself
    quantize  w8a8, w8, w4, or None for the checkpoint's own weights
    program   what the adapter runs, if the engine is no Python package
    has_text  whether the engine takes prompts as text only
    """

    name: str
    adapter: str
    python: str
    threads: bool
    lookups: tuple[int, ...]
    drafts: tuple[int, ...]
    needs_gguf: bool = False
    quantize: str | None = None
    has_auto: bool = False
    program: str | None = None
    has_text: bool = False


class PeerChoice(NamedTuple):
    """A point of a sweep."""

    threads: int | None
    drafting: PeerDrafting | None

    def words(self) -> str:
        threads = "own threads" if self.threads is None else f"{self.threads} threads"
        if self.drafting is None:
            return threads
        if self.drafting.by == AUTO:
            return f"{threads}, {AUTO}"
        return f"{threads}, {self.drafting.by} {self.drafting.tokens}"


def make_systems(
    pythons: Mapping[str, str],
    quantize: str | None = None,
    programs: Mapping[str, str] | None = None,
) -> list[System]:
    """The systems that have a Python. specserve is tried with one limit for each drafter.

    `programs` are those of llama.cpp, by their names; specserve's own Python runs their adapters.
    If weights are quantized, specserve also runs with the checkpoint's weights.
    """
    known = [
        ("specserve", SPECSERVE, False, (16,), (8,), False),
        ("llama.cpp", "llama", True, (2, 4, 8, 16), (2, 4, 8), True),
        ("ik_llama.cpp", "ik", True, (), (), True),
        (MISTRAL_RS, "mistralrs", True, (), (), True),
        ("OpenVINO GenAI", "openvino", True, (), (), True),
        ("vLLM", "vllm", True, (2, 4, 8), (2, 4, 8), False),
        ("transformers", "transformers", True, (2, 4, 8), (2, 4, 8), False),
    ]
    systems = [
        System(
            name,
            adapter,
            pythons[adapter],
            threads,
            lookups,
            drafts,
            needs_gguf,
            quantize,
            has_auto=name == SPECSERVE,
            has_text=name == MISTRAL_RS,
        )
        for name, adapter, threads, lookups, drafts, needs_gguf in known
        if adapter in pythons
    ]
    for name, program in (programs or {}).items():
        adapter, python = name.replace("-", "_"), pythons[SPECSERVE]
        lookups = (4, 16) if name == SERVER else ()
        systems.append(System(name, adapter, python, True, lookups, (), True, program=program))
    if quantize:
        systems.append(systems[0]._replace(name=UNQUANTIZED, quantize=None))
    return systems


def thread_choices(system: System, cores: int) -> list[PeerChoice]:
    """1, 2, 4, ... and all cores."""
    if not system.threads:
        return [PeerChoice(None, None)]
    powers = [1 << i for i in range(cores.bit_length())]
    return [PeerChoice(n, None) for n in sorted({*powers, cores}) if n <= cores]


def drafting_choices(
    system: System, threads: int | None, drafter: str, draft: str | None
) -> list[PeerChoice]:
    """The limits of draft tokens that are tried with a drafter.

    AUTO is specserve's own choice; a peer has its best fixed setting in its place.
    """
    lookups = [PeerDrafting(LOOKUP, n) for n in system.lookups]
    drafts = [PeerDrafting(DRAFT, n, draft) for n in system.drafts if draft]
    own = [PeerDrafting(AUTO, 0, draft)] if system.has_auto else [*lookups, *drafts]
    chosen = {LOOKUP: lookups, DRAFT: drafts, AUTO: own}[drafter]
    return [PeerChoice(threads, each) for each in chosen]


class NamedDraft(NamedTuple):
    label: str
    folder: Path


class ComparedModels(NamedTuple):
    """Label and folder of the target model, and the draft models."""

    label: str
    target: Path
    drafts: list[NamedDraft]


def named_models(target: Path, drafts: list[Path], scratch: Path) -> ComparedModels:
    named = [NamedDraft(draft.name, draft) for draft in drafts]
    return ComparedModels(target.name, with_tokenizer(target, scratch), named)


def scaled_pair(scratch: Path) -> ComparedModels:
    """The demo target in the layers of a 0.6B model, and its draft as it is and at a tenth's cost.

    The vocabulary stays the demo's, as the engines want the same in target and draft.
    """
    target, tenth = scratch / "target", scratch / "tenth"
    fields = SHAPES[LIKE] | {"vocab_size": read_json(DEMO_TARGET / "config.json")["vocab_size"]}
    scale_model(DEMO_TARGET, target, shape_folder(scratch / "shape", fields))
    scale_model(DEMO_DRAFT, tenth, shape_folder(scratch / "tenth-shape", fields | TENTH))
    drafts = [NamedDraft("nearly free draft", DEMO_DRAFT), NamedDraft("draft of a tenth", tenth)]
    return ComparedModels(f"{DEMO_TARGET.name} in the layers of {LIKE}", target, drafts)


def with_tokenizer(folder: Path, scratch: Path) -> Path:
    """The folder, or one that adds the demo's tokenizer: random checkpoints come without one."""
    if (folder / "tokenizer_config.json").exists() or (folder / "tokenizer.json").exists():
        return folder
    complete = scratch / folder.name
    complete.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            (complete / path.name).symlink_to(path.absolute())
        else:
            shutil.copyfile(path, complete / path.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_TARGET / name, complete / name)
    return complete
