"""What an engine is started with: the checkpoint in its format, and room for the requests."""

from collections.abc import Iterable
from pathlib import Path

from specserve.models import decoder_config
from specserve_bench.peers.cases import Case
from specserve_bench.peers.gguf_file import write_gguf
from specserve_bench.peers.protocol import Setup
from specserve_bench.peers.systems import Choice, System

BF16_BYTES = 2
KV_SLACK = 128  # tokens a request: engines round up to blocks, and keep room for guesses


class Setups:
    """Makes setups for one model. GGUF files go to `scratch`, each written once."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self.model, self.scratch = model, scratch
        self.written: dict[Path, Path] = {}

    def setup(self, system: System, choice: Choice, cases: Iterable[Case]) -> Setup:
        guessing = choice.guessing
        folders = [self.model]
        if guessing is not None and guessing.draft is not None:
            folders.append(Path(guessing.draft))
            guessing = guessing._replace(draft=self.path(system, folders[1]))
        each = list(cases)
        max_requests = max(len(c.prompts) if c.is_batch else 1 for c in each)
        max_len = max(len(c.prompts[0]) + c.num_tokens for c in each)
        bytes_a_token = sum(map(kv_token_bytes, folders))
        return Setup(
            model=self.path(system, self.model),
            max_len=max_len,
            max_requests=max_requests,
            kv_bytes=max_requests * (max_len + KV_SLACK) * bytes_a_token,
            threads=choice.threads,
            guessing=guessing,
            quantize=system.quantize,
        )

    def path(self, system: System, folder: Path) -> str:
        if not system.needs_gguf:
            return str(folder)
        if folder not in self.written:
            file = self.scratch / f"{len(self.written)}-{folder.name}.gguf"
            write_gguf(folder, file)
            self.written[folder] = file
        return str(self.written[folder])


def kv_token_bytes(folder: Path) -> int:
    c = decoder_config.load_config(folder)
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * BF16_BYTES
