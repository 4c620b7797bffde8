"""A column of the matrix: an engine with a drafter, which runs requests and notes what happened."""

from collections import Counter, defaultdict
from concurrent.futures import wait

import msgspec

from specserve.api.outputs import Generation, TokenUsage, output
from specserve.engine.grammars import Grammars, Vocabulary
from specserve.exchange.messages import TokenLogprobs
from specserve.exchange.sampling_params import Sampling, SamplingParams, choices_of
from specserve.text.grammars.compiled import vocabulary_of
from specserve_drafters import ROOT
from tests.engine.engines import ask_always, draft_of, engine_for
from tests.equivalence.pair import END, VOCAB

CHAIN = {"width": 1, "max_depth": 4, "min_gain": 0.0, "min_value": 0.0, "ngrams": False}
TREE = {"width": 4, "max_depth": 6, "min_gain": 0.0, "min_value": 0.0}
COLUMNS = {  # drafter, guesses of a request, the drafter's options
    "off": ("none", 0, {}),
    "ngram": ("ngram", 8, {"min_ngram": 1}),
    "model chain": ("model", 4, CHAIN),
    "model tree of 16": ("model", 16, TREE),
    "head tree of 16": ("eagle", 16, TREE),
    "auto": ("auto", 16, {}),
}
OTHERS, BLOCK_SIZE = 8, 8


class SaidChoice(msgspec.Struct, frozen=True):
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    seed: int
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


class Said(msgspec.Struct, frozen=True):
    """All that a caller sees of a request that may not depend on guesses."""

    usage: TokenUsage
    choices: list[SaidChoice]

    @property
    def bits(self):
        return msgspec.msgpack.encode(self)


class Asked(msgspec.Struct, frozen=True):
    prompt: list[int]
    params: SamplingParams
    sampling: Sampling  # as the engine takes them
    arrives: int = 0  # in this step


class Played(msgspec.Struct, frozen=True):
    """A request that has ended: what it said, what happened, and, without guesses, the logits that
    each token of each choice was drawn from.
    """

    said: Said
    facts: Counter
    samplings: list
    logits: list


class Column:
    def __init__(self, name, pair):
        drafter, max_nodes, options = COLUMNS[name]
        self.pair, self.drafter = pair, drafter
        tokens = vocabulary_of(pair.tokenizer, VOCAB, [END])
        self.engine = engine_for(
            pair.target,
            draft_of(pair.draft, drafter),
            drafter,
            head=pair.head if drafter in ("eagle", "auto") else None,
            max_len=512,
            max_nodes=max_nodes,
            max_step_nodes=16 * max_nodes,
            max_running=32,
            prefill_chunk=16,
            block_size=BLOCK_SIZE,
            options=options,
            grammars=Grammars(lambda: Vocabulary(tokens, VOCAB, [END])),
        )
        if drafter == "auto":
            ask_always(self.engine)
        self.facts = defaultdict(Counter)  # by request
        self.logits = defaultdict(list)
        self.read = None  # logits of the last launch
        self.launch, self.commit = self.engine.target.launch, self.engine.commit
        self.engine.target.launch, self.engine.commit = self.on_launch, self.on_commit

    def on_launch(self, step):
        launched = self.launch(step)
        if self.drafter == "none":
            self.read = launched.logits.numpy().copy()
        return launched

    def on_commit(self, scheduled, sampled, paths):
        has_chunks = not all(s.is_root for s in scheduled)
        outputs = self.commit(scheduled, sampled, paths)
        for row, (item, path, told) in enumerate(zip(sampled, paths, outputs, strict=True)):
            if told.is_verified:
                self.note(self.facts[told.id], item, path, told)
                self.facts[told.id]["beside a prompt"] += has_chunks
                self.facts[told.id]["among 8 others"] += len(scheduled) > OTHERS
            if self.drafter == "none":
                self.logits[told.id].append(self.read[row])
        return outputs

    def note(self, facts, item, path, told):
        last = path.nodes[-1] if path.nodes else ROOT
        facts["steps"] += 1
        facts["drafted"] += len(item.draft)
        facts["accepted"] += len(path.nodes)
        facts["rejected"] += last in item.draft.parents and told.finish_reason is None
        facts["moved"] += path.nodes != [*range(1, 1 + len(path.nodes))]
        facts["trees"] += not item.draft.is_chain
        facts["ended in a block"] += told.finish_reason is not None and len(path.nodes) > 0

    def play(self, asked):
        """Run requests together; what became of each, in order."""
        engine, step, live, every = self.engine, 0, {}, {}
        while len(every) < len(asked) or not engine.is_idle:
            for i, ask in enumerate(asked):
                if ask.arrives == step:
                    every[i] = self.start(ask)
                    live.update((g.id, g) for g in every[i])
            for told in engine.step():
                live[told.id].push(told)
                if live[told.id].is_done:  # the engine does not look for stop strings
                    engine.finish(told.id)
            step += 1
        played = [self.played(every[i], ask.params) for i, ask in enumerate(asked)]
        self.facts.clear()
        self.logits.clear()
        return played

    def start(self, ask):
        requests = self.engine.add_choices(ask.prompt, choices_of(ask.sampling, ask.params.n))
        # Admitted in the next step, however long a grammar takes: every run has the same steps.
        wait([future for future, _ in self.engine.grammars.waiting.values()])
        return [Generation(r.id, ask.prompt, r.sampling, self.pair.tokenizer) for r in requests]

    def played(self, generations, params):
        """Facts of all choices add up."""
        whole, facts = output(generations, self.drafter, params), Counter()
        each = [
            SaidChoice(
                c.text,
                c.token_ids,
                c.finish_reason,
                c.stop_reason,
                c.seed,
                generation.logprobs,
                generation.prompt_logprobs,
            )
            for c, generation in zip(whole.choices, generations, strict=True)
        ]
        for generation in generations:
            facts += self.facts[generation.id]
        logits = [self.logits[generation.id] for generation in generations]
        return Played(Said(whole.usage, each), facts, [g.sampling for g in generations], logits)
