"""Gradients in block codes of 1 to 8 bits, in both directions.

An all-to-all of encoded slices; each owner sums its slice in FP32 and sends the encoded mean to all replicas. This is
qgZ of ZeRO++ (Wang et al., arXiv:2306.10209) and SDP4Bit (Jia et al., arXiv:2410.15526), with the error feedback of
1-bit SGD (Seide et al., 2014) and LoCo (Xie et al., arXiv:2407.04480).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.backends import block_code, choose_backend, exchange_passes
from torchtitan_scape.kernels.exchange.layout import FIRST, OWNER_ERROR, SECOND, BlockSlice
from torchtitan_scape.methods.base import ChunkedMethod
from torchtitan_scape.methods.coded_exchange import CodedChunk, CodedExchange
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.topology.partition import Chunk, chunks_of


class Quantized(ChunkedMethod):
    """One step, chunk by chunk, in mean units:

    1. x = gradient + residual. A block contains entries of one parameter only.
    2. Every replica encodes its x and sends each slice to its owner.
    3. An owner sums the decoded slices in FP32, in the order of the replicas, and sends the encoded mean to all.
    4. All replicas decode these messages. The residual is the quantization error of x, and for the owner also N times
       that of the mean, so that the sum over replicas of (x - residual) is N times the result.

    With one or two bits, N times the error of the mean is a state of its own, "owner_error". The owner adds the error
    to its next mean, before it encodes that (Tang et al., arXiv:1905.05957, "DoubleSqueeze").

    Within a node sums are sent in FP32, and the encoded means are forwarded unchanged. With a single replica nothing is
    encoded.
    """

    def __init__(self, context: MethodContext, options: QuantizedOptions) -> None:
        backend = choose_backend(context.kernels, context.shards[0].device)
        self._code = block_code(backend, options.code, options.block)
        passes = exchange_passes(backend, (torch.float32,))
        device, tensors = context.shards[0].device, len(context.shards)
        rule = passes, options.fills_blocks, False, context.gradient_scale
        self._exchange = CodedExchange(context.collectives, self._code, options.block, device, tensors, *rule)
        super().__init__(context, options, self._code, self._exchange.in_place)
        sizes = [shard.size for shard in context.shards]
        # No block contains entries of two parameters. Steps in FP32 have smaller chunks, because these have buffers.
        in_fp32 = chunks_of(sizes, self.collectives.chunk_limit(sum(sizes)), options.block)
        self._divisions = {False: (in_fp32, self._coded(in_fp32, False)), True: (self.chunks, self._coded(self.chunks))}
        self._coded_chunks = self._divisions[True][1]  # in this step, of `chunks`
        self._pending = ErrorFeedback.of(context.shards if options.error_feedback else [])
        keeps_owner_error = options.keeps_owner_error(self.collectives.replicas)
        self._owner_error = ErrorFeedback.of(context.shards if keeps_owner_error else [])
        self._uncompressed = False  # in this step
        for kind, errors in ((SECOND, self._pending), (OWNER_ERROR, self._owner_error)):
            if errors.tensors:
                self._exchange.set(kind, [errors.tensors[shard.name] for shard in context.shards])
        self._errors_elsewhere = False  # after a load: another layout may have had other owners
        self._sends_errors = False  # in this step

    def _coded(self, chunks: Sequence[Chunk], encodes: bool = True) -> list[CodedChunk]:
        block = self.options.block
        slices = [[BlockSlice(s.tensor, s.first, s.length, block, s.at // block) for s in c.slices] for c in chunks]
        return [self._exchange.chunk(each, chunk.entries, encodes) for each, chunk in zip(slices, chunks, strict=True)]

    def begin(self) -> None:
        self._begin_exchange(self.take_full_exchange_request() or self.collectives.replicas == 1)

    def _begin_exchange(self, uncompressed: bool) -> None:
        self._uncompressed = uncompressed
        if self.overlap is None:  # its hooks count the gradients of a chunk, and all its buffers exist at once
            self.chunks, self._coded_chunks = self._divisions[not uncompressed]

    def bind(self, gradients: Sequence[Tensor | None]) -> None:
        self._exchange.bind(FIRST, gradients)

    def finish_previous_step(self, applied: bool) -> None:
        if applied and self._sends_errors:
            self._errors_elsewhere = False
        self._sends_errors = False

    def start_chunk(self, number: int, gradients: Sequence[Tensor | None], applied: Tensor | None) -> Any:
        self._sends_errors = True
        chunk, encodes = self._coded_chunks[number], not self._uncompressed
        return self._exchange.start(chunk, encodes, gradients, applied, self._errors_elsewhere)

    def finish_chunk(self, sent: Any, applied: Tensor) -> None:
        self._exchange.finish(sent, applied)

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        self._sends_errors, self._errors_elsewhere = False, True

    def states(self) -> list[State]:
        kinds = (("residual", self._pending), ("owner_error", self._owner_error))
        return [State(kind, each.tensors, True, "gradient") for kind, each in kinds if each.tensors]
