"""Least squares with coefficients of 0 or more, for a fit of a few terms to measured times."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def least_squares(columns: Sequence[Sequence[float]], measured: Sequence[float]) -> np.ndarray:
    """Return coefficients >= 0 of `columns` that minimize the relative squared error against `measured`.

    All subsets are tried, so that only a few columns are feasible.

    Args:
        columns: One sequence of len(measured) per coefficient.
    """
    values = np.asarray(measured, dtype=float)
    scaled = np.asarray(columns, dtype=float).T / values[:, None]
    best, least = np.zeros(len(columns)), float(len(values))
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            part = scaled[:, chosen]
            unit = np.abs(part).max(axis=0)  # columns differ by many orders of magnitude
            if not unit.all():
                continue
            solution = np.linalg.lstsq(part / unit, np.ones(len(values)), rcond=None)[0] / unit
            squares = float(((part @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and squares < least:
                best, least = np.zeros(len(columns)), squares
                best[list(chosen)] = solution
    return best
