"""Triton passes that depend on the updater: every replica updates all entries, or each entry has an owner."""

from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import as_flag, to_device
from torchtitan_scape.kernels.dense.triton_passes import DTYPES
from torchtitan_scape.kernels.scape import triton_kernels, triton_owner
from torchtitan_scape.kernels.scape.blocks import Mask
from torchtitan_scape.kernels.scape.step import PayloadChunk, PayloadPlan
from torchtitan_scape.kernels.scape.triton_passes import TritonPasses
from torchtitan_scape.kernels.scape.updaters import ReplicatedUpdate, ShardedUpdate

_SQUARED = 4096  # entries of the payload per program


def triton_passes(
    updater: ReplicatedUpdate | ShardedUpdate, plan: PayloadPlan, device: torch.device, **options: Any
) -> TritonPasses:
    """Return the passes of a step on Triton kernels. Arguments are those of `ScapePasses`."""
    if isinstance(updater, ShardedUpdate):
        return TritonSharded(updater, plan, device, **options)
    return TritonReplicated(updater, plan, device, **options)


class TritonReplicated(TritonPasses):
    """Passes of `ReplicatedUpdate`: every replica updates all entries.

    At the target density `moment_on_mask` contains the first moment of the sparsified tensors between two steps, see
    `triton_kernels`. `store_moments` copies it to the state.
    """

    # `applied` of the last step, if it stored the moments on A in `moment_on_mask`.
    _last_step: Tensor | None = None
    _masks: tuple[Mask, Mask]
    _payload_tiles: tuple[Tensor, list[int], Tensor] | None = None

    @property
    def leaves_state(self) -> bool:
        return self.compact

    def begin_step(self) -> None:
        self._last_step = None  # if it was not followed by `rotate`, it was not applied
        if not self.compact:
            self.store_moments()
        self._masks = self.step.in_use, self.step.previous

    def rotate(self, received: Tensor | None, density: float, in_use: Tensor, previous: Tensor) -> None:
        self.moments_in_payload, self._last_step = self._last_step is not None, None
        super().rotate(received, density, in_use, previous)

    def store_moments(self) -> None:
        applied = self._last_step
        if not self.moments_in_payload and applied is None:
            return
        in_use, previous = self._masks
        lists = self.lists_of(in_use if applied is not None else None, previous if self.moments_in_payload else None)
        flag = as_flag(torch.zeros((), dtype=torch.bool, device=self.device) if applied is None else applied)
        count = self.sparsified
        for first, end in self.storage.walk(("state",), (0, count), [(0, count)], changed=True):
            ranges = tuple(r for r in self.sparse if first <= r[0] < end)
            for listed, _, _ in self.tiles.lists(ranges, self.any_kinds):
                launching.launch(
                    triton_kernels.store_moments_kernel,
                    (len(listed),),
                    listed,
                    self.table,
                    *lists,
                    self.moment_on_mask,
                    flag,
                    int(self.moments_in_payload),
                    warps=self.tiles.warps,
                    ENTRIES=self.most_entries(self.tiles),
                    BLOCK=self.layout.block_size,
                )
        self.moments_in_payload, self._last_step = False, None

    def pack_part(self, part: PayloadChunk) -> None:
        for ranges, select in ((self.selected_blocks, True), (self.other_blocks, False), (self.dense, False)):
            self.pack_ranges(part, ranges, select, HAS_STATE=True, HAS_COMMON=False)

    def squares_of(self, part: PayloadChunk) -> list[Tensor]:
        if not self.compact:
            return self.squares_of_tiles(part, self.all, owned=False)
        if self._payload_tiles is None:
            self._payload_tiles = self.tile_payload()
        tiles, first, partial = self._payload_tiles
        launching.launch(
            triton_kernels.squares_kernel,
            (first[part.end] - first[part.first],),
            tiles,
            first[part.first],
            self.rates,
            self.payload,
            self.moment_on_mask,
            partial,
            warps=4,
            TILE=_SQUARED,
        )
        return [partial] if part.end == len(self.sizes) else []

    def tile_payload(self) -> tuple[Tensor, list[int], Tensor]:
        """Return the tiles of the payload buffer, int64 (tiles, 3), the first one of each tensor and the end, and the
        buffer of their sums.
        """
        tiles: list[Tensor] = []
        first = [0]
        for i, (start, count) in enumerate(zip(self.payload_layout.positions, self.counts, strict=True)):
            at = torch.arange(0, count, _SQUARED, dtype=torch.int64, device="cpu")
            tiles.append(torch.stack((torch.full_like(at, i), start + at, (count - at).clamp(max=_SQUARED)), dim=1))
            first.append(first[-1] + len(at))
        partial = torch.zeros(first[-1], dtype=torch.float32, device=self.device)
        return to_device(torch.cat(tiles), self.device), first, partial

    def update_part(self, part: PayloadChunk) -> None:
        if self.compact and self._last_step is None:
            self._last_step = self.step.applied.clone()  # the next check overwrites the tensor
        last, writes = self.moment_on_mask, self.updater.writes
        self.update_ranges(triton_kernels.update_kernel, part, self.all, last, WRITES=writes)
        if writes:
            self.writable.store(range(part.first, part.end))


class TritonSharded(TritonPasses):
    """Passes of `ShardedUpdate`: each entry's owner updates it for all replicas."""

    updater: ShardedUpdate

    def __init__(self, updater: ShardedUpdate, plan: PayloadPlan, device: torch.device, **options: Any) -> None:
        super().__init__(updater, plan, device, **options)
        self._owned = tuple(r for r in self.all if updater.owns(r[0]))
        # (blocks, whether the next mask is selected in them, whether the slices are owned). A dry run also selects in
        # the slices of other owners.
        self._packed = [
            (tuple(r for r in blocks if updater.owns(r[0]) == owned), select, owned)
            for owned in (True, False)
            for blocks, select in ((self.selected_blocks, True), (self.other_blocks, False))
        ]

    def owned_addresses(self, i: int) -> tuple[int, int]:
        if not self.updater.owns(i):
            return 0, 0
        common = self.updater.share_of(self.updater.common, i).data_ptr()
        return common, self.masters[i].data_ptr() if self.masters else 0

    def pack_part(self, part: PayloadChunk) -> None:
        self.pack_ranges(part, self.dense, HAS_STATE=False, HAS_COMMON=False)
        for blocks, select, owned in self._packed:
            self.pack_ranges(part, blocks, select, HAS_STATE=True, HAS_COMMON=owned)

    def squares_of(self, part: PayloadChunk) -> list[Tensor]:
        return self.squares_of_tiles(part, self._owned, owned=True)

    def update_part(self, part: PayloadChunk) -> None:
        owner = self.updater
        has_scales = owner.scales.numel() > 0
        self.update_ranges(
            triton_owner.owned_update_kernel,
            part,
            self._owned,
            owner.scales if has_scales else self.unused,
            HAS_MASTER=bool(self.masters),
            HAS_SCALES=has_scales,
            CHANGES=owner.sends_changes,
        )

    def write(self, own_only: bool = False) -> None:
        owner = self.updater
        if not owner.writes:
            return
        whole = PayloadChunk(0, len(self.sizes), 0, 0)
        for form, some in self.forms(whole, self._owned if own_only else self.all):
            for listed, full, dtype in self.tiles.lists(some, self.parameter_kinds):
                self.launch(
                    triton_owner.write_kernel,
                    self.tiles,
                    listed,
                    owner.value_buffer(self.payload),
                    self.list_in_use(form),
                    self.applied,
                    form=form,
                    ALIGNED_TILE=full,
                    DTYPE=DTYPES[dtype],
                    DECAYS=owner.scales.numel() == 0,
                    CHANGES=owner.sends_changes,
                )
        self.writable.store()
