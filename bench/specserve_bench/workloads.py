"""Workloads: conversations and texts that the demo pair was not trained on.

Each is made offline, only from the seed; the JSON keeps its description and hash.
"""

import hashlib
import json
import random
import re
import string
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

from specserve import LLM, SpeculationParams
from specserve.errors import ConfigError
from specserve_bench.demo import held_out

Message = dict[str, str]
NUM_TURNS = 8  # of a conversation with an agent
EDIT = "edit"
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RENAMED = 20  # each so many-th identifier is
UNLEARNT = SpeculationParams(learn=False)  # no source learns what such a request says
UNDRAFTED = SpeculationParams(enabled=False, learn=False)


class Ask(NamedTuple):
    """One request: a conversation, or a text to go on with.

    prediction    what its text is expected to be
    speculation   settings of its drafting; None: all drafters
    schema        a JSON schema that its text obeys
    """

    prompt: str | Sequence[Message]
    max_tokens: int
    temperature: float
    seed: int
    prediction: str | None = None
    speculation: SpeculationParams | None = None
    schema: dict[str, Any] | None = None


class Workload(NamedTuple):
    name: str
    about: str
    seed: int
    asks: list[Ask]

    @property
    def is_edit(self) -> bool:
        """Whether its requests have predictions, which are made of what the target says to them."""
        return self.name == EDIT

    @property
    def once_before(self) -> "Workload":
        """The same requests with other seeds, so that random texts are other ones."""
        return self._replace(asks=[ask._replace(seed=ask.seed + 2**32) for ask in self.asks])

    def with_speculation(self, speculation: SpeculationParams) -> "Workload":
        """The same requests with these speculation settings."""
        return self._replace(asks=[ask._replace(speculation=speculation) for ask in self.asks])

    def expecting(self, texts: Sequence[str]) -> "Workload":
        """Its requests with edited texts as their predictions."""
        both = zip(self.asks, texts, strict=True)
        return self._replace(asks=[ask._replace(prediction=edited(text)) for ask, text in both])

    def described(self) -> dict[str, Any]:
        """For the JSON."""
        asked = [(ask.prompt, ask.max_tokens, ask.temperature, ask.seed) for ask in self.asks]
        return {
            "about": self.about,
            "seed": self.seed,
            "hash": hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16],
            "requests": len(self.asks),
            "max_tokens": max(ask.max_tokens for ask in self.asks),
            "temperature": max(ask.temperature for ask in self.asks),
        }


def workload(name: str, size: int, seed: int, temperature: float | None = None) -> Workload:
    """The workload of that name with `size` requests, all at `temperature` if it is given."""
    if name not in WORKLOADS:
        raise ConfigError(f"--workloads {name}: the workloads are {', '.join(WORKLOADS)}")
    about, make = WORKLOADS[name]
    asks = make(random.Random(f"{name} {seed}"), size)
    if temperature is not None:
        asks = [ask._replace(temperature=temperature) for ask in asks]
    return Workload(name, about, seed, asks)


def source_tokens(llm: LLM) -> list[int]:
    """All of the source that the demo pair was not trained on."""
    texts = held_out.source_files().values()
    return [token for text in texts for token in llm.tokenizer.encode(text)]


def ask(source: random.Random, prompt: str | Sequence[Message], max_tokens: int) -> Ask:
    return Ask(prompt, max_tokens, 0.0, source.randrange(2**32))


def says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def questions(source: random.Random, size: int) -> list[Ask]:
    known = held_out.questions()
    drawn = source.sample(known, size) if size <= len(known) else source.choices(known, k=size)
    return [ask(source, [says("user", q.question)], 96) for q in drawn]


def completion(source: random.Random, size: int) -> list[Ask]:
    return [ask(source, beginning(source, 1200), 96) for _ in range(size)]


def beginning(source: random.Random, characters: int) -> str:
    """Lines of a file up to somewhere inside it, where a new line begins."""
    text = source.choice(list(held_out.source_files().values()))
    end = text.index("\n", source.randrange(min(characters, len(text) // 2), len(text) - 1)) + 1
    start = text.rfind("\n", 0, max(0, end - characters)) + 1
    return text[start:end]


def agent(source: random.Random, size: int) -> list[Ask]:
    """Whole conversations, turn by turn: each request repeats the last one and adds a little."""
    asks: list[Ask] = []
    while len(asks) < size:
        messages = [says("user", f"Here is a file.\n\n{beginning(source, 1600)}")]
        for _ in range(min(NUM_TURNS, size - len(asks))):
            asks.append(ask(source, list(messages), 48))
            known = source.choice(held_out.questions())
            messages.append(says("assistant", known.first_sentence))
            result = beginning(source, 360)  # of what a tool says in a turn
            messages.append(says("user", f"{known.question}\n\n{result}"))
    return asks


def random_text(source: random.Random, size: int) -> list[Ask]:
    """Random characters, continued at temperature 2: n-grams find nothing."""
    signs = string.ascii_letters + string.digits + string.punctuation + "  "
    texts = ["".join(source.choices(signs, k=400)) for _ in range(size)]
    return [ask(source, text, 64)._replace(temperature=2.0) for text in texts]


def mixed(source: random.Random, size: int) -> list[Ask]:
    """Every fourth prompt is long, about 1,900 tokens; the others are questions."""
    short = iter(questions(source, size))

    def long_one() -> Ask:
        text = "\n".join([beginning(source, 2000) for _ in range(3)])
        return ask(source, text[:6000], 32)

    return [long_one() if number % 4 == 3 else next(short) for number in range(size)]


def edit(source: random.Random, size: int) -> list[Ask]:
    """Longer texts than those of `completion`, as most of each is expected."""
    return [ask(source, beginning(source, 1200), 192) for _ in range(size)]


def edited(text: str) -> str:
    """The text with another name in place of every 20th identifier."""
    numbers = count(1)
    return IDENTIFIER.sub(
        lambda found: f"{'' if next(numbers) % RENAMED else 'new_'}{found[0]}", text
    )


HELD_OUT = "twelve files of the standard library that training never saw"
WORKLOADS: dict[str, tuple[str, Callable[[random.Random, int], list[Ask]]]] = {
    "questions": (
        "questions about the standard library, in wording that training never saw",
        questions,
    ),
    "completion": (f"Python to continue, from {HELD_OUT}", completion),
    "agent": (
        f"conversations of {NUM_TURNS} turns about a file; a request repeats the last one and adds "
        f"a turn; files from {HELD_OUT}",
        agent,
    ),
    "random": (
        "random characters, continued at temperature 2: an unpredictable text",
        random_text,
    ),
    EDIT: (
        f"Python to continue, from {HELD_OUT}; the prediction is the target model's text, with "
        f"another name for every {RENAMED}th identifier",
        edit,
    ),
    "mixed": (f"three questions for each long prompt, from {HELD_OUT}", mixed),
}
