"""DeMo: momentum whose fast components are sent, and what is not sent goes on as momentum.

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
    """One step (the paper's Algorithm 1; the learning rate, which sign descent does not see, is left out of momentum):

    1. m = beta m + gradient; C = the orthonormal two-dimensional cosine transform of each tile of m;
    2. q = the k largest |C| of each tile, ties to the lower place; they leave m, transformed back;
    3. q, in FP32 or as signs times the mean |q| of the tensor, and coded places are one message to all replicas;
    4. the synchronised gradient is what is transformed back of the mean of every component, added in replica order,
       over those that sent it.

    The optimizer is meant to be SignSGD, which sees no length; with another one it is top-k in another basis. All is
    sent so, of what is on a shard; N messages exist at once on each replica.
    """

    def __init__(self, context: MethodContext, options: DemoOptions) -> None:
        super().__init__(context, options)
        self._sent = [i for i, shard in enumerate(context.shards) if shard.size]
        self._cuts = [divisor_grid(tuple(context.shards[i].local_shape), options.chunk) for i in self._sent]
        self._bases = [Basis.of(cut, context.shards[0].device) for cut in self._cuts]
        chosen = [min(options.k, cut.size) for cut in self._cuts]
        self._messages = TopkMessages(self._cuts, chosen, options.code)
        self._pending = ErrorFeedback.of(context.shards)
        self._momenta = [self._pending.tensors[context.shards[i].name] for i in self._sent]

    def synchronize(self, gradients: list[Tensor], step: StepInfo) -> list[Tensor]:
        self.scale_to_mean(gradients)
        sent = [gradients[i] for i in self._sent]
        for x, momentum in zip(sent, self._momenta, strict=True):
            x.add_(momentum.view(-1), alpha=self.options.beta)
        if self.take_full_exchange_request() or not sent:
            self.collectives.all_reduce_chunked(gradients)
            self._pending.clear(step.applied)
            return gradients
        picked, places = [], []
        for i, (x, cut, basis) in enumerate(zip(sent, self._cuts, self._bases, strict=True)):
            components = basis.transformed(to_blocks(x, cut))
            places.append(select_rows(components, self._messages.chosen[i]))
            picked.append(components.gather(1, places[i]))
            leaves = torch.zeros_like(components).scatter_(1, places[i], picked[i])
            masked_copy_(self._momenta[i], x - from_blocks(basis.back(leaves), cut), step.applied)
        message = self._messages.encode(picked, places, [None] * len(places))
        arrived = torch.empty(self.collectives.replicas * message.numel(), dtype=torch.uint8, device=message.device)
        self.collectives.all_gather(arrived, message, kind="payload").wait()
        arrived = arrived.view(self.collectives.replicas, -1)
        for i, (x, cut, basis) in enumerate(zip(sent, self._cuts, self._bases, strict=True)):
            mean = self.collectives.run_once(partial(self._messages.mean, arrived, i, over_senders=True))
            x.copy_(from_blocks(basis.back(mean), cut))
        return gradients

    def states(self) -> list[State]:
        return [self._pending.state()]

    def density(self) -> float:
        return sum(self._messages.counts) / max(1, sum(shard.size for shard in self.context.shards))


@dataclass(frozen=True)
class Basis:
    """Of a tile: FP32 (height, height) and (width, width), orthogonal; row i has cosines of i half periods."""

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, cut: BlockGrid, device: torch.device) -> "Basis":
        return cls(_cosines(cut.height).to(device), _cosines(cut.width).to(device))

    def transformed(self, tiles: Tensor) -> Tensor:
        """(tiles, entries of a tile), FP32: the orthonormal DCT-II of both dimensions of each."""
        return (self.rows @ tiles.view(-1, len(self.rows), len(self.columns)) @ self.columns.T).view(tiles.shape)

    def back(self, components: Tensor) -> Tensor:
        """The inverse of `transformed`."""
        tiles = components.view(-1, len(self.rows), len(self.columns))
        return (self.rows.T @ tiles @ self.columns).view(components.shape)


def _cosines(size: int) -> Tensor:
    i = torch.arange(size, dtype=torch.float64)
    table = torch.cos(i[:, None] * (i + 0.5) * math.pi / size) * math.sqrt(2.0 / size)
    table[0] *= math.sqrt(0.5)
    return table.masked_fill(table.abs() < 1e-12, 0.0).float()  # the sign of what is 0 on paper would be a step
