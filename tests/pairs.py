"""Which cases of a product of parameters the everyday suite has: see the mark `pairs`."""

from itertools import combinations

import pytest


def leave_pairs(items):
    """Mark as slow what a product of parameters has beyond each pair of values of each two."""
    products = {}
    for item in items:
        if item.get_closest_marker("pairs") and not item.get_closest_marker("slow"):
            products.setdefault((item.path, item.originalname, item.cls), []).append(item)
    for product in products.values():
        kept = covering([choices(item) for item in product])
        for i, item in enumerate(product):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


def choices(item):
    """What is chosen for a case of each of its parameters; those of one decorator are one."""
    given = {name: repr(value) for name, value in item.callspec.params.items()}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        given |= {" ".join(names): tuple(given.pop(name) for name in names)}
    return given


def covering(cases):
    """Places of cases that have all pairs of choices that there are, few of them: next is always
    the first of those that have the most new pairs. A case is a dict of choices.
    """
    pairs = [{pair for n in (1, 2) for pair in combinations(sorted(c.items()), n)} for c in cases]
    left, kept = set().union(*pairs), set()
    while left:
        best = max(range(len(pairs)), key=lambda i: len(pairs[i] & left))
        kept.add(best)
        left -= pairs[best]
    return kept
