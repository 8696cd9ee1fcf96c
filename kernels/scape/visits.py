"""Rates at which rows and columns of a tensor enter the mask, to estimate the staleness of entries without their age.

By Little's law, the number of entries that enter per step gives the mean time that entries spend outside the mask.
Entries differ: an input that is rarely active has small gradients in its whole column, so that its entries stay outside
for longer. The rate at which entry (r, c) enters is estimated as rate[r] * rate[c] / rate of the tensor, the rank-1
form of the second moments of Adafactor (Shazeer and Stern 2018, Section 3). It needs rows + columns numbers per tensor.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

# Decay rate of the exponential moving average over steps; the time constant is five steps.
SMOOTHING = 0.8
# Lower limit of the estimated rate of an entry, relative to the mean of its tensor.
MIN_VISIT_RATE = 1e-3
# Upper limit of the estimated steps outside the mask, by which the step of an entering entry is multiplied.
MAX_STALENESS = 1000.0
# Factor on the moment of an entering entry after its scaled step. At the target density such an entry is also excluded
# from the next mask if enough other entries exist: its large mt is consumed by this step.
KEPT_MOMENT = 0.5


class VisitRates:
    """Moving average of the newly entered entries per step of every row and column; bitwise equal on all replicas.

    Args:
        sizes: Entries of each sparsified tensor's local shard.
        columns: Row length of each shard; one of several dimensions counts as a matrix (first dimension, all others).
        device: Device of the tensors.

    Attributes:
        rates: FP32 (rows and columns of all tensors, then one entry per tensor,): the averages; the saved state.
        relative: FP32 (rows and columns of all tensors,): rates relative to the tensor's mean row or column.
        counts: int32, of the same shape: entries that entered in this step. Set it before `accumulate`.
        fresh: int64 (tensors,): entries of each tensor that entered in the step of the last `accumulate`.
        starts: First index of the rows, then of the columns, of every tensor in these tensors; ends with their size.
    """

    def __init__(self, sizes: Sequence[int], columns: Sequence[int], device: torch.device) -> None:
        self.columns = tuple(columns)
        self.rows = tuple(n // c for n, c in zip(sizes, columns, strict=True))
        lengths = [length for pair in zip(self.rows, self.columns, strict=True) for length in pair]
        self.starts = (0, *accumulate(lengths))
        axes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        # The first row of every tensor, and the entry after its last one.
        edges = torch.tensor(self.starts[:-1], dtype=torch.int64, device="cpu")
        # `output_size` is needed in a dry run, because fake tensors have no values.
        axis = torch.arange(len(lengths), device="cpu").repeat_interleave(axes, output_size=self.starts[-1])
        self._row_edges = edges.to(device)
        self._axis, self._axis_lengths = axis.to(device, torch.int32), axes.to(device, torch.float32)
        self.counts = torch.zeros(self.starts[-1], dtype=torch.int32, device=device)
        self.fresh = torch.zeros(len(self.rows), dtype=torch.int64, device=device)
        self.rates = torch.zeros(self.starts[-1] + len(self.rows), dtype=torch.float32, device=device)
        self.relative = torch.ones(self.starts[-1], dtype=torch.float32, device=device)

    def of(self, values: Tensor, tensor: int) -> tuple[Tensor, Tensor]:
        """Return the entries of a tensor's rows and columns in `counts`, `rates` or `relative`."""
        rows, columns, end = self.starts[2 * tensor : 2 * tensor + 3]
        return values[rows:columns], values[columns:end]

    def count(self, tensor: int, fresh: Tensor) -> None:
        """Set the counts of a tensor by PyTorch. fresh: bool (n,), true for the entries in A and not in P."""
        rows, columns = self.of(self.counts, tensor)
        fresh = fresh.view(rows.numel(), columns.numel())
        rows.copy_(fresh.sum(1))
        columns.copy_(fresh.sum(0))

    def accumulate(self, applied: Tensor) -> None:
        """Update `rates` with `counts`, if `applied`, and then `relative`.

        Sums are over integers, so that the result does not depend on their order.
        """
        sums = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)).index_select(0, self._row_edges)
        # Not `counts * number`: PyTorch computes integers times a number in the default dtype.
        self.fresh = sums[1::2] - sums[::2]
        counts = torch.cat((self.counts, self.fresh)).float()
        new = self.rates * SMOOTHING + counts * (1.0 - SMOOTHING)
        torch.where(applied, new, self.rates, out=self.rates)
        axes, tensors = self.rates.split((self.starts[-1], len(self.rows)))
        mean = (tensors.repeat_interleave(2) / self._axis_lengths).index_select(0, self._axis)
        self.relative.copy_(torch.where(mean > 0, axes / mean, 1.0))
