"""What the owner of entries does in the sharded form of SCAPE ("gather", Algorithm 2 of the paper), in plain PyTorch.

A replica's state holds its own residual alone, zero on A. Of the entries that it owns a replica has a second buffer,
`common`: the first moment m on A, and off A what the moments of entries that left the mask have become, the part of
the residual that is the same for all. All other replicas leave it out of what they send; the owner adds it to the mean.

Functions work on one owned piece of one tensor, n entries. Names are those of `reference.py`.
"""

import torch
from torch import Tensor

from kernels.reference import gated, known_false


def carried(common: Tensor, held: Tensor | None, beta1: float) -> Tensor:
    """What all replicas leave out of mt: beta1 * m on P, the common residual off P; `held`, bool (n,), is P."""
    return common * beta1 if held is None else torch.where(held, common * beta1, common)


def keep_common_(common: Tensor, held: Tensor | None, used: Tensor | None, beta1: float, applied: Tensor) -> None:
    """Off A the common part becomes residual. On A it stays, for `synchronised_gradient_`.

    Args:
        common: FP32 (n,), written unless not `applied`.
        held, used: P and A, bool (n,); None for all ones.
    """
    if used is not None and not known_false(applied):
        common.copy_(gated(applied, torch.where(used, common, carried(common, held, beta1)), common))


def last_moment(common: Tensor, indices: Tensor | None, held: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of A's entries: last step's m, and the common residual that is released; both FP32 (nnz(A),).

    indices: positions of A, int64 (nnz(A),); None for all.
    """
    before = common if indices is None else common.index_select(0, indices)
    if held is None:
        return before, torch.zeros_like(before)
    was_held = held if indices is None else held.index_select(0, indices)
    return torch.where(was_held, before, 0.0), torch.where(was_held, 0.0, before)


def synchronised_gradient_(mean: Tensor, released: Tensor, beta1: float) -> None:
    """gh = (b - beta1 * q) / (1 - beta1), written over the mean of what was sent.

    b is that mean plus what all left out: beta1 * q, which cancels, where m was held; else the residual released.
    """
    mean.add_(released).div_(1.0 - beta1)


def write_(parameter: Tensor, indices: Tensor | None, values: Tensor, applied: Tensor) -> None:
    """parameter = values on A, unless not `applied`; FP32 (n,), positions int64 (nnz(A),) or None for all."""
    if known_false(applied):
        return
    if indices is None:
        parameter.copy_(gated(applied, values, parameter))
    else:
        parameter.scatter_(0, indices, gated(applied, values, parameter.index_select(0, indices)))
