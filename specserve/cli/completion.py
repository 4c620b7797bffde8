"""Completion of the command's arguments in bash, zsh and fish, with argcomplete.

A shell's script runs `specserve` with the typed line in the environment to get completions.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from argcomplete import autocomplete
from argcomplete.completers import BaseCompleter, FilesCompleter
from argcomplete.shell_integration import shellcode

from specserve.config import KNOBS, TLS_FILES, named_values
from specserve_drafters.base import BUILT_IN

KEYS = {  # flags that take the values of a setting
    "demo_compute": "model.demo_compute",
    "quantize": "model.quantize",
    "drafter": "drafter.name",
    "draft_quantize": "drafter.quantize",
    "tool_parser": "server.tool_parser",
    "reasoning_parser": "server.reasoning_parser",
}
# Arguments that may be paths.
MODELS = "model", "draft_model", "draft_head"
FILES = *MODELS, "source", "subjects", "api_key_file", "admin_key_file", *TLS_FILES


def script(shell: str) -> str:
    return shellcode(["specserve"], use_defaults=False, shell=shell)


def complete(top: argparse.ArgumentParser, others: dict[str, EntryPoint]) -> None:
    """Print completions for the shell, and exit. Commands of other packages are completed if their
    module has a function `parser` that returns an ArgumentParser.
    """
    point = os.environ.get("COMP_POINT", "")
    typed = os.environ["COMP_LINE"].encode()[: int(point) if point.isdecimal() else None]
    line = typed.decode(errors="ignore")
    _, *words = line.split(" ")
    name = next(filter(None, words[:-1]), "")
    if name in others:
        others[name].load()
        own = getattr(sys.modules[others[name].module], "parser", None)
        os.environ["_ARGCOMPLETE"] = "2"  # number of words that name the command
        top = argparse.ArgumentParser(add_help=False) if own is None else own()
    autocomplete(top, always_complete_options="long", default_completer=Values())


class Values(BaseCompleter):
    """Completes arguments without `choices`."""

    def __call__(self, *, prefix: str, action: argparse.Action, **told: Any) -> Iterable[str]:
        if action.dest == "set":
            key, equals, _ = prefix.partition("=")
            return (f"{key}={v}" for v in values_of(key)) if equals else map("{}=".format, KNOBS)
        if action.dest in KEYS:
            return values_of(KEYS[action.dest])
        return FilesCompleter()(prefix) if action.type is Path or action.dest in FILES else ()


def values_of(key: str) -> Iterable[str]:
    if key == "drafter.name":
        return "none", *BUILT_IN
    kind = KNOBS.get(key)
    return ("true", "false") if bool in getattr(kind, "__args__", ()) else named_values(kind)
