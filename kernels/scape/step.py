"""Inputs of the passes of a step, the layout of its payload, and the owners of a sharded update (Algorithm 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.launching import DeviceTable, to_device
from torchtitan_scape.kernels.common.tensors import Rates, in_dry_run
from torchtitan_scape.kernels.scape.blocks import Mask, Ownership


@dataclass(frozen=True)
class PassInputs:
    """Tensors of a step, sparsified ones first, and its scalars.

    Attributes:
        parameters: Local shards, any floating-point dtype; written by `update`, or by `write` with a sharded update.
        gradients: Contiguous, of any shape; their storage is used as scratch space.
        rates: Hyper-parameters of each tensor of the passes, in the order of their `sizes`.
        in_use: The current mask, A.
        previous: The mask of the previous step, P.
        next_density: Density of the mask that this step selects.
        applied: bool (). If false, no state changes, and payload and selection are undefined.
        steps: float64 (), applied steps, this one included. This and the following are read by `update`.
        clip: FP32 (), clip factor of the synchronized gradient.
        clip_moment: Apply the factor to the first moment too; false is the form printed in the paper.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    rates: list[Rates]
    in_use: Mask
    previous: Mask
    next_density: float
    applied: Tensor
    steps: Tensor
    clip: Tensor
    clip_moment: bool = True

    @property
    def masked(self) -> bool:
        """True if neither mask has all bits set."""
        return not (self.in_use.dense or self.previous.dense)


@dataclass(frozen=True)
class PayloadChunk:
    """Tensors [first, end) of the model, and their slice [start, stop) of the payload buffer.

    padding: (start, stop) of the ranges of the slice that belong to no tensor.
    """

    first: int
    end: int
    start: int
    stop: int
    padding: tuple[tuple[int, int], ...] = ()

    def __contains__(self, tensor: int) -> bool:
        return self.first <= tensor < self.end


@dataclass(frozen=True)
class PayloadPlan:
    """Selection of the mask, and division of the payload into chunks.

    Attributes:
        selection: "block" or "tensor".
        density: Target density, for which a payload buffer exists.
        replica: Replica whose run is selected; None selects in all runs (a dry run, without other replicas).
        chunk_entries: Approximate entries of a chunk; 0 for a single chunk.
        chunk_multiple: Each chunk is padded to a multiple of this number of entries.
        size_multiple: Tensors that are not sparsified begin at a multiple of it, the block size of the codec.
        keeps_code_error: Store the quantization error of the payload, FP32 per entry, and add it to the next moment.
    """

    selection: str
    density: float
    replica: int | None
    chunk_entries: int = 0
    chunk_multiple: int = 1
    size_multiple: int = 1
    keeps_code_error: bool = False


@dataclass(frozen=True)
class PayloadLayout:
    """Location of the payload of a step.

    Attributes:
        compact: True for a separate buffer, at the target density: one chunk can be exchanged while the next one is
            packed. False for a mask that is denser than the target, whose payload is a single chunk in the storage of
            the gradients. This avoids an allocation of the size of the model, and the moment of the last step is read
            from the state.
        parts: Chunks of the payload.
        positions: First payload entry of each tensor.
    """

    compact: bool
    parts: tuple[PayloadChunk, ...]
    positions: Sequence[int]

    @property
    def entries(self) -> int:
        """Size of the buffer."""
        return self.parts[-1].stop

    @staticmethod
    def buffered(counts: Sequence[int], sparsified: int, plan: PayloadPlan) -> "PayloadLayout":
        """Return the layout in a buffer of tensors with `counts` payload entries each, the `sparsified` ones first."""
        chunks = max(1, round(sum(counts) / plan.chunk_entries)) if plan.chunk_entries else 1
        parts: list[PayloadChunk] = []
        positions: list[int] = []
        padding: list[tuple[int, int]] = []
        first = start = stop = assigned = 0

        def pad(multiple: int) -> int:
            end = -(-stop // multiple) * multiple
            if end > stop:
                padding.append((stop, end))
            return end

        for i, count in enumerate(counts):
            if i == sparsified:
                stop = pad(plan.size_multiple)
            positions.append(stop)
            stop += count
            assigned += count
            # A chunk ends when its share of all entries is reached.
            if i + 1 == len(counts) or assigned * chunks >= sum(counts) * (len(parts) + 1):
                stop = pad(plan.chunk_multiple)
                parts.append(PayloadChunk(first, i + 1, start, stop, tuple(padding)))
                first, start = i + 1, stop
                padding.clear()
        return PayloadLayout(True, tuple(parts), positions)

    @staticmethod
    def in_place(counts: Sequence[int]) -> "PayloadLayout":
        """Return the layout in the gradients of tensors with `counts` payload entries each."""
        return PayloadLayout(False, (PayloadChunk(0, len(counts), 0, 0),), [0, *accumulate(counts)][:-1])


# Scales below this limit are renormalized, long before the scaled weights leave the range of BF16.
MIN_WEIGHT_SCALE = 2.0**-16


class ShardedUpdate:
    """The owner of an entry updates it and sends the new value to all replicas.

    The tensors of the passes are slices with one owner each. A replica's state is its local residual off A, zero on A;
    tensors that are not sparsified have none. For the entries that it owns, FP32 (ownership.share,), a replica also has

    - `common`: the first moment on A, and off A the part of the residual that is equal on all replicas;
    - `master`: FP32 weights, if the parameters are in BF16; new values are then sent in BF16. Empty otherwise.

    The payload at the target density is a matrix with one row per owner.

    Args:
        ownership: Slices and their owners.
        replica: This replica.
        device: Device of the tensors.
        scaled: The bound parameters are w / scales in BF16 instead of the weights w; see `decay_scales`.

    Attributes:
        slices: (tensor, first entry, end) of every slice.
        own: Indices of the slices that this replica owns.
        scales: float64 (slices,), equal on all replicas and for all slices of a tensor. Empty if not `scaled`.
    """

    def __init__(self, ownership: Ownership, replica: int, device: torch.device, scaled: bool = False) -> None:
        self.ownership, self.replica, self.device, self.scaled = ownership, replica, device, scaled
        self.sizes = tuple(piece.end - piece.start for piece in ownership.pieces)
        sparse = len(ownership.tensors.sizes)
        whole = [(sparse + p.tensor, p.start, p.end) for p in ownership.whole]
        self.slices = (*((p.tensor, p.start, p.end) for p in ownership.sparse), *whole)
        self.own = [i for i, piece in enumerate(ownership.pieces) if piece.owner == replica]
        self.common = torch.zeros(ownership.share, dtype=torch.float32, device=device)
        self.master = torch.zeros(ownership.share if scaled else 0, dtype=torch.float32, device=device)
        count = len(ownership.pieces) if scaled else 0
        self.scales = torch.ones(count, dtype=torch.float64, device=device)
        self._decay_factors = DeviceTable(count, 1, torch.float64, device)
        self._min_scale = 1.0
        self._padding_indices: Tensor | None = None

    # ------------------------------------------------------------------------------------------ slices

    def owns(self, piece: int) -> bool:
        """Return True if this replica owns the slice."""
        return self.ownership.pieces[piece].owner == self.replica

    def cut(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return views of the slices of contiguous tensors, (n,)."""
        return [tensors[i].view(-1)[start:end] for i, start, end in self.slices]

    def share_of(self, buffer: Tensor, piece: int) -> Tensor:
        """Return an owned slice in a buffer of this replica's owned entries."""
        return buffer[self.ownership.buffer_offsets[piece] :][: self.sizes[piece]]

    # ----------------------------------------------------------------------------------------- payload

    def payload_layout(self, counts: Sequence[int], plan: PayloadPlan) -> PayloadLayout:
        """Return the layout of the payload buffer of the target density."""
        length, positions = self.ownership.rows(counts, plan.size_multiple)
        entries = self.ownership.tensors.replicas * length
        return PayloadLayout(True, (PayloadChunk(0, len(self.sizes), 0, entries),), positions)

    def stretches(self, counts: Sequence[int], first: int, end: int) -> list[list[tuple[int, int]]]:
        """Return every owner's ranges in a payload that is in place, for slices [first, end).

        Ranges are (first entry, length), in order.
        """
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.ownership.tensors.replicas)]
        start = sum(counts[:first])
        for piece, count in zip(self.ownership.pieces[first:end], counts[first:end], strict=True):
            own = rows[piece.owner]
            if own and sum(own[-1]) == start:
                own[-1] = (own[-1][0], own[-1][1] + count)
            else:
                own.append((start, count))
            start += count
        return rows

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
        return payload.view(torch.bfloat16)[: payload.numel()] if self.scaled else payload

    def values(self, payload: Tensor) -> Tensor:
        """Return this replica's new values after `update`, in the dtype in which they are sent."""
        return payload.view(self.ownership.tensors.replicas, -1)[self.replica].to(self.value_buffer(payload).dtype)

    # ------------------------------------------------------------------------------------ BF16 weights

    def start_master(self, parameters: list[Tensor]) -> None:
        """Copy the parameters of owned slices into the master weights, if there are any."""
        parts = self.cut(parameters)
        for i in self.own if self.scaled else ():
            self.share_of(self.master, i).copy_(parts[i].reshape(-1).float() * self.scales[i].float())

    def decay_scales(self, step: PassInputs, writes: bool) -> None:
        """Apply the weight decay of the step to the scales, if parameters are scaled and the step is applied.

        A weight w off the mask changes only by decay, w *= 1 - lr * wd. This is less than half a unit in the last place
        of BF16, so that a weight that is rounded to BF16 in every step would never change. Parameters therefore contain
        w / scale, rounded once when the entry was last on the mask, and the decay is applied to the scale, in FP64. The
        error is that of one rounding, however long an entry stays off the mask. Small scales are renormalized: they are
        divided, and the parameters multiplied, by a power of two, which is exact.
        """
        if not self.scaled:
            return
        if self._min_scale < MIN_WEIGHT_SCALE:
            powers = torch.exp2(torch.frexp(self.scales).exponent.double())
            for parameter, power in zip(self.cut(step.parameters) if writes else (), powers, strict=writes):
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
