"""Comparison of the hyper-parameters of the param groups over all ranks, in the collective of the finite check."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.topology.collectives import ReplicaCollectives

# Checksums are below it, so that they are exact in FP32. Subtracted from the values, so that no zero is the smallest.
_OFFSET = 1 << 23


_Values = dict[tuple[str, int], Any]


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
        self._compared = set(self._read())
        self._values: _Values = {}
        self._checksums: Tensor | None = None

    def _read(self) -> "_Values":
        """Return the numbers in all groups by (key, group)."""
        numbered = enumerate(self._groups())
        return {(key, i): number(v) for i, group in numbered for key, v in group.items() if is_number(v)}

    def checksums(self, device: torch.device) -> Tensor:
        """Return the values to reduce in this step, FP32 (2 * stages,)."""
        values = {key: value for key, value in self._read().items() if key in self._compared}
        if self._checksums is None or values != self._values:
            self._checksums = torch.zeros(2 * self._stages, dtype=torch.float32, device=device)
            self._values = values
            checksum = zlib.crc32(repr(sorted(values.items())).encode()) % _OFFSET
            one, other = self._checksums.view(-1, 2)[self._stage]
            one.fill_(checksum - _OFFSET)  # in contrast to a copy from the host this does not wait for the device
            other.fill_(-checksum - _OFFSET)
        return self._checksums

    def after_step(self) -> None:
        """Compare no longer what the optimizer has changed in its step: its own estimates, in the param groups."""
        now = self._read()
        self._compared -= {key for key, value in self._values.items() if now.get(key) != value}

    def check(self, smallest: Sequence[float]) -> None:
        """Raise ValueError on every rank if the rates of the last step differed. Collective then.

        Args:
            smallest: of each value of that step, over all ranks.
        """
        pairs = zip(smallest[::2], smallest[1::2], strict=True)
        if all(one + other == -2 * _OFFSET for one, other in pairs):
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        every = sorted(self._collectives.gather_objects((self._stage, rank, self._values, self._compared)))
        for stage in range(self._stages):
            (_, one, expected, _), *others = (each for each in every if each[0] == stage)
            # An estimate of the optimizer may have changed on some ranks only.
            keys = sorted(set.intersection(*(compared for each, *_, compared in every if each == stage)))
            for _, rank, values, _ in others:
                for key, i in keys:
                    own, wanted = values.get((key, i)), expected.get((key, i))
                    if own != wanted:
                        raise ValueError(
                            f"rank {rank} has {key}={own!r} in param group {i}, rank {one} has {wanted!r}; every "
                            "replica needs the same values in every step: give a scheduler that reads a loss the mean "
                            "over all ranks"
                        )
            if stage == self._stage:
                self._compared = set(keys)


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
