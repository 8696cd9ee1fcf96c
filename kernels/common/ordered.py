"""Sums in a specified order, in few launches."""

import torch
from torch import Tensor


def add_in_order_(total: Tensor, rows: Tensor) -> None:
    """Add `rows`, FP32 (k, ...), to `total`, FP32 (...), one after the other.

    On a CPU this is one operator, because `index_add_` adds the rows in order. On a GPU its order is undefined, so that
    each row is one launch; the Triton kernels add all rows in one.
    """
    if rows.is_cpu:
        total[None].index_add_(0, torch.zeros(len(rows), dtype=torch.int64), rows)
        return
    for row in rows:
        total += row
