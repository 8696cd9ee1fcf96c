"""TAGC between replicas: the largest entries of every replica, summed at all places that any of them chose.

Polyakov, Dukhanov, Spirin, "TAGC: Optimizing Gradient Communication in Distributed Transformer Training"
(arXiv:2504.05638), which does so between the ranks of a shard axis.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import choose_backend, tagc_passes
from kernels.scape.blocks import entries_per_block
from kernels.tagc.formats import BITMAP, BLOCK, bitmap_bytes, capacity, sends_offsets
from kernels.tagc.index import to_offsets, union_of_offsets
from torchtitan_scape.core.parameters import split
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.tagc.options import TagcOptions


class Tagc(GradientMethod):
    """One step, with x = residual + gradient (in mean units), in blocks of 1024 entries of a parameter:

    1. each replica chooses the k = max(1, round(density * 1024)) largest |x| of each block, ties to the lower index;
    2. all learn the union of the choices, exactly: from coded offsets that are gathered, or from bits that owners of
       parts unite and send back, whichever is shorter;
    3. each packs what it has at the places of the union, min(1024, N k) entries a block (filled up to fours), zeros
       after them, and the mean of that comes back: no offsets travel with values, and zeros elsewhere;
    4. the residual is x without what was sent, to the last bit.

    What is not compressed (one dimension, `dense_names`) goes with the packed values.
    """

    def __init__(self, context: MethodContext, options: TagcOptions) -> None:
        super().__init__(context, options)
        shards = context.shards
        sparse, _ = split(shards, options.dense_names)
        self._sparse = [i for i, shard in enumerate(shards) if shard in sparse and shard.size]
        self._whole = [i for i in range(len(shards)) if i not in self._sparse]
        self._blocks = [-(-shards[i].size // BLOCK) for i in self._sparse]
        self._pending = ErrorFeedback.of(sparse)  # of empty shards, too: a checkpoint has them of all ranks
        self._residuals = [self._pending.tensors[shards[i].name].view(-1) for i in self._sparse]
        self._passes = tagc_passes(choose_backend(context.kernels, shards[0].device))
        self._chosen = entries_per_block(options.density, BLOCK)
        self._capacity = capacity(options.density, self.collectives.replicas)
        self._offsets = sends_offsets(options.density, self.collectives.replicas)

    def synchronize(self, gradients: list[Tensor], step: StepInfo) -> list[Tensor]:
        self.scale_to_mean(gradients)
        sparse = [gradients[i] for i in self._sparse]
        if sparse:
            torch._foreach_add_(sparse, self._residuals)
        if self.take_full_exchange_request() or self._dense:
            self.collectives.all_reduce_chunked(gradients)
            self._pending.clear(step.applied)
            return gradients
        index = self._index([self._passes.select(x, self._chosen) for x in sparse])
        packed = sparse[0].new_empty(sum(self._blocks), self._capacity)
        places = index.split([blocks * BITMAP for blocks in self._blocks])
        parts = packed.split(self._blocks)
        for x, residual, bits, part in zip(sparse, self._residuals, places, parts, strict=True):
            self._passes.pack(x, bits, bits, self._capacity, part)
            masked_copy_(residual, x, step.applied)
        self.collectives.all_reduce_chunked([packed.view(-1), *(gradients[i] for i in self._whole)])
        for x, bits, part in zip(sparse, places, parts, strict=True):
            self._passes.expand(part[None], bits, x)
        return gradients

    def states(self) -> list[State]:
        return [self._pending.state()]

    def density(self) -> float:
        shards = self.context.shards
        sent = [shard.size for shard in shards]
        if not self._dense:
            for i, blocks in zip(self._sparse, self._blocks, strict=True):
                sent[i] = min(sent[i], blocks * self._capacity)
        return sum(sent) / max(1, sum(shard.size for shard in shards))

    @property
    def _dense(self) -> bool:
        return self.options.density >= 1.0 or not self._sparse

    def _index(self, chosen: list[Tensor]) -> Tensor:
        """Bits that any replica chose, uint8 (bytes of all blocks,). A collective call."""
        own, replicas, blocks = torch.cat(chosen), self.collectives.replicas, sum(self._blocks)
        if self._offsets:
            coded = to_offsets(own, self._chosen)
            arrived = coded.new_empty(replicas * coded.numel())
            self.collectives.all_gather(arrived, coded, kind="index").wait()
            return union_of_offsets(arrived.view(replicas, -1), blocks, self._chosen)
        bits = pad(own, (0, bitmap_bytes(blocks, replicas) - own.numel()))
        self.collectives.all_reduce_or(bits, kind="index").wait()
        return bits[: own.numel()]
