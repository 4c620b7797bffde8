"""Following a grammar without a model: texts made of random tokens that it allows."""

from functools import cache

import numpy as np

from specserve.text.grammars.compiled import vocabulary_of
from specserve.text.tokenizer import Tokenizer
from tests.checkpoints import EOS, tiny_tokenizer

END = tiny_tokenizer().convert_tokens_to_ids(EOS)
SIZE = 320


@cache
def tiny_vocabulary():
    return vocabulary_of(Tokenizer(tiny_tokenizer().backend_tokenizer), SIZE, (END,))


def allowed(matcher):
    """The ids that may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


def draw(matcher, chance, most):
    """A text of up to so many tokens, each any that is allowed, and the last of them."""
    matcher, tokens = matcher.deep_copy(), []
    while len(tokens) < most and END not in tokens[-1:]:
        tokens.append(chance.choice(allowed(matcher)))
        assert matcher.consume_token(tokens[-1]), matcher.get_error()
    text = tiny_tokenizer().decode([t for t in tokens if t != END])
    return text, tokens[-1]


def takes(matcher, text):
    """Whether a text is allowed, and complete."""
    matcher = matcher.deep_copy()
    ids = tiny_tokenizer().encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
