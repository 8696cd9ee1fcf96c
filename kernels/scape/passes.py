"""The passes of an optimizer step over all tensors of a model: what PyTorch and Triton both provide.

A step binds its tensors, then calls `pack`, has the payload averaged, asks for `squares`, and calls `update`. The
payload lies in a buffer of its own at the target density; while the mask is denser it lies in the gradients' own
storage (`compact` tells), so that nothing of the model's size is ever allocated. At the target density all this goes
part by part, each part some tensors, so that one can be exchanged while the next is packed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.common.offload import Window, check_host_memory, walk
from kernels.scape.blocks import BlockLayout, Mask
from kernels.scape.visits import Staleness, VisitRates


@dataclass(frozen=True)
class Rates:
    """One tensor's hyper-parameters in a step.

    scale: factor on the gradient, the number of replicas where these are summed.
    counted: whether the tensor counts in the norm over the model.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float = 1.0
    counted: bool = True


@dataclass(frozen=True)
class Part:
    """Tensors [first, end) of the model, and the stretch [start, stop) of the payload buffer that is theirs.

    From `filled` on it is padding.
    """

    first: int
    end: int
    start: int
    filled: int
    stop: int

    def __contains__(self, tensor: int) -> bool:
        return self.first <= tensor < self.end


class ScapePasses:
    """State, payload and passes of SCAPE on this rank's shards; sparsified tensors first, then those sent whole.

    Args:
        layout: the sparsified tensors in blocks.
        whole_sizes: entries of the others.
        selection: "block" or "tensor".
        density: the target density, for which there is a payload buffer.
        replica: whose run to select in; None selects in all of them (a dry run, where nobody else does).
        chunk_entries: the payload goes in parts of about so many entries; 0 for one part.
        granularity: each part's stretch is padded to a multiple of so many entries.
        carries: keep what rounding the payload loses, FP32 per entry, and add it to the next new moment.
        staleness: how steps of newly entered entries are scaled; None for not at all.
        holds_master: parameters are kept in FP32 here, and `bind` is given copies of them in a narrower dtype.
        offload: which of "state" and "master" lie in host memory, see `offload.Window`.

    `state` is the flat buffer, on the host where it is offloaded; `states` are its tensors as the passes see them, on
    the device. Likewise `master` and `masters`.
    """

    # What each pass works on of what may be offloaded.
    _touched: ClassVar[dict[str, tuple[str, ...]]] = {
        "pack": ("state",),
        "squares": ("state",),
        "update": ("state", "master"),
    }

    def __init__(
        self,
        layout: BlockLayout,
        whole_sizes: Sequence[int],
        selection: str,
        density: float,
        replica: int | None,
        device: torch.device,
        chunk_entries: int = 0,
        granularity: int = 1,
        carries: bool = False,
        staleness: Staleness | None = None,
        holds_master: bool = False,
        offload: Sequence[str] = (),
    ) -> None:
        self.layout, self.selection, self.device, self.density = layout, selection, device, density
        self.sparsified = len(layout.sizes)
        self.sizes = (*layout.sizes, *whole_sizes)
        self.first_run, self.runs = (0, layout.replicas) if replica is None else (replica, 1)
        self._padded = self._pad()
        self._counts_at: tuple[float, list[int]] = (0.0, [])
        self._whole = (Part(0, len(self.sizes), 0, 0, 0),)
        self._parts, self._places = self._cut(chunk_entries, granularity) if density < 1.0 else ((), [])
        self.entries = self._parts[-1].stop if self._parts else 0  # of the payload buffer
        self.holds_master, self._offload = holds_master, tuple(offload)
        self._allocate(sum(self._padded), self.entries, self.entries if carries else 0)
        self.visits = None if staleness is None else self._rates_of_visits(staleness.columns)
        self.most_stale, self.keeps = (1.0, 1.0) if staleness is None else (staleness.most, staleness.keeps)
        self.compact = False
        self.release()

    def _pad(self) -> list[int]:
        """Entries of every tensor's state: padded to blocks, or to 16 bytes, so that all are aligned."""
        blocks = [blocks * self.layout.block_size for blocks in self.layout.blocks]
        return blocks + [-(-n // 4) * 4 for n in self.sizes[self.sparsified :]]

    def _allocate(self, state: int, payload: int, residual: int) -> None:
        spans = self._spans()
        self._keep(spans, state, spans if self.holds_master else [], state if self.holds_master else 0)
        self.payload, self.moment_on_mask, self.wire_residual = (self._zeros(n) for n in (payload, payload, residual))

    def _spans(self) -> list[tuple[int, int]]:
        """Where every tensor's state lies in the flat buffer, padding left out."""
        starts = [0, *accumulate(self._padded)]
        return [(a, a + min(n, room)) for a, n, room in zip(starts, self.sizes, self._padded, strict=False)]

    def _keep(
        self, spans: list[tuple[int, int]], entries: int, master_spans: list[tuple[int, int]], master_entries: int
    ) -> None:
        """Makes `state` and `master`: zeros, FP32 (entries,), and their tensors where they lie for the passes."""
        kinds = {"state": (spans, entries), "master": (master_spans, master_entries)}
        # Not where the two buffers would hold all of it.
        away = [name for name in self._offload if Window.pays(*kinds[name])]
        check_host_memory(4 * sum(kinds[name][1] for name in away))
        self.windows = {name: Window(*kinds[name], self.device) for name in away}
        flat = {k: self.windows[k].host if k in away else self._zeros(n) for k, (_, n) in kinds.items()}
        self.state, self.master = flat["state"], flat["master"]
        self.states, self.masters = (
            self.windows[k].views if k in away else [flat[k][start:end] for start, end in where]
            for k, (where, _) in kinds.items()
        )

    def kept(self, name: str) -> list[Tensor]:
        """The tensors of "state" or "master" where they are kept, on the host where offloaded; up to date."""
        if name not in self.windows:
            return self.states if name == "state" else self.masters
        self.finish()
        return [self.windows[name].host[start:end] for start, end in self.windows[name].spans]

    def finish(self) -> None:
        """Waits until what is offloaded lies in host memory. Call it before `state` or `master` is read."""
        for window in self.windows.values():
            window.finish()

    def _walk(self, part: Part, name: str) -> Iterator[Part]:
        """The part's tensors, those at a time whose offloaded state is on the device."""
        windows = [self.windows[kind] for kind in self._touched[name] if kind in self.windows]
        if name == "squares" and self.compact:
            windows = []  # the payload has all that is needed
        if not windows:
            yield part
            return
        parts = [(p.first, p.end) for p in self.parts]
        for first, end in walk(windows, (part.first, part.end), parts, changed=name != "squares"):
            yield replace(part, first=first, end=end)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def _rates_of_visits(self, columns: Sequence[int]) -> VisitRates:
        return VisitRates(self.layout.sizes, columns, self.device)

    def use(self, state: Tensor, payload: Tensor, moment_on_mask: Tensor, wire_residual: Tensor) -> None:
        """Takes these buffers, FP32 and aligned to 16 bytes, for its own; of the sizes of those that it has."""
        self.state, self.payload = state, payload
        self.moment_on_mask, self.wire_residual = moment_on_mask, wire_residual
        self.states = [state[..., start:end] for start, end in self._spans()]
        self.windows, self.master, self.masters = {}, self._zeros(0), []

    def _cut(self, chunk_entries: int, granularity: int) -> tuple[tuple[Part, ...], list[int]]:
        """The parts of the payload at the target density, and where each tensor's entries start in the buffer."""
        counts = self.payload_counts(self.density)
        chunks = max(1, round(sum(counts) / chunk_entries)) if chunk_entries else 1
        parts: list[Part] = []
        places: list[int] = []
        first = start = stop = taken = 0
        for i, count in enumerate(counts):
            places.append(stop)
            stop += count
            taken += count
            # A part ends where its share of the whole is reached; a tensor is never cut.
            if i + 1 == len(counts) or taken * chunks >= sum(counts) * (len(parts) + 1):
                filled, stop = stop, -(-stop // granularity) * granularity
                parts.append(Part(first, i + 1, start, filled, stop))
                first, start = i + 1, stop
        return tuple(parts), places

    @property
    def skips_new(self) -> bool:
        """Whether newly entered entries count as zeros in the selection."""
        return self.keeps < 1.0 and self.compact and not (self.in_use.dense or self.previous.dense)

    def learn_visits(self, part: Part, applied: Tensor) -> VisitRates | None:
        """The rates at which the mask visits rows and columns, renewed once a step; None where no step needs them."""
        if self.visits is None or self.in_use.dense or self.previous.dense:
            return None
        if part.first == 0:
            self.count_entering(self.visits)
            self.visits.learn(applied)
        return self.visits

    def count_entering(self, visits: VisitRates) -> None:
        """Newly entered entries of every row and column into `visits.counts`."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the step goes by: parts of the payload buffer where `compact`, else one of all tensors."""
        return self._parts if self.compact else self._whole

    def positions(self) -> list[int]:
        """Where each tensor's entries start in the payload of this step."""
        return self._places if self.compact else [0, *accumulate(self.counts)][:-1]

    @property
    def carrying(self) -> bool:
        """Whether rounding lost something in the step before this one, on its mask P."""
        return self.wire_residual.numel() > 0 and self.at_target(self.previous)

    def at_target(self, mask: Mask) -> bool:
        """Whether a payload on this mask has the buffer's shape."""
        return bool(self._parts) and (
            mask.density == self.density or self.payload_counts(mask.density) == self.payload_counts(self.density)
        )

    def keep_wire_residual(self, part: Part, lost: Tensor, applied: Tensor) -> None:
        """Takes what rounding lost, FP32 (part.stop - part.start,), of an applied step for the next one to add."""
        own = self.wire_residual[..., part.start : part.stop]
        own.copy_(torch.where(applied, lost, own))

    def wire_residual_of(self, tensor: int) -> Tensor:
        """What is kept of one tensor, FP32 (payload entries,): of those of its entries that P has, in order."""
        return self.wire_residual[..., self._places[tensor] :][..., : self.payload_counts(self.density)[tensor]]

    def release(self) -> None:
        """Lets go of the step's tensors: a gradient that was kept would be there twice in the next backward pass."""
        self.parameters: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def payload_counts(self, density: float) -> list[int]:
        """Entries of each tensor in the payload at this density."""
        if self._counts_at[0] != density:
            sparse = [self.layout.nnz(i, density, self.selection) for i in range(self.sparsified)]
            self._counts_at = density, [*sparse, *self.sizes[self.sparsified :]]
        return self._counts_at[1]

    def payload_entries(self, density: float) -> int:
        return sum(self.payload_counts(density))

    def bind(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        rates: list[Rates],
        in_use: Mask,
        previous: Mask,
        next_density: float,
    ) -> None:
        """The tensors of the step that follows, in the order of `sizes`; `release` lets go of them.

        parameters: local shards, any floating-point dtype; written by `update`. With a master, copies of it.
        gradients: flat and contiguous; their storage is scratch space from here on.
        in_use, previous: A and P.
        next_density: of the mask to select.
        """
        self.parameters, self.gradients, self.rates = parameters, gradients, rates
        self.in_use, self.previous, self.next_density = in_use, previous, next_density
        self.counts = self.payload_counts(in_use.density)
        self.compact = self.at_target(in_use)

    def pack(self, part: Part, applied: Tensor) -> None:
        """mt into payload and residual, and the selection of this rank's part of the next mask; parts in their order.

        applied: bool (); false leaves the state as it is, and payload and selection undefined.
        """
        for some in self._walk(part, "pack"):
            self._pack_tensors(some, applied)

    def _pack_tensors(self, part: Part, applied: Tensor) -> None:
        raise NotImplementedError

    def selected(self, applied: Tensor) -> Tensor | None:
        """After all parts are packed: what was selected, for the wire.

        Returns uint8, one stretch of `layout.wire_bytes` a run; None where there is nothing to tell.
        """
        raise NotImplementedError

    def pack_all(self, applied: Tensor) -> Tensor | None:
        """All parts, and what was selected."""
        for part in self.parts:
            self.pack(part, applied)
        return self.selected(applied)

    def pieces(self) -> Any:
        """The payload where it is not compact, for an all-reduce in chunks."""
        raise NotImplementedError

    def squares(self, part: Part) -> Tensor:
        """FP64 (): sum of squares of the synchronised gradient, from the averaged payload. Call it once a part."""
        # One sum over all, so that it does not depend on how many tensors are at hand at a time.
        sums = [partial for some in self._walk(part, "squares") for partial in self._squares_of(some)]
        return torch.cat([self._zeros(1), *sums]).sum(dtype=torch.float64)

    def _squares_of(self, part: Part) -> list[Tensor]:
        """Sums of squares of stretches of the tensors, FP32 (any number,), in an order that no cut changes."""
        raise NotImplementedError

    def squares_all(self) -> Tensor:
        """FP64 (): the sum over all parts."""
        return torch.stack([self.squares(part) for part in self.parts]).sum()

    def update(
        self,
        part: Part,
        clip: Tensor,
        clip_moment: bool,
        steps: Tensor,
        applied: Tensor,
    ) -> None:
        """The AdamS step on A and weight decay everywhere, after `squares`.

        Args:
            clip: FP32 (), factor on the synchronised gradient.
            steps: float64 (), applied steps, this one included.
        """
        visits = self.learn_visits(part, applied)
        for some in self._walk(part, "update"):
            self._update_tensors(some, clip, clip_moment, steps, visits, applied)

    def _update_tensors(
        self,
        part: Part,
        clip: Tensor,
        clip_moment: bool,
        steps: Tensor,
        visits: VisitRates | None,
        applied: Tensor,
    ) -> None:
        raise NotImplementedError

    def start_master(self, parameters: list[Tensor]) -> None:
        """Copies the parameters, in the order of `sizes`, into the master, where there is one."""
        for master, parameter in zip(self.kept("master"), parameters, strict=bool(self.masters)):
            master.copy_(parameter.reshape(-1))

    def update_all(self, *arguments: Any) -> None:
        """All parts, with the arguments of `update` behind the part; then lets go of the step's tensors."""
        for part in self.parts:
            self.update(part, *arguments)
        self.release()

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        """previous = in_use, in_use = the mask that the runs' `received` selections make.

        received: uint8, `layout.wire_bytes(density)` of every replica; None for a mask of all ones.
        """
        raise NotImplementedError
