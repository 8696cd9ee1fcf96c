"""Three levels, after the update: from masters, of which every rank has its cut, to the weights that all ranks hold.

Each rank tells the others of its row what has become of its cut, across nodes, then over the pairs of a node. With
"int8" that is the difference between its master and what all holders have, in blocks that share a scale: all add the
same numbers to the same numbers, so that they stay equal to the last bit, and what rounding leaves is in the next
difference: error feedback that takes no memory; norms and biases go as FP32 values. "bfloat16" and "float32" send the
new values of all.

Source: arXiv 2501.04266, Section V-C, gathers new weights in FP16.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.codec.codes import BlockCode
from topology import shard_collectives
from topology.rank_group import RankGroup
from topology.shard_collectives import ShardLedger
from torchtitan_scape.sharding.base import UPDATE
from torchtitan_scape.sharding.levels_layout import MasterSlice, RowLayout
from torchtitan_scape.sharding.levels_messages import SliceCodec


class WeightAllGather:
    """Of one parameter group.

    Args:
        rank_groups: across nodes, where each of them has a cut of its own, then over the pairs.
        code: of differences, or
        dtype: in which values go where there is no code.
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
        self._differs, self._dtype = code is not None, torch.float32 if code is not None else dtype
        self._messages = SliceCodec(layout, 1, code)

    @torch.no_grad()
    def __call__(
        self, master: Tensor, slices: Sequence[MasterSlice], weights: Sequence[Tensor], applied: Tensor | None
    ) -> None:
        """Brings all weights of this rank's row up to date. A collective call.

        master: FP32 (sub_piece,), this rank's cut. slices: of it, the tensors' own entries. weights: the tensors, flat.
        applied: bool (), whether masters have changed; None for yes. Else weights stay as they are.
        """
        coded, raw = (part[0] for part in self._layout.parts(master[None]))
        if self._differs:
            held = torch.zeros_like(master)
            for one, weight in zip(slices, weights, strict=True):
                held[one.at : one.at + one.stop - one.start] = weight[one.start : one.stop]
            coded = coded - held[: len(coded)]
            if applied is not None:
                coded = torch.where(applied, coded, 0.0)
        told = self._gather((coded, raw))
        if dist.get_backend() == "fake":
            return  # what has been received is no message
        for number, (weight, values) in enumerate(zip(weights, self._layout.tensors(*told), strict=True)):
            values = values[: len(weight)]
            if self._differs and number in self._layout.coded.tensors:
                weight.add_(values)
            else:
                weight.copy_(values)

    def _gather(self, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """FP32 (coded.entries,) and (raw.entries,): what every cut's rank tells of it."""
        message = torch.empty(self._messages.message_bytes(self._dtype), dtype=torch.uint8, device=own[1].device)
        self._messages.encode((own[0].to(self._dtype), own[1].to(self._dtype)), message)
        for rank_group in self._rank_groups:
            output = torch.empty(rank_group.size * message.numel(), dtype=torch.uint8, device=message.device)
            shard_collectives.all_gather(output, message, rank_group, self._ledger, UPDATE)
            message = output
        coded, raw = self._messages.decode(message.view(self._layout.cuts, -1), self._dtype)
        return coded.reshape(-1).float(), raw.reshape(-1).float()
