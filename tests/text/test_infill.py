"""The prompts that fill in text, in the formats of popular models."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from specserve.errors import RequestError
from specserve.text.infill import FORMATS, infill_prompt
from specserve.text.tokenizer import Tokenizer
from tests.checkpoints import EOS, tiny_tokenizer

TEXTS = {  # the text of the prompt, by the first token of its format
    "<|fim_prefix|>": "<|fim_prefix|>a<|fim_suffix|>z<|fim_middle|>",
    "<fim_prefix>": "<fim_prefix>a<fim_suffix>z<fim_middle>",
    "<|fim_begin|>": "<|fim_begin|>a<|fim_hole|>z<|fim_end|>",  # with other bars and spaces
    "[PREFIX]": "[SUFFIX]z[PREFIX]a",
}


def tokenizer_with(tokens):
    backend = Backend.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    backend.add_special_tokens([token for token in tokens if token])
    return Tokenizer(backend)


def plain(text):
    return text.replace("\uff5c", "|").replace("\u2581", "_")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: plain(form.prefix))
def test_a_prompt_has_the_form_of_the_model(form):
    tokenizer = tokenizer_with(form[:3])
    ids = infill_prompt(tokenizer, "a", "z", starts=False)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert plain(text) == TEXTS[plain(form.prefix)]


def test_a_prompt_begins_as_the_tokenizer_begins_a_text():
    tokenizer = tokenizer_with(FORMATS[0][:3])
    end = tokenizer.backend.token_to_id(EOS)
    tokenizer.backend.post_processor = TemplateProcessing(
        single=f"{EOS} $A {EOS}", special_tokens=[(EOS, end)]
    )
    begun, bare = (infill_prompt(tokenizer, "a", "z", starts) for starts in (True, False))
    assert begun == [end, *bare]


def test_a_model_without_such_tokens_is_refused():
    with pytest.raises(RequestError, match="no tokens to fill in") as raised:
        infill_prompt(tokenizer_with([]), "a", "z", starts=True)
    assert raised.value.param == "suffix"
