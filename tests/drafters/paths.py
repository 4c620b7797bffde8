"""The probability of a candidate's whole path, made anew from those of its nodes."""

from specserve_drafters import ROOT


def path_value(trie, node):
    value = 1.0
    while node != ROOT:
        value *= trie.p[node]
        node = trie.parents[node]
    return value
