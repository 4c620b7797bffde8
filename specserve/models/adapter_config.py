"""Parses adapter_config.json of a LoRA adapter in the same way as peft."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as shortened
from time import perf_counter
from typing import Any

import msgspec
import regex

from specserve.errors import ConfigError
from specserve.models.config_fields import flag, is_int, positive
from specserve.models.folder import read_json

NAME = "adapter_config.json"
DEFAULTS: dict[str, Any] = {  # peft's values for missing fields
    "peft_type": None,
    "r": 8,
    "lora_alpha": 8,
    "use_rslora": False,
    "rank_pattern": None,
    "alpha_pattern": None,
    "target_modules": None,
    "exclude_modules": None,
    "layers_to_transform": None,
}
ALLOWED: dict[str, tuple[Any, ...]] = {  # supported values of fields that change the computation
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "layers_pattern": (None, "", [], "layers", ["layers"]),
}
# Supported values of init_lora_weights. peft's other values change the model's weights first.
BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# Ignored fields: the origin of an adapter, its training, and options of unsupported fields.
HARMLESS = (
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "lora_dropout",
    "lora_ga_config",
    "loftq_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
)
REMEDY = (
    "Use another adapter, correct the file if it is wrong, or merge the adapter into its model "
    "(peft's merge_and_unload)"
)
LAYER = re.compile(r"model\.layers\.(\d+)\.")
LARGEST = 1 << 20  # maximum rank and alpha
SECONDS = 5.0  # time limit for all regular expressions of an adapter
LARGEST_PATTERN = 1 << 16  # maximum characters times repetition counts; limits the compile time
COUNT = re.compile(r"\{(\d*),?(\d*)\}")
MOST_BYTES = 1 << 20  # maximum size of the file


class Pattern:
    """A regular expression from an adapter's file. Uses the package `regex`, not `re`, because
    `regex` has a time limit, and lets other threads run while it matches.
    """

    def __init__(self, text: str, left: list[float]) -> None:
        """`left` is a list with the seconds that all expressions of the file may still take."""
        self.text, self.left = text, left
        if size_of(text) > LARGEST_PATTERN:
            raise ValueError(
                f"the regular expression {text!r:.200} is too large: at most {LARGEST_PATTERN} "
                "characters, times its repetition counts, are allowed. List the names of the "
                "modules instead"
            )
        with self.timed():
            try:
                self.compiled = regex.compile(text, cache_pattern=False)
            except (regex.error, RecursionError, OverflowError) as e:
                raise ValueError(f"{text!r:.200} is not a regular expression ({e!s:.200})") from e

    def matches(self, module: str, whole: bool = True) -> bool:
        """Whether the expression matches a module's whole name, or else a prefix of it. Raises
        TimeoutError if no time is left.
        """
        find = self.compiled.fullmatch if whole else self.compiled.match
        with self.timed() as left:
            return find(module, timeout=left, concurrent=True) is not None

    @contextmanager
    def timed(self) -> Iterator[float]:
        """Yield the time left in seconds, and subtract the time of the block from it."""
        start = perf_counter()
        try:
            yield max(self.left[0], 1e-3)
        except TimeoutError as e:
            raise TimeoutError(f"the regular expression {self.text!r:.200} takes too long") from e
        self.left[0] -= perf_counter() - start
        if self.left[0] < 0:
            raise TimeoutError("its regular expressions take too long")


class Names:
    """Matches modules whose name is in a list, or ends with a period and a name of the list."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def matches(self, module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[i:]) in self.names for i in range(len(parts)))


def size_of(pattern: str) -> int:
    """An estimate of the number of nodes that a regular expression compiles to."""
    counts = (max(1, *(int(n[:9] or 1) for n in found)) for found in COUNT.findall(pattern))
    return len(pattern) * math.prod(counts)


Patterns = tuple[tuple[Pattern, Any], ...]  # the first match wins


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    alpha: float
    divides_by_root: bool
    ranks: Patterns  # of modules that do not have `rank`
    alphas: Patterns
    targets: Pattern | Names
    excluded: Pattern | Names
    whole_names: frozenset[str]  # targets in any layer
    layers: frozenset[int] | None  # layers of the other targets; None: all layers

    def rank_of(self, module: str) -> int:
        rank: int = first_match(self.ranks, module, self.rank)
        return rank

    def scaling_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), first_match(self.alphas, module, self.alpha)
        scaling: float = alpha / (math.sqrt(rank) if self.divides_by_root else rank)
        return scaling

    def is_target(self, module: str) -> bool:
        if self.excluded.matches(module):
            return False
        if module in self.whole_names:
            return True
        layer = LAYER.match(module)
        is_in_layer = self.layers is None or (layer is not None and int(layer[1]) in self.layers)
        return self.targets.matches(module) and is_in_layer


def load_adapter_config(folder: Path) -> AdapterConfig:
    path = folder / NAME
    if not path.exists():
        raise ConfigError(
            f"{path} is missing. Name a folder that peft's save_pretrained wrote, with {NAME} and "
            "adapter_model.safetensors"
        )
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path} exceeds {MOST_BYTES} bytes. Download the adapter again")
    try:
        return parse(read_json(path))
    except (ValueError, TimeoutError) as e:
        raise ConfigError(f"{path}: {e}. {REMEDY}") from e


def parse(written: Mapping[str, Any]) -> AdapterConfig:
    """Parse the fields of adapter_config.json. Raises ValueError for unsupported fields."""
    fields = DEFAULTS | dict(written)
    check_fields(fields)
    targets, layers = fields["target_modules"], layers_of(fields["layers_to_transform"])
    if isinstance(targets, str) and layers is not None:
        raise ValueError("layers_to_transform needs a list of target_modules")
    if not targets:
        raise ValueError(f"target_modules = {targets!r} does not name any module")
    left = [SECONDS]
    return AdapterConfig(
        rank=positive(fields, "r", LARGEST),
        alpha=number(fields, "lora_alpha"),
        divides_by_root=flag(fields, "use_rslora"),
        ranks=patterns(fields, "rank_pattern", lambda at, key: positive(at, key, LARGEST), left),
        alphas=patterns(fields, "alpha_pattern", number, left),
        targets=names(fields, "target_modules", left),
        excluded=names(fields, "exclude_modules", left),
        whole_names=frozenset(() if isinstance(targets, str) else targets),
        layers=layers,
    )


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for fields that would be ignored. Empty fields are accepted, because peft's
    later versions turn features off with empty fields.
    """
    for key, value in fields.items():
        if key in ALLOWED:
            if value not in ALLOWED[key]:
                raise ValueError(
                    f"{key} = {shortened(value)} is not supported, only "
                    f"{' and '.join(repr(known) for known in ALLOWED[key] if known)}"
                )
        elif value and key == "modules_to_save":
            raise ValueError(
                f"{key} = {shortened(value)} is not supported: it replaces whole modules, and "
                "specserve adapts only the linear maps of layers"
            )
        elif value and key not in DEFAULTS and key not in HARMLESS:
            raise ValueError(f"{key} = {shortened(value)} is not supported")
    if (beginning := fields.get("init_lora_weights")) not in BEGINNINGS:
        raise ValueError(
            f"init_lora_weights = {shortened(beginning)} is not supported: it changes the model's "
            "weights (peft's path_initial_model_for_weight_conversion saves an adapter that does "
            "not)"
        )


def first_match(patterns: Patterns, module: str, otherwise: Any) -> Any:
    matching = (value for pattern, value in patterns if pattern.matches(module, whole=False))
    return next(matching, otherwise)


def patterns(fields: Mapping[str, Any], key: str, value_of: Any, left: list[float]) -> Patterns:
    """The values of a field that maps expressions to values. An expression matches a module's name,
    or its end after a period.
    """
    told = fields[key] or {}
    if not isinstance(told, dict):
        raise ValueError(f"{key} = {shortened(told)} must be an object")
    try:
        return tuple(
            (Pattern(rf"(.*\.)?({pattern})$", left), value_of(told, pattern)) for pattern in told
        )
    except ValueError as e:
        raise ValueError(f"{key}: {e}") from e


def names(fields: Mapping[str, Any], key: str, left: list[float]) -> Pattern | Names:
    """The matcher of a field with module names: a regular expression or a list of names."""
    told = fields[key] or []
    if isinstance(told, str):
        is_all = told.lower() == "all-linear"  # peft's name for all maps but the head
        return Pattern(r"model\.layers\..*" if is_all else told, left)
    if not isinstance(told, list) or not all(isinstance(name, str) for name in told):
        raise ValueError(f"{key} = {shortened(told)} must be names or a regular expression")
    return Names(told)


def layers_of(told: Any) -> frozenset[int] | None:
    if told is None or told == []:
        return None
    layers = told if isinstance(told, list) else [told]
    if not all(is_int(layer) for layer in layers):
        raise ValueError(f"layers_to_transform = {shortened(told)} must be layer numbers")
    return frozenset(layers)


def number(fields: Mapping[str, Any], key: str) -> float:
    value = fields[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{key} = {value!r} must be a number from {-LARGEST} to {LARGEST}")
    return float(value)
