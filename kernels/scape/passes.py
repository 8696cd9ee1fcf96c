"""Passes of a SCAPE step over all tensors of a model: the common part of the PyTorch and Triton backends.

The caller binds a step, packs its chunks, averages their payload over the replicas, calls `squares` for the gradient
norm, and then `update`. Packing chunk by chunk allows one chunk to be exchanged while the next one is packed. Three
aspects are separate objects: the distribution of the update over the replicas (`updaters`), the storage of the payload
(`step.BufferedPayload`, `step.InPlacePayload`), and the storage of the state (`common.storage`).

Letters in the comments follow Algorithm 1 of the SCAPE paper; see `reference`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.storage import Storage
from torchtitan_scape.kernels.scape.blocks import Mask
from torchtitan_scape.kernels.scape.step import BufferedPayload, InPlacePayload, PassInputs, PayloadChunk, PayloadPlan
from torchtitan_scape.kernels.scape.updaters import ReplicatedUpdate, ShardedUpdate
from torchtitan_scape.kernels.scape.visits import Staleness, VisitRates


class ScapePasses:
    """State, payload and passes of SCAPE on this rank's shards: sparsified tensors first, then all others.

    Subclasses of a backend and an updater implement the methods that end in `_part` and `_of`, for tensors whose
    offloaded state is on the device.

    Args:
        updater: Distribution of the update over the replicas; determines the tensors of the passes.
        plan: Selection, and layout of the payload.
        device: Device of the tensors.
        offload: Which of "state" and "master" are stored in host memory.
        staleness: Scaling of the updates of newly entered entries; None for no scaling.

    Attributes:
        payload: FP32, buffer of the exchanged entries at the target density.
        moment_on_mask: FP32, first moment of the last step of the same entries.
        code_residual: FP32, quantization error of the last step's payload of the same entries.
        visits: Rates at which rows and columns enter the mask; None without staleness.
        payload_layout: Location of the payload of the bound step.
    """

    def __init__(
        self,
        updater: ReplicatedUpdate | ShardedUpdate,
        plan: PayloadPlan,
        device: torch.device,
        offload: Sequence[str] = (),
        staleness: Staleness | None = None,
    ) -> None:
        self.updater, self.plan, self.device = updater, plan, device
        self.layout, self.sizes, self.sparsified = updater.layout, updater.sizes, len(updater.layout.sizes)
        self.selection, self.density = plan.selection, plan.density
        self.first_run, self.runs = (0, self.layout.replicas) if plan.replica is None else (plan.replica, 1)
        self._counts_at: tuple[float, list[int]] = (0.0, [])
        self._buffer: BufferedPayload | None = None
        if self.density < 1.0:
            self._buffer = updater.buffered_payload(self.payload_counts(self.density), plan)
        self.entries = self._buffer.entries if self._buffer else 0
        self.storage = Storage(updater.allocations(), offload, device)
        sizes = (
            self.entries,
            self.entries if updater.stores_moment_on_mask else 0,
            self.entries if plan.keeps_code_error else 0,
        )
        self.payload, self.moment_on_mask, self.code_residual = (
            torch.zeros(n, dtype=torch.float32, device=device) for n in sizes
        )
        self.visits = None if staleness is None else VisitRates(updater.tensors.sizes, staleness.columns, device)
        self.max_staleness, self.keeps = (1.0, 1.0) if staleness is None else (staleness.most, staleness.keeps)
        self.payload_layout: BufferedPayload | InPlacePayload = InPlacePayload.of([])
        self._zero = torch.zeros(1, dtype=torch.float32, device=device)

    # ----------------------------------------------------------------------------- state and payload layout

    @property
    def leaves_state(self) -> bool:
        """Whether the update of the bound step neither reads nor writes the state of sparsified tensors."""
        return False

    def store_moments(self) -> None:
        """Copy first moments that are outside the state between steps to the state."""

    @property
    def states(self) -> list[Tensor]:
        return self.storage.tensors["state"]

    @property
    def masters(self) -> list[Tensor]:
        return self.storage.tensors["master"]

    def kept(self, kind: str) -> list[Tensor]:
        """Return the stored tensors of "state" or "master", up to date; on the host if offloaded."""
        self.store_moments()
        return self.storage.kept(kind)

    def finish(self) -> None:
        """Store the current values of the state, and wait until host memory contains those of offloaded state."""
        self.store_moments()
        self.storage.finish()

    @property
    def compact(self) -> bool:
        """True if the payload of the bound step is in the payload buffer."""
        return self.payload_layout.compact

    @property
    def parts(self) -> tuple[PayloadChunk, ...]:
        """Chunks of the bound step, in the order in which they are packed."""
        return self.payload_layout.parts

    def payload_counts(self, density: float) -> list[int]:
        """Return the payload entries of each tensor at this density."""
        if self._counts_at[0] != density:
            sparse = [self.layout.nnz(i, density, self.selection) for i in range(self.sparsified)]
            self._counts_at = density, [*sparse, *self.sizes[self.sparsified :]]
        return self._counts_at[1]

    def at_target(self, mask: Mask) -> bool:
        """Return True if the payload of this mask uses the payload buffer.

        Its size must be that of the buffer. An encoded payload of a mask with all bits set does not use the buffer.
        """
        if self.plan.keeps_code_error and mask.dense:
            return False
        return self._buffer is not None and (
            mask.density == self.density or self.payload_counts(mask.density) == self.payload_counts(self.density)
        )

    @property
    def payload_padding(self) -> list[tuple[int, int]]:
        """(start, stop) of the ranges of the payload buffer that belong to no tensor."""
        return [] if self._buffer is None else [each for part in self._buffer.parts for each in part.padding]

    def code_residual_of(self, tensor: int) -> Tensor:
        """Return the quantization errors of one tensor, FP32 (payload entries,): of its entries in P, in order."""
        assert self._buffer is not None
        start = self._buffer.positions[tensor]
        return self.code_residual[start : start + self.payload_counts(self.density)[tensor]]

    def keep_code_residual(self, part: PayloadChunk, code_error: Tensor) -> None:
        """Store the quantization error of a chunk, FP32 (part.stop - part.start,), for the next step, if applied."""
        own = self.code_residual[part.start : part.stop]
        torch.where(self.step.applied, code_error, own, out=own)

    # --------------------------------------------------------------------------------------- the passes

    def bind(self, step: PassInputs) -> None:
        """Set the inputs of the next passes. `release` drops the references to their tensors."""
        self.step = step
        self.gradients = step.gradients
        self.counts = self.payload_counts(step.in_use.density)
        buffered = self._buffer is not None and self.at_target(step.in_use)
        self.payload_layout = self._buffer if self._buffer is not None and buffered else InPlacePayload.of(self.counts)
        # True if `code_residual` has quantization errors of the last step, on its mask.
        self.carrying = self.code_residual.numel() > 0 and self.at_target(step.previous)
        # Newly entered entries then count as zero in the selection.
        self.excludes_new = self.keeps < 1.0 and self.compact and step.masked
        self.stale: VisitRates | None = None
        self._squares: list[list[Tensor]] = []  # of every chunk

    def release(self) -> None:
        """Drop the references to the step's tensors, so that the next backward pass does not hold gradients twice."""
        del self.step, self.gradients

    def pack(self, part: PayloadChunk) -> None:
        """Split mt into payload and residual, and select this rank's run of the next mask. Call it in chunk order."""
        for some in self._walk(part, "pack"):
            self.pack_part(some)

    def pack_part(self, part: PayloadChunk) -> None:
        """See `pack`."""
        raise NotImplementedError

    def selected(self) -> Tensor | None:
        """Return the encoded selection after all chunks are packed.

        Returns:
            uint8, `layout.wire_bytes` per run; None if nothing was selected.
        """
        raise NotImplementedError

    def received_selections(self, received: Tensor, density: float) -> Tensor:
        """Return the selections of all runs without padding, concatenated; a copy if there was padding."""
        used = self.layout.selection_bytes(density, self.selection)
        runs = received.view(self.layout.replicas, -1)
        return received if runs.shape[1] == used else runs[:, :used].reshape(-1)

    def pieces(self) -> Any:
        """Return the payload that is in place, as flat tensors or a `topology.chunks.Source`."""
        raise NotImplementedError

    def squares(self, part: PayloadChunk) -> None:
        """Sum the squares of the synchronized gradient from the averaged payload. Call it once for each chunk."""
        # One sum over all partial sums, so that it does not depend on the number of tensors on the device at a time.
        self._squares.append([partial for some in self._walk(part, "squares") for partial in self.squares_of(some)])

    def squares_of(self, part: PayloadChunk) -> list[Tensor]:
        """Return partial sums of squares, FP32 (any number,), in an order that does not depend on the chunks."""
        raise NotImplementedError

    def norm_squared(self) -> Tensor:
        """Return the sum of squares of the synchronized gradient, FP64 (), after `squares` of all chunks."""
        sums = [torch.cat([self._zero, *each]).sum(dtype=torch.float64) for each in self._squares if each]
        return sum(sums[1:], sums[0]) if sums else self._zero.double().sum()

    def update(self, part: PayloadChunk) -> None:
        """Apply the AdamS update on A and weight decay everywhere, after `squares`.

        With sharded updates the owner's new values replace the payload.
        """
        if part.first == 0:
            self.updater.begin_update(self.step)
            self.stale = self._visit_rates()
        for some in self._walk(part, "update"):
            self.update_part(some)

    def update_part(self, part: PayloadChunk) -> None:
        """See `update`."""
        raise NotImplementedError

    def write(self, own_only: bool = False) -> None:
        """Write the owners' values on A, and apply weight decay everywhere else.

        own_only: only in the slices that this replica owns, for a dry run without received values. A replicated update
        writes nothing here.
        """

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        """Set previous = in_use, and in_use = the mask of the received selections.

        received: uint8, `layout.wire_bytes(density)` of every replica; None for a mask with all bits set.
        """
        raise NotImplementedError

    def start_master(self, parameters: list[Tensor]) -> None:
        """Copy the parameters into the master weights, if there are any."""
        self.updater.start_master(self.kept("master"), parameters)

    def count_entering(self, visits: VisitRates) -> None:
        """Count the newly entered entries of every row and column in `visits.counts`."""
        raise NotImplementedError

    def _visit_rates(self) -> VisitRates | None:
        """Update and return the visit rates; None if the step does not need them."""
        if self.visits is None or not self.step.masked:
            return None
        self.count_entering(self.visits)
        self.visits.accumulate(self.step.applied)
        return self.visits

    def _walk(self, part: PayloadChunk, name: str) -> Iterator[PayloadChunk]:
        """Yield sub-chunks of `part` whose offloaded state is on the device."""
        # With a payload buffer the norm needs no state.
        kinds = () if name == "squares" and self.compact else self.updater.state_kinds[name]
        if not self.storage.windows:
            yield part
            return
        ranges = [(kinds, 0, len(self.sizes))]
        if name == "update" and self.leaves_state:
            sparsified = tuple(kind for kind in kinds if kind != "state")
            ranges = [(sparsified, 0, self.sparsified), (kinds, self.sparsified, len(self.sizes))]
        for used, low, high in ranges:
            own, *every = [(max(p.first, low), min(p.end, high)) for p in (part, *self.parts)]
            if own[0] >= own[1]:
                continue
            every = [(first, end) for first, end in every if first < end]
            for first, end in self.storage.walk(used, own, every, changed=name != "squares"):
                yield part if (first, end) == (part.first, part.end) else replace(part, first=first, end=end)


# ------------------------------------------------- all chunks, if nothing is exchanged between them


def pack_all(passes: ScapePasses) -> Tensor | None:
    """Pack all chunks and return the encoded selection."""
    for part in passes.parts:
        passes.pack(part)
    return passes.selected()


def squares_all(passes: ScapePasses) -> Tensor:
    """Return the sum of squares of all chunks, FP64 ()."""
    for part in passes.parts:
        passes.squares(part)
    return passes.norm_squared()


def update_all(passes: ScapePasses) -> None:
    """Update all chunks."""
    for part in passes.parts:
        passes.update(part)
