"""Inputs of the passes of a step, and the layout of its payload."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.kernels.scape.blocks import Mask


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
