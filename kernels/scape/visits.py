"""How often the mask visits the rows and columns of a tensor: the staleness of entries, at no age per entry.

Little's law gives the mean time that entries spend outside the mask from the number that enters per step. Entries
differ: an input that is rarely active has small gradients in its whole column, so that its entries grow staler. The
rate at which entry (r, c) enters is estimated as rate[r] * rate[c] / rate of the tensor, the rank-1 form in which
Adafactor (Shazeer and Stern 2018, Section 3) keeps second moments. It costs rows + columns numbers a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

# Of the means over steps: the last five count most.
SMOOTHING = 0.8
# No entry is taken to enter less often than this, against its tensor's mean.
MIN_VISIT_RATE = 1e-3


@dataclass(frozen=True)
class Staleness:
    """How the steps of entries that enter the mask are scaled by the time that they were outside.

    columns: length of the sparsified tensors' rows.
    most: upper limit of the factor.
    keeps: share of its moment that such an entry keeps after the step. Below 1, at the target density, it is not
        selected for the next mask either, unless nothing else is left: its mt, large as it is, is about to be spent.
    """

    columns: tuple[int, ...]
    most: float = 1000.0
    keeps: float = 1.0


class VisitRates:
    """Newly entered entries per step of every row and column, smoothed; the same on all replicas to the last bit.

    Args:
        sizes: entries of each sparsified tensor's local shard.
        columns: length of its rows; a shard of several dimensions counts as (first, all others).

    Attributes:
        rates: FP32 (rows and columns of all tensors, then one for each tensor,): the means; the state.
        relative: FP32 (rows and columns of all tensors,): rate over that of the tensor's average row or column.
        counts: int32, likewise: what entered in this step, to be filled before `learn`.
    """

    def __init__(self, sizes: Sequence[int], columns: Sequence[int], device: torch.device) -> None:
        self.columns = tuple(columns)
        self.rows = tuple(n // c for n, c in zip(sizes, columns, strict=True))
        lengths = [length for pair in zip(self.rows, self.columns, strict=True) for length in pair]
        self.places = (0, *accumulate(lengths))  # of rows and columns in turn
        axes = torch.tensor(lengths, dtype=torch.int64)
        # The size is given for a dry run's sake: fake tensors have no values to add up.
        axis = torch.arange(len(lengths)).repeat_interleave(axes, output_size=self.places[-1])
        self._axis, self._axis_lengths = axis.to(device, torch.int32), axes.to(device, torch.float32)
        self.counts = torch.zeros(self.places[-1], dtype=torch.int32, device=device)
        self.rates = torch.zeros(self.places[-1] + len(self.rows), dtype=torch.float32, device=device)
        self.relative = torch.ones(self.places[-1], dtype=torch.float32, device=device)

    def of(self, values: Tensor, tensor: int) -> tuple[Tensor, Tensor]:
        """The tensor's rows and columns of `counts`, `rates` or `relative`."""
        rows, columns, end = self.places[2 * tensor : 2 * tensor + 3]
        return values[rows:columns], values[columns:end]

    def learn(self, applied: Tensor) -> None:
        """Takes `counts` into `rates`, unless not `applied`, and renews `relative`.

        Sums are of integers: the result does not depend on their order.
        """
        totals = torch.zeros_like(self._axis_lengths, dtype=torch.int32).index_add_(0, self._axis, self.counts)
        new = self.rates * SMOOTHING + torch.cat((self.counts, totals[::2])) * (1.0 - SMOOTHING)
        self.rates.copy_(torch.where(applied, new, self.rates))
        axes, tensors = self.rates.split((self.places[-1], len(self.rows)))
        mean = (tensors.repeat_interleave(2) / self._axis_lengths).index_select(0, self._axis)
        self.relative.copy_(torch.where(mean > 0, axes / mean, 1.0))
