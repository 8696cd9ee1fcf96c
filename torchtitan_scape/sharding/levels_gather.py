"""Three levels, weights: a gather over the w ranks that keeps a secondary partition for the gathers that follow.

Source: arXiv 2501.04266, Section V-A. With weights on a pair of GCDs a partition over the pair saves a pass of the
quantiser, and one over the node sends more, over slower links: it is here to reproduce the paper.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from topology.circles import Circle, ShardLedger
from torchtitan_scape.sharding.base import WEIGHTS, Allocates, FlatGroup, Version
from torchtitan_scape.sharding.messages import RowMessages


class KeptGather(Allocates):
    """Of one parameter group.

    Args:
        circle: the ranks over which FSDP2 shards. rows: how each codes its own.
        keepers: ranks that hold the same weights, or shards of them, together: after the first gather each keeps its
            part of all messages, and they gather these until parameters change.
        version: of the parameters.
    """

    def __init__(
        self,
        flat: FlatGroup,
        circle: Circle,
        rows: RowMessages,
        keepers: Circle,
        ledger: ShardLedger,
        version: Version,
    ) -> None:
        self._flat, self._circle, self._rows, self._keepers, self._ledger = flat, circle, rows, keepers, ledger
        self._version = version
        self.kept: tuple[int, Tensor] | None = None

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """For FSDP2; see `base.Gather`."""
        ranks, size = self._circle.size, self._rows.bytes_of(input_tensor.dtype)
        self._flat.check_gather(output_tensor, input_tensor, group, ranks)
        part = -(-ranks * size // self._keepers.size)
        every = torch.zeros(part * self._keepers.size, dtype=torch.uint8, device=input_tensor.device)
        version = self._version.now()
        if self.kept is None or self.kept[0] != version:
            self.kept = None  # before there is another
            own = torch.empty(size, dtype=torch.uint8, device=input_tensor.device)
            self._rows.encode(self._rows.cut(input_tensor), own)
            self._circle.gather(own, every[: ranks * size], self._ledger, WEIGHTS)
            self.kept = version, every.view(-1, part)[self._keepers.place].clone()
        else:
            own = self.kept[1]
            if own.is_cuda:  # it may be of another stream than this gather
                own.record_stream(torch.cuda.current_stream())
            self._keepers.gather(own, every, self._ledger, WEIGHTS)
        if dist.get_backend() == "fake":  # what has been received is no message
            output_tensor.zero_()
            return
        messages = every[: ranks * size].view(ranks, size)
        for message, row in zip(messages, output_tensor.view(ranks, -1), strict=True):
            self._rows.paste(self._rows.decode(message, row.dtype), row)
