"""Small operations on tensors that several methods share."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.tensors import masked_copy_ as masked_copy_
from torchtitan_scape.kernels.scape.reference import pack_bits

K = TypeVar("K", bound=Hashable)
PART = 1 << 22  # entries that are converted to FP64 at once


def flat(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return contiguous tensors as vectors (n,), which are views."""
    return [tensor if tensor.ndim == 1 else tensor.view(-1) for tensor in tensors]


def packed_bits(bits: Tensor) -> Tensor:
    """Return bool (n,) as uint8 (ceil(n / 8),), with entry i in bit i % 8 of byte i // 8."""
    return pack_bits(torch.nn.functional.pad(bits, (0, -bits.numel() % 8)))


def indices_by_key(keys: Iterable[K]) -> dict[K, list[int]]:
    """Return the indices of equal keys, by key: tensors of one shape can be processed together."""
    indices: dict[K, list[int]] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, []).append(index)
    return indices


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of squares, FP64 (), with temporaries of at most `PART` entries."""
    parts = [part.double().square().sum() for part in values.reshape(-1).split(PART)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def add_to_each_(counters: Sequence[Tensor], value: Tensor) -> None:
    """Add `value`, (), to all counters, () on its device and of one dtype, without waiting for the device.

    `torch._foreach_add_` with a single tensor reads its value on the host.
    """
    value = value.to(counters[0].dtype)
    torch._foreach_add_(list(counters), [value] * len(counters))
