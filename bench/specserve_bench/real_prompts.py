"""Prompts as users of a small chat model write them, for real weights.

HumanEval's problems come from its package, and the documents are those of Python's help.
"""

import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from pydoc_data import topics
from typing import Any

from specserve.errors import ConfigError
from specserve_bench.real_models import FOLDER, REMEDY, real_models
from specserve_bench.workloads import Ask, agent, says

NEW_TOKENS = 64
DOCUMENTS, DOCUMENT_LENGTH = 60, 6000  # documents, and most characters of each
CHARACTERS = 4.2  # per token of the long texts
SCHEMAS = Path(__file__).with_name("schemas.json")
# Each question of a chat is one of these about one of the topics below.
LONG_TASKS = (
    "Summarize the text above.",
    "List five facts from the text above.",
    "Copy the last paragraph of the text above.",
    "What is the text above about?",
    "Write a short poem about the text above.",
    "Which words of the text above are names?",
)
QUESTIONS = (
    "What is {}?",
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "How would you start learning about {}?",
    "Write a letter to a friend about {}.",
)
TOPICS = (
    *("the moon", "pancakes", "photosynthesis", "chess", "recursion"),
    *("the French Revolution", "bicycles", "coffee", "volcanoes", "jazz"),
)
EDIT_TASKS = (
    "Add a docstring to this function. Answer with the whole function.",
    "Rename the function to `solve`. Answer with the whole function.",
    "Add type hints to this function. Answer with the whole function.",
)


def prompts(name: str) -> list[Ask]:
    """All prompts of this name, in a fixed order."""
    asks = [*PROMPTS[name]()]
    random.Random(name).shuffle(asks)
    return asks


def as_text(ask: Ask) -> Ask:
    """The messages as one text, for a model without a chat template."""
    if isinstance(ask.prompt, str):
        return ask
    return ask._replace(prompt="\n\n".join(message["content"] for message in ask.prompt) + "\n\n")


def chat(content: str, seed: int, **more: Any) -> Ask:
    return Ask([says("user", content)], NEW_TOKENS, 0.0, seed)._replace(**more)


def human_eval() -> Iterator[Ask]:
    for seed, problem in enumerate(problems()):
        yield chat(f"Complete this Python function.\n\n{problem['prompt']}", seed)


def questions() -> Iterator[Ask]:
    each = ((question, topic) for question in QUESTIONS for topic in TOPICS)
    for seed, (question, topic) in enumerate(each):
        yield chat(question.format(topic), seed)


def edits() -> Iterator[Ask]:
    for seed, (problem, task) in enumerate(zip(problems(), cycle(EDIT_TASKS), strict=False)):
        code = problem["prompt"] + problem["canonical_solution"]
        yield chat(f"{task}\n\n```python\n{code}```", seed, prediction=f"```python\n{code}```")


def documents() -> Iterator[Ask]:
    texts = sorted(topics.topics.values(), key=len, reverse=True)[:DOCUMENTS]
    for seed, text in enumerate(texts):
        yield chat(f"Summarize this text.\n\n{text[:DOCUMENT_LENGTH]}", seed)


def of_long_texts(num_tokens: int) -> Iterator[Ask]:
    """Tasks about two long texts. Each comes first in its prompts, so they share a prefix."""
    pages = sorted(topics.topics.values(), key=len, reverse=True)[:DOCUMENTS]
    size = int(CHARACTERS * num_tokens)
    for number in range(2):
        text = "\n\n".join(pages[number::2])[:size]
        for seed, task in enumerate(LONG_TASKS):
            yield chat(f"{text}\n\n{task}", seed)


def conversations() -> Iterator[Ask]:
    return (ask._replace(max_tokens=NEW_TOKENS) for ask in agent(random.Random(0), 48))


def structured() -> Iterator[Ask]:
    schemas: Mapping[str, Any] = json.loads(SCHEMAS.read_bytes())
    for seed, (name, schema) in enumerate(schemas.items()):
        task = f"Give a realistic example of {name.replace('_', ' ')} as JSON."
        yield chat(task, seed, schema=schema)


def problems() -> list[dict[str, str]]:
    """HumanEval's problems."""
    models = real_models()
    if models is None:
        raise ConfigError(f"no real weights in {FOLDER}: {REMEDY}")
    with gzip.open(models.human_eval, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


PROMPTS: dict[str, Callable[[], Iterator[Ask]]] = {
    "HumanEval": human_eval,
    "chat": questions,
    "edit": edits,
    "documents": documents,
    "agent": conversations,
    "JSON": structured,
    "4k tokens": partial(of_long_texts, 4000),
    "7k tokens": partial(of_long_texts, 7000),
    "16k tokens": partial(of_long_texts, 16_000),
    "32k tokens": partial(of_long_texts, 32_000),
}
SHORT = tuple(PROMPTS)[:6]  # the other kinds take long to compute
