"""TAGC between replicas: the gradients at the union of all replicas' top-k indices.

Polyakov, Dukhanov, Spirin, "TAGC: Optimizing Gradient Communication in Distributed Transformer Training"
(arXiv:2504.05638). The paper applies the method between the ranks of the shard axis.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.core.tensors import flat
from torchtitan_scape.kernels.backends import tagc_passes
from torchtitan_scape.kernels.scape.blocks import entries_per_block
from torchtitan_scape.kernels.tagc.formats import BITMAP, BLOCK, bitmap_bytes, capacity, sends_offsets
from torchtitan_scape.methods.base import ResidualMethod
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.tagc.options import TagcOptions


class Tagc(ResidualMethod):
    """One step, with x = residual + gradient (in mean units), in blocks of 1024 entries of a parameter:

    1. Each replica selects the k = max(1, round(density * 1024)) largest |x| of each block, ties to the lower index.
    2. All replicas compute the exact union of the selections, from an all-gather of encoded offsets or from an
       all-reduce (OR) of bitmaps, whichever sends less.
    3. Each replica packs its x at the indices of the union, min(1024, N k) entries per block (rounded up to a multiple
       of four), padded with zeros, and all-reduces the packed values. The synchronized gradient is zero elsewhere.
    4. The residual is x without the sent entries. No rounding occurs.

    Parameters of one dimension are uncompressed, and part of the same all-reduce.
    """

    def __init__(self, context: MethodContext, options: TagcOptions) -> None:
        super().__init__(context, options)
        self._blocks = [-(-context.shards[i].size // BLOCK) for i in self.sparse]
        self._passes = tagc_passes(self.backend)
        self._selected = entries_per_block(options.density, BLOCK)
        self._capacity = capacity(options.density, self.collectives.replicas)
        self._sends_offsets = sends_offsets(options.density, self.collectives.replicas)

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        gradients = flat(gradients)
        sparse = [gradients[i] for i in self.sparse]
        self.scale_and_add(sparse, self.residuals)
        self.scale_to_mean([gradients[i] for i in self.uncompressed])
        if self.take_full_exchange_request() or self._dense:
            self.collectives.all_reduce_chunked(gradients)
            self.pending.clear(info.applied)
            return gradients
        union = self._union([self._passes.select(x, self._selected) for x in sparse])
        packed = sparse[0].new_empty(sum(self._blocks), self._capacity)
        bitmaps = union.split([blocks * BITMAP for blocks in self._blocks])
        rows = packed.split(self._blocks)
        for x, residual, bits, row in zip(sparse, self.residuals, bitmaps, rows, strict=True):
            self._passes.pack(x, bits, bits, self._capacity, row, residual, info.applied)
        self.collectives.all_reduce_chunked([packed.view(-1), *(gradients[i] for i in self.uncompressed)])
        for x, bits, row in zip(sparse, bitmaps, rows, strict=True):
            self._passes.expand(row[None], bits, x)
        return gradients

    def density(self) -> float:
        shards = self.context.shards
        sent = [shard.size for shard in shards]
        if not self._dense:
            for i, blocks in zip(self.sparse, self._blocks, strict=True):
                sent[i] = min(sent[i], blocks * self._capacity)
        return sum(sent) / max(1, sum(shard.size for shard in shards))

    @property
    def _dense(self) -> bool:
        return self.options.density >= 1.0 or not self.sparse

    def _union(self, selected: list[Tensor]) -> Tensor:
        """Return the union of all replicas' selections as bitmaps, uint8 (bytes of all blocks,). Collective."""
        bitmap, replicas, blocks = torch.cat(selected), self.collectives.replicas, sum(self._blocks)
        if self._sends_offsets:
            encoded = self._passes.to_offsets(bitmap, self._selected)
            received = encoded.new_empty(replicas * encoded.numel())
            self.collectives.all_gather(received, encoded, kind="index").wait()
            return self._passes.union_of_offsets(received.view(replicas, -1), blocks, self._selected)
        bits = pad(bitmap, (0, bitmap_bytes(blocks, replicas) - bitmap.numel()))
        self.collectives.all_reduce_or(bits, kind="index").wait()
        return bits[: bitmap.numel()]
