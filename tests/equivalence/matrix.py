"""The equivalence matrix: whatever guesses, a request says what it says without.

Its axes are drafters x ways to draw x parameters x situations. Requests of the cells that differ in
the drafter alone have the same prompts, seeds and company. Each cell without a drafter is held
against an oracle, and any other against the cell without a drafter, bit by bit. A cell in which
what it names did not happen fails as well.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from pytest import MonkeyPatch

from tests.engine.clock import Clock
from tests.equivalence.asks import ASKED, DRAWN, Ask
from tests.equivalence.columns import COLUMNS, Asked, Column
from tests.equivalence.oracle import end_of, wrong_logits, wrong_logprobs, wrong_tokens
from tests.equivalence.pair import random_pair, spoken

TOGETHER = {  # situations, and how many requests of cells share a run there
    "alone": 1,
    "among 8 others": 6,
    "beside a prompt": 3,
    "after a prefix hit": 4,
}
NUM_SEEDS = 3


class Cell(NamedTuple):
    column: str
    drawn: str
    asked: str
    situation: str

    def __str__(self):
        return f"{' | '.join(self)} (seeds {', '.join(map(str, self.seeds))})"

    @property
    def seeds(self):
        """Of its requests, all of which it has with each of them. A seed has a prompt of its own,
        and one way to draw and situation.
        """
        place = [*product(DRAWN, TOGETHER)].index((self.drawn, self.situation))
        return range(1 + NUM_SEEDS * place, 1 + NUM_SEEDS * (place + 1))


class Line(NamedTuple):
    """One request of a cell, as it is played: one of those that it has with each seed."""

    cell: Cell
    seed: int
    number: int
    ask: Ask
    asked: Asked

    def is_met(self, said, probes):
        return self.ask.is_met(said, probes[self.seed].token_ids)


class Failure(NamedTuple):
    cell: Cell
    reason: str

    def __str__(self):
        return f"{self.cell}: {self.reason}"


class Report(NamedTuple):
    """Cells that ran, cells without a drafter that equal the oracle, and others equal to them."""

    num_run: int
    num_reported: int
    num_equal: int
    failures: list[Failure]
    facts: dict[str, Counter]  # by column


CELLS = [Cell(*at) for at in product(COLUMNS, DRAWN, ASKED, TOGETHER)]


def is_of_the_tenth(cell):
    """Every pair of a drafter and a parameter, and of a way to draw and a situation, is there."""
    axes = zip((ASKED, DRAWN, TOGETHER), (cell.asked, cell.drawn, cell.situation), strict=True)
    asked, drawn, situation = ([*axis].index(value) for axis, value in axes)
    return (asked + 2 * drawn + 3 * situation) % 10 == 0


TENTH = [cell for cell in CELLS if is_of_the_tenth(cell)]


@contextmanager
def columns():
    """All columns, whose time goes on by launches alone: so `auto` guesses alike in every run."""
    with TemporaryDirectory() as folder, MonkeyPatch.context() as patch:
        Clock(patch)
        torch.set_num_threads(1)
        pair = random_pair(Path(folder))
        yield {name: Column(name, pair) for name in COLUMNS}


def prompt_of(seed):
    """It repeats itself, so that n-grams have guesses from the first step on."""
    rng, ids = Random(seed), spoken()
    part = rng.sample(ids, 7)
    return [*part, *part, *rng.sample(ids, 3), *part, *part[:2]]


def check(columns, cells):
    """Run the cells, of which those without a drafter come first."""
    matrix = Matrix(columns, cells)
    for name in COLUMNS:
        matrix.run(name, [cell for cell in cells if cell.column == name])
    return matrix.report()


class Matrix:
    def __init__(self, columns, cells):
        self.columns, self.cells = columns, cells
        self.pair = columns["off"].pair
        drawn = {seed: cell.drawn for cell in cells for seed in cell.seeds}
        self.probes = {seed: self.probe(drawn[seed], seed) for seed in drawn}
        self.off = {}  # what cells without a drafter said
        self.failed = {}  # reasons by cell, in order
        self.facts = {name: Counter() for name in COLUMNS}

    def probe(self, drawn, seed):
        """The text of the seed's cells without their parameter."""
        asked = Ask().asked(prompt_of(seed), drawn, seed, "probe")
        [played] = self.columns["off"].play([asked])
        return played.said.choices[0]

    def run(self, name, cells):
        column = self.columns[name]
        for situation, most in TOGETHER.items():
            lines = [x for cell in cells if cell.situation == situation for x in self.lines(cell)]
            played = []
            for i in range(0, len(lines), most):
                played += play(column, lines[i : i + most], situation)
            both = [*zip(lines, played, strict=True)]
            for cell in cells:
                if cell.situation == situation:
                    self.judge(cell, [(line, one) for line, one in both if line.cell == cell])

    def lines(self, cell):
        for seed in cell.seeds:
            probe = self.probes[seed]
            for i, ask in enumerate(ASKED[cell.asked](probe.token_ids, probe.text)):
                salt = f"{cell} {seed} {i}"  # no request finds another's KV
                yield Line(cell, seed, i, ask, ask.asked(prompt_of(seed), cell.drawn, seed, salt))

    def judge(self, cell, mine):
        key, said = cell[1:], [one.said for _, one in mine]
        for _, one in mine:
            self.facts[cell.column] += one.facts
        if cell.column == "off":
            self.off[key] = said
            reasons = [r for line, one in mine for r in untold(self.pair, line, one)]
        else:
            reasons = [*differences(said, self.off[key])]
        reasons += unexercised(cell, mine, self.probes)
        self.failed[cell] = reasons

    def report(self):
        ok = [cell for cell, reasons in self.failed.items() if not reasons]
        num_reported = sum(cell.column == "off" for cell in ok)
        failures = [Failure(cell, r) for cell, reasons in self.failed.items() for r in reasons]
        return Report(len(self.failed), num_reported, len(ok) - num_reported, failures, self.facts)


def play(column, lines, situation):
    """A run of some requests of cells in a situation; what became of these."""
    asked = [line.asked for line in lines]
    column.engine.reset_cache()
    if situation == "among 8 others":
        asked += [stranger(i, 24, max_tokens=44) for i in range(12 - len(asked))]
    if situation == "beside a prompt":
        asked += [stranger(i, 110, arrives=i, max_tokens=1) for i in (1, 4, 9, 15)]
    if situation == "after a prefix hit":
        column.play([one_token(ask) for ask in asked])
    return column.play(asked)[: len(lines)]


def stranger(i, size, arrives=0, **given):
    """A request that is no cell's."""
    drawn = [*DRAWN][i % len(DRAWN)]
    prompt = Random(-1 - i).choices(spoken(), k=size)
    given |= {"presence_penalty": 0.5} if i % 2 else {}
    return Ask(given).asked(prompt, drawn, i, "stranger", arrives)


def one_token(asked):
    return Ask({"max_tokens": 1}).asked(asked.prompt, "greedy", 0, asked.params.cache_salt)


def untold(pair, line, played) -> Iterable[str]:
    """What the oracle says otherwise."""
    prompt, usage = line.asked.prompt, played.said.usage
    sizes = [len(c.token_ids) for c in played.said.choices]
    num_cached = len(prompt) - 1  # the last token is computed
    num_cached *= line.cell.situation == "after a prefix hit"
    want = len(prompt), sum(sizes), len(prompt) + sum(sizes), num_cached
    got = usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens
    if got != want:
        yield f"its usage is {got}, not {want}"
    for choice, asked, rows in zip(
        played.said.choices, played.samplings, played.logits, strict=True
    ):
        yield from unreported_choice(pair, prompt, choice, asked, rows)


def unreported_choice(pair, prompt, choice, asked, rows):
    output = choice.token_ids
    if places := wrong_tokens(prompt, output, rows, asked):
        yield f"the oracle draws other tokens at {places}"
    if far := wrong_logits(pair.model, prompt, output, rows):
        yield f"logits are {far} from those of transformers"
    end = end_of(pair.tokenizer, output, asked)
    said = len(output), choice.text, choice.finish_reason, choice.stop_reason
    if said != end._replace(text=choice.text if end.text is None else end.text):
        yield f"it ends {said}, not {end}"
    k = asked.logprobs
    if k is not None and (places := wrong_logprobs(choice.logprobs, output, rows, k)):
        yield f"the oracle tells other logprobs at {places}"


def differences(said, want):
    """Where a cell is not what it is without a drafter."""
    for i, (one, other) in enumerate(zip(said, want, strict=True)):
        if one.bits != other.bits:
            yield f"request {i}: {first_difference(one, other)}"


def first_difference(one, other):
    if one.usage != other.usage:
        return f"{one.usage}, not {other.usage}"
    for c, (a, b) in enumerate(zip(one.choices, other.choices, strict=True)):
        for name in a.__struct_fields__:
            x, y = getattr(a, name), getattr(b, name)
            if x != y:
                return f"choice {c}: {name} {x!r}, not {y!r}"
    return "the bits of a number differ"


def unexercised(cell, mine, probes):
    """What the cell names and did not happen."""
    facts = sum((one.facts for _, one in mine), Counter())
    shown = {line.number for line, one in mine if line.is_met(one.said, probes)}
    for number in {line.number for line, _ in mine} - shown:
        yield f"not exercised: no request {number} of a seed shows {cell.asked}"
    for i, (_, one) in enumerate(mine):
        if not has_met(cell.situation, one):
            yield f"not exercised: request {i} was not {cell.situation}"
    if cell.column != "off":
        wanted = ["accepted", "rejected"]
        wanted += ["ended in a block"] * any(line.ask.ends_in_block for line, _ in mine)
        yield from (f"not exercised: no guess was {x}" for x in wanted if not facts[x])


def has_met(situation, played):
    if situation == "after a prefix hit":
        return played.said.usage.cached_tokens > 0
    return situation == "alone" or played.facts[situation] > 0
