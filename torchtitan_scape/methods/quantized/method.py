"""Gradients in block codes of 1 to 8 bits, in both directions.

An all-to-all of encoded slices; each owner sums its slice in FP32 and sends the encoded mean to all replicas. This is
qgZ of ZeRO++ (Wang et al., arXiv:2306.10209) and SDP4Bit (Jia et al., arXiv:2410.15526), with the error feedback of
1-bit SGD (Seide et al., 2014) and LoCo (Xie et al., arXiv:2407.04480).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.kernels.backends import block_code, choose_backend, exchange_passes
from torchtitan_scape.kernels.exchange.layout import FIRST, OWNER_ERROR, SECOND, BlockSlice
from torchtitan_scape.methods.chunked import ChunkedMethod
from torchtitan_scape.methods.coded_exchange import CodedChunk, CodedExchange
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.quantized.whitening import WhiteningBases
from torchtitan_scape.optimizers.muon import hidden_names
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

    With `whiten_every`, x is the gradient in the basis of `whitening.WhiteningBases`, and so are both errors.

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
        in_fp32 = chunks_of(sizes, self.collectives.chunk_limit(sum(sizes), self._code), options.block)
        self._divisions = {False: (in_fp32, self._coded(in_fp32, False)), True: (self.chunks, self._coded(self.chunks))}
        self._coded_chunks = self._divisions[True][1]  # in this step, of `chunks`
        self._pending = ErrorFeedback.of(context.shards if options.error_feedback else [])
        keeps_owner_error = options.keeps_owner_error(self.collectives.replicas)
        self._owner_error = ErrorFeedback.of(context.shards if keeps_owner_error else [])
        self._uncompressed = False  # in this step
        self._bases: WhiteningBases | None = None
        if options.whiten_every and self.collectives.replicas > 1:
            hidden = hidden_names(context.optimizer, context.shards)
            self._bases = WhiteningBases(context.shards, hidden, self.collectives)
            self._check_bases(hidden)
        for kind, errors in ((SECOND, self._pending), (OWNER_ERROR, self._owner_error)):
            if errors.tensors:
                self._exchange.set(kind, [errors.tensors[shard.name] for shard in context.shards])
        # Bases move errors to other entries. After a load, another layout may have had other owners.
        self._errors_elsewhere = self._bases is not None
        self._sends_errors = False  # in this step

    def _coded(self, chunks: Sequence[Chunk], encodes: bool = True) -> list[CodedChunk]:
        block = self.options.block
        slices = [[BlockSlice(s.tensor, s.first, s.length, block, s.at // block) for s in c.slices] for c in chunks]
        return [self._exchange.chunk(each, chunk.entries, encodes) for each, chunk in zip(slices, chunks, strict=True)]

    def _check_bases(self, hidden: Collection[str]) -> None:
        """Raise ValueError if no parameter of any pipeline stage is a matrix that Muon updates."""
        shards = self.context.shards
        has_matrices = any(len(shard.whole_shape) == 2 for shard in shards if shard.name in hidden)
        if not any(self.collectives.gather_from_stages(has_matrices)[0]):
            raise ValueError(
                f"[sync.quantized] whiten_every = {self.options.whiten_every} is for the matrices of two dimensions "
                "that Muon updates, or would update by its default rule, such as 'layers.0.wq.weight'; none of "
                f"{shards[0].name!r} to {shards[-1].name!r} is one. Set it to 0, or choose others by matrices= of Muon"
            )

    def begin(self) -> None:
        self._begin_exchange(self.take_full_exchange_request() or self.collectives.replicas == 1)

    def _begin_exchange(self, uncompressed: bool) -> None:
        self._uncompressed = uncompressed
        if self.overlap is None:  # its hooks count the gradients of a chunk, and all its buffers exist at once
            self.chunks, self._coded_chunks = self._divisions[not uncompressed]

    def bind(self, gradients: Sequence[Tensor | None]) -> None:
        self._exchange.bind(FIRST, gradients)

    def finish_previous_step(self, applied: bool) -> None:
        if applied and self._sends_errors and self._bases is None:
            self._errors_elsewhere = False
        self._sends_errors = False

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        self._enter_bases(gradients, info)
        return self._leave_bases(super().synchronize(gradients, info), info)

    def start(self, gradients: list[Tensor], info: StepInfo) -> Callable[[], list[Tensor]]:
        self._enter_bases(gradients, info)
        finish = super().start(gradients, info)
        return lambda: self._leave_bases(finish(), info)

    def _enter_bases(self, gradients: list[Tensor], info: StepInfo) -> None:
        if self._bases is not None:
            if info.number > 1 and (info.number - 1) % self.options.whiten_every == 0:
                self._bases.change((self._pending.tensors, self._owner_error.tensors), info.applied)
            self._bases.encode(gradients)

    def _leave_bases(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        if self._bases is not None:
            self._bases.decode_and_observe(gradients, info.applied)
        return gradients

    def start_chunk(self, number: int, gradients: Sequence[Tensor | None], applied: Tensor | None) -> Any:
        self._sends_errors = True
        chunk, encodes = self._coded_chunks[number], not self._uncompressed
        return self._exchange.start(chunk, encodes, gradients, applied, self._errors_elsewhere)

    def finish_chunk(self, sent: Any, applied: Tensor) -> None:
        self._exchange.finish(sent, applied)

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        self._sends_errors = False
        if self._bases is None:
            self._errors_elsewhere = True
        else:
            self._bases.reset()
            for errors in (self._pending, self._owner_error):
                errors.clear(torch.tensor(True, dtype=torch.bool, device="cpu"))

    def states(self) -> list[State]:
        migration: Literal["gradient", "pending"] = "gradient" if self._bases is None else "pending"
        kinds = (("residual", self._pending), ("owner_error", self._owner_error))
        states = [State(kind, each.tensors, True, migration) for kind, each in kinds if each.tensors]
        return states if self._bases is None else [*states, self._bases.state()]

    def pending_gradient(self, state: State, name: str) -> Tensor:
        errors = super().pending_gradient(state, name)
        return errors if self._bases is None else self._bases.decoded(name, errors)

    def replicated_tensors(self) -> list[ReplicatedTensors]:
        tensors = super().replicated_tensors()
        for one in tensors:
            if self._bases is not None and one.name:
                one.parts.extend(self._bases.replicated(one.name))
        return tensors
