"""The demo pair's tokenizer: byte-level BPE with a chat template, trained on its own corpus."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END_OF_TEXT, BEGIN_TURN, END_TURN = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Words with the space before them, numbers by up to three digits, runs of signs, indentation.
WORDS = Regex(
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """The same texts in the same order give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(WORDS, "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END_OF_TEXT, BEGIN_TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrap: Any = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END_TURN,
        additional_special_tokens=[END_OF_TEXT, BEGIN_TURN],
        chat_template=CHAT_TEMPLATE,
    )


def load(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)
