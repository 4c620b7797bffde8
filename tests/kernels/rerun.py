"""CUDA graphs without a GPU: a replay runs the forward again, on the addresses of its recording."""


class Rerun:
    def __init__(self):
        self.num_recorded = 0

    def __call__(self, forward):
        self.num_recorded += 1
        kept = forward()

        def replay():
            residual, aux_hidden_states, logits = forward()
            kept[0].copy_(residual)
            kept[2].copy_(logits)
            for i, aux in aux_hidden_states.items():
                kept[1][i].copy_(aux)

        return kept, replay


def rerun(launch):
    """A recording of a launch that has one result."""
    kept = launch()
    return kept, lambda: kept.copy_(launch())
