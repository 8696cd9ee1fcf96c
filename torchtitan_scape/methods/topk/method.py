"""Top-k of the gradient with error feedback: every replica sends its own largest entries to all others.

Seide et al., "1-Bit Stochastic Gradient Descent" (2014), has the error feedback; Stich, Cordonnier, Jaggi, "Sparsified
SGD with Memory" (2018), its convergence with top-k. The baseline of both the SCAPE and the Radius paper.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kernels import choose_backend
from kernels.scape.blocks import density_at
from kernels.scape.reference import select_rows
from torchtitan_scape.core.parameters import split
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import CollectiveCall, ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.options import LAYOUT, MethodOptions
from torchtitan_scape.methods.topk.blocks import BlockGrid, block_grid, selected_per_block, topk_message_bytes
from torchtitan_scape.methods.topk.messages import TopkMessages, from_blocks, to_blocks, valid_mask
from torchtitan_scape.planner.volumes import PlannedRun as PlannedMethod


@dataclass
class TopkOptions(MethodOptions):
    """[sync.topk]: read with method = "topk"."""

    section: ClassVar[str] = "sync.topk"

    density: float = 0.01
    """Share of the entries that each replica sends, in (0, 1]. All receive those of all: with N replicas a step
    sends less than dense training only while density x N is below 1.5"""

    density_warmup_steps: int = 0
    """The density falls exponentially from 1 over so many steps. Meanwhile a step whose messages would be longer than
    dense gradients is dense"""

    start: int = 0
    """So many steps at first are dense"""

    selection: Literal["block", "tensor", "tile"] = field(default="block", metadata=LAYOUT)
    """The largest of every block, whose offsets take 9 bits at 0.01 of blocks of 1024; of every tensor (32 bits); or of
    every tile of 64 x 64, those of one dimension in runs of 4096 (8 bits at 64 of 4096)"""

    block_size: int = 1024
    """Entries of a block, a multiple of 8 up to 32768"""

    values: Literal["float32", "e2m1", "2bit"] = "float32"
    """How what is sent travels: in FP32, in blocks of 128 of four bits each, or in two bits by four means of each
    tensor. What the code loses stays in the residual"""

    decay: float = 1.0
    """What a step leaves of the residual, in (0, 1]; below 1 what is not sent in time is lost"""

    divisor: Literal["replicas", "senders"] = "replicas"
    """What sums are divided by: all replicas, or those that sent the entry, up to so many times more"""

    dense_names: list[str] = field(default_factory=list, metadata=LAYOUT)
    """Parameters exchanged whole although they would be compressed"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.01")
        self.require(self.density_warmup_steps >= 0, "density_warmup_steps", "it must be 0 (none) or more")
        self.require(self.start >= 0, "start", "it must be 0 or more")
        whole_bytes = self.block_size % 8 == 0 and 8 <= self.block_size <= 32768
        self.require(whole_bytes, "block_size", "it must be a multiple of 8 from 8 to 32768")
        self.require(0.0 < self.decay <= 1.0, "decay", "it must lie in (0, 1]")

    def planned(self, optimizer: str) -> PlannedMethod:
        return PlannedMethod(
            "topk",
            self.density,
            values=self.values,
            selection=self.selection,
            block=self.block_size,
            optimizer=optimizer.lower(),
        )


class Topk(GradientMethod):
    """One step, with x = decay * residual + gradient (all in mean units):

    1. the k = max(1, round(density * entries)) largest |x| of each block are chosen, ties to the lower index;
    2. their values, coded or not, and coded offsets are one message, which goes to all replicas;
    3. the synchronised gradient is the sum of what arrives, decoded, added in replica order, over the number of
       replicas, or of those that sent the entry; zero elsewhere;
    4. the residual is x without what was sent, as it is decoded.

    What is not compressed (one dimension unless selected by tiles, `dense_names`) is all-reduced. N messages exist at
    once on each replica.
    """

    def __init__(self, context: MethodContext, options: TopkOptions) -> None:
        super().__init__(context, options)
        shards = context.shards
        sparse, whole = split(shards, options.dense_names)
        if options.selection == "tile":
            sparse = [*sparse, *(shard for shard in whole if shard.name not in options.dense_names)]
        self._sparse = [i for i, shard in enumerate(shards) if shard in sparse and shard.size]
        self._whole = [i for i in range(len(shards)) if i not in self._sparse]
        self._cuts = [
            block_grid(tuple(shards[i].local_shape), options.selection, options.block_size) for i in self._sparse
        ]
        self._pending = ErrorFeedback.of(sparse)  # of empty shards, too: a checkpoint has them of all ranks
        self._residuals = [self._pending.tensors[shards[i].name] for i in self._sparse]
        self._backend = choose_backend(context.kernels, shards[0].device)

    def synchronize(self, gradients: list[Tensor], step: StepInfo) -> list[Tensor]:
        self.scale_to_mean(gradients)
        sparse = [gradients[i] for i in self._sparse]
        for x, residual in zip(sparse, self._residuals, strict=True):
            x.add_(residual.view(-1), alpha=self.options.decay)
        density = self._density(step.number)
        if density >= 1.0 or not sparse:
            self.collectives.all_reduce_chunked(gradients)
            self._pending.clear(step.applied)
            return gradients
        messages = TopkMessages(self._cuts, selected_per_block(self._cuts, density), self.options.values, self._backend)
        selected = [self._select(x, cut, k) for x, cut, k in zip(sparse, self._cuts, messages.chosen, strict=True)]
        message = messages.encode(*zip(*selected, strict=True))
        arrived = torch.empty(self.collectives.replicas * message.numel(), dtype=torch.uint8, device=message.device)
        handle = self.collectives.all_gather(arrived, message, kind="payload")
        self.collectives.all_reduce_chunked([gradients[i] for i in self._whole])
        for i, (picked, offsets, _) in enumerate(selected):
            quantization_error = picked - messages.decode_values(message, i)
            tiles = to_blocks(sparse[i], self._cuts[i]).scatter_(1, offsets, quantization_error)
            masked_copy_(self._residuals[i], from_blocks(tiles, self._cuts[i]), step.applied)
        handle.wait()
        arrived = arrived.view(self.collectives.replicas, -1)
        over_senders = self.options.divisor == "senders"
        for i, (x, cut) in enumerate(zip(sparse, self._cuts, strict=True)):
            mean = self.collectives.run_once(partial(messages.mean, arrived, i, over_senders))
            x.copy_(from_blocks(mean, cut))
        return gradients

    def states(self) -> list[State]:
        return [self._pending.state()]

    def collective_calls(self) -> list[CollectiveCall]:
        chunked, shards = self.collectives.chunked_entries, self.context.shards
        if self.options.density >= 1.0 or not self._sparse:
            return [CollectiveCall("all_reduce", chunked(sum(shard.size for shard in shards)))]
        whole = CollectiveCall("all_reduce", chunked(sum(shards[i].size for i in self._whole)))
        return [CollectiveCall("all_gather", self._message_bytes(self.options.density)), whole]

    def density(self) -> float:
        entries = sum(shard.size for shard in self.context.shards)
        chosen = selected_per_block(self._cuts, self.options.density)
        sent = sum(one.count(k) for one, k in zip(self._cuts, chosen, strict=True))
        return (sent + sum(self.context.shards[i].size for i in self._whole)) / max(1, entries)

    def _density(self, number: int) -> float:
        """Of this step; 1 for a dense one."""
        if self.take_full_exchange_request() or number <= self.options.start:
            return 1.0
        target = self.options.density
        density = density_at(number - self.options.start, target, self.options.density_warmup_steps)
        entries = sum(residual.numel() for residual in self._residuals)
        longer = self.collectives.gathered_bytes(self._message_bytes(density)) > self.collectives.reduced_bytes(entries)
        return 1.0 if density > target and longer else density

    def _message_bytes(self, density: float) -> int:
        return topk_message_bytes(self._cuts, selected_per_block(self._cuts, density), self.options.values)

    def _select(self, x: Tensor, cut: BlockGrid, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """(tiles, k) of what is sent: values FP32, offsets int64, and bool, whether x has the entry; None for all."""
        tiles, real = to_blocks(x, cut), valid_mask(cut, x.device)
        offsets = select_rows(tiles, k, real)
        return tiles.gather(1, offsets), offsets, None if real is None else real.gather(1, offsets)
