"""Weight update in three-level sharding: from masters, one slice per rank, to the weights that all ranks hold.

Each rank sends its updated slice to the other ranks of its row, between nodes and then over the pairs of a node. With
"int8" it sends the difference between its master and the weights of all peers, in blocks that share a scale. All ranks
add the same numbers to the same numbers, so weights stay bitwise equal. The rounding error is part of the next
difference, which is error feedback without memory. Norms and biases are sent as FP32 values. "bfloat16" and "float32"
send the new values of all parameters.

Source: arXiv 2501.04266, Section V-C, gathers new weights in FP16.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.sharding.base import UPDATE
from torchtitan_scape.sharding.levels_layout import MasterSlice, RowLayout
from torchtitan_scape.sharding.levels_messages import SliceCodec
from torchtitan_scape.topology import shard_collectives
from torchtitan_scape.topology.rank_group import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger


class WeightAllGather:
    """All-gather of the weight update of one parameter group.

    Args:
        layout: Layout of the row.
        rank_groups: Rank groups: between nodes, if every node owns a slice, then over the pairs.
        code: Code of the differences; None sends values.
        dtype: Dtype of the values if there is no code.
        ledger: Byte ledger.
    """

    def __init__(
        self,
        layout: RowLayout,
        rank_groups: Sequence[RankGroup],
        code: BlockCode | None,
        dtype: torch.dtype,
        ledger: ShardLedger,
    ) -> None:
        self._layout, self._rank_groups, self._ledger = layout, rank_groups, ledger
        self._sends_differences, self._dtype = code is not None, torch.float32 if code is not None else dtype
        self._messages = SliceCodec(layout, 1, code)

    @torch.no_grad()
    def __call__(
        self, master: Tensor, slices: Sequence[MasterSlice], weights: Sequence[Tensor], applied: Tensor | None
    ) -> None:
        """Update all weights of this rank's row. Collective.

        Args:
            master: FP32 (slice_size,), this rank's row slice.
            slices: The tensors' parts of it.
            weights: The tensors, flat.
            applied: bool (), whether the masters have changed; None for yes. If false, the weights stay unchanged.
        """
        coded, raw = (part[0] for part in self._layout.parts(master[None]))
        if self._sends_differences:
            current = torch.zeros_like(master)
            for part, weight in zip(slices, weights, strict=True):
                current[part.at : part.at + part.stop - part.start] = weight[part.start : part.stop]
            coded = coded - current[: len(coded)]
            if applied is not None:
                coded = torch.where(applied, coded, 0.0)
        gathered = self._gather((coded, raw))
        if dist.get_backend() == "fake":
            return  # The received bytes are not valid messages.
        for number, (weight, values) in enumerate(zip(weights, self._layout.tensors(*gathered), strict=True)):
            values = values[: len(weight)]
            if self._sends_differences and number in self._layout.coded.tensors:
                weight.add_(values)
            else:
                weight.copy_(values)

    def _gather(self, parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """All-gather the encoded slices. Return FP32 (coded.entries,) and (raw.entries,) of the row."""
        message = torch.empty(self._messages.message_bytes(self._dtype), dtype=torch.uint8, device=parts[1].device)
        self._messages.encode((parts[0].to(self._dtype), parts[1].to(self._dtype)), message)
        for rank_group in self._rank_groups:
            output = torch.empty(rank_group.size * message.numel(), dtype=torch.uint8, device=message.device)
            shard_collectives.all_gather(output, message, rank_group, self._ledger, UPDATE)
            message = output
        coded, raw = self._messages.decode(message.view(self._layout.slice_count, -1), self._dtype)
        return coded.reshape(-1).float(), raw.reshape(-1).float()
