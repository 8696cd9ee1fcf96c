"""What SCAPE's replicas exchange in a step: payload, updated values, and masks.

With a replicated update every replica receives the mean (SCAPE paper, Algorithm 1). With a sharded update the owner of
an entry receives the mean, updates the entry, and sends the new value to all replicas (Algorithm 2).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_scape.core.observer import Observer
from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.kernels.scape import reference
from torchtitan_scape.kernels.scape.blocks import Mask
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.step import PayloadChunk, ShardedUpdate
from torchtitan_scape.topology.chunks import (
    ConcatSource,
    RowSource,
    Source,
    SourceSlice,
    all_gather_chunked,
    reduce_scatter_chunked,
)
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.stages import Codec, Handle


@dataclass(frozen=True)
class PayloadInFlight:
    """A chunk of the payload whose exchange has started.

    Attributes:
        code_error: FP32 (n,), receives the quantization error; None without a codec.
    """

    chunk: PayloadChunk
    handle: Handle
    code_error: Tensor | None = None


class PayloadExchange(ABC):
    """Exchange of the payload of the bound step.

    Args:
        codec: Encoding of the payload at the target density, with error feedback; None for FP32.
        warmup: Encoding of the payload during the density warm-up, without error feedback, because the buffer of the
            errors has the size of the target density. Tensors without a mask, and payloads whose mask is all ones (the
            first step, a full exchange), are sent in FP32.
    """

    def __init__(
        self, passes: ScapePasses, collectives: ReplicaCollectives, codec: Codec | None, warmup: Codec | None
    ) -> None:
        self.passes, self.collectives, self.codec, self.warmup = passes, collectives, codec, warmup

    @abstractmethod
    def start(self, chunk: PayloadChunk) -> PayloadInFlight:
        """Start averaging a packed chunk of the payload. Collective."""

    def wait(self, sent: PayloadInFlight) -> None:
        """Wait for the mean, and store the quantization error for the next step."""
        sent.handle.wait()
        if sent.code_error is not None:
            self.passes.keep_code_residual(sent.chunk, sent.code_error)

    @abstractmethod
    def norm_squared(self, squares: Tensor) -> Tensor:
        """Return the squared norm of the whole model, FP32 (), from this rank's sum of squares. Collective."""

    def publish(self) -> None:
        """Send the new values after the update. A replicated update sends none."""

    def source(self) -> Source:
        """Return the payload as a source of chunks if it is stored in place, not in a buffer."""
        pieces = self.passes.pieces()
        return ConcatSource(pieces) if isinstance(pieces, list) else pieces

    def warmup_codec(self) -> Codec | None:
        """Return the codec of the masked part of a payload in place; None for a mask of all ones."""
        return None if self.passes.step.in_use.dense else self.warmup

    def allocate_code_error(self, payload: Tensor) -> Tensor | None:
        """Return an uninitialized tensor for the quantization error of the payload; None without a codec."""
        return None if self.codec is None or self.collectives.is_fake else torch.empty_like(payload)


class ReplicatedExchange(PayloadExchange):
    """All-reduce of the payload."""

    def start(self, chunk: PayloadChunk) -> PayloadInFlight:
        passes, collectives = self.passes, self.collectives
        if not passes.compact:
            source, masked, coded = self.source(), sum(passes.counts[: passes.sparsified]), self.warmup_codec()
            if coded is None:
                collectives.all_reduce_chunked(source)
            else:
                collectives.all_reduce_chunked(SourceSlice(source, 0, masked), codec=coded)
                collectives.all_reduce_chunked(SourceSlice(source, masked, source.entries))
            return PayloadInFlight(chunk, Handle())
        if chunk.first == 0 and passes.payload_padding:  # masks of the previous step were received in this buffer
            torch._foreach_zero_([passes.payload[start:stop] for start, stop in passes.payload_padding])
        payload = passes.payload[chunk.start : chunk.stop]
        code_error = self.allocate_code_error(payload)
        handle = collectives.all_reduce(payload, codec=self.codec, error=code_error)
        return PayloadInFlight(chunk, handle, code_error)

    def norm_squared(self, squares: Tensor) -> Tensor:
        return self.collectives.sum_over_model(squares)


class ShardedExchange(PayloadExchange):
    """Reduce-scatter of the payload to its owners, all-gather of the new values."""

    @property
    def owner(self) -> ShardedUpdate:
        assert self.passes.owner is not None
        return self.passes.owner

    def start(self, chunk: PayloadChunk) -> PayloadInFlight:
        passes, collectives, every = self.passes, self.collectives, len(self.passes.counts)
        if not passes.compact:
            source, coded = self.source(), self.warmup_codec()
            masked = every if coded is None else passes.sparsified
            reduce_scatter_chunked(collectives, self._rows(source, 0, masked), coded)
            if masked < every:
                reduce_scatter_chunked(collectives, self._rows(source, masked, every), None)
            return PayloadInFlight(chunk, Handle())
        self.owner.clear_padding(passes.payload, passes.payload_layout.positions, passes.counts)
        code_error = self.allocate_code_error(passes.payload)
        handle = collectives.reduce_scatter(passes.payload, codec=self.codec, error=code_error)
        return PayloadInFlight(chunk, handle, code_error)

    def norm_squared(self, squares: Tensor) -> Tensor:
        return self.collectives.sum_over_owners(squares)

    def publish(self) -> None:
        passes, owner, payload = self.passes, self.owner, self.passes.payload
        if passes.compact:
            self.collectives.all_gather(owner.value_buffer(payload), owner.values(payload), kind="values").wait()
        else:
            all_gather_chunked(self.collectives, self._rows(self.source(), 0, len(passes.counts)))

    def _rows(self, source: Source, first: int, end: int) -> RowSource:
        """Return the slices [first, end) of the payload in place as one row per owner."""
        return RowSource(source, self.owner.stretches(self.passes.counts, first, end))


class DelayedMasks:
    """The mask in use (A), the previous mask (P), and the all-gather of the next one.

    Each replica selects in its share of the blocks, and the mask is used one step later (SCAPE paper, Section IV-A and
    Figure 7). The asynchronous all-gather starts at the end of a step, when the payload's buffer is free to receive it.
    The next step waits for it before it first uses the mask.
    """

    def __init__(self, passes: ScapePasses, collectives: ReplicaCollectives, device: torch.device) -> None:
        self._passes, self.layout, self.collectives = passes, passes.layout, collectives
        size = self.layout.mask_bytes()
        words = -(-size // 4)  # kernels write full 32-bit words
        masks = (Mask(torch.zeros(4 * words, dtype=torch.uint8, device=device)[:size]) for _ in range(2))
        self.in_use, self.previous = masks
        # (handle, received selections, density) of the exchange in flight.
        self._in_flight: tuple[Handle, Tensor | None, float] | None = None
        self._received = torch.empty(0, dtype=torch.uint8, device=device)

    def moment_masks(self, applied: bool) -> tuple[Mask, Mask]:
        """Return (the mask on which the first moment is stored, the other of the two masks).

        Between an applied step and `rotate` the moment is stored on the mask in use; after `rotate`, or after a skipped
        step, on the previous mask.

        Args:
            applied: Whether the last step was applied.
        """
        if self._in_flight is not None and applied:
            return self.in_use, self.previous
        return self.previous, self.in_use

    def exchange(self, own: Tensor | None, density: float) -> None:
        """Start the all-gather of the next mask. Collective.

        The selections are received in the payload buffer, which is not used before the next step, if they fit.

        Args:
            own: This replica's encoded selection, uint8; None for a mask of all ones.
            density: Density of the next mask.
        """
        handle, received = Handle(), own
        if own is not None and not self.collectives.is_fake and self.collectives.replicas > 1:
            received = self._receive_buffer(self.collectives.replicas * own.shape[-1])
            handle = self.collectives.all_gather(received, own)
        self._in_flight = (handle, received, density)

    def _receive_buffer(self, size: int) -> Tensor:
        spare = self._passes.payload.view(-1).view(torch.uint8)
        if spare.numel() >= size:
            self._received = spare[:0]
            return spare[:size]
        if self._received.numel() != size:
            self._received = torch.empty(size, dtype=torch.uint8, device=spare.device)
        return self._received

    def rotate(self, was_applied: bool) -> None:
        """Wait for the exchange, and use the received mask from now on if its step was applied; otherwise drop it."""
        if self._in_flight is None:
            return
        handle, received, density = self._in_flight
        self._in_flight = None
        handle.wait()
        if was_applied:
            self._passes.rotate(received, density, self.in_use.bits, self.previous.bits)
            self.previous.density, self.in_use.density = self.in_use.density, density


class GradientRecorder:
    """Collects the synchronized gradient gh of the observed parameters in a step: on mask A, NaN outside it."""

    def __init__(
        self, passes: ScapePasses, exchange: PayloadExchange, ordered: Sequence[Shard], observer: Observer
    ) -> None:
        self._passes, self._exchange, self._ordered, self._observer = passes, exchange, ordered, observer
        self._gradients: dict[str, Tensor] = {}

    def add(self, chunk: PayloadChunk) -> None:
        """Collect the gradients of a chunk. Call it after the mean was received, before the norm is computed."""
        owner = self._passes.owner
        for tensor in range(chunk.first, chunk.end):
            number, start, end = self._passes.slices[tensor]
            shard = self._ordered[number]
            if shard.name not in self._observer.names:
                continue
            # Zeros in the slices of other owners, because `_assembled` sums the bits over replicas.
            zeros = torch.zeros(shard.size, dtype=torch.float32, device=shard.device)
            gradient = self._gradients.setdefault(shard.name, zeros)
            if owner is None or owner.owns(tensor):
                gradient[start:end] = self._on_mask(tensor)

    def finish(self) -> None:
        """Pass the gradients to the observer after the last chunk. Collective."""
        self._observer.synchronized(self._assembled, self._passes.step.applied)

    def _assembled(self, name: str) -> Tensor:
        gradient = self._gradients[name]
        if self._passes.owner is not None:
            self._exchange.collectives.sum_over_replicas(gradient.view(torch.int32))
        return gradient

    def _on_mask(self, tensor: int) -> Tensor:
        """Return gh = (b - b1 q) / (1 - b1) of a tensor, FP32 (n,), NaN outside mask A.

        b is the received mean, q the previous first moment on A, b1 is beta1 (SCAPE paper, Algorithm 1).
        """
        passes, step, owner = self._passes, self._passes.step, self._passes.owner
        beta1, size, count = step.rates[tensor].beta1, passes.sizes[tensor], passes.counts[tensor]
        masks = (step.in_use, step.previous) if tensor < passes.sparsified else ()
        used, held = [passes.layout.bits(mask, tensor) for mask in masks] or (None, None)
        indices = None if used is None else reference.mask_indices(used, size, count)
        payload = self._payload(tensor)
        if owner is not None:
            _, released = reference.owned_moment(owner.share_of(owner.common, tensor), indices, held)
            reference.owned_gradient_(payload, released, beta1)
        else:
            if passes.compact:
                last = passes.moment_on_mask[passes.payload_layout.positions[tensor] :][:count]
            else:
                state = passes.kept()[tensor].to(payload.device)
                last = state if indices is None else state.index_select(0, indices)
            reference.synchronized_gradient_(payload, last, beta1)
        if indices is None:
            return payload
        return torch.full((size,), torch.nan, dtype=torch.float32, device=payload.device).scatter_(0, indices, payload)

    def _payload(self, tensor: int) -> Tensor:
        """Return a copy of the received mean on mask A, FP32 (entries of A,)."""
        passes, count = self._passes, self._passes.counts[tensor]
        if passes.compact:
            return passes.payload[passes.payload_layout.positions[tensor] :][:count].clone()
        chunk = torch.empty(count, dtype=torch.float32, device=passes.device)
        if count:
            self._exchange.source().fill(chunk, sum(passes.counts[:tensor]))
        return chunk
