"""Gradients in 4-bit and 8-bit block codes, in both directions.

An all-to-all of encoded slices; each owner sums its slice in FP32 and sends the encoded mean to all replicas. This is
qgZ of ZeRO++ (Wang et al., arXiv:2306.10209) and SDP4Bit (Jia et al., arXiv:2410.15526), with the error feedback of
1-bit SGD (Seide et al., 2014) and LoCo (Xie et al., arXiv:2407.04480).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kernels import block_code, choose_backend, exchange_passes
from kernels.exchange.layout import BlockSlices
from topology.comm_stream import Handle
from topology.partition import Chunk
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.chunked import ChunkedMethod, ChunkInFlight
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.quantized.options import QuantizedOptions


class Quantized(ChunkedMethod):
    """One step, chunk by chunk, in mean units:

    1. x = gradient + residual. A block contains entries of one parameter only.
    2. Every replica encodes its x and sends each slice to its owner.
    3. An owner sums the decoded slices in FP32, in the order of the replicas, and sends the encoded mean to all.
    4. All replicas decode these messages. The residual is the quantization error of x, and for the owner also N times
       that of the mean, so that the sum over replicas of (x - residual) is N times the result.

    Within a node sums are sent in FP32, and the encoded means are forwarded unchanged. With a single replica nothing is
    encoded.
    """

    def __init__(self, context: MethodContext, options: QuantizedOptions) -> None:
        backend = choose_backend(context.kernels, context.shards[0].device)
        self._code = block_code(backend, options.code, options.block)
        super().__init__(context, options, self._code)
        self._pending = ErrorFeedback.of(context.shards if options.error_feedback else [])
        self._uncompressed = False  # in this step
        one_level = len(self.collectives.levels) == 1
        self._passes = exchange_passes(backend, (torch.float32,)) if one_level else None
        self._slices: dict[int, BlockSlices] = {}  # by chunk

    def begin(self) -> None:
        self._uncompressed = self.take_full_exchange_request() or self.collectives.replicas == 1

    def send(self, chunk: Chunk, values: Tensor) -> tuple[Handle, Callable[[StepInfo], None]]:
        self.scale_to_mean([values])
        residuals = self._residuals_of(chunk)
        if residuals:
            torch._foreach_add_([values[s.at : s.at + s.length] for s in chunk.slices], residuals)
        quantization_error = torch.empty_like(values) if residuals and not self._uncompressed else None
        codec = None if self._uncompressed else self.codec
        handle = self.collectives.all_reduce(values, codec=codec, error=quantization_error)

        def finish(info: StepInfo) -> None:
            if quantization_error is not None and quantization_error.is_cuda:
                quantization_error.record_stream(torch.cuda.current_stream(quantization_error.device))
            for s, residual in zip(chunk.slices, residuals, strict=False):
                masked_copy_(
                    residual,
                    0.0 if quantization_error is None else quantization_error[s.at : s.at + s.length],
                    info.applied,
                )

        return handle, finish

    def start_chunk(self, number: int, gradients: Sequence[Tensor] | Mapping[int, Tensor]) -> ChunkInFlight:
        """Exchange a chunk as with `send`, bitwise. On one level no buffer is filled where the kernels run."""
        if self._passes is None or self._uncompressed:
            return super().start_chunk(number, gradients)
        passes, slices = self._passes, self._slices_of(number, gradients)
        rule = {"subtracts": False, "factor": self.context.gradient_scale}
        sent = passes.encode(slices, **rule)
        handle = self.collectives.all_reduce_messages(sent.messages, sent.means, slices.count, slices.code, sent.error)

        def finish(info: StepInfo) -> None:
            handle.wait()
            sent.record_stream()  # a hook of the backward pass may have allocated it on another stream
            passes.apply(slices, sent, info.applied, **rule)
            slices.first = ()  # otherwise it keeps the memory of the gradients

        return ChunkInFlight(handle, finish)

    def _slices_of(self, number: int, gradients: Sequence[Tensor] | Mapping[int, Tensor]) -> BlockSlices:
        chunk = self.chunks[number]
        if number not in self._slices:
            size, ranks = self.collectives.padded_size(chunk.entries, self._code), self.collectives.replicas
            residuals = self._residuals_of(chunk)
            self._slices[number] = BlockSlices([], residuals, self._code, size, ranks, self.collectives.replica)
        slices = self._slices[number]
        slices.first = [gradients[s.tensor][s.first : s.first + s.length] for s in chunk.slices]
        return slices

    def _residuals_of(self, chunk: Chunk) -> list[Tensor]:
        """Return the residuals of the chunk's slices, FP32 (n,) each; [] without error feedback."""
        if not self.options.error_feedback:
            return []
        names = [self.context.shards[s.tensor].name for s in chunk.slices]
        flat = [self._pending.tensors[name].view(-1) for name in names]
        return [residual[s.first : s.first + s.length] for s, residual in zip(chunk.slices, flat, strict=True)]

    def states(self) -> list[State]:
        return [self._pending.state()] if self.options.error_feedback else []
