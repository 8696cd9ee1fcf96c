"""Who updates the parameters: every replica all of them, or each entry's owner for all.

What an updater is asked: which tensors the passes work on, where their state lies, and what of it is shared. How its
passes are computed is said by `torch_updates` and `triton_updates`.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from kernels.common.launching import DeviceTable, to_device
from kernels.common.offload import in_dry_run
from kernels.common.storage import StateAllocation
from kernels.scape.blocks import BlockLayout
from kernels.scape.ownership import Ownership
from kernels.scape.step import BufferedPayload, PassInputs, PayloadChunk, PayloadPlan

# A scale of weights that has become smaller is made larger, long before what it divides leaves the range of BF16.
LEAST_SCALE = 2.0**-16


class ReplicatedUpdate:
    """Every replica holds the moment and computes the same update for itself (SCAPE paper, Algorithm 1).

    Args:
        layout: the sparsified tensors in blocks.
        whole_sizes: entries of those that are sent whole, which follow them.
        has_master: parameters are kept in FP32 in the state, and those bound are copies in a narrower dtype.
        writes: whether new values go into the parameters bound; not where another replica of this process writes them.
    """

    # What each pass works on of what may be offloaded.
    touched: ClassVar[dict[str, tuple[str, ...]]] = {
        "pack": ("state",),
        "squares": ("state",),
        "update": ("state", "master"),
    }
    # Whether last step's moment on the mask is taken beside the payload.
    takes_moment = True
    # Whether the master stands in for the parameters, which become copies of it.
    steps_on_master = True

    def __init__(
        self, layout: BlockLayout, whole_sizes: Sequence[int], has_master: bool = False, writes: bool = True
    ) -> None:
        self.layout = self.tensors = layout
        self.sizes = (*layout.sizes, *whole_sizes)
        self.has_master, self.writes = has_master and writes, writes

    def rooms(self) -> dict[str, StateAllocation]:
        """Where state lies: padded to blocks, or to 16 bytes, so that all tensors are aligned."""
        whole = [-(-n // 4) * 4 for n in self.sizes[len(self.layout.sizes) :]]
        room = _room([*_padded(self.layout), *whole], self.sizes)
        return {"state": room, "master": room if self.has_master else ([], 0)}

    def in_buffer(self, counts: Sequence[int], plan: PayloadPlan) -> BufferedPayload:
        """Where the payload of the target density lies."""
        return BufferedPayload.of(counts, len(self.layout.sizes), plan)

    def start_master(self, masters: list[Tensor], parameters: list[Tensor]) -> None:
        """Copies the parameters into the master, where there is one."""
        for master, parameter in zip(masters, parameters, strict=bool(masters)):
            master.copy_(parameter.reshape(-1))

    def begin_update(self, step: PassInputs) -> None:
        """Before the passes of an update."""


class ShardedUpdate:
    """The owner of entries updates them and sends the new values to all (Algorithm 2 of the paper).

    The tensors of the passes are pieces, of one owner each. A replica's state is its own residual off A, zero on A;
    whole tensors have none. Of what it owns there are besides, FP32 (ownership.share,):

    common: first moment on A, the part of the residual that is the same on all replicas off A.
    master: parameters, where values travel in BF16 or all replicas hold scaled copies; else empty.

    The payload at the target density is a matrix with a row an owner.

    Args:
        owner: whose pieces are this rank's.
        rounds_values: values travel in BF16 at the target density; their owner keeps them in FP32.
        sends_changes: what travels is by how much the owner's FP32 values differ from the decayed copies that all
            replicas hold. So what a code loses of it is not lost: it is part of the next difference.
        scaled: the parameters bound are not the weights w but w / scales, in BF16, see `begin_update`.
        writes: as of `ReplicatedUpdate`.

    Attributes:
        own: numbers of the pieces that are this rank's.
        scales: float64 (pieces,), equal on all replicas and for all pieces of a tensor. Empty if not `scaled`.
    """

    # An owner's moments are n / N numbers and stay on the device; norm and update need no residual.
    touched: ClassVar[dict[str, tuple[str, ...]]] = {"pack": ("state",), "squares": (), "update": ("master",)}
    takes_moment = False  # it is the owner's, in `common`
    steps_on_master = False

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
        assert not (sends_changes and (rounds_values or scaled))
        self.rounds_values, self.sends_changes, self.writes = rounds_values, sends_changes, writes
        self.has_master = rounds_values or sends_changes or scaled
        self.own = [i for i, piece in enumerate(ownership.pieces) if piece.owner == owner]
        self.common = torch.zeros(ownership.share, dtype=torch.float32, device=device)
        count = len(ownership.pieces) if scaled else 0
        self.scales = torch.ones(count, dtype=torch.float64, device=device)
        self._left_by_decay = DeviceTable(count, 1, torch.float64, device)
        self._least_scale = 1.0
        self._padding_at: Tensor | None = None

    def rooms(self) -> dict[str, StateAllocation]:
        state = _room([*_padded(self.layout), *(0 for _ in self.ownership.whole)], self.sizes)
        spans, end = [], 0
        for i, place in enumerate(self.ownership.places):
            start, end = (place, place + self.sizes[i]) if self.owns(i) else (end, end)
            spans.append((start, end))
        return {"state": state, "master": (spans, self.ownership.share) if self.has_master else ([], 0)}

    def in_buffer(self, counts: Sequence[int], plan: PayloadPlan) -> BufferedPayload:
        length, positions = self.ownership.rows(counts, plan.size_multiple)
        return BufferedPayload((PayloadChunk(0, len(self.sizes), 0, self.layout.replicas * length),), positions)

    def start_master(self, masters: list[Tensor], parameters: list[Tensor]) -> None:
        for i in self.own if masters else ():
            values = parameters[i].reshape(-1).float()
            masters[i].copy_(values * self.scales[i].float() if self.scales.numel() else values)

    def begin_update(self, step: PassInputs) -> None:
        """Weight decay of the step, where parameters are scaled; unless it is not applied.

        A weight w off the mask changes by decay alone, w *= 1 - lr * wd, which is less than half a unit of BF16's last
        place: rounded to BF16 step by step it would not decay at all. So what is kept is w / scale, rounded once, when
        the entry was last on the mask; the decay of all entries is that of the scale, exact to FP64. However long an
        entry waits, its error stays that of one rounding. A scale that has become small moves into the numbers by a
        power of two, which rounds nothing.
        """
        if not self.scales.numel():
            return
        if self._least_scale < LEAST_SCALE:
            powers = torch.exp2(torch.frexp(self.scales).exponent.double())
            for parameter, power in zip(step.parameters if self.writes else (), powers, strict=self.writes):
                parameter.mul_(power)
            self.scales.div_(powers)
            self._least_scale = 0.5
        left = [1.0 - r.lr * r.weight_decay for r in step.rates]
        # What the host can tell without asking whether steps were applied: scales are this at least.
        self._least_scale *= min(left)
        decay = self._left_by_decay.set([(value,) for value in left]).view(-1)
        self.scales.mul_(torch.where(step.applied, decay, 1.0))

    def load_scales(self, scales: Tensor) -> None:
        """Takes back `scales`."""
        self.scales.copy_(scales)
        self._least_scale = 1.0 if in_dry_run() else min([1.0, *scales.tolist()])

    def owns(self, piece: int) -> bool:
        return self.ownership.pieces[piece].owner == self.owner

    def share_of(self, buffer: Tensor, piece: int) -> Tensor:
        """The stretch of an owned piece in a buffer of this replica's share."""
        return buffer[self.ownership.places[piece] :][: self.sizes[piece]]

    def stretches(self, counts: Sequence[int], first: int, end: int) -> list[list[tuple[int, int]]]:
        """Where every owner's entries of pieces [first, end) lie in a payload that is in place: (first entry, length),
        in order."""
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
        """Entries of the replica that owns most."""
        owned = [0] * self.layout.replicas
        for piece in self.ownership.pieces:
            owned[piece.owner] += piece.end - piece.start
        return max(owned)

    def clear_padding(self, payload: Tensor, positions: Sequence[int], counts: Sequence[int]) -> None:
        """Zeros behind every row of the payload buffer, where masks have lain."""
        if self._padding_at is None:
            padding = torch.ones(payload.numel(), dtype=torch.bool)
            for start, count in zip(positions, counts, strict=True):
                padding[start : start + count] = False
            self._padding_at = to_device(padding.nonzero().view(-1), self.device)
        payload.index_fill_(0, self._padding_at, 0.0)

    def wire(self, payload: Tensor) -> Tensor:
        """After `update`, in the payload buffer: room for the values of all owners, FP32 or BF16 (replicas * row,)."""
        return payload.view(torch.bfloat16)[: payload.numel()] if self.rounds_values else payload

    def values(self, payload: Tensor) -> Tensor:
        """This rank's values, of the dtype of the wire."""
        return payload.view(self.layout.replicas, -1)[self.owner].to(self.wire(payload).dtype)


def _padded(layout: BlockLayout) -> list[int]:
    return [blocks * layout.block_size for blocks in layout.blocks]


def _room(rooms: Sequence[int], sizes: Sequence[int]) -> StateAllocation:
    """Tensors of these sizes in rooms of theirs, one behind the other."""
    starts = [0, *accumulate(rooms)]
    return [(a, a + min(n, room)) for a, n, room in zip(starts, sizes, rooms, strict=False)], starts[-1]
