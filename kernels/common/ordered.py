"""Sums in a specified order, in few launches, and divisions with one rounding."""

import torch
from torch import Tensor


def divisor_of(x: Tensor, value: float) -> Tensor:
    """Return `value` as a tensor, (), to divide x by.

    PyTorch replaces a division by a Python number on a GPU with a multiplication by its inverse, which rounds twice.
    """
    return x.new_full((), value)


def add_in_order_(total: Tensor, rows: Tensor) -> None:
    """Add `rows`, FP32 (k, ...), to `total`, FP32 (...), one after the other.

    On a CPU this is one operator, because `index_add_` adds the rows in order. On a GPU its order is undefined, so that
    each row is one launch; the Triton kernels add all rows in one.
    """
    if rows.is_cpu:
        total[None].index_add_(0, torch.zeros(len(rows), dtype=torch.int64, device="cpu"), rows)
        return
    for row in rows:
        total += row
