"""What the passes of a step are given, and where its payload lies."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from torch import Tensor

from kernels.common.rates import Rates
from kernels.scape.blocks import Mask


@dataclass(frozen=True)
class PassInputs:
    """Tensors of a step, in the order of the passes' `sizes`, and its scalars.

    parameters: local shards, any floating-point dtype; written by `update`. With a master, copies of it.
    gradients: flat and contiguous; their storage is scratch space from here on.
    in_use, previous: A and P.
    next_density: of the mask to select.
    applied: bool (); false leaves all that lasts as it is, and payload and selection undefined.
    steps: float64 (), applied steps, this one included; read by `update`, as the following are.
    clip: FP32 (), factor on the synchronised gradient.
    clip_moment: whether the first moment sees it, too; false is the paper's printed form.
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
        """Whether neither of the masks is all ones."""
        return not (self.in_use.dense or self.previous.dense)


@dataclass(frozen=True)
class PayloadChunk:
    """Tensors [first, end) of the model, and the stretch [start, stop) of the payload buffer that is theirs.

    padding: what of the stretch is no tensor's, (start, stop) each.
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
    """What is selected, and how the payload goes.

    selection: "block" or "tensor".
    density: the target density, for which there is a payload buffer.
    replica: whose run to select in; None selects in all of them (a dry run, where nobody else does).
    chunk_entries: the payload goes in parts of about so many entries; 0 for one part.
    granularity: each part's stretch is padded to a multiple of so many entries.
    unit: entries that are coded together: tensors that are sent whole, whose values are of another size, begin at a
        multiple of it.
    carries: keep what coding the payload loses, FP32 per entry, and add it to the next new moment.
    """

    selection: str
    density: float
    replica: int | None
    chunk_entries: int = 0
    chunk_multiple: int = 1
    size_multiple: int = 1
    keeps_wire_error: bool = False


@dataclass(frozen=True)
class BufferedPayload:
    """The payload lies in a buffer of its own: at the target density, part by part, so that one part can be exchanged
    while the next is packed.

    positions: where each tensor's entries start.
    """

    compact: ClassVar[bool] = True
    parts: tuple[PayloadChunk, ...]
    positions: Sequence[int]

    @property
    def entries(self) -> int:
        return self.parts[-1].stop

    @staticmethod
    def of(counts: Sequence[int], sparsified: int, plan: PayloadPlan) -> "BufferedPayload":
        """Of tensors with so many entries each, `sparsified` ones first: one behind the other, none cut."""
        chunks = max(1, round(sum(counts) / plan.chunk_entries)) if plan.chunk_entries else 1
        parts: list[PayloadChunk] = []
        positions: list[int] = []
        padding: list[tuple[int, int]] = []
        first = start = stop = taken = 0

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
            taken += count
            # A part ends where its share of the whole is reached.
            if i + 1 == len(counts) or taken * chunks >= sum(counts) * (len(parts) + 1):
                stop = pad(plan.chunk_multiple)
                parts.append(PayloadChunk(first, i + 1, start, stop, tuple(padding)))
                first, start = i + 1, stop
                padding.clear()
        return BufferedPayload(tuple(parts), positions)


@dataclass(frozen=True)
class InPlacePayload:
    """The payload of a denser mask lies in the gradients' own storage, all of it one part: nothing of the model's size
    is ever allocated. Last step's moment on it lies in the state."""

    compact: ClassVar[bool] = False
    parts: tuple[PayloadChunk, ...]
    positions: Sequence[int]

    @staticmethod
    def of(counts: Sequence[int]) -> "InPlacePayload":
        return InPlacePayload((PayloadChunk(0, len(counts), 0, 0),), [0, *accumulate(counts)][:-1])
