"""How SCAPE's payload reaches those who update: the two forms of the algorithm.

"replicated": every replica receives the mean and updates its own copy (SCAPE paper, Algorithm 1). "sharded": the mean
goes to the owner of an entry, which updates it and sends its new value to all (Algorithm 2).
"""

import torch
from torch import Tensor

from kernels.scape.gather_passes import GatherPasses
from kernels.scape.passes import Part, ScapePasses
from topology.chunks import Pieces, Rows, all_gather_chunked, reduce_scatter_chunked
from topology.collectives import ReplicaCollectives
from topology.lanes import Handle


class LocalExchange:
    """All-reduce of the payload.

    rounds: BF16 crosses the outermost level at the target density.
    """

    def __init__(self, passes: ScapePasses, collectives: ReplicaCollectives, rounds: bool) -> None:
        self.passes, self.collectives, self.rounds = passes, collectives, rounds

    def start(self, part: Part) -> tuple[Handle, Tensor | None]:
        """Starts averaging a part of the payload; the errors are there once it has arrived, None without rounding."""
        passes, collectives = self.passes, self.collectives
        if not passes.compact:
            collectives.all_reduce_chunked(passes.pieces())
            return Handle(), None
        payload = passes.payload[..., part.start : part.stop]
        payload[..., part.filled - part.start :].zero_()  # masks have lain there
        errors = self._room_for_errors(payload)
        return collectives.all_reduce(payload, error=errors), errors

    def _room_for_errors(self, payload: Tensor) -> Tensor | None:
        return torch.empty_like(payload) if self.rounds and not self.collectives.is_fake else None

    def norm_squared(self, squares: Tensor) -> Tensor:
        """FP32 (): over the whole model, from what `squares` of the passes says of all parts."""
        return self.collectives.sum_over_model(squares)

    def planned_bytes(self) -> float:
        """Bytes of payload that this rank sends in a step at the target density."""
        return self.collectives.reduced_bytes(self.passes.entries or sum(self.passes.sizes), self.rounds)


class GatherExchange(LocalExchange):
    """Reduce-scatter of the payload to its owners, all-gather of the new values."""

    passes: GatherPasses

    def start(self, part: Part) -> tuple[Handle, Tensor | None]:
        passes, collectives = self.passes, self.collectives
        if not passes.compact:
            reduce_scatter_chunked(collectives, self._rows())
            return Handle(), None
        passes.clear_padding()
        errors = self._room_for_errors(passes.payload)
        return collectives.reduce_scatter(passes.payload, error=errors), errors

    def _rows(self) -> Rows:
        source = self.passes.pieces()
        return Rows(Pieces(source) if isinstance(source, list) else source, self.passes.stretches())

    def norm_squared(self, squares: Tensor) -> Tensor:
        return self.collectives.sum_over_owners(squares)

    def gather(self) -> None:
        """Behind the update: the owners' values go to all."""
        if not self.passes.compact:
            all_gather_chunked(self.collectives, self._rows())
        else:
            self.collectives.all_gather(self.passes.wire, self.passes.values(), kind="values").wait()

    def planned_bytes(self) -> float:
        entries = self.passes.entries or self.collectives.replicas * self.passes.longest_row
        own = entries // self.collectives.replicas * (2 if self.passes.rounds_values else 4)
        return self.collectives.scattered_bytes(entries, self.rounds) + self.collectives.gathered_bytes(own)
