"""Data that end on one rank end the run on all of them, at the same step."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from torchtitan_scape.data.loader import NoTextError
from torchtitan_scape.data.simulated import Batch
from torchtitan_scape.titan.components import IGNORE_INDEX
from torchtitan_scape.titan.data import DataloaderExhaustedError
from torchtitan_scape.titan.distributed import device_type


def raise_together(error: ValueError | None, what: str) -> None:
    """Raises this rank's `error`, or names the ranks that have one. A collective call over all ranks.

    what: what failed, for the other ranks' message.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        failed = torch.tensor([error is not None, dist.get_rank() if error else 0], device=device_type)
        dist.all_reduce(failed)
        n_failed, place = failed.tolist()
        if n_failed and error is None:
            where = f"rank {place}" if n_failed == 1 else f"{n_failed} ranks"
            error = ValueError(f"{what} failed on {where}; see the message there")
    if error is not None:
        raise error


class EndOfDataSync:
    """Rides on the sum of tokens with which TorchTitan begins a step.

    A rank whose data have ended hands out batches without a label instead, so that it reaches that sum; there all
    ranks learn of it, and raise: DataloaderExhaustedError where data ended as they should, NoTextError where a rank's
    share has no token. No forward pass of that step is taken. The sum is the same collective as before, of three more
    numbers.
    """

    def __init__(self) -> None:
        self._error: DataloaderExhaustedError | NoTextError | None = None

    def batches(self, source: Iterator[Batch], alone: bool) -> Iterator[Batch]:
        """What `source` gives, and batches without a label where it ends; alone: no other rank has to be told."""
        while True:
            try:
                batch = next(source)
            except (DataloaderExhaustedError, NoTextError) as error:
                if alone:
                    raise
                self._error = error
                break
            yield batch
        while True:
            yield {"input": torch.zeros(1, 1, dtype=torch.int64)}, torch.full((1, 1), IGNORE_INDEX)

    def count(self, tokens: torch.Tensor, mesh: Any = None, *args: Any, **kwargs: Any) -> float:
        """TorchTitan's `dist_sum` of a step's tokens, which also says on which ranks data have ended."""
        ended = isinstance(self._error, DataloaderExhaustedError)
        failed = isinstance(self._error, NoTextError)
        mine = [float(tokens), float(ended), float(failed), failed * float(dist.get_rank())]
        values = torch.tensor(mine, dtype=torch.float64, device=tokens.device)
        total, n_ended, n_failed, place = funcol.all_reduce(values, reduceOp="sum", group=mesh).tolist()
        if n_failed:
            where = f"rank {place:.0f}" if n_failed == 1 else f"{n_failed:.0f} ranks"
            if isinstance(self._error, NoTextError):
                raise self._error
            raise NoTextError(f"the data of {where} have no token; see the message there")
        if n_ended:
            raise DataloaderExhaustedError(f"the data of {n_ended:.0f} data-parallel ranks ran out")
        return float(total)
