"""The passes of an optimizer step over all tensors of a model: what PyTorch and Triton both provide.

A step is bound, then its parts are packed, their payload is averaged, `squares` is asked for, and `update` called. Part
by part, so that one can be exchanged while the next is packed. Three things vary and are objects of their own: who
updates (`updaters`), the storage of the payload (`step.BufferedPayload`, `step.InPlacePayload`) and of the state
(`common.storage`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.common.storage import Storage
from kernels.scape.blocks import Mask
from kernels.scape.step import BufferedPayload, InPlacePayload, PassInputs, PayloadChunk, PayloadPlan
from kernels.scape.updaters import ReplicatedUpdate, ShardedUpdate
from kernels.scape.visits import Staleness, VisitRates


class Updates(Protocol):
    """How a backend computes what depends on who updates."""

    def pack(self, part: PayloadChunk) -> None:
        """See `ScapePasses.pack`."""

    def squares(self, part: PayloadChunk) -> list[Tensor]:
        """Sums of squares of stretches of the tensors, FP32 (any number,), in an order that no cut changes."""

    def update(self, part: PayloadChunk) -> None:
        """See `ScapePasses.update`."""

    def write(self, own_only: bool) -> None:
        """See `ScapePasses.write`."""

    def count_entering(self, visits: VisitRates) -> None:
        """Newly entered entries of every row and column into `visits.counts`."""


class ScapePasses:
    """State, payload and passes of SCAPE on this rank's shards; sparsified tensors first, then those sent whole.

    Args:
        updater: who updates, and so what the tensors of the passes are.
        plan: what is selected, and how the payload goes.
        offload: which of "state" and "master" lie in host memory.
        staleness: how steps of newly entered entries are scaled; None for not at all.

    Attributes:
        payload, moment_on_mask, wire_residual: FP32, of the target density: what is exchanged, last step's moment of
            the same entries, and what rounding lost of them in the last step.
        visits: the rates at which the mask visits rows and columns, where steps are scaled by them.
        lies: where the payload of the bound step lies.
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
            self._buffer = updater.in_buffer(self.payload_counts(self.density), plan)
        self.entries = self._buffer.entries if self._buffer else 0
        self.storage = Storage(updater.rooms(), offload, device)
        sizes = self.entries, self.entries if updater.takes_moment else 0, self.entries if plan.keeps_wire_error else 0
        self.payload, self.moment_on_mask, self.wire_residual = (
            torch.zeros(n, dtype=torch.float32, device=device) for n in sizes
        )
        self.visits = None if staleness is None else VisitRates(updater.tensors.sizes, staleness.columns, device)
        self.most_stale, self.keeps = (1.0, 1.0) if staleness is None else (staleness.most, staleness.keeps)
        self.payload_layout: BufferedPayload | InPlacePayload = InPlacePayload.of([])
        self.updates: Updates  # from who makes the passes

    # --------------------------------------------------------------------------------- what lies where

    @property
    def states(self) -> list[Tensor]:
        return self.storage.tensors["state"]

    @property
    def masters(self) -> list[Tensor]:
        return self.storage.tensors["master"]

    def kept(self, kind: str) -> list[Tensor]:
        """The tensors of "state" or "master" where they are kept, on the host where offloaded; up to date."""
        return self.storage.kept(kind)

    def finish(self) -> None:
        """Waits until what is offloaded lies in host memory."""
        self.storage.finish()

    @property
    def compact(self) -> bool:
        return self.payload_layout.compact

    @property
    def parts(self) -> tuple[PayloadChunk, ...]:
        """What the bound step goes by."""
        return self.payload_layout.parts

    def payload_counts(self, density: float) -> list[int]:
        """Entries of each tensor in the payload at this density."""
        if self._counts_at[0] != density:
            sparse = [self.layout.nnz(i, density, self.selection) for i in range(self.sparsified)]
            self._counts_at = density, [*sparse, *self.sizes[self.sparsified :]]
        return self._counts_at[1]

    def at_target(self, mask: Mask) -> bool:
        """Whether a payload on this mask goes in the buffer: it has the buffer's shape, and may be coded, as one on a
        mask of all ones may not."""
        if self.plan.keeps_wire_error and mask.dense:
            return False
        return self._buffer is not None and (
            mask.density == self.density or self.payload_counts(mask.density) == self.payload_counts(self.density)
        )

    def wire_residual_of(self, tensor: int) -> Tensor:
        """What is kept of one tensor, FP32 (payload entries,): of those of its entries that P has, in order."""
        assert self._buffer is not None
        start = self._buffer.positions[tensor]
        return self.wire_residual[start : start + self.payload_counts(self.density)[tensor]]

    def keep_wire_residual(self, part: PayloadChunk, wire_error: Tensor) -> None:
        """Takes what rounding lost, FP32 (part.stop - part.start,), of an applied step for the next one to add."""
        own = self.wire_residual[part.start : part.stop]
        torch.where(self.step.applied, wire_error, own, out=own)

    # --------------------------------------------------------------------------------------- the passes

    def bind(self, step: PassInputs) -> None:
        """Takes the step that follows; `release` lets go of its tensors."""
        self.step = step
        self.gradients = step.gradients
        self.counts = self.payload_counts(step.in_use.density)
        buffered = self._buffer is not None and self.at_target(step.in_use)
        self.payload_layout = self._buffer if self._buffer is not None and buffered else InPlacePayload.of(self.counts)
        # Whether rounding lost something in the step before, on its mask.
        self.carrying = self.wire_residual.numel() > 0 and self.at_target(step.previous)
        # Newly entered entries then count as zeros in the selection.
        self.skips_new = self.keeps < 1.0 and self.compact and step.masked
        self.stale: VisitRates | None = None

    def release(self) -> None:
        """Lets go of the step's tensors: a gradient that was kept would be there twice in the next backward pass."""
        del self.step, self.gradients

    def pack(self, part: PayloadChunk) -> None:
        """mt into payload and residual, and the selection in this rank's run of the next mask; parts in their order."""
        for some in self._walk(part, "pack"):
            self.updates.pack(some)

    def selected(self) -> Tensor | None:
        """After all parts are packed: what was selected, for the wire.

        Returns uint8, one stretch of `layout.wire_bytes` a run; None where there is nothing to tell.
        """
        raise NotImplementedError

    def received_selections(self, received: Tensor, density: float) -> Tensor:
        """What all runs tell of their selections, one behind the other: a copy where zeros come after each."""
        used = self.layout.selection_bytes(density, self.selection)
        runs = received.view(self.layout.replicas, -1)
        return received if runs.shape[1] == used else runs[:, :used].reshape(-1)

    def pieces(self) -> Any:
        """The payload that is in place, for an exchange in chunks."""
        raise NotImplementedError

    def squares(self, part: PayloadChunk) -> Tensor:
        """FP64 (): sum of squares of the synchronised gradient, from the averaged payload. Call it once a part."""
        # One sum over all, so that it does not depend on how many tensors are at hand at a time.
        sums = [partial for some in self._walk(part, "squares") for partial in self.updates.squares(some)]
        none = torch.zeros(1, dtype=torch.float32, device=self.device)
        return torch.cat([none, *sums]).sum(dtype=torch.float64)

    def update(self, part: PayloadChunk) -> None:
        """The AdamS step on A, weight decay everywhere, after `squares`. An owner's new values replace the payload."""
        if part.first == 0:
            self.updater.begin_update(self.step)
            self.stale = self._visit_rates()
        for some in self._walk(part, "update"):
            self.updates.update(some)

    def write(self, own_only: bool = False) -> None:
        """The owners' values on A, weight decay everywhere else.

        own_only: in this replica's own pieces, for a dry run, where no others' values arrive.
        """
        self.updates.write(own_only)

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        """previous = in_use, in_use = the mask that the runs' `received` selections make.

        received: uint8, `layout.wire_bytes(density)` of every replica; None for a mask of all ones.
        """
        raise NotImplementedError

    def start_master(self, parameters: list[Tensor]) -> None:
        """Copies the parameters, in the order of `sizes`, into the master, where there is one."""
        self.updater.start_master(self.kept("master"), parameters)

    def _visit_rates(self) -> VisitRates | None:
        """The rates at which the mask visits rows and columns, renewed; None where the step does not need them."""
        if self.visits is None or not self.step.masked:
            return None
        self.updates.count_entering(self.visits)
        self.visits.learn(self.step.applied)
        return self.visits

    def _walk(self, part: PayloadChunk, name: str) -> Iterator[PayloadChunk]:
        """The part's tensors, those at a time whose offloaded state is on the device."""
        # With a payload buffer the norm needs no state.
        kinds = () if name == "squares" and self.compact else self.updater.touched[name]
        parts = [(p.first, p.end) for p in self.parts]
        for first, end in self.storage.walk(kinds, (part.first, part.end), parts, changed=name != "squares"):
            yield replace(part, first=first, end=end)


# ------------------------------------------------------- all parts, where nothing is exchanged between them


def pack_all(passes: ScapePasses) -> Tensor | None:
    """Packs, and gives what was selected."""
    for part in passes.parts:
        passes.pack(part)
    return passes.selected()


def squares_all(passes: ScapePasses) -> Tensor:
    """FP64 (): the sum of `squares`."""
    return torch.stack([passes.squares(part) for part in passes.parts]).sum()


def update_all(passes: ScapePasses) -> None:
    """Updates."""
    for part in passes.parts:
        passes.update(part)
