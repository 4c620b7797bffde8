"""Train draft heads. `specserve serve` without a model serves the demo models."""

import argparse
from collections.abc import Callable

from specserve_bench.demo import train_head


def main(argv: list[str]) -> int:
    """The entry point of `specserve demo`."""
    args = parser().parse_args(argv)
    action: Callable[[argparse.Namespace], int] = args.action
    return action(args)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="specserve demo", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    words = "train an EAGLE-3 head for your model, or for the demo target"
    train_head.add_arguments(commands.add_parser("train-head", help=words))
    return top
