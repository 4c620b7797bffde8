"""llama.cpp through llama-cpp-python's bindings of its C API.

The package's own `Llama` copies the logits of all rows to NumPy in each step, which costs llama.cpp
more than it should be measured by. The loops here are those of its examples: greedy decoding, many
sequences in a batch, and guesses as a chain that one batch verifies.
"""

import ctypes
import os
from typing import Any, NamedTuple, Protocol

import numpy as np

from specserve_bench.peers.protocol import (
    DRAFT,
    EngineError,
    PeerGuessing,
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
    """What `LlamaModel` does; tests have one without llama.cpp."""

    def clear(self) -> None: ...

    def cut(self, length: int) -> None:
        """Drop the first sequence's KV from a position on."""
        ...

    def decode(self, rows: list[BatchRow]) -> list[int]:
        """One batch; the likeliest token after each row that is read."""
        ...


class Guesser(Protocol):
    def guess(self, text: list[int]) -> list[int]: ...


class Llama:
    def __init__(self, model: Decoding, guesser: Guesser | None, version: str) -> None:
        self.model, self.guesser, self.version = model, guesser, version

    def guessed(self, prompt: list[int], num_tokens: int, guesser: Guesser) -> Timed:
        timed = Timed()
        self.model.clear()
        token = extend(self.model, prompt, 0)
        timed.add([token])
        text = [*prompt, token]
        while (missing := num_tokens - len(timed.token_ids)) > 0:
            # The last token of all comes from the target, so one guess fewer is of use.
            guesses = guesser.guess(text)[: missing - 1]
            tokens = self.verify(text, guesses)
            timed.add(tokens)
            text += tokens
        return timed

    def verify(self, text: list[int], guesses: list[int]) -> list[int]:
        """The accepted guesses and the target's own next token; KV of wrong ones is dropped."""
        known = len(text) - 1  # tokens with KV
        chain = [text[-1], *guesses]
        answers = self.model.decode([BatchRow(t, known + i, 0, True) for i, t in enumerate(chain)])
        accepted = 0
        while accepted < len(guesses) and guesses[accepted] == answers[accepted]:
            accepted += 1
        self.model.cut(known + 1 + accepted)
        return answers[: accepted + 1]

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        if self.guesser is not None and len(prompts) == 1:
            return [self.guessed(prompts[0], num_tokens, self.guesser)]
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
    """A model of llama.cpp with its KV."""

    def __init__(self, file: str, max_len: int, num_sequences: int, threads: int | None) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
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
        self.context = self.api.llama_init_from_model(self.model, params)
        if not self.context:
            raise EngineError("llama.cpp cannot make a context")
        self.vocab_size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.memory = self.api.llama_get_memory(self.context)
        self.batch = self.api.llama_batch_init(BATCH, 0, 1)

    def clear(self) -> None:
        self.api.llama_memory_clear(self.memory, False)

    def cut(self, length: int) -> None:
        self.api.llama_memory_seq_rm(self.memory, 0, length, -1)

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

    def guess(self, text: list[int]) -> list[int]:
        found: list[int] = self.lookup(np.array(text, np.intc)).tolist()
        return found


class DraftGuesser:
    """A smaller model that continues the text, one token after the other."""

    def __init__(self, model: Decoding, num_tokens: int) -> None:
        self.model, self.num_tokens = model, num_tokens
        self.text: list[int] = []  # that has KV

    def guess(self, text: list[int]) -> list[int]:
        same = next(
            (i for i, (a, b) in enumerate(zip(self.text, text, strict=False)) if a != b),
            min(len(self.text), len(text) - 1),
        )
        self.model.cut(same)
        guesses = [extend(self.model, text[same:], 0, same)]
        while len(guesses) < self.num_tokens:
            position = len(text) + len(guesses) - 1
            guesses.append(extend(self.model, guesses[-1:], 0, position))
        self.text = [*text, *guesses[:-1]]
        return guesses


def quantized(file: str, quantize: str | None) -> str:
    """The file, or one beside it that llama.cpp's own tool makes of it, once."""
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
    model = LlamaModel(
        quantized(setup.model, setup.quantize), setup.max_len, setup.max_requests, setup.threads
    )
    return Llama(model, make_drafter(setup), str(llama_cpp.__version__))


def make_drafter(setup: Setup) -> Guesser | None:
    guessing: PeerGuessing | None = setup.guessing
    if guessing is None:
        return None
    if guessing.by != DRAFT:
        return Lookup(guessing.tokens)
    assert guessing.draft is not None
    model = LlamaModel(
        quantized(guessing.draft, setup.quantize), setup.max_len + guessing.tokens, 1, setup.threads
    )
    return DraftGuesser(model, guessing.tokens)


if __name__ == "__main__":
    serve(load)
