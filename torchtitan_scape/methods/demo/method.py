"""DeMo: exchange of the largest DCT components of the momentum; the other components remain in the local momentum.

Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization" (2024), arXiv:2411.19870.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.scape.reference import select_rows
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.demo.options import DemoOptions
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.topk.blocks import BlockGrid, divisor_grid
from torchtitan_scape.methods.topk.messages import TopkMessages, from_blocks, to_blocks


class Demo(GradientMethod):
    """One step (the paper's Algorithm 1, without the learning rate in the momentum, since sign descent ignores scale):

    1. m = beta m + gradient. C is the orthonormal two-dimensional DCT-II of each tile of m.
    2. q contains the k largest |C| of each tile, ties to the lower index. Its inverse transform is subtracted from m.
    3. All-gather one message per replica: q in FP32 or as signs and the mean |q| of the tensor, and encoded offsets.
    4. The mean of each component is taken over the replicas that sent it, in replica order. The synchronized gradient
       is the inverse transform of the means.

    The intended optimizer is SignSGD, which ignores the scale of the gradient. With another optimizer the method is
    top-k in the DCT basis. All parameters are compressed, in tiles of the local shard. Each replica holds N messages at
    once.
    """

    def __init__(self, context: MethodContext, options: DemoOptions) -> None:
        super().__init__(context, options)
        self._non_empty = [i for i, shard in enumerate(context.shards) if shard.size]
        self._grids = [divisor_grid(tuple(context.shards[i].local_shape), options.chunk) for i in self._non_empty]
        self._bases = [Basis.of(grid, context.shards[0].device) for grid in self._grids]
        selected = [min(options.k, grid.size) for grid in self._grids]
        self._messages = TopkMessages(self._grids, selected, options.code)
        self._pending = ErrorFeedback.of(context.shards)
        self._momenta = [self._pending.tensors[context.shards[i].name] for i in self._non_empty]

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        self.scale_to_mean(gradients)
        non_empty = [gradients[i] for i in self._non_empty]
        for x, momentum in zip(non_empty, self._momenta, strict=True):
            x.add_(momentum.view(-1), alpha=self.options.beta)
        if self.take_full_exchange_request() or not non_empty:
            self.collectives.all_reduce_chunked(gradients)
            self._pending.clear(info.applied)
            return gradients
        values, offsets = [], []
        for i, (x, grid, basis) in enumerate(zip(non_empty, self._grids, self._bases, strict=True)):
            components = basis.transform(to_blocks(x, grid))
            offsets.append(select_rows(components, self._messages.selected[i]))
            values.append(components.gather(1, offsets[i]))
            sent = torch.zeros_like(components).scatter_(1, offsets[i], values[i])
            masked_copy_(self._momenta[i], x - from_blocks(basis.inverse(sent), grid), info.applied)
        message = self._messages.encode(values, offsets, [None] * len(offsets))
        received = torch.empty(self.collectives.replicas * message.numel(), dtype=torch.uint8, device=message.device)
        self.collectives.all_gather(received, message, kind="payload").wait()
        received = received.view(self.collectives.replicas, -1)
        for i, (x, grid, basis) in enumerate(zip(non_empty, self._grids, self._bases, strict=True)):
            mean = self.collectives.run_once(partial(self._messages.mean, received, i, over_senders=True))
            x.copy_(from_blocks(basis.inverse(mean), grid))
        return gradients

    def states(self) -> list[State]:
        return [self._pending.state()]

    def density(self) -> float:
        return sum(self._messages.counts) / max(1, sum(shard.size for shard in self.context.shards))


@dataclass(frozen=True)
class Basis:
    """DCT-II matrices of a tile, orthogonal: FP32 (height, height) and (width, width)."""

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, grid: BlockGrid, device: torch.device) -> "Basis":
        return cls(_cosines(grid.height).to(device), _cosines(grid.width).to(device))

    def transform(self, tiles: Tensor) -> Tensor:
        """Return the orthonormal two-dimensional DCT-II of each tile, FP32 (tiles, entries of a tile)."""
        return (self.rows @ tiles.view(-1, len(self.rows), len(self.columns)) @ self.columns.T).view(tiles.shape)

    def inverse(self, components: Tensor) -> Tensor:
        """Return the inverse of `transform`."""
        tiles = components.view(-1, len(self.rows), len(self.columns))
        return (self.rows.T @ tiles @ self.columns).view(components.shape)


def _cosines(size: int) -> Tensor:
    i = torch.arange(size, dtype=torch.float64)
    table = torch.cos(i[:, None] * (i + 0.5) * math.pi / size) * math.sqrt(2.0 / size)
    table[0] *= math.sqrt(0.5)
    # Entries that are exactly 0 in real arithmetic: the sign of a rounding error would become an update of SignSGD.
    return table.masked_fill(table.abs() < 1e-12, 0.0).float()
