"""Token ids and chat templates of real tokenizers, against transformers'."""

import pytest
from transformers import AutoTokenizer

from specserve.api.input_processor import load_text_files

TEXTS = (
    "",
    " ",
    "\n\n  \n\t x",
    "Hello, world! It's 2026; they'll've gone.",
    "naïve café — “quotes” … Ærøskøbing Łódź",
    "日本語のテキスト、中文文本\uff0c한국어 텍스트",
    "العربية עברית हिन्दी ไทย",
    "👩🏽‍🚀🏳️‍🌈 e\u0301 \u00e9 \u200b\u00a0\ufeff",
    "1234567890 3.14159 0x1F 1,000,000",
    "x" * 300 + " " * 40 + "=" * 80,
    "for i in range(10):\n        print(i)\r\n",
    "\x00\x01\x7f",
)
SPECIALS = {
    "smollm2": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "a<|endoftext|>b <|im_end|> c",
        "<|im_start|> <|im_end|",
        "<repo_name>x<file_sep>y<jupyter_start>",
    ),
    "gemma": (
        "<bos>text<eos>",
        "<start_of_turn>user\nHi<end_of_turn>\n",
        "a <pad> b <unk> <unused5> <start_of_tur",
    ),
}
CHATS = {
    "a question": [{"role": "user", "content": "Why is the sky blue?"}],
    "a system message": [
        {"role": "system", "content": "Answer in rhymes."},
        {"role": "user", "content": "  Who are you?\n"},
    ],
    "several turns": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2 <|im_end|> {{ x }}"},
        {"role": "user", "content": "日本語 👩🏽‍🚀"},
    ],
}


@pytest.fixture(scope="module", params=["smollm2", "gemma"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def files(models):
    """Our text files by model, and transformers' tokenizers."""
    folders = {"smollm2": models.smollm2_folder, "gemma": models.gemma_folder}
    ours = {"smollm2": models.smollm2, "gemma": models.gemma}
    return {
        name: (load_text_files(ours[name]).tokenizer, AutoTokenizer.from_pretrained(folders[name]))
        for name in folders
    }


@pytest.mark.parametrize("adds_specials", [True, False])
def test_ids_are_those_of_transformers(files, name, problems, adds_specials):
    ours, theirs = files[name]
    programs = [each["prompt"] + each["canonical_solution"] for each in problems]
    for text in [*TEXTS, *SPECIALS[name], *programs]:
        want = theirs(text, add_special_tokens=adds_specials)["input_ids"]
        assert ours.encode(text, adds_specials) == want, text


def test_text_of_ids_is_that_of_transformers(files, name, problems):
    ours, theirs = files[name]
    for text in [*TEXTS, *SPECIALS[name], *(each["prompt"] for each in problems[:20])]:
        ids = theirs(text)["input_ids"]
        for skips in (True, False):
            assert ours.decode(ids, skips) == theirs.decode(ids, skip_special_tokens=skips), text


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("adds_prompt", [True, False])
def test_a_chat_is_written_as_by_transformers(files, chat, adds_prompt):
    ours, theirs = files["smollm2"]
    want = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=adds_prompt)
    assert ours.apply_chat_template(chat, False, add_generation_prompt=adds_prompt) == want


def test_a_continued_chat_is_written_as_by_transformers(files):
    ours, theirs = files["smollm2"]
    chat = [*CHATS["a question"], {"role": "assistant", "content": "Because of"}]
    want = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert ours.apply_chat_template(chat, False, continue_final_message=True) == want
