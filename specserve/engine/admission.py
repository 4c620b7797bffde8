"""Turns prompts into requests that the scheduler can plan."""

from array import array
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

from msgspec.structs import replace

from specserve.engine.adapters import Adapters
from specserve.engine.grammars import Grammars
from specserve.engine.runner import Runner
from specserve.errors import RequestError
from specserve.exchange.messages import AdapterRef, Caller, ResumeState
from specserve.exchange.sampling_params import Sampling, SpeculationParams
from specserve.memory.blocks import Keys, KVTables
from specserve.scheduling import Request, Scheduler
from specserve.scheduling.processors import LogitsProcessor, LogitsProcessors
from specserve.scheduling.scheduler import seconds

MOMENT = 2e-3  # seconds that a step waits for a grammar or adapter if nothing else is due
NO_SPECULATION = SpeculationParams(enabled=False)


class Admitted(NamedTuple):
    """Requests of one prompt that no longer wait, or the reason why they fail.

    blamed  the parameter that causes the failure, if any
    """

    choices: list[Request]
    failure: str = ""
    blamed: str = ""


class Admission:
    """Creates requests, and holds them until their grammar is compiled and their adapter is
    read.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        vocab_size: int,
        tables: KVTables,
        grammars: Grammars | None,
        adapters: Adapters | None,
    ) -> None:
        self.scheduler, self.vocab_size, self.tables = scheduler, vocab_size, tables
        self.grammars, self.adapters = grammars, adapters

    def requests(
        self,
        token_ids: Sequence[int],
        samplings: Sequence[Sampling],
        ids: Sequence[int],
        keys: Keys | None,
        caller: Caller | None,
        processors: Sequence[LogitsProcessor],
        resume: ResumeState,
        adapter: AdapterRef | None,
    ) -> list[Request]:
        """Return one request per id, see `Engine.add_choices`; the first leads the others."""
        assert not resume.output or len(samplings) == 1, "only a single request can resume"
        prompt = self.checked(token_ids)
        salt, digest = samplings[0].cache_salt, "" if adapter is None else adapter.digest
        tenant = 0 if caller is None else caller.tenant
        known = keys or self.tables.prompt_keys(prompt, salt, digest, tenant)
        if processors:
            samplings = [replace(each, speculation=NO_SPECULATION) for each in samplings]
        now, budget = perf_counter(), self.scheduler.budget
        choices = [
            Request(
                id=id,
                token_ids=prompt + self.checked(resume.output) if resume.output else prompt[:],
                num_prompt=len(prompt),
                num_scored=resume.num_scored,
                first_token_at=now if resume.output else 0.0,
                sampling=sampling,
                table=self.tables.table("target", salt, known, digest, tenant),
                draft_table=self.tables.table("draft", salt, known, tenant=tenant),
                caller=caller or Caller(ids[0]),
                arrived_at=now,
                ttft=seconds(sampling.slo.ttft_ms, budget.ttft),
                tpot=seconds(sampling.slo.tpot_ms, budget.tpot),
                adapter=adapter,
                processors=LogitsProcessors(processors, prompt) if processors else None,
            )
            for id, sampling in zip(ids, samplings, strict=True)
        ]
        for request in choices:
            request.table.want_checkpoint(request.sampling.num_history)
        leader, *followers = choices
        leader.followers = followers
        for request in followers:
            request.leader = leader
        return choices

    def checked(self, token_ids: Sequence[int]) -> "array[int]":
        """Return the prompt as an array. RequestError for ids outside the vocabulary, which would
        crash the embedding lookup.
        """
        try:
            prompt = array("i", token_ids)
        except OverflowError as e:
            raise RequestError(
                f"the prompt has an id out of range. Use ids in [0, {self.vocab_size})", "prompt"
            ) from e
        if not prompt:
            raise RequestError("the prompt has no tokens. Pass at least one", "prompt")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"prompt token {token} is out of range. Use ids in [0, {self.vocab_size})",
                    "prompt",
                )
        return prompt

    @property
    def has_waiting(self) -> bool:
        return any(part is not None and part.waiting for part in (self.grammars, self.adapters))

    def holds(self, choices: list[Request]) -> bool:
        """Return whether the requests of one prompt must wait; if so, queue them until `ready`
        yields them.
        """
        if not choices[0].sampling.grammar:
            return self.waits_for_adapter(choices)
        assert self.grammars is not None, "the engine has no grammars"
        self.grammars.ask([*choices])
        return True

    def waits_for_adapter(self, choices: list[Request]) -> bool:
        if choices[0].adapter is None:
            return False
        assert self.adapters is not None, "the engine has no adapters"
        self.adapters.ask([*choices])
        return True

    def ready(self) -> Iterator[Admitted]:
        """Yield requests that no longer wait."""
        for choices, state in () if self.grammars is None else self.grammars.ready():
            if isinstance(state, str):
                yield Admitted(choices, f"the grammar: {state}")
                continue
            choices[0].begin_text(self.vocab_size, state)
            text = choices[0].text
            assert text is not None, "begin_text was called"
            for request in choices[1:]:  # each has its own state: any may end before the others
                request.text = text.fork()
            if not self.waits_for_adapter(choices):
                yield Admitted(choices)
        for choices, failure in () if self.adapters is None else self.adapters.ready():
            yield Admitted(choices, failure, "model" if failure else "")

    def wait(self, target: Runner) -> None:
        """Do pending KV updates without a forward. If there are none, wait up to MOMENT seconds for
        a grammar, an adapter, or a load from disk.
        """
        if target.run_updates(self.scheduler.pool.updates):
            return
        if self.grammars is not None and self.grammars.waiting:
            self.grammars.wait(MOMENT)
        elif self.adapters is not None and (self.adapters.waiting or self.adapters.loading):
            self.adapters.wait(MOMENT)
        elif self.scheduler.tiers is not None:
            self.scheduler.tiers.wait(MOMENT)

    def drop(self, request: Request) -> None:
        """Drop a request that has ended."""
        if self.grammars is not None and self.grammars.waiting:
            self.grammars.drop(request)
        if self.adapters is not None:
            self.adapters.release(request)
