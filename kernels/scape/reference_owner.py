"""Updates by the owner of entries in SCAPE with sharded updates (Algorithm 2 of the paper), in plain PyTorch.

A replica's state contains only its local residual, which is zero on A. For the entries that it owns, a replica has a
second buffer, `common`: the first moment m on A, and off A the decayed moments of entries that left the mask. The
latter are the part of the residual that is equal on all replicas. No replica includes it in its payload; the owner adds
it to the mean.

Functions process one owned slice of one tensor, n entries. Letters are those of `reference.py`.
"""

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.gating import gated, known_false
from torchtitan_scape.kernels.scape.reference import unpack_bits


def common_part(common: Tensor, previous: Tensor | None, beta1: float) -> Tensor:
    """Return the part of mt that no replica sends: beta1 * m on P, the common residual off P. previous: packed P."""
    if previous is None:
        return common * beta1
    return torch.where(unpack_bits(previous, common.numel()), common * beta1, common)


def keep_common_(common: Tensor, previous: Tensor | None, in_use: Tensor | None, beta1: float, applied: Tensor) -> None:
    """Set `common` to the common part of mt off A. On A it keeps its value, for `last_moment`.

    Args:
        common: FP32 (n,), written if `applied`.
        previous: Packed P; None if all bits are set.
        in_use: Packed A; None if all bits are set.
        beta1: Decay rate of the first moment.
        applied: bool ().
    """
    if in_use is not None and not known_false(applied):
        used = unpack_bits(in_use, common.numel())
        common.copy_(gated(applied, torch.where(used, common, common_part(common, previous, beta1)), common))


def last_moment(common: Tensor, indices: Tensor | None, previous: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return m of the last step, and the common residual that is now applied, of the entries of A.

    Both are FP32 (nnz(A),). indices: positions of A, int64 (nnz(A),); None for all. previous: packed P.
    """
    values = common if indices is None else common.index_select(0, indices)
    if previous is None:
        return values, torch.zeros_like(values)
    held = unpack_bits(previous, common.numel())
    if indices is not None:
        held = held.index_select(0, indices)
    return torch.where(held, values, 0.0), torch.where(held, 0.0, values)


def synchronized_gradient_(mean: Tensor, released: Tensor, beta1: float) -> None:
    """Replace the mean of the payloads by gh = (b - beta1 * q) / (1 - beta1).

    b is the mean plus the common part of mt. For entries in P that part is beta1 * q, which cancels; for others it is
    the common residual, `released`.
    """
    mean.add_(released).div_(1.0 - beta1)


def decayed_copy(parameter: Tensor, indices: Tensor | None, rate: float) -> Tensor:
    """Return a replica's parameters on A after weight decay, FP32 (nnz(A),). `write` decays the parameters."""
    held = parameter if indices is None else parameter.index_select(0, indices)
    return held - held * rate


def write_(parameter: Tensor, indices: Tensor | None, values: Tensor, applied: Tensor) -> None:
    """Set parameter = values on A, if `applied`. FP32 (n,); indices: int64 (nnz(A),) or None for all."""
    if known_false(applied):
        return
    if indices is None:
        parameter.copy_(gated(applied, values, parameter))
    else:
        parameter.scatter_(0, indices, gated(applied, values, parameter.index_select(0, indices)))
