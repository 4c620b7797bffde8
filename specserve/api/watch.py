"""Terminal output that colors each token by its draft source, and draws the tree of each step.

Colors need a terminal. Without a terminal, or with NO_COLOR, accepted draft tokens are in brackets.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING

from specserve.exchange.messages import StepDetails

if TYPE_CHECKING:
    from specserve.api.outputs import Output

    Watched = Generator[tuple[str, list[int], list[StepDetails]], None, Output]

COLORS = "32", "34", "33", "35", "36", "31"  # of sources, in order: green, blue, yellow, ...
BOLD, DIM, UNDERLINE = "1", "2", "4"
LONGEST = 18  # maximum characters of a token in a tree
# Control characters that move the cursor or erase, and characters that change the text direction.
CONTROLS = (
    *range(9),
    *range(11, 32),
    *range(127, 160),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)
HARMLESS = dict.fromkeys(CONTROLS, "�")
VISIBLE = HARMLESS | str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍", "\x1b": "␛"})


def harmless(text: str) -> str:
    """Replace characters that could control a terminal."""
    return text.translate(HARMLESS)


def has_colors() -> bool:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain


def styled(text: str, *codes: str) -> str:
    """Return the text with ANSI codes around each of its lines.

    Without colors, return drafted text in brackets, and other text unchanged.
    """
    codes = tuple(filter(None, codes))
    if not has_colors():
        return f"[{text}]" if text and not {*COLORS}.isdisjoint(codes) else text
    if not codes:
        return text
    lines = (f"\x1b[{';'.join(codes)}m{line}\x1b[0m" if line else "" for line in text.split("\n"))
    return "\n".join(lines)


def style(bits: int) -> tuple[str, ...]:
    """Return the style of a token; bit i stands for source i.

    The color is the first source's. A token of several sources is underlined.
    """
    if not bits:
        return ()
    first = (bits & -bits).bit_length() - 1
    return COLORS[first % len(COLORS)], UNDERLINE if bits & (bits - 1) else ""


def legend(sources: Sequence[str]) -> str:
    if not has_colors():
        names = [harmless(name) for name in sources]
        return (
            f"[accepted draft tokens] of {', '.join(names)}; a terminal shows the source by color"
        )
    names = [styled(harmless(name), *style(1 << i)) for i, name in enumerate(sources)]
    return f"accepted draft tokens of {', '.join(names)}; target model: no color"


class Colored:
    """Colors a text while it is generated. A token's text may come later than its step."""

    def __init__(self) -> None:
        self.text, self.num_shown = "", 0
        self.tokens: list[tuple[int, int]] = []  # not yet shown: end in the text, sources

    def add_steps(self, steps: Iterable[StepDetails]) -> None:
        for step in steps:
            self.tokens += zip(step.ends, step.sources, strict=True)

    def shown(self, text: str) -> str:
        """Add new text, and return the colored text to print."""
        self.text += text
        pieces: list[str] = []
        while self.tokens and self.tokens[0][0] <= len(self.text):
            end, bits = self.tokens.pop(0)
            pieces.append(styled(self.text[self.num_shown : end], *style(bits)))
            self.num_shown = max(self.num_shown, end)
        if not self.tokens:  # text of steps without details
            pieces.append(self.rest())
        return "".join(pieces)

    def rest(self) -> str:
        """Return the text that was not shown, e.g. of a token that a stop string cut."""
        left, self.num_shown = self.text[self.num_shown :], len(self.text)
        return left


def tree_lines(step: StepDetails, text_of: Callable[[int], str]) -> list[str]:
    """Draw the draft tokens of a step as lines of text.

    Accepted tokens are bold and have their source's color; others are dim. The first child of a
    node continues its line.
    """
    tree = step.tree
    children: list[list[int]] = [[] for _ in range(len(tree.parents) + 1)]
    for node, parent in enumerate(tree.parents, 1):
        children[parent].append(node)
    accepted = set(tree.accepted)
    for each in children:
        each.sort(key=lambda node: node not in accepted)

    def label(node: int) -> tuple[str, int]:
        if node == 0:
            return "●", 1
        text = text_of(tree.tokens[node - 1]).translate(VISIBLE)
        text = (text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…") or "∅"
        codes = (BOLD, *style(tree.sources[node - 1])) if node in accepted else (DIM,)
        shown = styled(text, *codes)
        return shown, len(text) if has_colors() else len(shown)

    def draw(node: int) -> list[str]:
        shown, width = label(node)
        lines: list[str] = []
        last = len(children[node]) - 1
        for place, child in enumerate(children[node]):
            first, *others = draw(child)
            if place == 0:
                lines.append(f"{shown} {'───' if last == 0 else '─┬─'} {first}")
            else:
                lines.append(f"{' ' * width} {' ├─' if place < last else ' └─'} {first}")
            line = " │ " if place < last else "   "
            lines += [f"{' ' * width} {line} {other}" for other in others]
        return lines or [shown]

    return draw(0)


def step_words(number: int, step: StepDetails) -> str:
    drafted, accepted, new = len(step.tree.tokens), len(step.tree.accepted), len(step.tokens)
    words = f"{drafted} draft token{'' if drafted == 1 else 's'}, {accepted} accepted"
    return f"step {number}: {words}, {new} new token{'' if new == 1 else 's'}"


def draw_stream(steps: "Watched", text_of: Callable[[int], str]) -> "Output":
    """Print the tree of each step with draft tokens, then the whole text; return the output."""
    colored, number = Colored(), 0
    pieces: list[str] = []
    while True:
        try:
            text, _, details = next(steps)
        except StopIteration as end:
            print("".join(pieces) + colored.rest(), flush=True)
            output: Output = end.value
            return output
        colored.add_steps(details)
        pieces.append(colored.shown(text))
        for step in details:
            number += 1
            if not step.tree.tokens:
                continue
            print(step_words(number, step))
            print(*tree_lines(step, text_of), "", sep="\n", flush=True)
