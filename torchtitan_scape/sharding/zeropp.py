"""ZeRO++ (arXiv:2306.10209): weights and gradients travel coded, and weights cross nodes once an update.

qwZ: the all-gather carries every row as one message; all ranks decode all messages, their own included, so that all
compute with the same bits. Over two groups rows cross nodes once for each rank's place, then go round the node.

hpZ: what has crossed nodes is kept, coded (n c / P bytes), until parameters change; the gathers in between stay in the
node. The paper gathers across nodes in every forward pass.

qgZ: the reduce-scatter is an all-to-all of messages, decoded and added in rank order: in the node, then across nodes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from topology.rank_group import RankGroup
from topology.shard_collectives import ShardLedger
from torchtitan_scape.sharding.base import (
    GRADIENTS,
    WEIGHTS,
    Allocates,
    ShardedParamGroup,
    TrainPosition,
    WeightsCache,
    WeightsVersion,
)
from torchtitan_scape.sharding.messages import RowCodec, gather_between_nodes, gather_within_node, sum_over


class QuantizedAllGather(Allocates):
    """Stands in for the all-gather of one group.

    Args:
        rank_groups: what rows go over, from the inside out.
        rows: how they are coded.
        keeps: what has come over the last group stays for later gathers of the same version of the weights.
    """

    def __init__(
        self,
        flat: ShardedParamGroup,
        rank_groups: Sequence[RankGroup],
        rows: RowCodec,
        ledger: ShardLedger,
        keeps: WeightsVersion | None = None,
    ) -> None:
        self._flat, self._rank_groups, self._rows, self._ledger = flat, rank_groups, rows, ledger
        self._kept = WeightsCache(keeps) if keeps is not None else None

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        ranks = group.size()
        self._flat.check_gather(output_tensor, input_tensor, group, _ranks(self._rank_groups))
        messages = self._across(input_tensor)
        every = gather_within_node(messages, self._rank_groups, self._ledger, WEIGHTS)
        if dist.get_backend(group) == "fake":  # what has been received is no message
            output_tensor.zero_()
            return
        self._rows.unpack(every, output_tensor.view(ranks, -1))

    def _across(self, row: Tensor) -> Tensor:
        """What has come over the last group, now or before."""
        if self._kept is not None and (kept := self._kept.get()) is not None:
            return kept
        own = torch.empty(self._rows.message_bytes(row.dtype), dtype=torch.uint8, device=row.device)
        self._rows.encode(self._rows.split(row), own)
        messages = gather_between_nodes(own, self._rank_groups, self._ledger, WEIGHTS)
        if self._kept is not None:
            self._kept.keep(messages)
        return messages


class QuantizedReduceScatter(Allocates):
    """Stands in for the reduce-scatter of one group. FP32 inside; a flat of another dtype is converted once.

    Args:
        rank_groups: of the hops, from the inside out. rows: how each codes what it sends.
        moment: for the keys of stochastic rounding; None to round to nearest.
    """

    def __init__(
        self,
        flat: ShardedParamGroup,
        rank_groups: Sequence[RankGroup],
        rows: Sequence[RowCodec],
        ledger: ShardLedger,
        moment: TrainPosition | None = None,
    ) -> None:
        self._flat, self._rank_groups, self._rows, self._ledger, self._moment = flat, rank_groups, rows, ledger, moment

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._flat.check_reduce(output_tensor, input_tensor, group, op, _ranks(self._rank_groups))
        flat = input_tensor.float().view(group.size(), -1)
        parts = sum_over(flat, self._rank_groups, self._rows, self._ledger, GRADIENTS, self._key)
        if dist.get_backend(group) == "fake":
            output_tensor.zero_()
            return
        self._rows[0].assemble(parts, output_tensor)

    def _key(self, hop: int, message: int) -> int | None:
        return None if self._moment is None else self._moment.key(hop, dist.get_rank(), self._flat.number, message)


def _ranks(rank_groups: Sequence[RankGroup]) -> int:
    ranks = 1
    for rank_group in rank_groups:
        ranks *= rank_group.size
    return ranks
