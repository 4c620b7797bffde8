"""An even split."""

from collections.abc import Sequence


def share(total: int, caps: Sequence[int], step: int) -> list[int]:
    """Split a total evenly under caps; what does not divide goes one each, rotating by step."""
    got = [0] * len(caps)
    start = step % len(caps) if caps else 0
    hungry = [i for i in [*range(start, len(caps)), *range(start)] if caps[i] > 0]
    while total > 0 and hungry:
        each, extra = divmod(total, len(hungry))
        for place, i in enumerate(hungry):
            more = min(caps[i] - got[i], each + (place < extra))
            got[i] += more
            total -= more
        hungry = [i for i in hungry if got[i] < caps[i]]
    return got
