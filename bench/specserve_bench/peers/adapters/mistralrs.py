"""mistral.rs through its Python package, which takes prompts as text and streams text."""

import os
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specserve_bench.peers.protocol import EngineError, Setup, Timed, serve

# Loading needs a template; a prompt that is one string does not use it.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class MistralRs:
    def __init__(self, setup: Setup) -> None:
        if setup.threads is not None:
            os.environ["RAYON_NUM_THREADS"] = str(setup.threads)  # before its pool starts
        import mistralrs

        self.api, self.version = mistralrs, version("mistralrs")
        with TemporaryDirectory(prefix="specserve-peer-") as folder:
            template = Path(folder, "template.jinja")
            template.write_text(TEMPLATE)
            self.runner = mistralrs.Runner(
                which=which(mistralrs, setup),
                max_seqs=1,
                prefix_cache_n=0,  # rounds repeat the prompts
                token_source="none",
                jinja_explicit=str(template),
            )
        self.texts: dict[tuple[int, ...], str] = {}

    def together(self, prompts: list[list[int]], num_tokens: int) -> list[Timed]:
        return [self.stream(prompt, num_tokens) for prompt in prompts]

    def stream(self, prompt: list[int], num_tokens: int) -> Timed:
        request = self.api.ChatCompletionRequest(
            messages=self.text(prompt),
            model="default",
            max_tokens=num_tokens,
            temperature=0.0,
            top_k=1,
            ignore_eos=True,
            stream=True,
        )
        timed, num_read = Timed(), len(prompt)
        for chunk in self.runner.send_chat_completion_request(request):
            timed.add([0])  # each chunk is one token, even if its text is still incomplete
            num_read = num_read if chunk.usage is None else chunk.usage.prompt_tokens
        if num_read != len(prompt):
            raise EngineError(
                f"mistral.rs reads the prompt as {num_read} token ids, not {len(prompt)}"
            )
        timed.token_ids = []  # it returns text only
        return timed

    def text(self, prompt: list[int]) -> str:
        """The text whose token ids are those of the prompt, found before the request is timed."""
        key = tuple(prompt)
        if key not in self.texts:
            text = self.runner.detokenize_text(prompt, False)
            if self.runner.tokenize_text(text, False, None) != prompt:
                raise EngineError("mistral.rs reads the text of the prompt as other token ids")
            self.texts[key] = text
        return self.texts[key]


def which(api: Any, setup: Setup) -> Any:
    file = Path(setup.model)
    return api.Which.GGUF(str(file.parent), file.name, tokenizer_json=setup.tokenizer)


if __name__ == "__main__":
    serve(MistralRs)
