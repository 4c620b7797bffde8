"""A flag with a list, which is given once."""

import argparse
from typing import Any


class Once(argparse.Action):
    """Refuses a list that is given twice: only the last one would count."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise argparse.ArgumentError(self, "is there twice; give one list, with commas")
        setattr(namespace, self.dest, values)
