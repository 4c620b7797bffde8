"""The model source for a GGUF file, or for the parts of a split model. Does not import torch."""

import logging
import re
from collections.abc import Iterator
from functools import cached_property
from itertools import dropwhile
from pathlib import Path
from typing import Any

import msgspec

from specserve.errors import ConfigError
from specserve.models import parse_config
from specserve.models.decoder_config import DecoderConfig
from specserve.models.folder import BEGINNING, Scaled, refuse_transformers, samples
from specserve.models.gguf.architectures import ARCHITECTURES
from specserve.models.gguf.config import MTP, SECTIONS, find_architecture, read_config
from specserve.models.gguf.header import QUANTIZED, Array, Header, Value, read_header, refused
from specserve.models.gguf.names import OF_CONFIG, ROPE_FACTORS, TensorPlace, files_shapes, places
from specserve.models.gguf.ollama_files import as_llama_cpp, other_parts
from specserve.models.gguf.pre_tokenizers import find_pre_tokenizer
from specserve.models.gguf.recurrent import as_stored
from specserve.models.gguf.tokenizer import (
    PREFIX,
    GgufVocabulary,
    build_tokenizer,
    find_model,
)
from specserve.models.quantized.config import Quantization
from specserve.models.rope import FACTORS
from specserve.models.tensor_shapes import ALPHAS
from specserve.models.weight_files import check_is_at_home
from specserve.text.chat_template import chat_template_of, find_chat_template, template_files
from specserve.text.defaults import GenerationDefaults, read_defaults
from specserve.text.tokenizer import Tokenizer

SAMPLING = {  # general.sampling.* -> generation_config.json
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
TEMPLATE = "tokenizer.chat_template"
BLOCK = re.compile(r"blk\.(\d{1,9})\.")  # of a layer's tensors
KV = "attn_k", "attn_v", "attn_k_norm"
XIELU = "xielu.alpha_p", "xielu.alpha_n"  # the keys of ALPHAS
BETA = 0.5  # slope of xIELU at zero, as in `Ops.activate`

log = logging.getLogger("specserve")


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its first dimensions of size 1, which converters write or leave out."""
    return tuple(dropwhile((1).__eq__, shape))


class GgufFile:
    """The `ModelDescription` of a GGUF model; `path` is the file, or its first part."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def header(self) -> Header:
        return as_llama_cpp(read_header(self.path))

    def config(self) -> DecoderConfig:
        header = self.header
        try:
            config = parse_config.parse(read_config(header))
            told = config.rope_parameters
            factors, pairs = len(told.factors), told.rotating(config.head_dim) // 2
            if told.kind == FACTORS and factors != pairs:
                raise ValueError(f"{ROPE_FACTORS} has {factors} entries, not {pairs}")
        except ValueError as e:
            raise refused(f"{self.path}: {e}. Use another model, or another file of it") from e
        # Norms of a file include the 1 that some families add.
        family = msgspec.structs.replace(config.family, adds_one=False)
        if self.value(SECTIONS) is not None:  # the dimensions of a head are reordered for M-RoPE
            family = msgspec.structs.replace(family, rotates_neighbors=False)
        config = as_stored(msgspec.structs.replace(config, family=family))
        if all(tensor.type.is_plain for tensor in header.tensors.values()):
            return config
        return msgspec.structs.replace(config, quantization=Quantization(method="gguf"))

    def value(self, key: str) -> Value | Array | None:
        """The value of a key of the architecture."""
        return self.header.metadata.get(f"{find_architecture(self.header)}.{key}")

    def numbers(self) -> dict[str, float]:
        """The tensors of one number that the metadata contain, by Hugging Face name."""
        config = self.config()
        if config.activation != "xielu":
            return {}
        if any(beta != BETA for beta in self.by_layer("xielu.beta")):
            raise refused(f"{self.path}: xielu.beta must be {BETA}. Use another file of the model")
        layers = range(config.num_layers)
        return {
            f"model.layers.{i}.{name}": x
            for name, key in zip(ALPHAS, XIELU, strict=True)
            for i, x in zip(layers, self.by_layer(key), strict=True)
        }

    def by_layer(self, key: str) -> list[float]:
        """The numbers of a key, one per layer. Raises ConfigError if there are others."""
        count, value = self.config().num_layers, self.header.metadata.get(key)
        numbers: list[Any] = [value] * count
        if isinstance(value, Array) and value.is_numeric:
            numbers = value.numbers()
        if len(numbers) != count or not all(isinstance(x, float) for x in numbers):
            raise refused(
                f"{self.path}: {key} must have a number for each of {count} layers. Download the "
                "file again"
            )
        return numbers

    def places(self) -> dict[str, TensorPlace]:
        """Where the file has the tensors of a checkpoint, by Hugging Face name."""
        architecture = ARCHITECTURES[find_architecture(self.header)]
        return places(self.config(), architecture, self.header.tensors)

    def shape(self, implementation: str) -> DecoderConfig:
        refuse_transformers(self.path, implementation)
        return self.config()

    def scaled(self) -> Scaled | None:
        return None

    def defaults(self) -> GenerationDefaults:
        metadata = self.header.metadata
        written = {
            field: metadata[f"general.sampling.{key}"]
            for key, field in SAMPLING.items()
            if f"general.sampling.{key}" in metadata
        }
        return read_defaults(self.path, written)

    def ends(self) -> dict[str, list[int]]:
        try:
            return self.vocabulary.ends()
        except ValueError as e:
            raise self.refusal(e) from e

    @cached_property
    def vocabulary(self) -> GgufVocabulary:
        header = self.header
        try:
            return GgufVocabulary(header.metadata)
        except ValueError as e:
            raise self.refusal(e) from e

    def tokenizer(self) -> Tokenizer:
        vocabulary, metadata = self.vocabulary, self.header.metadata
        try:
            backend, named = build_tokenizer(vocabulary), vocabulary.named()
        except Exception as e:  # the library raises errors of many types
            raise self.refusal(e) from e
        keys = {"default": TEMPLATE, "tool_use": f"{TEMPLATE}.tool_use"}
        sources = {name: metadata.get(key) for name, key in keys.items()}
        written = {name: source for name, source in sources.items() if isinstance(source, str)}
        template = chat_template_of(written, named)
        if template is None:
            template = find_chat_template(self.path.parent, {}, named)
        return Tokenizer(backend, str(self.path), template, variables=named)

    def refusal(self, e: Exception) -> ConfigError:
        return refused(
            f"{self.path}: the tokenizer cannot be built ({e}). Use another file of the model, or "
            "its folder in the Hugging Face layout"
        )

    def check(self) -> None:
        """Raise ConfigError if a tensor is missing, has a wrong shape or type, or is unused, or if
        the tokenizer is not supported.
        """
        config, metadata = self.config(), self.header.metadata
        self.numbers()
        expected, left_out = files_shapes(self.places()), self.mtp_tensors()
        if left_out:
            log.warning("%s: the file's MTP layers are not loaded", self.path)
        left_out |= self.unused_kv_tensors()
        if others := other_parts(self.header):
            parts = ", ".join(sorted({*others.values()}))
            log.warning("%s: only the text model is loaded, without %s", self.path, parts)
            left_out |= {*others}
        for name, shape in expected.items():
            self.check_tensor(name, shape)
        for name in self.header.tensors:
            if name not in expected and name not in OF_CONFIG and name not in left_out:
                raise refused(
                    f"{self.path}: the tensor {name!r:.80} is not part of a "
                    f"{config.architecture}. Use a file of a supported architecture"
                )
        home = self.path.parent.resolve()
        for file in template_files(home).values() if TEMPLATE not in self.header.metadata else ():
            check_is_at_home(home, file)
        try:
            is_byte_level = find_model(metadata) == "gpt2"
            if is_byte_level:
                find_pre_tokenizer(metadata.get(f"{PREFIX}pre"))
        except ValueError as e:
            raise self.refusal(e) from e
        if is_byte_level and f"{PREFIX}pre" not in metadata:
            log.warning(
                "%s: %spre is missing, so the tokenizer splits text with llama.cpp's default. If "
                "the output is poor, convert the model again",
                *(self.path, PREFIX),
            )

    def mtp_tensors(self) -> set[str]:
        """The tensors of MTP layers, which follow the other layers."""
        first, drafting = self.config().num_layers, self.value(MTP)
        if not isinstance(drafting, int):
            return set()
        numbers, places = range(first, first + drafting), map(BLOCK.match, self.header.tensors)
        return {place.string for place in places if place and int(place[1]) in numbers}

    def unused_kv_tensors(self) -> set[str]:
        """The maps and norms of keys and values in layers that read the KV of earlier layers."""
        config = self.config()
        layers = [i for i in range(config.num_layers) if not config.owns_kv(i)]
        return {f"blk.{i}.{name}.weight" for i in layers for name in KV}

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.header.tensors.get(name)
        if found is None:
            raise refused(f"{self.path}: the tensor {name} is missing. Download the file again")
        if without_ones(found.shape) != without_ones(shape):
            raise refused(
                f"{self.path}: the tensor {name} has the shape {list(found.shape)}, but the "
                f"metadata require {list(shape)}. Download the file again"
            )
        is_map = len(shape) > 1 and name.endswith(".weight")
        if found.type.name in QUANTIZED and not is_map:
            raise refused(
                f"{self.path}: the tensor {name} has the type {found.type.name}, but only linear "
                "maps may be quantized. Use another quantization of the model"
            )

    def identity(self) -> Iterator[bytes]:
        header = self.header
        for file in sorted({self.path, *(tensor.file for tensor in header.tensors.values())}):
            size = header.data_offset if file == self.path else 0
            yield from samples(file, size + BEGINNING)
