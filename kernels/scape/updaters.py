"""Distribution of the update over the replicas: every replica updates all entries, or each entry has an owner.

An updater defines the tensors of the passes, their state and its layout. `torch_updates` and `triton_updates` implement
its passes.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.dry_run import in_dry_run
from torchtitan_scape.kernels.common.launching import DeviceTable, to_device
from torchtitan_scape.kernels.common.storage import StateAllocation
from torchtitan_scape.kernels.scape.blocks import BlockLayout
from torchtitan_scape.kernels.scape.ownership import Ownership
from torchtitan_scape.kernels.scape.step import BufferedPayload, PassInputs, PayloadChunk, PayloadPlan

# Scales below this limit are renormalized, long before the scaled weights leave the range of BF16.
MIN_WEIGHT_SCALE = 2.0**-16


class ReplicatedUpdate:
    """Every replica holds the moments and computes the same update (SCAPE paper, Algorithm 1).

    Args:
        layout: Blocks of the sparsified tensors.
        dense_sizes: Entries of the other tensors, which follow the sparsified ones.
        has_master: The state contains FP32 master weights; the bound parameters are copies in a narrower dtype.
        writes: Write new values to the bound parameters; false if another replica of this process writes them.
    """

    # Kinds of state that each pass uses, among those that can be offloaded.
    state_kinds: ClassVar[dict[str, tuple[str, ...]]] = {
        "pack": ("state",),
        "squares": ("state",),
        "update": ("state", "master"),
    }
    # True if the moment of the last step on the mask is stored next to the payload.
    stores_moment_on_mask = True
    # True if the passes update the master weights instead of the parameters.
    updates_master = True

    def __init__(
        self, layout: BlockLayout, dense_sizes: Sequence[int], has_master: bool = False, writes: bool = True
    ) -> None:
        self.layout = self.tensors = layout
        self.sizes = (*layout.sizes, *dense_sizes)
        # (tensor, first entry, end) of every tensor of the passes.
        self.slices = tuple((i, 0, n) for i, n in enumerate(self.sizes))
        self.has_master, self.writes = has_master and writes, writes

    def allocations(self) -> dict[str, StateAllocation]:
        """Return the layout of each kind of state, padded to blocks or to 16 bytes so that all tensors are aligned."""
        whole = [-(-n // 4) * 4 for n in self.sizes[len(self.layout.sizes) :]]
        allocation = _allocate([*_padded(self.layout), *whole], self.sizes)
        return {"state": allocation, "master": allocation if self.has_master else ([], 0)}

    def buffered_payload(self, counts: Sequence[int], plan: PayloadPlan) -> BufferedPayload:
        """Return the layout of the payload buffer of the target density."""
        return BufferedPayload.of(counts, len(self.layout.sizes), plan)

    def cut(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of the passes, given whole tensors: the same ones."""
        return tensors

    def start_master(self, masters: list[Tensor], parameters: list[Tensor]) -> None:
        """Copy the parameters into the master weights, if there are any."""
        for master, parameter in zip(masters, parameters, strict=bool(masters)):
            master.copy_(parameter.reshape(-1))

    def begin_update(self, step: PassInputs) -> None:
        """Prepare the passes of an update."""


class ShardedUpdate:
    """The owner of an entry updates it and sends the new value to all replicas (Algorithm 2 of the paper).

    The tensors of the passes are slices with one owner each. A replica's state is its local residual off A, zero on A;
    tensors that are not sparsified have none. For the entries that it owns, FP32 (ownership.share,), a replica also has

    - `common`: the first moment on A, and off A the part of the residual that is equal on all replicas;
    - a master: FP32 weights, if values are sent in BF16, encoded, or scaled; else empty.

    The payload at the target density is a matrix with one row per owner.

    Args:
        ownership: Slices and their owners.
        owner: Replica of this rank.
        device: Device of the tensors.
        rounds_values: Send values in BF16 at the target density; the owner keeps them in FP32.
        sends_changes: Send the difference between the owner's FP32 values and the decayed parameters of the replicas.
            The quantization error of a difference is then part of the next difference.
        scaled: The bound parameters are w / scales in BF16 instead of the weights w; see `begin_update`.
        writes: As in `ReplicatedUpdate`.

    Attributes:
        own: Indices of the slices that this rank owns.
        scales: float64 (slices,), equal on all replicas and for all slices of a tensor. Empty if not `scaled`.
    """

    # The state of an owner has n / N entries and stays on the device; norm and update need no residual.
    state_kinds: ClassVar[dict[str, tuple[str, ...]]] = {"pack": ("state",), "squares": (), "update": ("master",)}
    stores_moment_on_mask = False  # the owner has it in `common`
    updates_master = False

    def __init__(
        self,
        ownership: Ownership,
        owner: int,
        device: torch.device,
        rounds_values: bool = False,
        sends_changes: bool = False,
        scaled: bool = False,
        writes: bool = True,
    ) -> None:
        self.ownership, self.owner, self.device = ownership, owner, device
        self.layout, self.tensors = ownership.layout, ownership.tensors
        self.sizes = tuple(piece.end - piece.start for piece in ownership.pieces)
        count = len(ownership.tensors.sizes)
        whole = [(count + p.tensor, p.start, p.end) for p in ownership.whole]
        # (tensor, first entry, end) of every tensor of the passes.
        self.slices = (*((p.tensor, p.start, p.end) for p in ownership.sparse), *whole)
        assert not (sends_changes and (rounds_values or scaled))
        self.rounds_values, self.sends_changes, self.writes = rounds_values, sends_changes, writes
        self.has_master = rounds_values or sends_changes or scaled
        self.own = [i for i, piece in enumerate(ownership.pieces) if piece.owner == owner]
        self.common = torch.zeros(ownership.share, dtype=torch.float32, device=device)
        count = len(ownership.pieces) if scaled else 0
        self.scales = torch.ones(count, dtype=torch.float64, device=device)
        self._decay_factors = DeviceTable(count, 1, torch.float64, device)
        self._min_scale = 1.0
        self._padding_indices: Tensor | None = None

    def allocations(self) -> dict[str, StateAllocation]:
        """Return the layout of each kind of state."""
        state = _allocate([*_padded(self.layout), *(0 for _ in self.ownership.whole)], self.sizes)
        spans, end = [], 0
        for i, first in enumerate(self.ownership.buffer_offsets):
            start, end = (first, first + self.sizes[i]) if self.owns(i) else (end, end)
            spans.append((start, end))
        return {"state": state, "master": (spans, self.ownership.share) if self.has_master else ([], 0)}

    def buffered_payload(self, counts: Sequence[int], plan: PayloadPlan) -> BufferedPayload:
        """Return the layout of the payload buffer of the target density."""
        length, positions = self.ownership.rows(counts, plan.size_multiple)
        return BufferedPayload((PayloadChunk(0, len(self.sizes), 0, self.layout.replicas * length),), positions)

    def cut(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return views of the slices of contiguous tensors, (n,)."""
        return [tensors[i].view(-1)[start:end] for i, start, end in self.slices]

    def start_master(self, masters: list[Tensor], parameters: list[Tensor]) -> None:
        """Copy the parameters of owned slices into the master weights, if there are any."""
        parameters = self.cut(parameters) if masters else []
        for i in self.own if masters else ():
            values = parameters[i].reshape(-1).float()
            masters[i].copy_(values * self.scales[i].float() if self.scales.numel() else values)

    def begin_update(self, step: PassInputs) -> None:
        """Apply the weight decay of the step to the scales, if parameters are scaled and the step is applied.

        A weight w off the mask changes only by decay, w *= 1 - lr * wd. This is less than half a unit in the last place
        of BF16, so that a weight that is rounded to BF16 in every step would never change. Parameters therefore contain
        w / scale, rounded once when the entry was last on the mask, and the decay is applied to the scale, in FP64. The
        error is that of one rounding, however long an entry stays off the mask. Small scales are renormalized: they are
        divided, and the parameters multiplied, by a power of two, which is exact.
        """
        if not self.scales.numel():
            return
        if self._min_scale < MIN_WEIGHT_SCALE:
            powers = torch.exp2(torch.frexp(self.scales).exponent.double())
            for parameter, power in zip(self.cut(step.parameters) if self.writes else (), powers, strict=self.writes):
                parameter.mul_(power)
            self.scales.div_(powers)
            self._min_scale = 0.5
        factors = [1.0 - r.lr * r.weight_decay for r in step.rates]
        # A lower bound of the scales that needs no synchronization: it assumes that every step was applied.
        self._min_scale *= min(factors)
        decay = self._decay_factors.set([(value,) for value in factors]).view(-1)
        self.scales.mul_(torch.where(step.applied, decay, 1.0))

    def load_scales(self, scales: Tensor) -> None:
        """Set `scales` to loaded values."""
        self.scales.copy_(scales)
        self._min_scale = 1.0 if in_dry_run() else min([1.0, *scales.tolist()])

    def owns(self, piece: int) -> bool:
        """Return True if this rank owns the slice."""
        return self.ownership.pieces[piece].owner == self.owner

    def share_of(self, buffer: Tensor, piece: int) -> Tensor:
        """Return an owned slice in a buffer of this replica's owned entries."""
        return buffer[self.ownership.buffer_offsets[piece] :][: self.sizes[piece]]

    def stretches(self, counts: Sequence[int], first: int, end: int) -> list[list[tuple[int, int]]]:
        """Return every owner's ranges in a payload that is in place, for slices [first, end).

        Ranges are (first entry, length), in order.
        """
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.layout.replicas)]
        start = sum(counts[:first])
        for piece, count in zip(self.ownership.pieces[first:end], counts[first:end], strict=True):
            own = found[piece.owner]
            if own and sum(own[-1]) == start:
                own[-1] = (own[-1][0], own[-1][1] + count)
            else:
                own.append((start, count))
            start += count
        return found

    @property
    def longest_row(self) -> int:
        """Largest number of entries that one replica owns."""
        owned = [0] * self.layout.replicas
        for piece in self.ownership.pieces:
            owned[piece.owner] += piece.end - piece.start
        return max(owned)

    def clear_padding(self, payload: Tensor, positions: Sequence[int], counts: Sequence[int]) -> None:
        """Set the padding of every row of the payload buffer to zero."""
        if self._padding_indices is None:
            padding = torch.ones(payload.numel(), dtype=torch.bool, device="cpu")
            for start, count in zip(positions, counts, strict=True):
                padding[start : start + count] = False
            self._padding_indices = to_device(padding.nonzero().view(-1), self.device)
        payload.index_fill_(0, self._padding_indices, 0.0)

    def value_buffer(self, payload: Tensor) -> Tensor:
        """Return the payload buffer as the buffer of all owners' new values, FP32 or BF16 (replicas * row,)."""
        return payload.view(torch.bfloat16)[: payload.numel()] if self.rounds_values else payload

    def values(self, payload: Tensor) -> Tensor:
        """Return this rank's new values after `update`, in the dtype in which they are sent."""
        return payload.view(self.layout.replicas, -1)[self.owner].to(self.value_buffer(payload).dtype)


def _padded(layout: BlockLayout) -> list[int]:
    return [blocks * layout.block_size for blocks in layout.blocks]


def _allocate(padded: Sequence[int], sizes: Sequence[int]) -> StateAllocation:
    """Concatenate tensors of `sizes` entries, each padded to an entry of `padded`."""
    starts = [0, *accumulate(padded)]
    return [(a, a + min(n, limit)) for a, n, limit in zip(starts, sizes, padded, strict=False)], starts[-1]
