"""specserve through its Python API."""

from specserve import LLM, SamplingParams  # first: it configures the process before torch loads
from specserve.version import VERSION
from specserve_bench.peers.protocol import (
    AUTO,
    DRAFT,
    LOOKUP,
    PeerDrafting,
    Setup,
    Timed,
    serve,
    timed_together,
)


class Specserve:
    def __init__(self, setup: Setup) -> None:
        self.version = VERSION
        self.llm = LLM(setup.model, set=settings(setup), progress=False)

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        self.llm.reset_cache()  # rounds repeat the prompts
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        timed = timed_together(len(prompts))
        going = [self.llm.start(*self.llm.check(prompt, params))[0] for prompt in prompts]
        while not all(g.is_done for g in going):
            self.llm.step()
            for generation, each in zip(going, timed, strict=True):
                each.add(generation.token_ids[len(each.token_ids) :])
        self.llm.end(going)
        return timed


def settings(setup: Setup) -> dict[str, object]:
    return {
        "model.dtype": "bf16",
        "scheduler.max_model_len": setup.max_len,
        "memory.kv_bytes": setup.kv_bytes,
        **({} if setup.threads is None else {"model.threads": setup.threads}),
        **({} if setup.quantize is None else {"model.quantize": setup.quantize}),
        **drafter_settings(setup.drafting, setup.quantize),
    }


def drafter_settings(drafting: PeerDrafting | None, quantize: str | None) -> dict[str, object]:
    """One drafter with a fixed limit, as the peers have; or `auto`, without a limit."""
    if drafting is None:
        return {"drafter.name": "none"}
    if drafting.by == LOOKUP:
        return {"drafter.name": "ngram", "speculation.max_nodes": drafting.tokens}
    settings: dict[str, object] = {"drafter.name": "model" if drafting.by == DRAFT else AUTO}
    if drafting.draft is not None:
        settings["drafter.model"] = drafting.draft
        settings |= {} if quantize is None else {"drafter.quantize": quantize}
    return settings | ({"speculation.max_nodes": drafting.tokens} if drafting.by == DRAFT else {})


if __name__ == "__main__":
    serve(Specserve)
