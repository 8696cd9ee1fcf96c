"""Observed tensors: their selection, their assembly from shards, and statistics of whole tensors, FP32 (n,).

Histograms have the same edges in all runs.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torchtitan_scape.core.parameters import Shard, is_slice, matching, placed_like
from torchtitan_scape.core.tensors import PART, sum_of_squares
from torchtitan_scape.core.workloads import layer_of
from torchtitan_scape.kernels.scape.reference import select_largest

LINEAR = 4096  # Bins over [-2^e, 2^e). Histograms of different e can be merged by joining 2, 4, ... bins.
PER_OCTAVE = 4  # Bins per unit of log2 |x|.
LOWEST, HIGHEST = -149, 128  # Range of FP32: 2^-149 is the smallest magnitude, and all are below 2^128.
_LAYER = re.compile(r"(?<=layers\.)\d+")
_ALL = "layers.*."
# By [model] name: number of layers of the paper's model, and the tensors of its Figures 4 and 5.
PAPER: dict[str, tuple[int, tuple[str, ...]]] = {
    "gpt2": (
        24,
        (
            "layers.0.attention.wo.weight",
            "layers.10.feed_forward.w1.weight",
            "layers.2.attention.wq.weight+layers.2.attention.wk.weight+layers.2.attention.wv.weight",
        ),
    ),
    "llama3": (
        16,
        (
            "layers.0.feed_forward.w1.weight+layers.0.feed_forward.w3.weight",
            "layers.8.attention.wo.weight",
            "tok_embeddings.weight",
        ),
    ),
}


@dataclass(frozen=True)
class Observed:
    """One observed tensor: a parameter, or several parameters concatenated, with a short label."""

    label: str
    shards: tuple[Shard, ...]


def chosen(names: Sequence[str], shards: Sequence[Shard], family: str) -> list[Observed]:
    """Return the tensors that `names` select; by default those of the paper, in layers of the same relative depth.

    Each parameter that matches a pattern (with "*" as wildcard) is a separate tensor; those of patterns joined by "+"
    form one tensor. Raises ValueError if a pattern matches no parameter; the message lists the names.
    """
    tensors: dict[str, Observed] = {}
    for name in names or _of_paper(family, shards):
        matches = [_matching(pattern.strip(), shards) for pattern in name.split("+")]
        joined = tuple(shard for match in matches for shard in match)
        for one in [joined] if len(matches) > 1 else [(shard,) for shard in joined]:
            label = label_of([shard.name for shard in one])
            tensors.setdefault(label, Observed(label, one))
    return list(tensors.values())


def label_of(names: Sequence[str]) -> str:
    """Return a label such as `layers.0.feed_forward.w1+w3`: without "weight", and with the common prefix once."""
    parts = [name.removesuffix(".weight").split(".") for name in names]
    common = 0
    while len(parts) > 1 and all(len(p) > common + 1 and p[common] == parts[0][common] for p in parts):
        common += 1
    return ".".join([*parts[0][:common], "+".join(".".join(p[common:]) for p in parts)])


def _of_paper(family: str, shards: Sequence[Shard]) -> Iterator[str]:
    paper_layers, names = PAPER[family]
    layers = 1 + max(layer_of(shard.name) or 0 for shard in shards)
    for name in names:
        yield _LAYER.sub(lambda number: str(int(number[0]) * layers // paper_layers), name)


def _matching(pattern: str, shards: Sequence[Shard]) -> list[Shard]:
    matches = matching(shards, pattern)
    if not matches:
        raise ValueError(
            f"[observe] names: {pattern!r} matches no parameter; the parameters are "
            f"{', '.join(_name_patterns(shards))}, and * is a wildcard"
        )
    return matches


def _name_patterns(shards: Sequence[Shard]) -> list[str]:
    """Return the parameter names, with those of all layers merged: `layers.{0-5}.attention.wq.weight`."""
    layers: dict[str, list[int]] = {}
    for shard in shards:
        number = layer_of(shard.name)
        layers.setdefault(_LAYER.sub("*", shard.name), []).append(-1 if number is None else number)
    spans = {pattern: f"layers.{{{min(n)}-{max(n)}}}." for pattern, n in layers.items()}
    return [pattern.replace(_ALL, spans[pattern]) for pattern in layers]


def whole(shard: Shard, values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Assemble a whole tensor, FP32 (entries,), from this rank's entries, laid out like its shard. Collective."""
    parameter = shard.parameter
    if is_slice(parameter):
        total = torch.zeros(parameter.whole.numel(), dtype=torch.float32, device=values.device)
        total[parameter.start : parameter.start + values.numel()] = values
        if group is not None:
            dist.all_reduce(total.view(torch.int32), group=group)  # The other ranks add zeros.
        return total
    if isinstance(parameter, DTensor):
        distributed = cast(DTensor, placed_like(parameter, values.view(shard.local_shape)))
        return distributed.full_tensor().reshape(-1)
    return values


@dataclass(frozen=True)
class Distribution:
    """Distribution of the values of a tensor.

    Attributes:
        entries, zeros: Number of entries, and of those equal to 0.
        exponent: The smallest e with all |x| < 2^e.
        linear: int64 (LINEAR,), counts in bins of width 2^(e+1) / LINEAR from -2^e.
        log2: int64 ((HIGHEST - LOWEST) * PER_OCTAVE,), counts of |x| in logarithmic bins from 2^LOWEST; zeros are not
            counted.
        mean, deviation, kurtosis: FP64. Kurtosis is the fourth central moment over the square of the second: 3 for a
            normal distribution.
        within_tenth: Share of the entries with |x| <= deviation / 10.
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
    """Return the distribution of finite values. Counts are exact.

    For a tensor of zeros, all entries are within a tenth of the deviation and the kurtosis is NaN.
    """
    mantissas, exponents = torch.frexp(values.abs())
    zero = values == 0
    zeros, entries = int(zero.sum()), values.numel()
    exponent = int(exponents[~zero].max()) if zeros < entries else 0
    half = LINEAR // 2
    # Multiplication by a power of two and floor are exact. FP64 has the range of that power.
    bins = torch.cat([(part.double() * (half * 2.0**-exponent)).floor().int() for part in values.split(PART)])
    borders = [2.0 ** (i / PER_OCTAVE - 1) for i in range(1, PER_OCTAVE)]
    edges = torch.tensor(borders, dtype=torch.float32, device=values.device)
    parts = torch.bucketize(mantissas, edges, right=True, out_int32=True)
    octaves = (exponents - 1 - LOWEST) * PER_OCTAVE + parts
    mean, second, fourth = _central_moments(values)
    deviation = second**0.5
    return Distribution(
        entries,
        zeros,
        exponent,
        torch.bincount(bins + half, minlength=LINEAR),
        torch.bincount(octaves[~zero], minlength=(HIGHEST - LOWEST) * PER_OCTAVE),
        mean,
        deviation,
        fourth / second**2 if second > 0 else math.nan,
        sum(int((part.abs() <= deviation / 10).sum()) for part in _doubled(values)) / max(1, entries),
    )


def _doubled(values: Tensor) -> Iterator[Tensor]:
    return (part.double() for part in values.split(PART))


def _central_moments(values: Tensor) -> tuple[float, float, float]:
    """Return the mean, and the second and fourth central moments."""
    n = max(1, values.numel())
    mean = sum(float(part.sum()) for part in _doubled(values)) / n
    second = fourth = 0.0
    for part in _doubled(values):
        squares = (part - mean).square_()
        second += float(squares.sum()) / n
        fourth += float(squares.square_().sum()) / n
    return mean, second, fourth


def norm(values: Tensor) -> float:
    """Return the L2 norm, summed in FP64."""
    return float(sum_of_squares(values)) ** 0.5


def largest(values: Tensor, density: float) -> Tensor:
    """Return bool (n,): the max(1, round(density n)) largest |x|, ties to the lower index, zeros excluded."""
    return select_largest(values, max(1, round(density * values.numel()))) & (values != 0)


def overlap(before: Tensor, after: Tensor) -> float:
    """Return the number of entries in both masks over that of the larger mask; NaN if `before` is empty."""
    first, second = int(before.sum()), int(after.sum())
    return int((before & after).sum()) / max(first, second) if first else math.nan


class ShadowResidual:
    """Hypothetical error feedback of a full exchange: e += g, the largest entries of e are sent, the rest remains.

    Training does not use it. Both attributes are FP32 (n,). At every entry one of them is 0, so sent + residual is
    exactly the e before.
    """

    def __init__(self, like: Tensor) -> None:
        self.sent, self.residual = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, gradient: Tensor, density: float) -> None:
        total = self.residual + gradient
        mask = largest(total, density)
        self.sent, self.residual = torch.where(mask, total, 0.0), torch.where(mask, 0.0, total)


class IndexFrequency:
    """Number of steps in which each entry was among the largest |x| (Radius paper, Figure 1), int32 (n,)."""

    def __init__(self, like: Tensor) -> None:
        self.steps, self.counts = 0, torch.zeros(like.numel(), dtype=torch.int32, device=like.device)

    def add(self, values: Tensor, density: float) -> None:
        self.counts += largest(values, density)
        self.steps += 1

    def histogram(self) -> Tensor:
        """Return int64 (steps + 1,): number of entries that were selected in 0, 1, ... steps."""
        return torch.bincount(self.counts, minlength=self.steps + 1)
