"""Comparison of the hyper-parameters of the param groups over the replicas, in the collective of the finite check."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.replica.setup_checks import check_replicas_agree
from torchtitan_scape.topology.collectives import ReplicaCollectives

# Checksums are below it, so that they are exact in FP32. Subtracted from the values, so that no zero is the smallest.
_OFFSET = 1 << 23


class RateComparison:
    """Compares learning rates and the other numbers of the param groups, which schedulers may change in every step.

    Every rank sends a checksum and its negative, of which the smallest over all ranks is taken. Each pipeline stage has
    a pair of its own, because its param groups may be others.

    Args:
        groups: returns the param groups.
    """

    def __init__(self, groups: Callable[[], Sequence[dict[str, Any]]], collectives: ReplicaCollectives) -> None:
        self._groups, self._collectives = groups, collectives
        stages, self._stage = collectives.gather_from_stages(None)
        self._stages = len(stages)
        self._values: list[tuple[str, int, Any]] | None = None
        self._checksums: Tensor | None = None

    def checksums(self, device: torch.device) -> Tensor:
        """Return the values to reduce in this step, FP32 (2 * stages,)."""
        values = [
            (key, i, number(value))
            for i, group in enumerate(self._groups())
            for key, value in group.items()
            if is_number(value)
        ]
        if self._checksums is None:
            self._checksums = torch.zeros(2 * self._stages, dtype=torch.float32, device=device)
        if values != self._values:
            self._values = values
            checksum = zlib.crc32(repr(values).encode()) % _OFFSET
            one, other = self._checksums.view(-1, 2)[self._stage]
            one.fill_(checksum - _OFFSET)  # in contrast to a copy from the host this does not wait for the device
            other.fill_(-checksum - _OFFSET)
        return self._checksums

    def check(self, smallest: Sequence[float]) -> None:
        """Raise ValueError on every rank if the rates of the last step differed. Collective then.

        Args:
            smallest: of each value of that step, over all ranks.
        """
        pairs = zip(smallest[::2], smallest[1::2], strict=True)
        if all(one + other == -2 * _OFFSET for one, other in pairs):
            return
        settings = {f"{key} of group {i}": value for key, i, value in self._values or ()}
        check_replicas_agree(self._collectives, settings, ())


def is_number(value: Any) -> bool:
    """Return whether a value of a param group is a number, or several, that the host has."""
    if isinstance(value, Tensor):
        return value.is_cpu and value.numel() == 1
    return isinstance(value, bool | int | float) or (isinstance(value, tuple) and all(map(is_number, value)))


def number(value: Any) -> Any:
    """Return the value of `is_number` as Python numbers."""
    if isinstance(value, tuple):
        return tuple(map(number, value))
    return value.item() if isinstance(value, Tensor) else value
