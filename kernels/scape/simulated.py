"""The passes of several replicas that one process plays: each has its own state, residual and selection."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.scape import reference
from kernels.scape.blocks import BlockLayout, Mask
from kernels.scape.passes import Part, Rates, ScapePasses

# Entries of a tensor that are looked at together where replicas take the moment over: bounds the temporaries.
_SLICE = 1 << 22


class SimulatedPasses(ScapePasses):
    """`ScapePasses` of all N = `layout.replicas` replicas of this rank's shards.

    Buffers are 2-D, a row a replica, each row aligned to 16 bytes: `state` and `errors`, `states[i]` (N, sizes[i]), and
    `payload` (N, at least `entries`). The average of the payload belongs into the first row. From there the first
    replica's passes compute norm and update; the others then take its moment on A, the same that they would compute.

    Args as `ScapePasses`; kind: the passes of a replica.
    """

    def __init__(
        self,
        kind: type[ScapePasses],
        layout: BlockLayout,
        whole_sizes: tuple[int, ...],
        selection: str,
        density: float,
        device: torch.device,
        **options: Any,
    ) -> None:
        super().__init__(layout, whole_sizes, selection, density, None, device, **options)
        self._replicas: list[ScapePasses] = []
        for i in range(layout.replicas):
            passes = kind(layout, whole_sizes, selection, density, i, device, **options)
            # Last step's moment on A is the same for all.
            passes.use(self.state[i], self.payload[i], self.moment_on_mask, self.wire_residual[i])
            self._replicas.append(passes)
        self._first = self._replicas[0]
        self._first.visits = self.visits

    def _allocate(self, state: int, payload: int, errors: int) -> None:
        rows, payload, errors = self.layout.replicas, -(-payload // 4) * 4, -(-errors // 4) * 4
        self.use(self._zeros(rows, state), self._zeros(rows, payload), self._zeros(payload), self._zeros(rows, errors))

    def bind(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        rates: list[Rates],
        in_use: Mask,
        previous: Mask,
        next_density: float,
    ) -> None:
        """As for one replica, but with the gradients of all of them, replica behind replica."""
        super().bind(parameters, gradients, rates, in_use, previous, next_density)
        count = len(self.sizes)
        for i, passes in enumerate(self._replicas):
            own = gradients[i * count : (i + 1) * count]
            passes.bind(parameters, own, rates, in_use, previous, next_density)

    def pack(self, part: Part, applied: Tensor) -> None:
        for passes in self._replicas:
            passes.pack(part, applied)

    def selected(self, applied: Tensor) -> Tensor | None:
        """What each replica selected, uint8 (N, `layout.wire_bytes`); None where there is nothing to tell."""
        rows = [passes.selected(applied) for passes in self._replicas]
        return None if rows[0] is None else torch.stack([row for row in rows if row is not None])

    def pieces(self) -> Sequence[Any]:
        """`pieces()` of every replica. Their mean belongs into those of the first."""
        return [passes.pieces() for passes in self._replicas]

    def squares(self, part: Part) -> Tensor:
        return self._first.squares(part)

    def update(
        self,
        part: Part,
        clip: Tensor,
        clip_moment: bool,
        steps: Tensor,
        applied: Tensor,
    ) -> None:
        self._first.update(part, clip, clip_moment, steps, applied)
        for tensor in range(part.first, part.end):
            self._take_moment(tensor, applied)

    def _take_moment(self, tensor: int, applied: Tensor) -> None:
        """state = the first replica's on A, in all others; unless not `applied`."""
        bits = self.layout.bits(self.in_use, tensor) if tensor < self.sparsified else None
        first, *others = self.states[tensor].unbind()
        for start in range(0, first.numel(), _SLICE):
            moment = first[start : start + _SLICE]
            on_mask = applied
            if bits is not None:
                on_mask = reference.unpack_bits(bits[start // 8 :][: _SLICE // 8], moment.numel()) & applied
            for state in others:
                own = state[start : start + _SLICE]
                torch.where(on_mask, moment, own, out=own)

    def release(self) -> None:
        super().release()
        for passes in getattr(self, "_replicas", ()):  # none yet while they are being made
            passes.release()

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        self._first.rotate(received, density, in_use, previous)
