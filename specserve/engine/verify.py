"""The target's way through trees of guesses."""

from collections.abc import Callable, Sequence

import msgspec

from specserve_drafters import ROOT, Draft

Node = tuple[int, int]  # a request's number in the step, and a node of its tree
# The target's token after each node. It is asked for only where the walk has come to.
TokensAfter = Callable[[list[Node]], list[int]]
IsLast = Callable[[int, list[int]], bool]


class Path(msgspec.Struct, eq=False):
    """What one request says in a step, and the guesses that foresaw it, from the root down."""

    tokens: list[int]
    nodes: list[int]


def walk(drafts: Sequence[Draft], tokens_after: TokensAfter, is_last: IsLast) -> list[Path]:
    """Follow the target's own words through each tree for as long as the tree foresaw them.

    All requests take a step down at once. is_last(request, tokens) ends a request's output. The
    last token of a path that no node foresaw is the bonus token. No token depends on a draft: only
    how many there are does.
    """
    paths = [Path([], []) for _ in drafts]
    at = [(i, ROOT) for i in range(len(drafts))]
    while at:
        below = []
        for (i, node), token in zip(at, tokens_after(at), strict=True):
            paths[i].tokens.append(token)
            child = None if is_last(i, paths[i].tokens) else drafts[i].child(node, token)
            if child is not None:
                paths[i].nodes.append(child)
                below.append((i, child))
        at = below
    return paths
