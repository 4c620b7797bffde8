"""The captions that are generated next to tables."""

import pytest

from specserve_bench.documents import lost_rows

HEAD = "|  | specserve | other |\n|---|---|---|\n"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["| a: TPOT, ms | **1** | 2 |"], "No row has a better engine."),
        (
            ["| a: TPOT, ms (lower) | 2 | **1** |", "| b | **3** | 2 |", "| c | none | none |"],
            "Another engine is better in 1 of 2 rows: a: TPOT.",
        ),
    ],
)
def test_losses_are_the_rows_whose_best_cell_is_another_engines(rows, words):
    assert lost_rows(HEAD + "\n".join(rows)) == words
