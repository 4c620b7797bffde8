"""Chooses and downloads a GGUF file of a hub repository. Does not import torch.

A repository has a model in several types, e.g. Q4_K_M, whose names are in the files' names. A split
model consists of several files, often in a folder of its own.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from glob import escape
from pathlib import Path, PurePosixPath

from specserve.errors import ConfigError

GGUF = ".gguf"
FIRST_PART, LATER_PART = (
    re.compile(r"-00001-of-\d{5}$"),
    re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$"),
)
USUAL = "Q4_K_M"
TYPE = re.compile(
    r"(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32|FP16|FP32)",
    re.IGNORECASE,
)
NAME = re.compile(rf"(?:^|(?<=[-_./]))({TYPE.pattern})(?=$|[-_./])", re.IGNORECASE)
OTHERS = re.compile(r"(^|[-_./])(mmproj|imatrix|mtp)", re.IGNORECASE)  # no models of text
BITS = re.compile(r"\d+")
PARTS = re.compile(r"-\d{5}-of-(\d{5})$")

log = logging.getLogger("specserve")


def type_of(file: str) -> str:
    """The type in a file's name, or in the name of its folder; "" if there is none."""
    stem = PARTS.sub("", file.removesuffix(GGUF))
    named = NAME.findall(stem)
    return named[-1].upper() if named else ""


def quality(type: str) -> tuple[bool, int, str]:
    """Orders types. Quantized types are before others, because those are several times larger."""
    bits = BITS.search(type)
    is_quantized = type.removeprefix("UD-")[:2] not in ("BF", "F1", "F3", "FP", "")
    return is_quantized, int(bits[0]) if bits else 0, type


def choose(repo: str, files: Iterable[str], asked: str) -> tuple[str, ...]:
    """The files of the model that is asked for by its type or its file name; "": Q4_K_M if it is
    there, else the best type. Empty if the repository has no GGUF files and nothing is asked for.

    Raises ConfigError if it is not there.
    """
    firsts = [f for f in files if f.endswith(GGUF) and not LATER_PART.search(f)]
    models = {f: type_of(f) for f in sorted(firsts) if not OTHERS.search(f)}
    if not models:
        if not asked:
            return ()
        raise ConfigError(f"{repo}:{asked}: the repository has no GGUF file. Use {repo}")
    if asked in models:
        return parts_of(asked)
    wanted = asked.upper() or (
        USUAL if USUAL in models.values() else max(models.values(), key=quality)
    )
    found = [file for file, type in models.items() if type == wanted]
    if not found:
        types = ", ".join(sorted({type or file for file, type in models.items()}))
        raise ConfigError(f"{repo}:{asked} is not in the repository. It has {types}")
    if len(found) > 1:
        raise ConfigError(
            f"{repo} has {len(found)} models of type {wanted} ({', '.join(found)}). Name one of "
            f"the files, like {repo}:{found[0]}"
        )
    if not asked:
        log.info("%s: loading type %s (%s)", repo, wanted or "unknown", found[0])
    return parts_of(found[0])


def parts_of(file: str) -> tuple[str, ...]:
    """A file, or all files of a split model."""
    stem = file.removesuffix(GGUF)
    count = PARTS.search(stem)
    if count is None:
        return (file,)
    base = FIRST_PART.sub("", stem)
    return tuple(f"{base}-{i:05}-of-{count[1]}{GGUF}" for i in range(1, int(count[1]) + 1))


@lru_cache(maxsize=8)  # a process asks for its models several times
def fetch(repo: str, asked: str) -> Path | None:
    """A repository's GGUF file, downloaded if necessary; None if there is none and no type is
    asked for. Raises ConfigError, or errors of the hub's client.
    """
    from huggingface_hub import snapshot_download  # slow to import, and only downloads need it

    files = choose(repo, list_files(repo), asked)
    if not files:
        return None
    folder = Path(snapshot_download(repo, allow_patterns=[escape(file) for file in files]))
    check_complete(repo, folder, files)
    return folder / files[0]


def check_complete(repo: str, folder: Path, files: Sequence[str]) -> None:
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise ConfigError(
            f"{repo}: {missing[0]} is not in the hub cache, and the hub cannot be reached. Check "
            "the network, or HF_HUB_OFFLINE"
        )


def list_files(repo: str) -> list[str]:
    """The files of a repository; if the hub cannot be reached, those in its cache."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        siblings = HfApi().model_info(repo).siblings  # unlike a listing, it is asked for only once
        return [each.rfilename for each in siblings or ()]
    except Exception as e:  # the hub's client does not wrap errors of its transport
        try:
            cached = Path(snapshot_download(repo, local_files_only=True))
        except Exception:
            raise e from None
        found = (file.relative_to(cached) for file in cached.rglob(f"*{GGUF}"))
        return [str(PurePosixPath(*file.parts)) for file in found]
