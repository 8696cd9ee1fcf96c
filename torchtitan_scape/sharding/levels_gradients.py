"""Three levels, gradients: what stands in for FSDP2's reduce-scatter, and the sum across nodes.

After every backward pass the flat of a group, (w, m), goes to the g ranks of the node in codes: the rank of pair p and
place q gets piece p of row q, adds what came in rank order, and adds that to a buffer of its own, in FP32. FSDP2 keeps
no gradient. Once a step the buffers are summed across nodes, coded or not: a reduce-scatter, of which each rank keeps
its sub-piece, where the paper all-reduces and throws (N - 1) / N of the sums away.

Source: arXiv 2501.04266, Sections V-B and V-C.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kernels.codec.codes import BlockCode
from topology.rank_group import RankGroup
from topology.shard_collectives import ShardLedger
from torchtitan_scape.sharding.base import GRADIENTS, Allocates, ShardedParamGroup, TrainPosition
from torchtitan_scape.sharding.levels_layout import RowLayout
from torchtitan_scape.sharding.levels_messages import SliceCodec
from torchtitan_scape.sharding.messages import Parts, RowCodec, hop


class SliceReduceScatter(Allocates):
    """Of one parameter group: its piece of the gradient of all micro-batches of a step.

    Args:
        ranks: w, over which FSDP2 shards.
        hops: (group, code of its messages): all g ranks at once, or the w ranks of a pair, then the pairs; a group of
            one rank is left out. The place of a rank among all g is that of its pair times w, plus its own in the pair.
        across: the code of the sum across nodes; None for FP32.
        turned: what is coded is turned by a Hadamard matrix, 32 entries at a time, before the first hop; turned back
            after the last one, as that is linear.
        stochastic: rounding by keys of the moment, else to the nearest.

    Attributes:
        buffer: FP32 (N, sub_piece), to be zeroed after every step, a skipped one too: it may hold its NaN.
    """

    def __init__(
        self,
        flat: ShardedParamGroup,
        layout: RowLayout,
        ranks: int,
        hops: Sequence[tuple[RankGroup, BlockCode | None]],
        ledger: ShardLedger,
        moment: TrainPosition,
        device: torch.device,
        across: BlockCode | None = None,
        turned: bool = False,
        stochastic: bool = False,
    ) -> None:
        self._flat, self._layout, self._ranks = flat, layout, ranks
        self._ledger, self._moment, self._stochastic = ledger, moment, stochastic
        self._turned = next((code for _, code in hops if code is not None), None) if turned else None
        self._hops: list[tuple[RankGroup, RowCodec]] = []
        cuts, rows = layout.cuts, ranks
        for rank_group, code in hops:
            # Of every row so many parts go out, and what comes in is a part of one row.
            cuts, rows = cuts // (rank_group.size // rows), 1
            self._hops.append((rank_group, SliceCodec(layout, cuts, code)))
        self._across = SliceCodec(layout, 1, across)
        self.buffer = torch.zeros(layout.nodes, layout.sub_piece, dtype=torch.float32, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """For FSDP2. What `output` gets means nothing: the gradient that is made of it is dropped."""
        self._flat.check_reduce(output_tensor, input_tensor, group, op, self._ranks)
        self._add(input_tensor.view(self._ranks, -1))

    @torch.no_grad()
    def hook(self, reduced: Tensor) -> None:
        """For FSDP2 over one rank, where it calls nothing else: its all-reduce hook."""
        self._flat.check_row(reduced)
        if reduced.is_cuda:
            # It is of another stream than the hook's, and FSDP2 counts on gradients, views of it that are dropped here,
            # to hold it until the backward pass is over.
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        self._add(reduced.view(1, -1))

    def across_nodes(self, nodes: RankGroup) -> Tensor:
        """FP32 (sub_piece,): the sum over nodes, in their order. A collective call."""
        if nodes.size == 1:
            return self.buffer[0]
        parts = list(zip(*self._layout.parts(self.buffer), strict=True))
        key = partial(self._key, len(self._hops))
        (own,) = hop(partial(_of, parts), 1, nodes, self._across, self.buffer.device, self._ledger, GRADIENTS, key)
        if dist.get_backend() == "fake":
            return self.buffer[nodes.group_rank]  # what has been received is no message
        return torch.cat(own)

    def _add(self, flat: Tensor) -> None:
        layout = self._layout
        coded, raw = layout.sections(flat.split(layout.sizes, 1))
        if self._turned is not None:
            self._turned.hadamard_(coded)
        for number, (rank_group, rows) in enumerate(self._hops):
            parts = list(zip(_by_rank(coded, rank_group), _by_rank(raw, rank_group), strict=True))
            key = partial(self._key, number)
            (own,) = hop(partial(_of, parts), 1, rank_group, rows, flat.device, self._ledger, GRADIENTS, key)
            coded, raw = own[0][None], own[1][None]
        if dist.get_backend() == "fake":
            return  # what has been received is no message
        if self._turned is not None:
            self._turned.hadamard_(coded)
        for into, what in zip(layout.parts(self.buffer), (coded, raw), strict=True):
            into += what.reshape(into.shape)

    def _key(self, number: int, message: int) -> int | None:
        return self._moment.key(number, dist.get_rank(), self._flat.number, message) if self._stochastic else None


def _of(parts: Sequence[Parts], rank: int, _: int) -> Parts:
    return parts[rank]


def _by_rank(rows: Tensor, rank_group: RankGroup) -> Tensor:
    """(group size, n): of rows (w, m), cut into equal parts, part p of row q is for rank p * w + q of the group."""
    parts = rank_group.size // len(rows)
    cut = rows.view(len(rows), parts, rows.shape[1] // parts)
    return cut.transpose(0, 1).reshape(rank_group.size, cut.shape[2])
