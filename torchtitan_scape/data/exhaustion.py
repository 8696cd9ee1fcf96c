"""End of the data: if the data of one rank end, the run ends on all ranks, at the same step."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_scape.data.loader import NoTextError
from torchtitan_scape.data.read_ahead import ReadAheadLoader, on_host
from torchtitan_scape.data.simulated import Batch
from torchtitan_scape.titan.components import IGNORE_INDEX
from torchtitan_scape.titan.data import DataloaderExhaustedError
from torchtitan_scape.titan.distributed import device_type


def raise_together(error: ValueError | None, what: str) -> None:
    """Raise this rank's `error`; on the other ranks, an error that names the rank. Collective over all ranks.

    Args:
        error: None if this rank has no error.
        what: The operation, for the message on the other ranks.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        flags = [error is not None, dist.get_rank() if error else 0]
        failed = torch.tensor(flags, dtype=torch.int64, device=device_type)
        dist.all_reduce(failed)
        n_failed, rank = failed.tolist()
        if n_failed and error is None:
            where = f"rank {rank}" if n_failed == 1 else f"{n_failed} ranks"
            error = ValueError(f"{what} failed on {where}; see the message there")
    if error is not None:
        raise error


class EndOfDataSync:
    """Counts the tokens of a step over all ranks, and ends the run on all of them if the data of one have ended.

    The sum is the first reduction of a TorchTitan step. It is computed on the host, over `group`, and is started during
    the previous step, when the batches of a step have been read: the host does not wait for the device, and seldom for
    other ranks. A rank whose data have ended yields batches without labels, so that it takes part in the sum. Then all
    ranks raise the same error: DataloaderExhaustedError at the end of the data, NoTextError if the share of a rank has
    no token. No forward pass of that step is run.

    Args:
        loader: Data loader of this rank.
        group: Data-parallel ranks, on the host; None if there is only this rank.
    """

    def __init__(self, loader: ReadAheadLoader, group: dist.ProcessGroup | None) -> None:
        self._loader, self._group = loader, group
        self._sum: tuple[dist.Work, torch.Tensor] | None = None
        self._error: DataloaderExhaustedError | NoTextError | None = None

    def start(self) -> None:
        """Read the batches of the next step and start the sum of their tokens, unless that was done. Collective."""
        step = self._loader.read_step()
        if self._group is None or self._sum is not None:
            return
        ended, failed = isinstance(step.end, StopIteration), isinstance(step.end, NoTextError)
        mine = [float(step.tokens), float(ended), float(failed), failed * float(dist.get_rank())]
        values = torch.tensor(mine, dtype=torch.float64, device="cpu")
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        self._sum = work, values

    def batches(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of `source`, and if it ends, batches without a label; raise if no other rank exists."""
        try:
            for batch in source:
                yield on_host(batch)
        except (DataloaderExhaustedError, NoTextError) as error:
            if self._group is None:
                raise
            self._error = error
        while True:
            tokens = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
            yield on_host(({"input": tokens}, torch.full_like(tokens, IGNORE_INDEX)))

    def count(self, *args: Any, **kwargs: Any) -> float:
        """Return the tokens of the step on all ranks, in place of TorchTitan's `dist_sum`.

        Raises:
            DataloaderExhaustedError, NoTextError: The data of a rank have ended.
        """
        assert self._sum is not None
        (work, values), self._sum = self._sum, None
        work.wait()
        total, n_ended, n_failed, rank = values.tolist()
        if n_failed:
            where = f"rank {rank:.0f}" if n_failed == 1 else f"{n_failed:.0f} ranks"
            if isinstance(self._error, NoTextError):
                raise self._error
            raise NoTextError(f"the data of {where} have no token; see the message there")
        if n_ended:
            raise DataloaderExhaustedError(f"the data of {n_ended:.0f} data-parallel ranks ran out")
        return float(total)
