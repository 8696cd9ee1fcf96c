"""Exchange of SCAPE's payload and of the updated values.

With a replicated update every replica receives the mean (SCAPE paper, Algorithm 1). With a sharded update the owner of
an entry receives the mean, updates the entry, and sends the new value to all replicas (Algorithm 2).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.step import PayloadChunk
from torchtitan_scape.kernels.scape.updaters import ShardedUpdate
from torchtitan_scape.topology.chunks import (
    ConcatSource,
    RowSource,
    Source,
    SourceSlice,
    all_gather_chunked,
    reduce_scatter_chunked,
)
from torchtitan_scape.topology.codecs import Codec
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.comm_stream import Handle
from torchtitan_scape.topology.partition import ALIGNED_ENTRIES


@dataclass(frozen=True)
class PayloadInFlight:
    """A chunk of the payload whose exchange has started.

    Attributes:
        code_error: FP32 (n,), receives the quantization error; None without a codec.
    """

    chunk: PayloadChunk
    passes: ScapePasses
    handle: Handle
    code_error: Tensor | None = None

    def wait(self) -> None:
        """Wait for the mean, and store the quantization error for the next step."""
        self.handle.wait()
        if self.code_error is not None:
            self.passes.keep_code_residual(self.chunk, self.code_error)


@dataclass(frozen=True)
class Codecs:
    """Encodings on the outermost level.

    Attributes:
        codec: Encoding of the payload at the target density, with error feedback; None for FP32.
        warmup: Encoding of the payload during the density warm-up, without error feedback, because the buffer of the
            errors has the size of the target density. Tensors without a mask, and payloads whose mask is all ones (the
            first step, a full exchange), are sent in FP32.
        update, warmup_update: Encodings of the new values of a sharded update. They need no error feedback: the owner
            knows the values that all replicas hold.
    """

    codec: Codec | None = None
    warmup: Codec | None = None
    update: Codec | None = None
    warmup_update: Codec | None = None


class ReplicatedExchange:
    """All-reduce of the payload."""

    def __init__(self, passes: ScapePasses, collectives: ReplicaCollectives, codecs: Codecs) -> None:
        self.passes, self.collectives, self.codecs = passes, collectives, codecs
        self._padding = [passes.payload[start:stop] for start, stop in passes.payload_padding]

    def start(self, chunk: PayloadChunk) -> PayloadInFlight:
        """Start averaging a packed chunk of the payload. Collective."""
        passes, collectives = self.passes, self.collectives
        if not passes.compact:
            source, masked = source_of(passes), sum(passes.counts[: passes.sparsified])
            coded = None if passes.step.in_use.dense else self.codecs.warmup
            if coded is None:
                collectives.all_reduce_chunked(source)
            else:
                collectives.all_reduce_chunked(SourceSlice(source, 0, masked), codec=coded)
                collectives.all_reduce_chunked(SourceSlice(source, masked, source.entries))
            return PayloadInFlight(chunk, passes, Handle())
        if chunk.first == 0 and self._padding:
            torch._foreach_zero_(self._padding)  # masks of the previous step were received in this buffer
        payload, codec = passes.payload[chunk.start : chunk.stop], self.codecs.codec
        code_error = allocate_code_error(payload, codec, collectives)
        handle = collectives.all_reduce(payload, codec=codec, error=code_error)
        return PayloadInFlight(chunk, passes, handle, code_error)

    def norm_squared(self, squares: Tensor) -> Tensor:
        """Return the squared norm of the whole model, FP32 (), from this rank's sum of squares. Collective."""
        return self.collectives.sum_over_model(squares)

    def publish(self) -> None:
        """Send the new values after the update. A replicated update sends none."""

    def planned_bytes(self) -> float:
        """Return the payload bytes that this rank sends in a step at the target density."""
        if not self.passes.entries:
            return self.collectives.reduced_bytes(sum(self.passes.sizes))
        return self.collectives.reduced_bytes(self.passes.entries, self.codecs.codec)


class ShardedExchange:
    """Reduce-scatter of the payload to its owners, all-gather of the new values."""

    def __init__(
        self, passes: ScapePasses, owner: ShardedUpdate, collectives: ReplicaCollectives, codecs: Codecs
    ) -> None:
        self.passes, self.owner, self.collectives, self.codecs = passes, owner, collectives, codecs

    def start(self, chunk: PayloadChunk) -> PayloadInFlight:
        passes, collectives = self.passes, self.collectives
        if not passes.compact:
            for rows, codec in self._rows(self.codecs.warmup):
                reduce_scatter_chunked(collectives, rows, codec)
            return PayloadInFlight(chunk, passes, Handle())
        self.owner.clear_padding(passes.payload, passes.payload_layout.positions, passes.counts)
        codec = self.codecs.codec
        code_error = allocate_code_error(passes.payload, codec, collectives)
        handle = collectives.reduce_scatter(passes.payload, codec=codec, error=code_error)
        return PayloadInFlight(chunk, passes, handle, code_error)

    def norm_squared(self, squares: Tensor) -> Tensor:
        return self.collectives.sum_over_owners(squares)

    def publish(self) -> None:
        passes, collectives, update = self.passes, self.collectives, self.codecs.update
        payload = passes.payload
        if not passes.compact:
            for rows, codec in self._rows(self.codecs.warmup_update):
                all_gather_chunked(collectives, rows, codec)
        elif update is None:
            collectives.all_gather(self.owner.value_buffer(payload), self.owner.values(payload), kind="values").wait()
        elif collectives.replicas > 1:
            # Some codes cannot represent zero. Decoded padding of the payload must not affect the scales of the values.
            self.owner.clear_padding(payload, passes.payload_layout.positions, passes.counts)
            rows = payload.view(collectives.replicas, -1)
            handle, messages = collectives.all_gather_encoded(rows[self.owner.owner], update, kind="values")
            handle.wait()
            update.decode(messages, rows)

    def planned_bytes(self) -> float:
        replicas, entries = self.collectives.replicas, self.passes.entries
        if not entries:
            rows = -(-self.owner.longest_row // ALIGNED_ENTRIES) * ALIGNED_ENTRIES
            return self.collectives.scattered_bytes(replicas * rows) + self.collectives.gathered_bytes(4 * rows)
        row, codec = entries // replicas, self.codecs.update
        own = codec.message_bytes(row) if codec else (2 if self.owner.rounds_values else 4) * row
        return self.collectives.scattered_bytes(entries, self.codecs.codec) + self.collectives.gathered_bytes(own)

    def _rows(self, codec: Codec | None) -> list[tuple[RowSource, Codec | None]]:
        """Return the in-place payload as one row per owner, with the codec of each source.

        Args:
            codec: Encoding of the tensors with a mask; the others are sent in FP32.
        """
        source, passes, every = source_of(self.passes), self.passes, len(self.passes.counts)
        if codec is None or passes.step.in_use.dense:
            return [(RowSource(source, self.owner.stretches(passes.counts, 0, every)), None)]
        masked = RowSource(source, self.owner.stretches(passes.counts, 0, passes.sparsified))
        return [
            (masked, codec),
            (RowSource(source, self.owner.stretches(passes.counts, passes.sparsified, every)), None),
        ]


def source_of(passes: ScapePasses) -> Source:
    """Return the payload as a source of chunks if it is stored in place, not in a buffer."""
    pieces = passes.pieces()
    return ConcatSource(pieces) if isinstance(pieces, list) else pieces


def allocate_code_error(payload: Tensor, codec: Codec | None, collectives: ReplicaCollectives) -> Tensor | None:
    """Return an uninitialized tensor for the quantization error of the payload; None without a codec."""
    return None if codec is None or collectives.is_fake else torch.empty_like(payload)
