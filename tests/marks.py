"""Parameters of tests that run only with `./run_tests.sh --slow`."""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

# Whether tests/kernels/interpreted runs in full: all examples, more steps, and a check of every access.
ALL_EXAMPLES = os.environ.get("SCAPE_ALL_EXAMPLES") == "1"


def slow(*values: Any) -> Any:
    """Return parameters that are left out of the default run: further cases of a property that others show there."""
    return pytest.param(*values, marks=pytest.mark.slow)


def covering(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the cases as parameters, of which the default run has a small set with each value at each position.

    The set is greedy: it takes the case with most new values, then the one whose values it has used least. The other
    cases are slow.
    """
    every = list(cases)
    values = [[(position, repr(value)) for position, value in enumerate(case)] for case in every]
    uses: Counter[tuple[int, str]] = Counter()
    chosen: set[int] = set()
    while {value for case in values for value in case} - uses.keys():
        best = max(
            range(len(every)),
            key=lambda i: (sum(value not in uses for value in values[i]), -sum(uses[value] for value in values[i])),
        )
        uses.update(values[best])
        chosen.add(best)
    return [pytest.param(*case) if i in chosen else slow(*case) for i, case in enumerate(every)]
