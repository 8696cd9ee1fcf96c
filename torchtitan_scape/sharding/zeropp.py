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
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.sharding.base import (
    WEIGHTS,
    CollectiveHook,
    ShardedParamGroup,
    WeightsCache,
)
from torchtitan_scape.sharding.row_codec import RowCodec, hop
from torchtitan_scape.topology import shard_collectives
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger


@dataclass(eq=False)
class QuantizedAllGather(CollectiveHook):
    """Quantized all-gather of one parameter group (qwZ, hpZ).

    Attributes:
        flat: The parameter group.
        rank_groups: Rank groups of the hops, innermost first.
        rows: Codec of the rows.
        ledger: Byte ledger.
        cache: Stores the messages of the outermost hop while the weights are unchanged; None to gather them each time.
    """

    flat: ShardedParamGroup
    rank_groups: Sequence[RankGroup]
    rows: RowCodec
    ledger: ShardLedger
    cache: WeightsCache | None = None

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        self.flat.check_gather(output_tensor, input_tensor, group, prod(one.size for one in self.rank_groups))
        messages = None if self.cache is None else self.cache.get()
        if messages is None:  # Those of the ranks with this rank's position in every node, or, with one hop, of all.
            messages = self._gather(self.rows.encoded(input_tensor)[None], self.rank_groups[-1])
            if self.cache is not None:
                self.cache.keep(messages)
        for intra_node in self.rank_groups[:-1]:
            messages = self._gather(messages, intra_node)
        if dist.get_backend(group) == "fake":  # The received bytes are not valid messages.
            output_tensor.zero_()
            return
        self.rows.unpack(messages, output_tensor.view(group.size(), -1))

    def _gather(self, messages: Tensor, rank_group: RankGroup) -> Tensor:
        """All-gather messages, uint8 (k, bytes), as (k * group size, bytes), in the order of FSDP2's ranks."""
        output = torch.empty(rank_group.size, *messages.shape, dtype=messages.dtype, device=messages.device)
        shard_collectives.all_gather(output.view(-1), messages.view(-1), rank_group, self.ledger, WEIGHTS)
        return output.transpose(0, 1).flatten(0, 1)


@dataclass(eq=False)
class QuantizedReduceScatter(CollectiveHook):
    """Quantized reduce-scatter of one parameter group (qgZ). It works in FP32; a flat buffer of another dtype is
    converted first.

    Attributes:
        flat: The parameter group.
        rank_groups: Rank groups of the hops, innermost first.
        rows: Codec of each hop; all have the same layout.
        ledger: Byte ledger.
    """

    flat: ShardedParamGroup
    rank_groups: Sequence[RankGroup]
    rows: Sequence[RowCodec]
    ledger: ShardLedger

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ranks = prod(one.size for one in self.rank_groups)
        self.flat.check_reduce(output_tensor, input_tensor, group, op, ranks)
        flat, inner = input_tensor.float().view(ranks, -1), self.rank_groups[0].size
        # This rank also sums the rows for the ranks with the same position in the other nodes, and sends them in hop 2.
        by_rank = flat.view(-1, inner, flat.shape[1]).transpose(0, 1)
        coded, raw = hop(self.rows[0].split(by_rank), self.rank_groups[0], self.rows[0], self.ledger)
        for rank_group, rows in zip(self.rank_groups[1:], self.rows[1:], strict=True):
            coded, raw = hop((coded[:, None], raw[:, None]), rank_group, rows, self.ledger)
        if dist.get_backend(group) == "fake":
            output_tensor.zero_()
            return
        self.rows[0].assemble((coded[0], raw[0]), output_tensor)
