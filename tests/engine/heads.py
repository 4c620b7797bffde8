"""What a head says of a text without an engine."""

import torch

from specserve_kernels.ops import EagerProgram
from tests.models.eagle_heads import Run
from tests.models.forward import causal_rows, empty_kv


class Oracle:
    """The head over a whole text, without an engine, and then over guesses after it."""

    def __init__(self, target, head, tokens):
        n, blocks = len(tokens) - 1, list(range(20))
        with torch.inference_mode():
            layers = [i for i in head.aux_layer_ids if i < target.config.num_layers]
            program = EagerProgram(target, empty_kv(target, len(blocks), 16), layers)
            ids = torch.tensor(tokens)
            rows = causal_rows(blocks, 0, n, 16)
            out = program.run(rows, ids[:-1], torch.arange(0))
            aux_hidden_states = [
                out.aux_hidden_states.get(i, out.residual) for i in head.aux_layer_ids
            ]
            self.run = Run(head, lambda model, kv, *_: EagerProgram(model, kv), max_rows=512)
            self.run.table, self.run.kv = blocks, empty_kv(head, len(blocks), 16)
            self.run.program = EagerProgram(head, self.run.kv)
            features = head.fuse(torch.cat(aux_hidden_states, dim=1))
        logits, hidden = self.run.step(features, ids[1:])
        self.logits, self.hidden = logits[-1], hidden[-1:]

    def guess(self, token):
        logits, self.hidden = self.run.step(self.hidden, torch.tensor([token]))
        return logits[-1]


def close(got, want):
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
