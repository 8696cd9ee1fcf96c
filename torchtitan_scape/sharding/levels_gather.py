"""All-gather of weights in three-level sharding, with a secondary partition for the following all-gathers.

Source: arXiv 2501.04266, Section V-A. With weights on a pair of GCDs, a partition over the pair saves one pass of the
quantizer, and a partition over the node sends more bytes over slower links. It is implemented to reproduce the paper.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.kernels.common.alignment import padded_bytes
from torchtitan_scape.sharding.base import WEIGHTS, Allocates, ShardedParamGroup, WeightsCache, WeightsVersion
from torchtitan_scape.sharding.messages import RowCodec
from torchtitan_scape.topology import shard_collectives
from torchtitan_scape.topology.rank_group import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger


class SecondaryAllGather(Allocates):
    """All-gather of one parameter group with a secondary partition.

    Args:
        flat: The parameter group.
        rank_group: Ranks over which FSDP2 shards.
        rows: Codec of the rows.
        keepers: Ranks that share the secondary partition. After the first all-gather each stores its part of all
            messages; later all-gathers are over these ranks until the parameters change.
        ledger: Byte ledger.
        version: Version of the weights.
    """

    def __init__(
        self,
        flat: ShardedParamGroup,
        rank_group: RankGroup,
        rows: RowCodec,
        partition: RankGroup,
        ledger: ShardLedger,
        version: WeightsVersion,
    ) -> None:
        self._flat, self._rank_group, self._rows, self._partition, self._ledger = (
            flat,
            rank_group,
            rows,
            partition,
            ledger,
        )
        self._cache = WeightsCache(version)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """All-gather the row; see `base.AllGatherHook`."""
        ranks, size = self._rank_group.size, self._rows.message_bytes(input_tensor.dtype)
        self._flat.check_gather(output_tensor, input_tensor, group, ranks)
        part_bytes = padded_bytes(-(-ranks * size // self._partition.size))
        gathered = torch.zeros(part_bytes * self._partition.size, dtype=torch.uint8, device=input_tensor.device)
        if (cached_part := self._cache.get()) is None:
            message = torch.empty(size, dtype=torch.uint8, device=input_tensor.device)
            self._rows.encode(self._rows.split(input_tensor), message)
            shard_collectives.all_gather(gathered[: ranks * size], message, self._rank_group, self._ledger, WEIGHTS)
            self._cache.keep(gathered.view(-1, part_bytes)[self._partition.group_rank].clone())
        else:
            shard_collectives.all_gather(gathered, cached_part, self._partition, self._ledger, WEIGHTS)
        if dist.get_backend() == "fake":  # The received bytes are not valid messages.
            output_tensor.zero_()
            return
        self._rows.unpack(gathered[: ranks * size].view(ranks, size), output_tensor.view(ranks, -1))
