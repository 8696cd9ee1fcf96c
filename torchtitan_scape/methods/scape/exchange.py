"""How SCAPE's payload reaches those who update, and what they send back.

Where the update is replicated, every replica receives the mean (SCAPE paper, Algorithm 1); where it is sharded, the
mean goes to the owner of an entry, which updates it and sends its new value to all (Algorithm 2).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.scape.passes import ScapePasses
from kernels.scape.step import PayloadChunk
from kernels.scape.updaters import ShardedUpdate
from topology.chunks import ConcatSource, RowSource, Source, SourceSlice, all_gather_chunked, reduce_scatter_chunked
from topology.codecs import Codec
from topology.collectives import ReplicaCollectives
from topology.comm_stream import Handle
from topology.partition import ALIGNED


@dataclass(frozen=True)
class PayloadInFlight:
    """A part of the payload on its way; `wire_error` is what its codec loses of it, None without one."""

    part: PayloadChunk
    passes: ScapePasses
    handle: Handle
    wire_error: Tensor | None = None

    def wait(self) -> None:
        """After it the mean has arrived, and what the codec lost is kept for the next step."""
        self.handle.wait()
        if self.wire_error is not None:
            self.passes.keep_wire_residual(self.part, self.wire_error)


@dataclass(frozen=True)
class WireCodecs:
    """How the payload crosses the outermost level.

    codec: at the target density, where what it loses of an entry is kept; None for FP32.
    warmup: of the denser masks of the density warm-up, which leave no room to keep anything. A mask of all ones (the
        first step, a whole send) and tensors without a mask travel in FP32 then.
    values, warmup_values: the same of the new values, of which nothing is lost, as their owner knows what others hold.
    """

    codec: Codec | None = None
    warmup: Codec | None = None
    values: Codec | None = None
    warmup_values: Codec | None = None


class ReplicatedExchange:
    """All-reduce of the payload."""

    def __init__(self, passes: ScapePasses, collectives: ReplicaCollectives, wire: WireCodecs) -> None:
        self.passes, self.collectives, self.wire = passes, collectives, wire

    def start(self, part: PayloadChunk) -> PayloadInFlight:
        """Starts averaging a packed part of the payload."""
        passes, collectives = self.passes, self.collectives
        if not passes.compact:
            source, masked = source_of(passes), sum(passes.counts[: passes.sparsified])
            coded = None if passes.step.in_use.dense else self.wire.warmup
            if coded is None:
                collectives.all_reduce_chunked(source)
            else:
                collectives.all_reduce_chunked(SourceSlice(source, 0, masked), codec=coded)
                collectives.all_reduce_chunked(SourceSlice(source, masked, source.entries))
            return PayloadInFlight(part, passes, Handle())
        for start, stop in part.padding:
            passes.payload[start:stop].zero_()  # masks have lain there
        payload, codec = passes.payload[part.start : part.stop], self.wire.codec
        wire_error = allocate_wire_error(payload, codec, collectives)
        return PayloadInFlight(part, passes, collectives.all_reduce(payload, codec=codec, error=wire_error), wire_error)

    def norm_squared(self, squares: Tensor) -> Tensor:
        """FP32 (): over the whole model, from what `squares` of the passes says of all parts."""
        return self.collectives.sum_over_model(squares)

    def publish(self) -> None:
        """After the update: new values go to those who did not compute them. Here all did."""

    def planned_bytes(self) -> float:
        """Bytes of payload that this rank sends in a step at the target density."""
        if not self.passes.entries:
            return self.collectives.reduced_bytes(sum(self.passes.sizes))
        return self.collectives.reduced_bytes(self.passes.entries, self.wire.codec)


class ShardedExchange:
    """Reduce-scatter of the payload to its owners, all-gather of the new values. Args as `ReplicatedExchange`."""

    def __init__(
        self, passes: ScapePasses, owner: ShardedUpdate, collectives: ReplicaCollectives, wire: WireCodecs
    ) -> None:
        self.passes, self.owner, self.collectives, self.wire = passes, owner, collectives, wire

    def start(self, part: PayloadChunk) -> PayloadInFlight:
        passes, collectives = self.passes, self.collectives
        if not passes.compact:
            for rows, codec in self._rows(self.wire.warmup):
                reduce_scatter_chunked(collectives, rows, codec)
            return PayloadInFlight(part, passes, Handle())
        self.owner.clear_padding(passes.payload, passes.payload_layout.positions, passes.counts)
        codec = self.wire.codec
        wire_error = allocate_wire_error(passes.payload, codec, collectives)
        return PayloadInFlight(
            part, passes, collectives.reduce_scatter(passes.payload, codec=codec, error=wire_error), wire_error
        )

    def norm_squared(self, squares: Tensor) -> Tensor:
        return self.collectives.sum_over_owners(squares)

    def publish(self) -> None:
        passes, collectives, values = self.passes, self.collectives, self.wire.values
        payload = passes.payload
        if not passes.compact:
            for rows, codec in self._rows(self.wire.warmup_values):
                all_gather_chunked(collectives, rows, codec)
        elif values is None:
            collectives.all_gather(self.owner.wire(payload), self.owner.values(payload), kind="values").wait()
        elif collectives.replicas > 1:
            # Some codes have no zero: what they made of the payload's padding must not count in the values' scales.
            self.owner.clear_padding(payload, passes.payload_layout.positions, passes.counts)
            rows = payload.view(collectives.replicas, -1)
            handle, messages = collectives.all_gather_encoded(rows[self.owner.owner], values, kind="values")
            handle.wait()
            values.decode(messages, rows)

    def planned_bytes(self) -> float:
        replicas, entries = self.collectives.replicas, self.passes.entries
        if not entries:
            rows = -(-self.owner.longest_row // ALIGNED) * ALIGNED
            return self.collectives.scattered_bytes(replicas * rows) + self.collectives.gathered_bytes(4 * rows)
        row, values = entries // replicas, self.wire.values
        own = values.message_bytes(row) if values else (2 if self.owner.rounds_values else 4) * row
        return self.collectives.scattered_bytes(entries, self.wire.codec) + self.collectives.gathered_bytes(own)

    def _rows(self, coded: Codec | None) -> list[tuple[RowSource, Codec | None]]:
        """The payload that is in place, a row an owner, and how it travels: `coded` is of what has a mask."""
        source, passes, every = source_of(self.passes), self.passes, len(self.passes.counts)
        if coded is None or passes.step.in_use.dense:
            return [(RowSource(source, self.owner.stretches(passes.counts, 0, every)), None)]
        masked = RowSource(source, self.owner.stretches(passes.counts, 0, passes.sparsified))
        return [
            (masked, coded),
            (RowSource(source, self.owner.stretches(passes.counts, passes.sparsified, every)), None),
        ]


def source_of(passes: ScapePasses) -> Source:
    """Of the payload that is in place."""
    pieces = passes.pieces()
    return ConcatSource(pieces) if isinstance(pieces, list) else pieces


def allocate_wire_error(payload: Tensor, codec: Codec | None, collectives: ReplicaCollectives) -> Tensor | None:
    """For what the codec will lose of the payload; None where there is none."""
    return None if codec is None or collectives.is_fake else torch.empty_like(payload)
