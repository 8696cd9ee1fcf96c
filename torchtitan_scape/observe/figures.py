"""Figures of one tensor: histograms whose edges are the same for all runs, moments, the largest entries.

Pure functions on whole tensors, FP32 (n,).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.scape.reference import select_largest

LINEAR = 4096  # bins over [-2^e, 2^e): those of another e join in pairs, in fours, ...
PER_OCTAVE = 4  # bins of log2 |x|
LOWEST, HIGHEST = -149, 128  # of FP32: 2^-149 is the smallest, and all lie below 2^128
_CHUNK = 1 << 22  # entries that are in FP64 at a time


@dataclass(frozen=True)
class Distribution:
    """Of the values of a tensor.

    entries, zeros: how many there are, and how many of them are 0.
    exponent: e, the smallest with all |x| < 2^e.
    linear: int64 (LINEAR,), entries from -2^e on, each bin 2^(e+1) / LINEAR wide.
    log2: int64 ((HIGHEST - LOWEST) * PER_OCTAVE,), entries of |x| from 2^LOWEST on, zeros in none.
    mean, deviation, kurtosis: FP64; the fourth central moment over the square of the second, 3 of a normal one.
    within_tenth: share of the entries with |x| <= deviation / 10.
    """

    entries: int
    zeros: int
    exponent: int
    linear: Tensor
    log2: Tensor
    mean: float
    deviation: float
    kurtosis: float
    within_tenth: float


def distribution(values: Tensor) -> Distribution:
    """Of finite values; counts are exact. All of a tensor of zeros are within a tenth, and it has no kurtosis."""
    mantissas, exponents = torch.frexp(values.abs())
    zero = values == 0
    zeros, entries = int(zero.sum()), values.numel()
    exponent = int(exponents[~zero].max()) if zeros < entries else 0
    half = LINEAR // 2
    # A product with a power of two is exact, and so is floor; in FP64, whose range holds the power.
    places = torch.cat([(part.double() * (half * 2.0**-exponent)).floor().int() for part in values.split(_CHUNK)])
    edges = torch.tensor([2.0 ** (i / PER_OCTAVE - 1) for i in range(1, PER_OCTAVE)], device=values.device)
    parts = torch.bucketize(mantissas, edges, right=True, out_int32=True)
    octaves = (exponents - 1 - LOWEST) * PER_OCTAVE + parts
    mean, second, fourth = _central_moments(values)
    deviation = second**0.5
    return Distribution(
        entries,
        zeros,
        exponent,
        torch.bincount(places + half, minlength=LINEAR),
        torch.bincount(octaves[~zero], minlength=(HIGHEST - LOWEST) * PER_OCTAVE),
        mean,
        deviation,
        fourth / second**2 if second > 0 else math.nan,
        sum(int((part.abs() <= deviation / 10).sum()) for part in _doubled(values)) / max(1, entries),
    )


def _doubled(values: Tensor) -> Iterator[Tensor]:
    return (part.double() for part in values.split(_CHUNK))


def _central_moments(values: Tensor) -> tuple[float, float, float]:
    """Mean, second and fourth central moment."""
    n = max(1, values.numel())
    mean = sum(float(part.sum()) for part in _doubled(values)) / n
    second = fourth = 0.0
    for part in _doubled(values):
        squares = (part - mean).square_()
        second += float(squares.sum()) / n
        fourth += float(squares.square_().sum()) / n
    return mean, second, fourth


def norm(values: Tensor) -> float:
    """L2, added in FP64."""
    return sum(float(part.square().sum()) for part in _doubled(values)) ** 0.5


def largest(values: Tensor, density: float) -> Tensor:
    """bool (n,): the max(1, round(density n)) largest |x|, ties to the lower index. A zero is never among them."""
    return select_largest(values, max(1, round(density * values.numel()))) & (values != 0)


def overlap(before: Tensor, now: Tensor) -> float:
    """Entries in both, over those of the larger one; NaN where `before` has none, as before the first step."""
    first, second = int(before.sum()), int(now.sum())
    return int((before & now).sum()) / max(first, second) if first else math.nan


class ShadowResidual:
    """Error feedback on gradients that were exchanged whole: e += g, the largest of e go out, the rest stays.

    Nothing in training reads it. sent: FP32 (n,), what the last step took out; kept: FP32 (n,), e after it. At every
    entry one of them is 0, so that sent + kept is the e before, exactly.
    """

    def __init__(self, like: Tensor) -> None:
        self.sent, self.observed_state = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, gradient: Tensor, density: float) -> None:
        total = self.observed_state + gradient
        out = largest(total, density)
        self.sent, self.observed_state = torch.where(out, total, 0.0), torch.where(out, 0.0, total)
