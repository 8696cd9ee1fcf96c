"""What the owner of entries does in the sharded form of SCAPE (Algorithm 2 of the paper), in plain PyTorch.

A replica's state holds its own residual alone, zero on A. Of the entries that it owns a replica has a second buffer,
`common`: the first moment m on A, and off A what the moments of entries that left the mask have become, the part of
the residual that is the same for all. All other replicas leave it out of what they send; the owner adds it to the mean.

Functions work on one owned piece of one tensor, n entries. Names are those of `reference.py`.
"""

import torch
from torch import Tensor

from kernels.common.gating import gated, known_false
from kernels.scape.reference import unpack_bits


def carried(common: Tensor, previous: Tensor | None, beta1: float) -> Tensor:
    """What all replicas leave out of mt: beta1 * m on P, the common residual off P; `previous` is P, packed."""
    if previous is None:
        return common * beta1
    return torch.where(unpack_bits(previous, common.numel()), common * beta1, common)


def keep_common_(common: Tensor, previous: Tensor | None, in_use: Tensor | None, beta1: float, applied: Tensor) -> None:
    """Off A the common part becomes residual. On A it stays, for `last_moment`.

    Args:
        common: FP32 (n,), written unless not `applied`.
        previous, in_use: packed P and A; None for all ones.
    """
    if in_use is not None and not known_false(applied):
        used = unpack_bits(in_use, common.numel())
        common.copy_(gated(applied, torch.where(used, common, carried(common, previous, beta1)), common))


def last_moment(common: Tensor, indices: Tensor | None, previous: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of A's entries: last step's m, and the common residual that is released; both FP32 (nnz(A),).

    indices: positions of A, int64 (nnz(A),); None for all. previous: packed P.
    """
    values = common if indices is None else common.index_select(0, indices)
    if previous is None:
        return values, torch.zeros_like(values)
    held = unpack_bits(previous, common.numel())
    if indices is not None:
        held = held.index_select(0, indices)
    return torch.where(held, values, 0.0), torch.where(held, 0.0, values)


def synchronised_gradient_(mean: Tensor, released: Tensor, beta1: float) -> None:
    """gh = (b - beta1 * q) / (1 - beta1), written over the mean of what was sent.

    b is that mean plus what all left out: beta1 * q, which cancels, where m was held; else the residual released.
    """
    mean.add_(released).div_(1.0 - beta1)


def held_by_all(parameter: Tensor, indices: Tensor | None, rate: float) -> Tensor:
    """What a replica's copy has on A after weight decay, FP32 (nnz(A),); `write` decays the copy itself."""
    held = parameter if indices is None else parameter.index_select(0, indices)
    return held - held * rate


def write_(parameter: Tensor, indices: Tensor | None, values: Tensor, applied: Tensor) -> None:
    """parameter = values on A, unless not `applied`; FP32 (n,), positions int64 (nnz(A),) or None for all."""
    if known_false(applied):
        return
    if indices is None:
        parameter.copy_(gated(applied, values, parameter))
    else:
        parameter.scatter_(0, indices, gated(applied, values, parameter.index_select(0, indices)))
