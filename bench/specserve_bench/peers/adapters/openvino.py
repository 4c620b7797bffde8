"""OpenVINO GenAI's `LLMPipeline`, which reads some GGUF files itself."""

from importlib.metadata import version
from typing import Any

import numpy as np

from specserve_bench.peers.protocol import EngineError, Setup, Timed, serve


class OpenVINO:
    def __init__(self, setup: Setup) -> None:
        import openvino
        import openvino_genai

        self.version = version("openvino-genai")
        self.tensor, self.genai = openvino.Tensor, openvino_genai
        try:
            self.pipeline = openvino_genai.LLMPipeline(setup.model, "CPU", **properties(setup))
        except RuntimeError as e:  # its last line has the reason
            raise EngineError(f"OpenVINO GenAI: {str(e).strip().rpartition(chr(10))[2]}") from e

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        return [self.generate(prompt, num_tokens) for prompt in prompts]

    def generate(self, prompt: list[int], num_tokens: int) -> Timed:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = num_tokens, False, True
        ids = self.tensor(np.array([prompt], dtype=np.int64))
        timed = Timed()
        self.pipeline.generate(ids, config, streamer(self.genai, timed))
        return timed


def properties(setup: Setup) -> dict[str, Any]:
    """The backend that is faster for one request; it has no prefix cache that rounds could use."""
    threads = {} if setup.threads is None else {"INFERENCE_NUM_THREADS": setup.threads}
    return {"ATTENTION_BACKEND": "SDPA", **threads}


def streamer(genai: Any, timed: Timed) -> Any:
    """Receives the ids of each step, before they become text."""

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def write(self, token_ids: Any) -> Any:
            timed.add(token_ids if isinstance(token_ids, list) else [token_ids])
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is held back."""

    return Streamer()


if __name__ == "__main__":
    serve(OpenVINO)
