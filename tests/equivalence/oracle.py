"""What a request without guesses has to say: by transformers' model and processors, and a sampler
in NumPy. It calls no op, and nothing of the engine.
"""

from collections import Counter
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.checkpoints import tiny_tokenizer

WORD = np.uint64(0xFFFFFFFF)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
LOGITS_ATOL = 1e-4  # float32 by two implementations
LOGPROB_ATOL = 2e-6  # float32 against float64


def noise(seed, index, size):
    """Gumbel noise of every id: Philox4x32-10, key = seed, counter = (id // 4, index, 0, 0)."""
    ids, key = np.arange(-(-size // 4), dtype=np.uint64), np.array([seed, seed >> 32], np.uint64)
    c0, c1, c2, c3 = ids, np.full_like(ids, index), 0 * ids, 0 * ids
    for _ in range(10):
        k0, k1 = key & WORD
        left, right = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1 = right >> np.uint64(32) ^ c1 ^ k0, right & WORD
        c2, c3 = left >> np.uint64(32) ^ c3 ^ k1, left & WORD
        key = key + WEYL
    words = np.stack([c0, c1, c2, c3], axis=1).ravel()[:size]
    u = np.minimum((words.astype(np.float32) + np.float32(0.5)) * 2.0**-32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-u.astype(np.float64)))


def counted(z, output, asked):
    """vLLM's definition of frequency and presence: of the output alone."""
    for token, count in Counter(output).items():
        z[0, token] -= asked.frequency_penalty * count + asked.presence_penalty
    return z


def edited(x, prompt, output, asked):
    """The logits [1, V] as bans, bias and penalties leave them; in float64."""
    z, text = torch.from_numpy(x).double()[None], torch.tensor([[*prompt, *output]])
    said = text[:, len(prompt) :]
    if asked.allowed_ids is not None:
        z = PrefixConstrainedLogitsProcessor(lambda *_: [*asked.allowed_ids], 1)(text, z)
    if asked.grammar:
        ids = allowed_by(asked, output, z.shape[1])
        z = PrefixConstrainedLogitsProcessor(lambda *_: ids, 1)(text, z)
    if asked.bad_words:
        z = NoBadWordsLogitsProcessor([[*word] for word in asked.bad_words])(said, z)
    if asked.min_tokens:
        ends, least = sorted(asked.stop_ids), asked.min_tokens
        z = MinNewTokensLengthLogitsProcessor(len(prompt), least, ends)(text, z)
    if asked.logit_bias:
        bias = {(token,): value for token, value in asked.logit_bias.items()}
        z = SequenceBiasLogitsProcessor(bias)(said, z)
    if asked.repetition_penalty != 1:
        z = RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)(text, z)
    return counted(z, output, asked)


def allowed_by(asked, output, size):
    """The ids that may come after a text, by a matcher that reads all of it."""
    matcher = LLMatcher(tokens_of(size, *asked.eos_ids), asked.grammar)
    assert matcher.consume_tokens(output)
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")[:size]).tolist()


@cache
def tokens_of(size, end):
    return LLTokenizer(tiny_tokenizer().backend_tokenizer.to_str(), n_vocab=size, eos_token=end)


def filtered(z, asked):
    z = TemperatureLogitsWarper(asked.temperature)(None, z)
    if asked.min_p:
        z = MinPLogitsWarper(asked.min_p)(None, z)
    if asked.top_k:
        z = TopKLogitsWarper(asked.top_k)(None, z)
    return TopPLogitsWarper(asked.top_p)(None, z) if asked.top_p < 1 else z


def next_token(x, prompt, output, asked):
    """The token after a text, of which x [V] are the logits."""
    z = edited(x, prompt, output, asked)
    if asked.temperature == 0:
        return int(z[0].argmax())
    index = len(prompt) + len(output)
    return int(np.argmax(filtered(z, asked)[0].numpy() + noise(asked.seed, index, len(x))))


class End(NamedTuple):
    num_tokens: int
    text: str | None  # None where it ends within a character, or has broken ones
    finish_reason: str | None
    stop_reason: str | int | None


def end_of(tokenizer, output, asked):
    """Where and how a text ends that goes on with these tokens."""
    for n, token in enumerate(output, 1):
        is_id = token in asked.stop_ids
        text = tokenizer.decode(output[: n - is_id], skip_special_tokens=True)
        early = len(tokenizer.decode(output[: min(n, asked.min_tokens)], skip_special_tokens=True))
        places = [(text.find(s, max(0, early - len(s) + 1)), len(s), s) for s in asked.stop]
        if found := [place for place in places if place[0] >= 0]:
            at, size, word = min(found)
            text = text[: at + size * asked.include_stop_str_in_output]
            return End(n, None if "\ufffd" in text else text, "stop", word)
        if is_id or n == asked.max_tokens:
            reason = token if is_id and token not in asked.eos_ids else None
            text = None if "\ufffd" in text else text
            return End(n, text, "stop" if is_id else "length", reason)
    return End(len(output), None, None, None)


def wrong_tokens(prompt, output, rows, asked):
    """Places of the output at which the oracle draws another token from the logits `rows`."""
    assert len(rows) >= len(output)
    each = enumerate(zip(output, rows, strict=False))
    return [i for i, (t, x) in each if next_token(x, prompt, output[:i], asked) != t]


def wrong_logits(model, prompt, output, rows):
    """How far logits are from those of transformers' model, if too far; else 0."""
    with torch.inference_mode():
        z = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    far = float((z - torch.from_numpy(np.stack(rows[: len(output)]))).abs().max())
    return far if far > LOGITS_ATOL else 0.0


def wrong_logprobs(told, tokens, rows, k):
    """Places at which what was told of tokens is not what the logits `rows` say."""
    if len(told) != len(tokens):
        return [*range(len(tokens))]
    places = []
    for i, (one, token, x) in enumerate(zip(told, tokens, rows, strict=True)):
        law = torch.from_numpy(x).double().log_softmax(0).numpy()
        order = np.argsort(-x, kind="stable")
        rank = 1 + int(np.flatnonzero(order == token)[0])
        want, said = [law[token], *law[order[:k]]], [one.logprob, *one.top]
        is_same = (one.rank, one.ids) == (rank, order[:k].tolist())
        if not is_same or not np.allclose(said, want, rtol=0, atol=LOGPROB_ATOL):
            places.append(i)
    return places
