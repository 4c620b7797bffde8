"""Text on a terminal that shows which sources drafted each token, and the tree of each step.

Colors need a terminal. Without colors, or with NO_COLOR, accepted draft tokens are in brackets.
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
LONGEST = 18  # characters of a token in a tree
# What moves the cursor or erases, of both sets of control characters, and what turns text around.
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
    """The text as a terminal may have it, character by character."""
    return text.translate(HARMLESS)


def has_colors() -> bool:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain


def styled(text: str, *codes: str) -> str:
    """The text with ANSI codes around it, on each of its lines. Without colors the text in brackets
    if a source drafted it, else as it is.
    """
    codes = tuple(filter(None, codes))
    if not has_colors():
        return f"[{text}]" if text and not {*COLORS}.isdisjoint(codes) else text
    if not codes:
        return text
    lines = (f"\x1b[{';'.join(codes)}m{line}\x1b[0m" if line else "" for line in text.split("\n"))
    return "\n".join(lines)


def style(bits: int) -> tuple[str, ...]:
    """The style of a token, where bit i stands for source i: the first source's color, and a line
    if several sources drafted it.
    """
    if not bits:
        return ()
    first = (bits & -bits).bit_length() - 1
    return COLORS[first % len(COLORS)], UNDERLINE if bits & (bits - 1) else ""


def legend(sources: Sequence[str]) -> str:
    if not has_colors():
        names = [harmless(name) for name in sources]
        return f"[accepted guesses] of {', '.join(names)}; a terminal shows by colors whose"
    names = [styled(harmless(name), *style(1 << i)) for i, name in enumerate(sources)]
    return f"guessed by {', '.join(names)}; by the target alone without a color"


class Colored:
    """A text as it comes. A token's text may come later than its step."""

    def __init__(self) -> None:
        self.text, self.num_shown = "", 0
        self.tokens: list[tuple[int, int]] = []  # end in the text, sources; not yet shown

    def add_steps(self, steps: Iterable[StepDetails]) -> None:
        for step in steps:
            self.tokens += zip(step.ends, step.sources, strict=True)

    def shown(self, text: str) -> str:
        """The text that came last as it is to be printed."""
        self.text += text
        pieces: list[str] = []
        while self.tokens and self.tokens[0][0] <= len(self.text):
            end, bits = self.tokens.pop(0)
            pieces.append(styled(self.text[self.num_shown : end], *style(bits)))
            self.num_shown = max(self.num_shown, end)
        if not self.tokens:  # the text of no token: its steps came without details
            pieces.append(self.rest())
        return "".join(pieces)

    def rest(self) -> str:
        """What is left at the end: of a token whose text was cut by a stop string."""
        left, self.num_shown = self.text[self.num_shown :], len(self.text)
        return left


def tree_lines(step: StepDetails, text_of: Callable[[int], str]) -> list[str]:
    """The draft tokens of a step as lines: accepted ones bold and in their source's color, the
    first path of each node in its own line, others dim.
    """
    tree = step.tree
    children: list[list[int]] = [[] for _ in range(len(tree.parents) + 1)]
    for node, parent in enumerate(tree.parents, 1):
        children[parent].append(node)
    right = set(tree.accepted)
    for each in children:
        each.sort(key=lambda node: node not in right)

    def label(node: int) -> tuple[str, int]:
        if node == 0:
            return "●", 1
        text = text_of(tree.tokens[node - 1]).translate(VISIBLE)
        text = (text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…") or "∅"
        codes = (BOLD, *style(tree.sources[node - 1])) if node in right else (DIM,)
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
    draft_tokens, right, new = len(step.tree.tokens), len(step.tree.accepted), len(step.tokens)
    more, tokens = "" if draft_tokens == 1 else "es", "token" if new == 1 else "tokens"
    return f"step {number}: {draft_tokens} guess{more}, {right} right, {new} new {tokens}"


def draw_stream(steps: "Watched", text_of: Callable[[int], str]) -> "Output":
    """Print the tree of each step, then all of the text; its output."""
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
            print(step_words(number, step))
            print(*tree_lines(step, text_of), "", sep="\n", flush=True)
