"""transformers' own generate, with its prompt lookup and its assistant models."""

from typing import Any

from specserve_bench.peers.protocol import DRAFT, PeerDrafting, Setup, Timed, serve, timed_together


class Transformers:
    def __init__(self, setup: Setup) -> None:
        import torch
        import transformers

        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self.version = str(transformers.__version__)
        self.torch = torch
        self.model = load_model(setup.model)
        self.options = drafting_options(setup.drafting)

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        ids = self.torch.tensor(prompts)  # prompts of a set have one length
        events = Events(len(prompts[0]), len(prompts))
        out = self.model.generate(
            ids,
            attention_mask=self.torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            stopping_criteria=[events],
            **self.options,
        )
        for timed, row in zip(events.timed, out.tolist(), strict=True):
            timed.token_ids = row[len(prompts[0]) :]
        return events.timed


class Events:
    """A stopping criterion that stops nothing: it is called after each step, with all tokens."""

    def __init__(self, num_prompt: int, num_prompts: int) -> None:
        self.timed = timed_together(num_prompts)
        self.num_seen = num_prompt

    def __call__(self, input_ids: Any, scores: Any, **others: Any) -> Any:
        for timed in self.timed:
            timed.add([0] * (input_ids.shape[1] - self.num_seen))  # the tokens come at the end
        self.num_seen = input_ids.shape[1]
        return input_ids.new_zeros(len(input_ids)).bool()


def load_model(folder: str) -> Any:
    """In bfloat16, and without an end token."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def drafting_options(drafting: PeerDrafting | None) -> dict[str, Any]:
    """Arguments of `generate`."""
    if drafting is None:
        return {}
    if drafting.by != DRAFT:
        return {"prompt_lookup_num_tokens": drafting.tokens}
    assert drafting.draft is not None
    assistant = load_model(drafting.draft)
    # Each step has the number of draft tokens of the sweep.
    assistant.generation_config.num_assistant_tokens = drafting.tokens
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0
    return {"assistant_model": assistant}


if __name__ == "__main__":
    serve(Transformers)
