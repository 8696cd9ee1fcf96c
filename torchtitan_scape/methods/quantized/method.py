"""Gradients in block codes of 4 and 8 bits, both ways.

All-to-all of coded parts, whose owners add in FP32 and code the mean for all: ZeRO++'s qgZ (Wang et al.,
arXiv:2306.10209) and SDP4Bit (Jia et al., arXiv:2410.15526); with the error feedback of 1-bit SGD (Seide et al. 2014)
and LoCo (Xie et al., arXiv:2407.04480).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import block_code, choose_backend
from topology.comm_stream import Handle
from topology.partition import Chunk
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.chunked import ChunkedMethod
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.quantized.options import QuantizedOptions


class Quantized(ChunkedMethod):
    """One step, chunk by chunk, in mean units:

    1. x = gradient + residual, in blocks of its parameter alone;
    2. every replica codes its x, and sends each part to its owner;
    3. an owner adds what it receives in FP32, in the order of the replicas, and codes the mean for all;
    4. all take what those messages say. The residual is what coding lost: of x, and for an owner N times that of the
       mean, so that the sum over replicas of (x - residual) is N times what all take.

    Inside a node sums travel in FP32, and the codes that come back as they are. With a single replica nothing is coded.
    """

    def __init__(self, context: MethodContext, options: QuantizedOptions) -> None:
        backend = choose_backend(context.kernels, context.shards[0].device)
        super().__init__(context, options, block_code(backend, options.code, options.block))
        self._pending = ErrorFeedback.of(context.shards if options.error_feedback else [])
        self._whole = False

    def begin(self) -> None:
        self._whole = self.take_full_exchange_request() or self.collectives.replicas == 1

    def send(self, chunk: Chunk, values: Tensor) -> tuple[Handle, Callable[[StepInfo], None]]:
        self.scale_to_mean([values])
        residuals = self._residuals_of(chunk)
        if residuals:
            torch._foreach_add_([values[s.at : s.at + s.length] for s in chunk.slices], residuals)
        quantization_error = torch.empty_like(values) if residuals and not self._whole else None
        handle = self.collectives.all_reduce(
            values, codec=None if self._whole else self.codec, error=quantization_error
        )

        def finish(step: StepInfo) -> None:
            if quantization_error is not None and quantization_error.is_cuda:
                quantization_error.record_stream(torch.cuda.current_stream(quantization_error.device))
            for s, residual in zip(chunk.slices, residuals, strict=False):
                masked_copy_(
                    residual,
                    0.0 if quantization_error is None else quantization_error[s.at : s.at + s.length],
                    step.applied,
                )

        return handle, finish

    def _residuals_of(self, chunk: Chunk) -> list[Tensor]:
        """Of the chunk's slices; [] where none are kept."""
        if not self.options.error_feedback:
            return []
        names = [self.context.shards[s.tensor].name for s in chunk.slices]
        flat = [self._pending.tensors[name].view(-1) for name in names]
        return [residual[s.first : s.first + s.length] for s, residual in zip(chunk.slices, flat, strict=True)]

    def states(self) -> list[State]:
        return [self._pending.state()] if self.options.error_feedback else []
