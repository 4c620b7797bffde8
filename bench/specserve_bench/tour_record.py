"""Records the steps of one request for docs/tour.md."""

from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any

import msgspec

from specserve import LLM, SamplingParams
from specserve.api.outputs import Output
from specserve.exchange.messages import CostState, PlanState, RowCost, SpeculationState, StepDetails
from specserve.exchange.sampling_params import SpeculationParams
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator, RequestDraft
from specserve.speculation.costs import Step
from specserve.text.chat_template import ChatOptions
from specserve.text.template_messages import Message


class Node(msgspec.Struct, frozen=True):
    """A verified draft token."""

    token: int
    text: str
    parent: int
    sources: int  # as in `StepDetails.tree`
    p: float  # the planner's probability of the path that ends here


class Recorded(msgspec.Struct, frozen=True):
    """A step of the request."""

    ms: float
    text: str
    tokens: list[int]
    texts: list[str]  # one per token
    sources: list[int]  # one per token, as bits
    nodes: list[Node]
    accepted: list[int]
    plan: PlanState | None = None
    draft_ms: float = 0.0  # drafting time in the planner's estimate
    candidates: list[float] = []  # p of all draft tokens, in falling order
    cost_ms: dict[int, float] = {}  # rows -> expected time of the target forward


class RecordedRun(msgspec.Struct, frozen=True):
    steps: list[Recorded]
    token_ids: list[int]
    text: str
    total_ms: float


class Tour(msgspec.Struct, frozen=True):
    body: dict[str, Any]  # HTTP request body
    written: str  # output of the chat template
    prompt: list[str]  # one text per token
    block_size: int
    blocks: list[int]  # block numbers of the prompt
    num_cached: int  # prompt tokens
    memory: dict[str, dict[str, int]]  # when -> holder -> blocks
    sources: tuple[str, ...]
    drafted: RecordedRun
    plain: RecordedRun  # speculation is off
    sampled: list[str]  # texts at temperature 1, with and without drafting

    @property
    def shown(self) -> int:
        """The index of the step in the pictures: it accepts tokens and has the most branches."""
        steps = self.drafted.steps
        return max(range(len(steps)), key=lambda i: (bool(steps[i].accepted), leaves(steps[i])))


def leaves(step: Recorded) -> int:
    return len(step.nodes) - len({node.parent for node in step.nodes} - {0})


def record(llm: LLM, asked: Sequence[str], warm: Sequence[str], max_tokens: int = 128) -> Tour:
    """Send each question of `warm`, then `asked` as one chat, and record the last request."""
    how: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "seed": 7}
    params = SamplingParams(**how, return_speculation_details=True)
    off = params.clone(speculation=SpeculationParams(enabled=False))
    for question in warm:
        llm.chat([{"role": "user", "content": question}], params)
        llm.chat([{"role": "user", "content": question}], off)

    *before, last = asked
    messages: list[Message] = []
    for question in before:
        messages.append({"role": "user", "content": question})
        [answer] = llm.chat(messages, params)
        messages.append({"role": "assistant", "content": answer.text})
    messages.append({"role": "user", "content": last})

    ids, written = llm.render(messages, ChatOptions(), params)
    memory = {"before": llm.memory()}
    drafted, output, blocks, memory["first step"] = run(llm, ids, params)
    memory["after"] = llm.memory()
    plain, *_ = run(llm, ids, off)
    hot = (p.clone(temperature=1.0) for p in (params, off))
    return Tour(
        body={"messages": messages, "stream": True, **how},
        written=written,
        prompt=[text_of(llm, token) for token in ids],
        block_size=llm.engine.target.kv.block_size,
        blocks=blocks,
        num_cached=output.num_cached_tokens,
        memory=memory,
        sources=llm.engine.sources,
        drafted=drafted,
        plain=plain,
        sampled=[llm.chat(messages, p)[0].text for p in hot],
    )


def run(
    llm: LLM, ids: list[int], params: SamplingParams
) -> tuple[RecordedRun, Output, list[int], dict[str, int]]:
    """Return steps, output, and the request's blocks and the pool's use after the first step."""
    steps: list[Recorded] = []
    blocks, memory = list[int](), dict[str, int]()
    events = llm.watch(ids, params)
    while True:
        state, start = llm.speculation(), perf_counter()
        try:
            text, _, [details] = next(events)
        except StopIteration as end:
            output: Output = end.value
            total = round(sum(step.ms for step in steps), 2)
            return RecordedRun(steps, output.token_ids, output.text, total), output, blocks, memory
        ms = 1e3 * (perf_counter() - start)
        if not steps:
            memory = llm.memory()
            blocks = [b for r in llm.engine.requests.values() for b in r.table.blocks]
        steps.append(step_of(llm, ms, text, details, state))


def step_of(
    llm: LLM, ms: float, text: str, details: StepDetails, state: SpeculationState
) -> Recorded:
    """`state` is the speculation state before the step, which the plan used."""
    tree, speculator = details.tree, llm.engine.speculator
    found: RequestDraft | None = None
    if isinstance(speculator, AdaptiveSpeculator):
        found = next(iter(speculator.roots.values()), None)
    step = Recorded(
        ms=round(ms, 2),
        text=text,
        tokens=details.tokens,
        texts=[text_of(llm, token) for token in details.tokens],
        sources=details.sources,
        nodes=[],
        accepted=tree.accepted,
    )
    if found is None or not isinstance(speculator, AdaptiveSpeculator) or not tree.tokens:
        return step
    trie = found.trie
    p, costs, at = trie.values, state.costs["target"], speculator.step
    each = zip(tree.tokens, tree.parents, tree.sources, found.nodes, strict=False)
    return msgspec.structs.replace(
        step,
        nodes=[Node(t, text_of(llm, t), above, bits, round(p[n], 4)) for t, above, bits, n in each],
        plan=llm.speculation().plan,
        draft_ms=round(1e3 * at.spent, 2),
        candidates=[round(v, 4) for v in speculator.plans.select(found.scheduled.draft_limit)],
        cost_ms={row.rows: round(1e3 * row_cost(row, costs, at), 2) for row in costs.steps},
    )


def row_cost(row: RowCost, costs: CostState, step: Step) -> float:
    """Return the seconds of a step with draft tokens, up to so many rows."""
    attended = step.attended_with(max(row.rows - step.rows, 0))
    added = costs.seconds_per_token * step.context + costs.seconds_per_row_token * attended
    return (row.seconds + added + costs.seconds_per_request * step.requests) * costs.slowdown


def text_of(llm: LLM, token: int) -> str:
    return llm.tokenizer.decode([token], skip_special_tokens=False)


def cost(step: Recorded, rows: int) -> float:
    """Return the milliseconds of the smallest row bucket that holds so many rows."""
    return next((ms for edge, ms in step.cost_ms.items() if edge >= rows), 0.0)


def rates(step: Recorded) -> list[float]:
    """Return the expected tokens per second with the 0, 1, 2, ... likeliest draft tokens."""
    tokens = accumulate(step.candidates, initial=1.0)
    return [1e3 * t / (step.draft_ms + cost(step, 1 + n)) for n, t in enumerate(tokens)]


def numbers(tour: Tour) -> list[str]:
    """Return the bold numbers of docs/tour.md, in order."""
    steps, step = tour.drafted.steps, tour.drafted.steps[tour.shown]
    assert step.plan is not None
    size, prompt, shown = tour.block_size, len(tour.prompt), str(tour.shown + 1)
    bits = [node.sources for node in step.nodes]
    by = {name: sum(b >> i & 1 for b in bits) for i, name in enumerate(tour.sources)}
    one, all_rows = cost(step, 1), cost(step, step.plan.rows)
    moves = sum(place != node for place, node in enumerate(step.accepted, 1))
    plain, drafted = tour.plain, tour.drafted
    found: list[int | str] = [
        *(prompt, size, len(tour.blocks), sum(tour.memory["before"].values())),
        *(tour.num_cached, prompt - tour.num_cached),
        *(prompt - tour.num_cached, f"{steps[0].ms:.0f}"),
        *(shown, by["ngram"], by["model"], sum(b & (b - 1) > 0 for b in bits)),
        *(f"{one:.0f}", step.plan.rows, f"{all_rows:.0f}", f"{step.draft_ms:.0f}"),
        *(len(step.candidates), len(step.nodes), f"{step.plan.tokens:.1f}"),
        *(f"{rates(step)[len(step.nodes)]:.0f}", f"{rates(step)[0]:.0f}"),
        *(step.plan.rows, len(step.accepted), len(step.accepted) + 1, moves),
        *(f"{step.ms:.0f}", len(drafted.token_ids), len(steps), f"{drafted.total_ms:.0f}"),
        *(len(plain.steps), f"{plain.total_ms:.0f}"),
    ]
    return [str(one) for one in found]
