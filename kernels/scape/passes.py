"""Passes of a SCAPE step over all tensors of a model: the common part of the PyTorch and Triton backends.

The caller binds a step, packs its chunks, averages their payload over the replicas, calls `squares` for the gradient
norm, and then `update`. Packing chunk by chunk allows one chunk to be exchanged while the next one is packed.

Letters in the comments follow Algorithm 1 of the SCAPE paper; see `reference`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.offload import StateStorage
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Mask, entries_per_block
from torchtitan_scape.kernels.scape.reference import VisitRates
from torchtitan_scape.kernels.scape.step import PassInputs, PayloadChunk, PayloadLayout, PayloadPlan, ShardedUpdate


class ScapePasses:
    """State, payload and passes of SCAPE on this rank's shards: sparsified tensors first, then all others.

    A backend has a subclass for the replicated update, in which every replica updates all entries (Algorithm 1), and
    one for the sharded update, in which each entry has an owner (Algorithm 2). They implement `pack`, `squares` and
    `update`, and iterate with `walk` over tensors whose offloaded state is on the device.

    Args:
        tensors: Blocks of the sparsified tensors.
        dense_sizes: Entries of the other tensors, which follow the sparsified ones.
        plan: Selection, and layout of the payload.
        device: Device of the tensors.
        owner: Slices of the sharded update, which are the tensors of its passes; None for the replicated update.
        writes: Write new values to the bound parameters; false if another replica of this process writes them.
        offload: Store the state in host memory.
        columns: Row length of each sparsified tensor, to scale the updates of newly entered entries by their staleness;
            None for no scaling.

    Attributes:
        slices: (tensor, first entry, end) of every tensor of the passes.
        payload: FP32, buffer of the exchanged entries at the target density.
        moment_on_mask: FP32, first moment of the last step of the same entries. With a sharded update the owner has it.
        code_residual: FP32, quantization error of the last step's payload of the same entries.
        visits: Rates at which rows and columns enter the mask; None without staleness.
        payload_layout: Location of the payload of the bound step.
    """

    # True if the update of the bound step neither reads nor writes the state of sparsified tensors.
    leaves_state = False

    def __init__(
        self,
        tensors: BlockLayout,
        dense_sizes: Sequence[int],
        plan: PayloadPlan,
        device: torch.device,
        owner: ShardedUpdate | None = None,
        *,
        writes: bool = True,
        offload: bool = False,
        columns: Sequence[int] | None = None,
    ) -> None:
        self.tensors, self.plan, self.device, self.owner, self.writes = tensors, plan, device, owner, writes
        whole = (*tensors.sizes, *dense_sizes)
        self.layout = tensors if owner is None else owner.ownership.layout
        self.sizes = whole if owner is None else owner.sizes
        self.slices = tuple((i, 0, n) for i, n in enumerate(whole)) if owner is None else owner.slices
        self.sparsified = len(self.layout.sizes)
        self.selection, self.density = plan.selection, plan.density
        self.first_run, self.runs = (0, self.layout.replicas) if plan.replica is None else (plan.replica, 1)
        self._selection_bits = torch.zeros(0, dtype=torch.uint8, device=device)
        self._counts_at: tuple[float, list[int]] = (0.0, [])
        self._buffer: PayloadLayout | None = None
        if self.density < 1.0:
            counts = self.payload_counts(self.density)
            if owner is None:
                self._buffer = PayloadLayout.buffered(counts, self.sparsified, plan)
            else:
                self._buffer = owner.payload_layout(counts, plan)
        self.entries = self._buffer.entries if self._buffer else 0
        self.storage = StateStorage(*self._state_spans(), offload, device)
        sizes = (
            self.entries,
            self.entries if owner is None else 0,
            self.entries if plan.keeps_code_error else 0,
        )
        self.payload, self.moment_on_mask, self.code_residual = (
            torch.zeros(n, dtype=torch.float32, device=device) for n in sizes
        )
        self.visits = None if columns is None else VisitRates(tensors.sizes, columns, device)
        self.payload_layout = PayloadLayout.in_place([])
        self._zero = torch.zeros(1, dtype=torch.float32, device=device)

    # ----------------------------------------------------------------------------- state and payload layout

    def _state_spans(self) -> tuple[list[tuple[int, int]], int]:
        """Return (start, end) of each tensor in the state, and the size of the state.

        Tensors are padded to blocks or to 16 bytes, so that all are aligned. With a sharded update, tensors that are
        not sparsified have no state.
        """
        padded = [blocks * self.layout.block_size for blocks in self.layout.blocks]
        padded += [0 if self.owner else -(-n // 4) * 4 for n in self.sizes[self.sparsified :]]
        starts = [0, *accumulate(padded)]
        spans = [(a, a + min(n, limit)) for a, n, limit in zip(starts, self.sizes, padded, strict=False)]
        return spans, starts[-1]

    def store_moments(self) -> None:
        """Copy first moments that are outside the state between steps to the state."""

    @property
    def states(self) -> list[Tensor]:
        return self.storage.tensors

    def kept(self) -> list[Tensor]:
        """Return the stored states, up to date; on the host if offloaded."""
        self.store_moments()
        return self.storage.kept()

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
        buffered = self._buffer if self.at_target(step.in_use) else None
        self.payload_layout = PayloadLayout.in_place(self.counts) if buffered is None else buffered
        # True if `code_residual` has quantization errors of the last step, on its mask.
        self.carrying = self.code_residual.numel() > 0 and self.at_target(step.previous)
        # Newly entered entries then count as zero in the selection.
        self.excludes_new = self.visits is not None and self.compact and step.masked
        self.stale: VisitRates | None = None
        self.partial_squares: list[list[Tensor]] = []  # of every chunk

    def release(self) -> None:
        """Drop the references to the step's tensors, so that the next backward pass does not hold gradients twice."""
        del self.step, self.gradients

    def leave_out_update(self, unless: Tensor) -> None:
        """Leave out the update of the bound step, which was packed, unless the flag is true, bool ()."""
        self.step = replace(self.step, applied=self.step.applied & unless)

    def pack(self, chunk: PayloadChunk) -> None:
        """Split mt into payload and residual, and select this rank's run of the next mask. Call it in chunk order."""
        raise NotImplementedError

    def allocate_selection(self, density: float) -> Tensor | None:
        """Allocate the selection of this rank's runs: int16 offsets (blocks, k), or uint8 bits.

        Returns:
            Zeros, or bits that the blocks of the runs overwrite; None if nothing is selected.
        """
        layout = self.layout
        if density >= 1.0 or layout.total_blocks == 0:
            return None
        if layout.sends_offsets(density, self.selection):
            shape = self.runs * layout.run_blocks, entries_per_block(density, layout.block_size)
            return torch.zeros(shape, dtype=torch.int16, device=self.device)
        # The same buffer in every step; for a single replica it contains the next mask.
        size = self.runs * layout.run_bytes
        if self._selection_bits.numel() != size:
            self._selection_bits = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._selection_bits

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

    def squares(self, chunk: PayloadChunk) -> None:
        """Append partial sums of squares of the synchronized gradient, from the averaged payload, to `partial_squares`.

        Call it once for each chunk. The partial sums, FP32, have an order that does not depend on the walk.
        """
        raise NotImplementedError

    def norm_squared(self) -> Tensor:
        """Return the sum of squares of the synchronized gradient, FP64 (), after `squares` of all chunks."""
        # One sum over all partial sums, so that it does not depend on the number of tensors on the device at a time.
        sums = [torch.cat([self._zero, *each]).sum(dtype=torch.float64) for each in self.partial_squares if each]
        return sum(sums[1:], sums[0]) if sums else self._zero.double().sum()

    def begin_update(self, chunk: PayloadChunk) -> None:
        """Update what all chunks of a step share: the scales of the weights, and the visit rates."""
        if chunk.first > 0:
            return
        if self.owner is not None:
            self.owner.decay_scales(self.step, self.writes)
        if self.visits is not None and self.step.masked:
            self.count_entering(self.visits)
            self.visits.accumulate(self.step.applied)
            self.stale = self.visits

    def update(self, chunk: PayloadChunk) -> None:
        """Apply the AdamS update on A and weight decay everywhere, after `squares`.

        With sharded updates the owner's new values replace the payload.
        """
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

    def count_entering(self, visits: VisitRates) -> None:
        """Count the newly entered entries of every row and column in `visits.counts`."""
        raise NotImplementedError

    def walk(self, chunk: PayloadChunk, name: str) -> Iterator[PayloadChunk]:
        """Yield sub-chunks of `chunk` whose offloaded state is on the device for a pass: pack, squares or update."""
        window = self.storage.window
        first_used = 0  # tensors before this one need no state
        if self.owner is not None and name != "pack":
            first_used = len(self.sizes)  # the owner's moments stay on the device; norm and update need no residual
        elif name == "squares" and self.compact:
            first_used = len(self.sizes)  # with a payload buffer the norm needs no state
        elif name == "update" and self.leaves_state:
            first_used = self.sparsified
        if window is None or chunk.end <= first_used:
            yield chunk
            return
        if chunk.first < first_used:
            yield replace(chunk, end=first_used)
        own, *every = [(max(p.first, first_used), p.end) for p in (chunk, *self.parts) if p.end > first_used]
        for first, end in window.walk(own, every, changed=name != "squares"):
            yield replace(chunk, first=first, end=end)
