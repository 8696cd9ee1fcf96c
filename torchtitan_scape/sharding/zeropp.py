"""ZeRO++ (arXiv:2306.10209): quantized all-gather and reduce-scatter, and weights sent between nodes once per update.

qwZ: the all-gather sends every row as one quantized message. All ranks decode all messages, including their own, so
that all compute with the same bits. With two hops a row is sent once to the rank with the same position in every other
node, then all-gathered within the node.

hpZ: the messages received from other nodes (n c / P encoded bytes) are kept until the parameters change; the
all-gathers in between stay within the node. The paper gathers between nodes in every forward pass.

qgZ: the reduce-scatter is an all-to-all of messages, decoded and summed in rank order: within the node, then between
nodes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

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
from torchtitan_scape.topology.rank_group import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger


class QuantizedAllGather(Allocates):
    """Quantized all-gather of one parameter group (qwZ, hpZ).

    Args:
        flat: The parameter group.
        rank_groups: Rank groups of the hops, innermost first.
        rows: Codec of the rows.
        ledger: Byte ledger.
        cache_version: Version of the weights; messages of the outermost hop are reused while it is unchanged. None
            disables the cache.
    """

    def __init__(
        self,
        flat: ShardedParamGroup,
        rank_groups: Sequence[RankGroup],
        rows: RowCodec,
        ledger: ShardLedger,
        cache_version: WeightsVersion | None = None,
    ) -> None:
        self._flat, self._rank_groups, self._rows, self._ledger = flat, rank_groups, rows, ledger
        self._cache = WeightsCache(cache_version) if cache_version is not None else None

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        ranks = group.size()
        self._flat.check_gather(output_tensor, input_tensor, group, _ranks(self._rank_groups))
        messages = self._outermost_messages(input_tensor)
        gathered = gather_within_node(messages, self._rank_groups, self._ledger, WEIGHTS)
        if dist.get_backend(group) == "fake":  # The received bytes are not valid messages.
            output_tensor.zero_()
            return
        self._rows.unpack(gathered, output_tensor.view(ranks, -1))

    def _outermost_messages(self, row: Tensor) -> Tensor:
        """Return the messages received over the outermost hop, from the cache if they are still valid."""
        if self._cache is not None and (cached := self._cache.get()) is not None:
            return cached
        message = torch.empty(self._rows.message_bytes(row.dtype), dtype=torch.uint8, device=row.device)
        self._rows.encode(self._rows.split(row), message)
        messages = gather_between_nodes(message, self._rank_groups, self._ledger, WEIGHTS)
        if self._cache is not None:
            self._cache.keep(messages)
        return messages


class QuantizedReduceScatter(Allocates):
    """Quantized reduce-scatter of one parameter group (qgZ). It works in FP32; a flat buffer of another dtype is
    converted first.

    Args:
        flat: The parameter group.
        rank_groups: Rank groups of the hops, innermost first.
        rows: Codec of each hop.
        ledger: Byte ledger.
        position: Source of the keys of stochastic rounding; None rounds to nearest.
    """

    def __init__(
        self,
        flat: ShardedParamGroup,
        rank_groups: Sequence[RankGroup],
        rows: Sequence[RowCodec],
        ledger: ShardLedger,
        position: TrainPosition | None = None,
    ) -> None:
        self._flat, self._rank_groups, self._rows, self._ledger, self._position = (
            flat,
            rank_groups,
            rows,
            ledger,
            position,
        )

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._flat.check_reduce(output_tensor, input_tensor, group, op, _ranks(self._rank_groups))
        flat = input_tensor.float().view(group.size(), -1)
        parts = sum_over(flat, self._rank_groups, self._rows, self._ledger, GRADIENTS, self._keys)
        if dist.get_backend(group) == "fake":
            output_tensor.zero_()
            return
        self._rows[0].assemble(parts, output_tensor)

    def _keys(self, hop: int, count: int) -> list[int] | None:
        position = self._position
        return None if position is None else position.keys(hop, dist.get_rank(), self._flat.number, count=count)


def _ranks(rank_groups: Sequence[RankGroup]) -> int:
    ranks = 1
    for rank_group in rank_groups:
        ranks *= rank_group.size
    return ranks
