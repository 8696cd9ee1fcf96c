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
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.kernels.backends import block_code, choose_backend, exchange_passes
from torchtitan_scape.kernels.common.launching import AddressTable
from torchtitan_scape.kernels.exchange.layout import FIRST, LISTS, OWNER_ERROR, SECOND, BlockSlice
from torchtitan_scape.methods.chunked import ChunkedMethod, ChunkInFlight, fill_last_block
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.quantized.whitening import WhiteningBases
from torchtitan_scape.optimizers.muon import hidden_names
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.partition import Chunk


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
        self._fills_blocks = options.fills_blocks
        # Kernels that need no buffer; None where they do not run.
        passes = exchange_passes(backend, (torch.float32,)) if len(context.collectives.levels) == 1 else None
        super().__init__(context, options, self._code, in_place=passes is not None)
        self._pending = ErrorFeedback.of(context.shards if options.error_feedback else [])
        keeps_owner_error = options.keeps_owner_error(self.collectives.replicas)
        self._owner_error = ErrorFeedback.of(context.shards if keeps_owner_error else [])
        self._uncompressed = False  # in this step
        self._bases = None
        if options.whiten_every and self.collectives.replicas > 1:
            hidden = hidden_names(context.optimizer, context.shards)
            self._bases = WhiteningBases.of(context.shards, options.whiten_every, hidden)
            self._check_bases(hidden)
        self._exchanges = [] if passes is None else [self._exchange_of(chunk, passes) for chunk in self.chunks]
        self._tensors = AddressTable(LISTS, len(context.shards), context.shards[0].device)
        for kind, errors in ((SECOND, self._pending), (OWNER_ERROR, self._owner_error)):
            if self._exchanges and errors.tensors:
                self._tensors.set(kind, [errors.tensors[shard.name] for shard in context.shards])
        # Bases move errors to other entries. After a load, another layout may have had other owners.
        self._errors_elsewhere = self._bases is not None
        self._sends_errors = False  # in this step

    def _exchange_of(self, chunk: Chunk, passes: Any) -> Any:
        """Return the passes over a chunk that need no buffer."""
        block, ranks = self._code.block_size, (self.collectives.replicas, self.collectives.replica)
        slices = [BlockSlice(s.tensor, s.first, s.length, block, s.at // block) for s in chunk.slices]
        size, device = self.collectives.padded_size(chunk.entries, self._code), self.context.shards[0].device
        return passes.BlockExchange(slices, self._code, size, *ranks, self._fills_blocks, device)

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
        self._uncompressed = self.take_full_exchange_request() or self.collectives.replicas == 1

    def bind(self, gradients: Sequence[Tensor | None]) -> None:
        if self._exchanges:
            self._tensors.set(FIRST, gradients)

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
            pending = (self._pending.tensors, self._owner_error.tensors)
            self._bases.begin(gradients, info.number, pending, info.applied)

    def _leave_bases(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        if self._bases is not None:
            self._bases.finish(gradients, info.applied)
        return gradients

    def send(self, chunk: Chunk, values: Tensor) -> tuple[Handle, Callable[[StepInfo], None]]:
        self.scale_to_mean([values])
        return self.send_with_feedback(chunk, values)

    def send_with_feedback(self, chunk: Chunk, values: Tensor) -> tuple[Handle, Callable[[StepInfo], None]]:
        """Start the exchange of values in mean units, with the pending errors added. As `send`."""
        residuals, owner_errors = self._parts(self._pending, chunk), self._parts(self._owner_error, chunk)
        views = [values[s.at : s.at + s.length] for s in chunk.slices]
        if residuals:
            torch._foreach_add_(views, residuals)
        quantization_error = torch.empty_like(values) if residuals and not self._uncompressed else None
        carried_error, owner_error = self._add_owner_error(chunk, values, owner_errors)
        self._fill_short_blocks(chunk, values)
        codec = None if self._uncompressed else self.codec
        handle = self.collectives.all_reduce(values, codec=codec, error=quantization_error, carried_error=carried_error)

        def finish(info: StepInfo) -> None:
            if quantization_error is not None and quantization_error.is_cuda:
                quantization_error.record_stream(torch.cuda.current_stream(quantization_error.device))
            if carried_error is not None and owner_error is not None:
                if owner_error.is_cuda:
                    owner_error.record_stream(torch.cuda.current_stream(owner_error.device))
                    carried_error.record_stream(torch.cuda.current_stream(carried_error.device))
                owner_error.zero_()
                torch.mul(carried_error, self.collectives.replicas, out=self._owned(owner_error))
            for kinds, error in ((residuals, quantization_error), (owner_errors, owner_error)):
                for s, state in zip(chunk.slices, kinds, strict=False):
                    masked_copy_(state, 0.0 if error is None else error[s.at : s.at + s.length], info.applied)

        return handle, finish

    def start_chunk(self, number: int, gradients: Sequence[Tensor | None], applied: Tensor | None) -> ChunkInFlight:
        """Exchange a chunk as with `send`, bitwise. On one level no buffer is filled where the kernels run.

        If `applied` is known, the first pass stores the quantization errors. Otherwise the second one computes them
        again from the gradients and the messages, because the first one must not change the residuals.
        """
        if not self._exchanges or self._uncompressed:
            return super().start_chunk(number, gradients, applied)
        exchange, tensors, factor = self._exchanges[number], self._tensors, self.context.gradient_scale
        known, self._sends_errors = applied if tensors.has(SECOND) else None, True
        sent = exchange.encode(tensors, False, factor, known, self._errors_elsewhere)
        handle = self.collectives.all_reduce_messages(
            sent.messages, sent.means, exchange.count, self._code, sent.error, sent.adds_error
        )

        def finish(info: StepInfo) -> None:
            handle.wait()
            sent.record_stream()  # a hook of the backward pass may have allocated it on another stream
            exchange.apply(tensors, sent, info.applied, False, factor)

        return ChunkInFlight(handle, finish)

    def _add_owner_error(
        self, chunk: Chunk, values: Tensor, owner_errors: list[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Add the owner's errors to `values`, apart from those of this replica's own slice.

        Returns:
            The error of this replica's slice in units of the mean, FP32 (n / replicas,), and a buffer for the new
            errors of the chunk, FP32 (n,); None if there are none or if nothing is encoded.
        """
        if not owner_errors:
            return None, None
        buffer = torch.zeros_like(values)
        torch._foreach_copy_([buffer[s.at : s.at + s.length] for s in chunk.slices], owner_errors)
        self._fill_short_blocks(chunk, buffer)
        if self._uncompressed:
            values.add_(buffer)
            return None, None
        carried_error = self._owned(buffer) / buffer.new_full((), self.collectives.replicas)  # as kernels divide
        self._owned(buffer).zero_()
        values.add_(buffer)  # not zero if the owners or the bases were others before
        return carried_error, buffer

    def _owned(self, buffer: Tensor) -> Tensor:
        """Return the slice of a chunk's buffer that this replica reduces."""
        return buffer.view(self.collectives.replicas, -1)[self.collectives.replica]

    def _fill_short_blocks(self, chunk: Chunk, values: Tensor) -> None:
        if self.codec is not None and not self._uncompressed and self._fills_blocks:
            for s in chunk.slices:
                fill_last_block(values, s, self.codec.block_size)

    def _parts(self, states: ErrorFeedback, chunk: Chunk) -> list[Tensor]:
        """Return the states of the chunk's slices, FP32 (n,) each; [] if the states do not exist."""
        if not states.tensors:
            return []
        flat = [states.tensors[self.context.shards[s.tensor].name].view(-1) for s in chunk.slices]
        return [state[s.first : s.first + s.length] for s, state in zip(chunk.slices, flat, strict=True)]

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
        basis = None if self._bases is None else self._bases.bases.get(name)
        errors = super().pending_gradient(state, name)
        return errors if basis is None else basis.decode(errors).reshape(-1)

    def replicated_tensors(self) -> list[ReplicatedTensors]:
        found = super().replicated_tensors()
        for one in found:
            if self._bases is not None and one.name and (basis := self._bases.bases.get(one.name)):
                one.parts.extend((f"basis.{kind}", tensor) for kind, tensor in basis.tensors().items())
        return found
