"""Gradients in three-level sharding: the reduce-scatter hook within the node, and the sum between nodes.

After every backward pass the flat buffer of a group, (w, m), is encoded and exchanged over the g ranks of the node. The
rank with index q in pair p receives node slice p of row q, sums the contributions in rank order and adds the sum to its
FP32 buffer. FSDP2 keeps no gradient. Once per step the buffers are summed between nodes, quantized or not, by a
reduce-scatter, of which each rank keeps its row slice. The paper all-reduces and discards (N - 1) / N of the sums.

Source: arXiv 2501.04266, Sections V-B and V-C.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.sharding.base import GRADIENTS, Allocates, ShardedParamGroup, TrainPosition
from torchtitan_scape.sharding.levels_layout import RowLayout
from torchtitan_scape.sharding.levels_messages import SliceCodec
from torchtitan_scape.sharding.messages import RowCodec, hop
from torchtitan_scape.topology.rank_group import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger


class SliceReduceScatter(Allocates):
    """Reduce-scatter of one parameter group to node slices, accumulated over the micro-batches of a step.

    Args:
        flat: The parameter group.
        layout: Layout of the row.
        ranks: Degree w over which FSDP2 shards.
        hops: (rank group, code of its messages): all g ranks at once, or the w ranks of a pair and then the pairs. A
            group of one rank is omitted. The index of a rank among all g ranks is (index of its pair) * w + (index in
            the pair).
        ledger: Byte ledger.
        position: Source of the keys of stochastic rounding.
        device: Device of the buffer.
        node_code: Code of the sum between nodes; None for FP32.
        hadamard: Apply a Hadamard transform to every 32 quantized entries before the first hop, and invert it after the
            last one, which is possible because the transform is linear.
        stochastic: Use stochastic rounding; else round to nearest.

    Attributes:
        buffer: FP32 (N, slice_size). Zero it after every step, including a skipped one, because it may contain NaN.
    """

    def __init__(
        self,
        flat: ShardedParamGroup,
        layout: RowLayout,
        ranks: int,
        hops: Sequence[tuple[RankGroup, BlockCode | None]],
        ledger: ShardLedger,
        position: TrainPosition,
        device: torch.device,
        node_code: BlockCode | None = None,
        hadamard: bool = False,
        stochastic: bool = False,
    ) -> None:
        self._flat, self._layout, self._ranks = flat, layout, ranks
        self._ledger, self._position, self._stochastic = ledger, position, stochastic
        self._hadamard_code = next((code for _, code in hops if code is not None), None) if hadamard else None
        self._hops: list[tuple[RankGroup, RowCodec]] = []
        slice_count, rows = layout.slice_count, ranks
        for rank_group, code in hops:
            # A hop sends this many parts of every row, and its result is one part of one row.
            slice_count, rows = slice_count // (rank_group.size // rows), 1
            self._hops.append((rank_group, SliceCodec(layout, slice_count, code)))
        self._node_codec = SliceCodec(layout, 1, node_code)
        self.buffer = torch.zeros(layout.nodes, layout.slice_size, dtype=torch.float32, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add the gradients of a micro-batch to the buffer. `output_tensor` stays undefined, because its gradient is
        dropped.
        """
        self._flat.check_reduce(output_tensor, input_tensor, group, op, self._ranks)
        self._add(input_tensor.view(self._ranks, -1))

    @torch.no_grad()
    def hook(self, reduced: Tensor) -> None:
        """Handle FSDP2's all-reduce hook, the only one that FSDP2 calls if it shards over one rank."""
        self._flat.check_row(reduced)
        if reduced.is_cuda:
            # `reduced` was allocated on another stream. FSDP2 relies on the gradients, which are views of it, to keep
            # it alive until the end of the backward pass, but they are dropped here.
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        self._add(reduced.view(1, -1))

    def across_nodes(self, nodes: RankGroup) -> Tensor:
        """Return the sum over nodes, in node order, FP32 (slice_size,). Collective."""
        if nodes.size == 1:
            return self.buffer[0]
        coded, raw = self._layout.parts(self.buffer)
        keys = partial(self._keys, len(self._hops))
        result = hop((coded[:, None], raw[:, None]), nodes, self._node_codec, self._ledger, GRADIENTS, keys)
        if dist.get_backend() == "fake":
            return self.buffer[nodes.group_rank]  # The received bytes are not valid messages.
        return torch.cat(result, -1)[0]

    def _add(self, flat: Tensor) -> None:
        layout = self._layout
        coded, raw = layout.sections(flat.split(layout.sizes, 1))
        if self._hadamard_code is not None:
            self._hadamard_code.hadamard_(coded)
        for number, (rank_group, rows) in enumerate(self._hops):
            parts = _by_rank(coded, rank_group)[:, None], _by_rank(raw, rank_group)[:, None]
            coded, raw = hop(parts, rank_group, rows, self._ledger, GRADIENTS, partial(self._keys, number))
        if dist.get_backend() == "fake":
            return  # The received bytes are not valid messages.
        if self._hadamard_code is not None:
            self._hadamard_code.hadamard_(coded)
        for target, values in zip(layout.parts(self.buffer), (coded, raw), strict=True):
            target += values.reshape(target.shape)

    def _keys(self, number: int, count: int) -> list[int] | None:
        if not self._stochastic:
            return None
        return self._position.keys(number, dist.get_rank(), self._flat.number, count=count)


def _by_rank(rows: Tensor, rank_group: RankGroup) -> Tensor:
    """Split rows (w, m) into equal parts and return (group size, n), ordered by receiving rank.

    Part p of row q is for rank p * w + q of the group.
    """
    parts = rank_group.size // len(rows)
    parts_by_row = rows.view(len(rows), parts, rows.shape[1] // parts)
    return parts_by_row.transpose(0, 1).reshape(rank_group.size, parts_by_row.shape[2])
