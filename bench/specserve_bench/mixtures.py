"""Steps of a mixture of experts against the bytes of those experts that its rows have."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from specserve.models import decoder_config
from specserve.models.decoder import Decoder, DecoderWeights, Experts
from specserve.models.decoder_config import DecoderConfig
from specserve.models.loader import rotary_tables
from specserve_bench.bound import Bound
from specserve_bench.families import RandomMaps
from specserve_bench.steps import (
    ITEMSIZE,
    WARM_UP,
    Size,
    Steps,
    kv_token_bytes,
    spread,
    typical,
    words,
)
from specserve_kernels import Ops, load

ROUNDS = 7
# A row a request, as rows over the same context have nearly the same experts in a random model.
SIZES = tuple(Size(f"{n} requests at 128", (128,) * n, 1) for n in (1, 2, 4, 8, 16))
SHAPE: dict[str, Any] = {  # 8 of 64 experts: a row reads 0.4 GB
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 10,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 16384,
}


@torch.inference_mode()
def mixture_figures(
    shape: Mapping[str, Any] = SHAPE, sizes: Sequence[Size] = SIZES, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Milliseconds by rows over interleaved rounds, and what reading takes that one row needs."""
    config = decoder_config.parse(dict(shape))
    model, bound = random_mixture(config, load(torch.device("cpu"))), Bound()
    steps = Steps(model, "mixture", sizes)
    steps.runner.arena.blocks.view(torch.bfloat16).normal_()
    for size in sizes:
        for _ in range(WARM_UP):
            steps.run(size)
    active = active_bytes(config, sizes[0])
    times: dict[str, list[float]] = {size.label: [] for size in sizes}
    reading = []
    for _ in range(rounds):
        reading.append(1e3 * active / bound.rates().read)
        for size in sizes:
            times[size.label].append(1e3 * typical(partial(steps.run, size)))
    first = times[sizes[0].label]
    result = {
        "shape": dict(shape),
        "rounds": rounds,
        "active_bytes": active,
        "reading_ms": spread(reading),
        "over_reading": spread(ratios(first, reading)),
        "steps": [
            {"step": label, "ms": spread(own), "over_first": spread(ratios(own, first))}
            for label, own in times.items()
        ],
    }
    print(table(result))
    return result


def ratios(own: Sequence[float], base: Sequence[float]) -> list[float]:
    """Within a round."""
    return [a / b for a, b in zip(own, base, strict=True)]


def active_bytes(config: DecoderConfig, size: Size) -> int:
    """What a step of one row reads: the maps that it is multiplied by, the head, and the KV."""
    weights = config.num_layer_weights + config.vocab_size * config.hidden_size
    return weights * ITEMSIZE + sum(size.contexts) * kv_token_bytes(config)


def random_mixture(config: DecoderConfig, ops: Ops) -> Decoder:
    maps, tables = RandomMaps(config, ops), rotary_tables(config, config.max_positions, ops)
    layers = tuple(
        maps.layer(config, i, tables)._replace(
            gate_up=None, down=None, experts=random_experts(config, ops, maps)
        )
        for i in range(config.num_layers)
    )
    norm = torch.ones(config.hidden_size)
    weights = DecoderWeights(maps.embedding, layers, norm, maps.head, torch.bfloat16)
    return Decoder(config, ops, tables.all_positions, weights)


def random_experts(config: DecoderConfig, ops: Ops, maps: RandomMaps) -> Experts:
    mixture, hidden = config.mixture, config.hidden_size
    assert mixture is not None, "a shape without experts"
    each = range(mixture.num_experts)
    weight = maps.weight
    return Experts(
        router=ops.prepack(weight(mixture.num_experts, hidden)),
        gate_up=ops.prepack_experts((weight(2 * mixture.width, hidden) for _ in each), True),
        down=ops.prepack_experts(weight(hidden, mixture.width) for _ in each),
        num_active=mixture.num_active,
        normalizes=mixture.normalizes,
    )


def table(result: Mapping[str, Any]) -> str:
    """Markdown: each step's time, and its ratio to that of one row."""
    reading = result["reading_ms"]["median"]
    lines = [
        f"one row reads {result['active_bytes'] / 1e9:.2f} GB, in {reading:.1f} ms; its step takes "
        f"{words(result['over_reading'])} of that",
        "",
        f"| step | ms | / {result['steps'][0]['step']} |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {s['step']} | {s['ms']['median']:.1f} | {words(s['over_first'])} |"
        for s in result["steps"]
    ]
    return "\n".join(lines)
