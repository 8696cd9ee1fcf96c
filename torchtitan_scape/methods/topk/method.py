"""Top-k of the gradient with error feedback: every replica sends its own largest entries to all others.

Seide et al., "1-Bit Stochastic Gradient Descent" (2014), has the error feedback; Stich, Cordonnier, Jaggi, "Sparsified
SGD with Memory" (2018), its convergence with top-k. The baseline of both the SCAPE and the Radius paper.
"""

from functools import partial

import torch
from torch import Tensor

from kernels import choose_backend
from kernels.scape.blocks import density_at
from kernels.scape.reference import select_rows
from torchtitan_scape.core.parameters import split
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.topk.blocks import BlockGrid, block_grid, selected_per_block, topk_message_bytes
from torchtitan_scape.methods.topk.messages import TopkMessages, from_blocks, to_blocks, valid_mask
from torchtitan_scape.methods.topk.options import TopkOptions


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
