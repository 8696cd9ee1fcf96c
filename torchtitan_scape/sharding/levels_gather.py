"""Three levels, weights: a gather over the w ranks that keeps a secondary partition for the gathers that follow.

Source: arXiv 2501.04266, Section V-A. With weights on a pair of GCDs a partition over the pair saves a pass of the
quantiser, and one over the node sends more, over slower links: it is here to reproduce the paper.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.common.wire import padded_bytes
from topology import shard_collectives
from topology.rank_group import RankGroup
from topology.shard_collectives import ShardLedger
from torchtitan_scape.sharding.base import WEIGHTS, Allocates, ShardedParamGroup, WeightsCache, WeightsVersion
from torchtitan_scape.sharding.messages import RowCodec


class SecondaryAllGather(Allocates):
    """Of one parameter group.

    Args:
        rank_group: the ranks over which FSDP2 shards. rows: how each codes its own.
        keepers: ranks that hold the same weights, or shards of them, together: after the first gather each keeps its
            part of all messages, and they gather these until parameters change.
        version: of the parameters.
    """

    def __init__(
        self,
        flat: ShardedParamGroup,
        rank_group: RankGroup,
        rows: RowCodec,
        keepers: RankGroup,
        ledger: ShardLedger,
        version: WeightsVersion,
    ) -> None:
        self._flat, self._rank_group, self._rows, self._keepers, self._ledger = flat, rank_group, rows, keepers, ledger
        self._kept = WeightsCache(version)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """For FSDP2; see `base.Gather`."""
        ranks, size = self._rank_group.size, self._rows.message_bytes(input_tensor.dtype)
        self._flat.check_gather(output_tensor, input_tensor, group, ranks)
        part = padded_bytes(-(-ranks * size // self._keepers.size))
        every = torch.zeros(part * self._keepers.size, dtype=torch.uint8, device=input_tensor.device)
        if (part_kept := self._kept.get()) is None:
            own = torch.empty(size, dtype=torch.uint8, device=input_tensor.device)
            self._rows.encode(self._rows.split(input_tensor), own)
            shard_collectives.all_gather(every[: ranks * size], own, self._rank_group, self._ledger, WEIGHTS)
            self._kept.keep(every.view(-1, part)[self._keepers.group_rank].clone())
        else:
            shard_collectives.all_gather(every, part_kept, self._keepers, self._ledger, WEIGHTS)
        if dist.get_backend() == "fake":  # what has been received is no message
            output_tensor.zero_()
            return
        self._rows.unpack(every[: ranks * size].view(ranks, size), output_tensor.view(ranks, -1))
