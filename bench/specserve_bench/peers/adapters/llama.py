"""llama.cpp through llama-cpp-python's bindings of its C API.

The package's own `Llama` copies the logits of all rows to NumPy in each step, which costs llama.cpp
more than it should be measured by. The loops follow its examples: greedy decoding, many
sequences in a batch, and a chain of draft tokens that one batch verifies.
"""

import ctypes
import os
from typing import Any, NamedTuple, Protocol

import numpy as np

from specserve_bench.peers.protocol import (
    DRAFT,
    EngineError,
    PeerDrafting,
    Setup,
    Timed,
    serve,
    timed_together,
)

# llama.h's llama_ftype: Q4_0 and Q8_0, but for a few weights that its tool keeps more exact.
BATCH = 2048  # llama.cpp's default n_batch; it cuts this into n_ubatch = 512 by itself


class BatchRow(NamedTuple):
    token: int
    position: int
    sequence: int
    is_read: bool


class Decoding(Protocol):
    """The interface of `LlamaModel`; tests implement it without llama.cpp."""

    def clear(self) -> None: ...

    def cut(self, length: int) -> None:
        """Drop the first sequence's KV from a position on."""
        ...

    def decode(self, rows: list[BatchRow]) -> list[int]:
        """One batch; the likeliest token after each row that is read."""
        ...


class Drafter(Protocol):
    def draft(self, text: list[int]) -> list[int]: ...


class Llama:
    def __init__(self, model: Decoding, drafter: Drafter | None, version: str) -> None:
        self.model, self.drafter, self.version = model, drafter, version

    def with_drafter(self, prompt: list[int], num_tokens: int, drafter: Drafter) -> Timed:
        timed = Timed()
        self.model.clear()
        token = extend(self.model, prompt, 0)
        timed.add([token])
        text = [*prompt, token]
        while (missing := num_tokens - len(timed.token_ids)) > 0:
            # The last token comes from the target, so one draft token fewer is needed.
            draft_tokens = drafter.draft(text)[: missing - 1]
            tokens = self.verify(text, draft_tokens)
            timed.add(tokens)
            text += tokens
        return timed

    def verify(self, text: list[int], draft_tokens: list[int]) -> list[int]:
        """The accepted draft tokens and the target's next token; drops the KV of rejected ones."""
        known = len(text) - 1  # tokens with KV
        chain = [text[-1], *draft_tokens]
        answers = self.model.decode([BatchRow(t, known + i, 0, True) for i, t in enumerate(chain)])
        accepted = 0
        while accepted < len(draft_tokens) and draft_tokens[accepted] == answers[accepted]:
            accepted += 1
        self.model.cut(known + 1 + accepted)
        return answers[: accepted + 1]

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        if self.drafter is not None and len(prompts) == 1:
            return [self.with_drafter(prompts[0], num_tokens, self.drafter)]
        self.model.clear()
        timed = timed_together(len(prompts))
        for sequence, (prompt, each) in enumerate(zip(prompts, timed, strict=True)):
            each.add([extend(self.model, prompt, sequence)])
        for done in range(num_tokens - 1):
            rows = [
                BatchRow(each.token_ids[-1], len(prompt) + done, sequence, True)
                for sequence, (prompt, each) in enumerate(zip(prompts, timed, strict=True))
            ]
            for each, token in zip(timed, self.model.decode(rows), strict=True):
                each.add([token])
        return timed


def extend(model: Decoding, tokens: list[int], sequence: int, start: int = 0) -> int:
    """Compute tokens of a sequence from a position on; the token after the last one."""
    end = len(tokens) - 1
    rows = [BatchRow(t, start + i, sequence, i == end) for i, t in enumerate(tokens)]
    return [model.decode(rows[i : i + BATCH]) for i in range(0, len(rows), BATCH)][-1][0]


class LlamaModel:
    """A model of llama.cpp with its KV; `api` is the module with the bindings."""

    def __init__(
        self,
        api: Any,
        file: str,
        max_len: int,
        num_sequences: int,
        threads: int | None,
        num_draft_tokens: int = 0,
    ) -> None:
        self.api = api
        self.model = self.api.llama_model_load_from_file(
            file.encode(), self.api.llama_model_default_params()
        )
        if not self.model:
            raise EngineError(f"llama.cpp cannot load {file}")
        params = self.api.llama_context_default_params()
        # Cells are cut evenly among sequences, in multiples of 256.
        params.n_ctx = num_sequences * -(-max_len // 256) * 256
        params.n_batch, params.n_seq_max = BATCH, num_sequences
        if threads is not None:
            params.n_threads = params.n_threads_batch = threads
        if num_draft_tokens:  # of recurrent layers, which states can be dropped
            params.n_rs_seq = num_draft_tokens
        self.context = self.api.llama_init_from_model(self.model, params)
        if not self.context:
            raise EngineError("llama.cpp cannot make a context")
        self.vocab_size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.batch = self.api.llama_batch_init(BATCH, 0, 1)

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)

    def cut(self, length: int) -> None:
        memory = self.api.llama_get_memory(self.context)
        if not self.api.llama_memory_seq_rm(memory, 0, length, -1):
            raise EngineError("llama.cpp cannot drop tokens from the state of this model")

    def decode(self, rows: list[BatchRow]) -> list[int]:
        for i, row in enumerate(rows):
            self.batch.token[i], self.batch.pos[i] = row.token, row.position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, row.sequence
            self.batch.logits[i] = row.is_read
        self.batch.n_tokens = len(rows)
        code = self.api.llama_decode(self.context, self.batch)
        if code != 0:
            raise EngineError(f"llama_decode returned {code}")
        return [self.likeliest(i) for i, row in enumerate(rows) if row.is_read]

    def likeliest(self, row: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, row)
        floats = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(floats, (self.vocab_size,)).argmax())


class Lookup:
    """llama-cpp-python's prompt lookup."""

    def __init__(self, num_tokens: int) -> None:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.lookup: Any = LlamaPromptLookupDecoding(num_pred_tokens=num_tokens)

    def draft(self, text: list[int]) -> list[int]:
        found: list[int] = self.lookup(np.array(text, np.intc)).tolist()
        return found


class DraftModelDrafter:
    """A smaller model that continues the text, one token after the other."""

    def __init__(self, model: Decoding, num_tokens: int) -> None:
        self.model, self.num_tokens = model, num_tokens
        self.text: list[int] = []  # that has KV

    def draft(self, text: list[int]) -> list[int]:
        same = next(
            (i for i, (a, b) in enumerate(zip(self.text, text, strict=False)) if a != b),
            min(len(self.text), len(text) - 1),
        )
        self.model.cut(same)
        draft_tokens = [extend(self.model, text[same:], 0, same)]
        while len(draft_tokens) < self.num_tokens:
            position = len(text) + len(draft_tokens) - 1
            draft_tokens.append(extend(self.model, draft_tokens[-1:], 0, position))
        self.text = [*text, *draft_tokens[:-1]]
        return draft_tokens


def quantized(file: str, quantize: str | None) -> str:
    """The file, or its quantized form, which llama.cpp's own tool writes once."""
    import llama_cpp

    if quantize is None:
        return file
    name, number = {"w4": ("q4_0", 2), "w8": ("q8_0", 7), "w8a8": ("q8_0", 7)}[quantize]
    made = f"{file.removesuffix('.gguf')}.{name}.gguf"
    if not os.path.exists(made):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = number
        code = llama_cpp.llama_model_quantize(file.encode(), f"{made}.new".encode(), params)
        if code != 0:
            raise EngineError(f"llama_model_quantize returned {code}")
        os.replace(f"{made}.new", made)
    return made


def load(setup: Setup) -> Llama:
    import llama_cpp

    llama_cpp.llama_backend_init()
    file = quantized(setup.model, setup.quantize)
    sizes = setup.max_len, setup.max_requests, setup.threads
    tokens = 0 if setup.drafting is None else setup.drafting.tokens
    model = LlamaModel(llama_cpp, file, *sizes, tokens)
    return Llama(model, make_drafter(setup), str(llama_cpp.__version__))


def make_drafter(setup: Setup) -> Drafter | None:
    drafting: PeerDrafting | None = setup.drafting
    if drafting is None:
        return None
    if drafting.by != DRAFT:
        return Lookup(drafting.tokens)
    assert drafting.draft is not None
    import llama_cpp

    file, max_len = quantized(drafting.draft, setup.quantize), setup.max_len + drafting.tokens
    model = LlamaModel(llama_cpp, file, max_len, 1, setup.threads)
    return DraftModelDrafter(model, drafting.tokens)


if __name__ == "__main__":
    serve(load)
