"""`make equivalence`: all of the matrix. Exit status 1 if a cell differs, or is not exercised."""

import sys
from time import perf_counter

from tests.equivalence.matrix import CELLS, TENTH, check, columns


def main():
    start, cells = perf_counter(), TENTH if "tenth" in sys.argv else CELLS
    with columns() as every:
        report = check(every, cells)
    for failure in report.failures:
        print(failure)
    for column, facts in report.facts.items():
        print(f"{column}: {', '.join(f'{n} {fact}' for fact, n in sorted(facts.items()))}")
    print(
        f"{report.num_run} cells run, {report.num_reported} without a drafter as the oracle says, "
        f"{report.num_equal} equal to these, in {perf_counter() - start:.0f} s"
    )
    sys.exit(bool(report.failures))


main()
