"""Models with recurrent layers: a step over its bytes, a tree, a prompt, and a second turn.

The prompt is compared with that of a dense model whose linear layers have as many weights.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from specserve.engine.engine import Engine
from specserve.models.decoder import Decoder, LoadedModel
from specserve.models.decoder_config import DecoderConfig
from specserve.models.loader import load_decoder
from specserve.models.parse_config import parse
from specserve_bench.bound import Bound, kv_token_bytes
from specserve_bench.demo.scaled_model import QWEN3, sizes_of
from specserve_bench.figures.steps import make_engine, plain_sampling
from specserve_bench.pairs import random_checkpoint
from specserve_bench.random_model import streamed_bytes
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_drafters.base import DraftRequest, Options
from specserve_drafters.candidates import Draft
from specserve_kernels import load

CONTEXT = 512  # tokens before the measured steps
STEPS = 32  # measured per round
NODES = 15  # draft tokens: with the root, a step of 16 rows
PROMPT = 1000
KNOWN, NEW = 1500, 40  # tokens of a conversation, and of its next message
WARM_UP = 8  # the first round has prompts of this part of their tokens
MODEL_SECONDS, LEAST_ROUNDS = 100, 2  # of a model: no round begins later, after this many
MAX_LEN = 4096
LIMITS = {"over_bytes": 1.25, "tree": 1.6, "over_dense": 1.35, "second_turn": 0.1}
CONV, LINEAR, FULL = "conv", "linear_attention", "full_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": QWEN3
    | sizes_of(1024, 3584, 24, 8, 2, 256, True)
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 6,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": [FULL if i in (2, 5, 8, 10, 12, 14) else CONV for i in range(16)],
        "tie_embedding": True,
        "dtype": "bfloat16",
    },
}


class NoOptions(Options, frozen=True):
    """None."""


class FixedChain:
    """Proposes a chain of one token, which a random model does not accept."""

    Options = NoOptions
    needs_executor = False

    def __init__(self, options: NoOptions) -> None:
        pass

    def propose(self, items: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft.chain([7] * min(item.limit, NODES)) for item in items]

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        pass

    def forget(self, id: int) -> None:
        pass


class Sizes(NamedTuple):
    """Tokens of a round's prompts."""

    context: int
    prompt: int
    known: int


class Measured(NamedTuple):
    """Milliseconds of a round."""

    step: float
    tree: float
    prompt: float
    dense_prompt: float
    conversation: float  # its whole prompt, nothing cached
    second_turn: float


@torch.inference_mode()
def measure(
    shapes: Mapping[str, Mapping[str, Any]] = SHAPES, rounds: int = 5, prompt: int = PROMPT
) -> dict[str, Any]:
    """For each shape, medians over interleaved rounds: `rounds`, or fewer on a slow CPU."""
    bound = Bound()
    return {
        "prompt": prompt,
        "known": KNOWN,
        "new": NEW,
        "models": [figure(name, fields, bound, rounds, prompt) for name, fields in shapes.items()],
    }


def figure(
    name: str, fields: Mapping[str, Any], bound: Bound, rounds: int, prompt: int
) -> dict[str, Any]:
    model = loaded(random_checkpoint(name, fields))
    dense = loaded(random_checkpoint(f"{name}-dense", dense_fields(model.config)))
    engines = Engines(model, dense, name)
    config = model.config
    state = sum(layout.num_pieces * layout.piece_bytes for layout in model.state_layouts())
    num_bytes = streamed_bytes(model) + 2 * state + CONTEXT * kv_token_bytes(config)
    engines.round(0, Sizes(CONTEXT // WARM_UP, prompt // WARM_UP, KNOWN // WARM_UP))
    reading, taken = list[float](), list[Measured]()
    start, sizes = perf_counter(), Sizes(CONTEXT, prompt, KNOWN)
    while len(taken) < rounds and (
        len(taken) < LEAST_ROUNDS or perf_counter() - start < MODEL_SECONDS
    ):
        reading.append(1e3 * num_bytes / bound.rates().read)
        taken.append(engines.round(len(taken) + 1, sizes))
    assert engines.tree.stats.num_drafted >= NODES * STEPS * len(taken), "trees are smaller"
    each = {field: [getattr(m, field) for m in taken] for field in Measured._fields}
    return {
        "model": name,
        "rounds": len(taken),
        "state_bytes": state,
        "step_bytes": num_bytes,
        **{f"{field}_ms": extremes(times) for field, times in each.items()},
        "over_bytes": extremes_over(each["step"], reading),
        "tree": extremes_over(each["tree"], each["step"]),
        "over_dense": extremes_over(each["prompt"], each["dense_prompt"]),
        "second_turn": extremes_over(each["second_turn"], each["conversation"]),
    }


def loaded(folder: Path) -> Decoder:
    decoder = load_decoder(folder, "bf16", load(torch.device("cpu")), MAX_LEN)
    assert isinstance(decoder, Decoder)
    return decoder


def dense_fields(config: DecoderConfig) -> dict[str, Any]:
    """A Qwen3 shape of the same layers, width and heads, with MLPs that are as much wider as the
    recurrent layers have more linear weights than attention.
    """
    hidden, heads = config.hidden_size, (config.num_heads, config.num_kv_heads, config.head_dim)

    def fields(mlp: int) -> dict[str, Any]:
        sizes = sizes_of(hidden, mlp, config.num_layers, *heads, True)
        return QWEN3 | sizes | {"vocab_size": config.vocab_size}

    lacking = config.num_layer_weights - parse(fields(64)).num_layer_weights
    wider = lacking / (3 * hidden * config.num_layers)
    return fields(64 + 64 * round(wider / 64))


class Engines:
    """Engines of a model without drafting and with FixedChain, and one of its dense counterpart."""

    def __init__(self, model: Decoder, dense: Decoder, name: str) -> None:
        self.plain = engine_of(model, name, "none")
        self.tree = engine_of(model, name, f"{__name__}:FixedChain")
        self.dense = engine_of(dense, f"{name}-dense", "none")
        self.vocab_size = model.config.vocab_size

    def round(self, number: int, sizes: Sizes) -> Measured:
        rng = random.Random(number)

        def tokens(size: int) -> list[int]:
            return [rng.randrange(100, self.vocab_size) for _ in range(size)]

        ids, known = tokens(sizes.prompt), tokens(sizes.known)
        context = sizes.context
        step, tree = (step_ms(engine, tokens(context)) for engine in (self.plain, self.tree))
        own, dense = (prompt_ms(engine, ids) for engine in (self.plain, self.dense))
        whole = prompt_ms(self.plain, tokens(sizes.known + NEW))
        prompt_ms(self.plain, known)  # the first turn
        return Measured(step, tree, own, dense, whole, prompt_ms(self.plain, known + tokens(NEW)))


def engine_of(model: LoadedModel, name: str, drafter: str) -> Engine:
    settings = {
        "drafter.name": drafter,
        "speculation.max_nodes": NODES,
        "memory.kv_bytes": 1 << 30,
        "scheduler.max_running": 4,
    }
    return make_engine(model, name, MAX_LEN, 0, settings)


def step_ms(engine: Engine, ids: list[int]) -> float:
    """Milliseconds of a step after the prompt, the median of some."""
    request, times = engine.add(ids, plain_sampling(2 * STEPS + 8)), list[float]()
    while request.num_output < 4:
        engine.step()
    while len(times) < STEPS:
        start = perf_counter()
        engine.step()
        times.append(1e3 * (perf_counter() - start))
    engine.finish(request.id)
    return median(times)


def prompt_ms(engine: Engine, ids: list[int]) -> float:
    """Milliseconds from a prompt's arrival to its first token."""
    start = perf_counter()
    engine.add(ids, plain_sampling(1))
    while not engine.is_idle:
        engine.step()
    return 1e3 * (perf_counter() - start)


def table(result: Mapping[str, Any]) -> str:
    """A row for each model and figure, with its limit."""
    words = {
        "over_bytes": "plain step / its bytes",
        "tree": f"step of {NODES + 1} rows / plain step",
        "over_dense": f"prompt of {result['prompt']:,} tokens / dense model",
        "second_turn": f"second turn ({KNOWN:,} tokens known, {NEW} new) / its whole prompt",
    }
    rows = (
        [each["model"], what, extremes_words(each[name]), f"{LIMITS[name]:g}"]
        for each in result["models"]
        for name, what in words.items()
    )
    return markdown_table(["model", "figure", "measured", "goal"], rows)
