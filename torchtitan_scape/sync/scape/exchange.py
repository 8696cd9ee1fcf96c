"""How SCAPE's payload reaches those who update, and what they send back.

Where the update is replicated, every replica receives the mean (SCAPE paper, Algorithm 1); where it is sharded, the
mean goes to the owner of an entry, which updates it and sends its new value to all (Algorithm 2).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.scape.passes import ScapePasses
from kernels.scape.step import Part
from kernels.scape.updaters import Owner
from topology.chunks import Pieces, Rows, all_gather_chunked, reduce_scatter_chunked
from topology.collectives import ReplicaCollectives
from topology.lanes import Handle


@dataclass(frozen=True)
class Arriving:
    """A part of the payload on its way; `lost` is what rounding loses of it, None where nothing is rounded."""

    part: Part
    passes: ScapePasses
    handle: Handle
    lost: Tensor | None = None

    def wait(self) -> None:
        """After it the mean has arrived, and what rounding lost is kept for the next step."""
        self.handle.wait()
        if self.lost is not None:
            self.passes.keep_wire_residual(self.part, self.lost)


class ReplicatedExchange:
    """All-reduce of the payload.

    rounds: BF16 crosses the outermost level at the target density.
    """

    def __init__(self, passes: ScapePasses, collectives: ReplicaCollectives, rounds: bool) -> None:
        self.passes, self.collectives, self.rounds = passes, collectives, rounds

    def start(self, part: Part) -> Arriving:
        """Starts averaging a packed part of the payload."""
        passes, collectives = self.passes, self.collectives
        if not passes.compact:
            collectives.all_reduce_chunked(passes.pieces())
            return Arriving(part, passes, Handle())
        payload = passes.payload[part.start : part.stop]
        payload[part.filled - part.start :].zero_()  # masks have lain there
        lost = room_for_lost(payload, self.rounds, collectives)
        return Arriving(part, passes, collectives.all_reduce(payload, error=lost), lost)

    def norm_squared(self, squares: Tensor) -> Tensor:
        """FP32 (): over the whole model, from what `squares` of the passes says of all parts."""
        return self.collectives.sum_over_model(squares)

    def publish(self) -> None:
        """After the update: new values go to those who did not compute them. Here all did."""

    def planned_bytes(self) -> float:
        """Bytes of payload that this rank sends in a step at the target density."""
        return self.collectives.reduced_bytes(self.passes.entries or sum(self.passes.sizes), self.rounds)


class ShardedExchange:
    """Reduce-scatter of the payload to its owners, all-gather of the new values. Args as `ReplicatedExchange`."""

    def __init__(self, passes: ScapePasses, owner: Owner, collectives: ReplicaCollectives, rounds: bool) -> None:
        self.passes, self.owner, self.collectives, self.rounds = passes, owner, collectives, rounds

    def start(self, part: Part) -> Arriving:
        passes, collectives = self.passes, self.collectives
        if not passes.compact:
            reduce_scatter_chunked(collectives, self._rows())
            return Arriving(part, passes, Handle())
        self.owner.clear_padding(passes.payload, passes.lies.positions, passes.counts)
        lost = room_for_lost(passes.payload, self.rounds, collectives)
        return Arriving(part, passes, collectives.reduce_scatter(passes.payload, error=lost), lost)

    def norm_squared(self, squares: Tensor) -> Tensor:
        return self.collectives.sum_over_owners(squares)

    def publish(self) -> None:
        payload = self.passes.payload
        if not self.passes.compact:
            all_gather_chunked(self.collectives, self._rows())
        else:
            self.collectives.all_gather(self.owner.wire(payload), self.owner.values(payload), kind="values").wait()

    def planned_bytes(self) -> float:
        entries = self.passes.entries or self.collectives.replicas * self.owner.longest_row
        own = entries // self.collectives.replicas * (2 if self.owner.rounds_values else 4)
        return self.collectives.scattered_bytes(entries, self.rounds) + self.collectives.gathered_bytes(own)

    def _rows(self) -> Rows:
        source, stretches = self.passes.pieces(), self.owner.stretches(self.passes.counts)
        return Rows(Pieces(source) if isinstance(source, list) else source, stretches)


def room_for_lost(payload: Tensor, rounds: bool, collectives: ReplicaCollectives) -> Tensor | None:
    """For what rounding will lose of the payload; None where nothing is rounded."""
    return torch.empty_like(payload) if rounds and not collectives.is_fake else None
