"""Lists of the entries of the masks A and P, for the kernels on listed entries."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import TileSchedule
from torchtitan_scape.kernels.scape import triton_kernels
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Mask, entries_per_block


class MaskLists:
    """The position of every entry of A and P in its block, int16 (blocks, k), ascending.

    They are written when a mask is decoded. A mask that was changed otherwise, as by loading a checkpoint, is listed
    when it is needed.

    Args:
        layout: Blocks of the masks.
        density: Target density, which determines k.
        device: Device of the lists.
    """

    def __init__(self, layout: BlockLayout, density: float, device: torch.device) -> None:
        self.k = entries_per_block(density, layout.block_size)
        shape = layout.total_blocks, self.k
        self._lists = [torch.zeros(shape, dtype=torch.int16, device=device) for _ in range(2)]
        self._identities: list[tuple[int, int, bool] | None] = [None, None]  # of the masks when they were listed

    def rotate(self, in_use: Tensor, previous: Tensor) -> Tensor:
        """Make the list of A that of P, for masks that will be rotated. Return the buffer for the list of the new A.

        Call `decoded` when the list is written.
        """
        known = self._identities[0] == _identity(in_use)
        self._lists.reverse()
        self._identities = [None, _identity(previous) if known else None]
        return self._lists[0]

    def decoded(self, in_use: Tensor) -> None:
        """Record that the list of A is that of these bits."""
        self._identities[0] = _identity(in_use)

    def of(
        self, masks: Sequence[Mask | None], tiles: TileSchedule, lists: Sequence[Tensor], table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the lists of A and P, rebuilt if necessary. That of a mask that is None may be invalid.

        tiles, lists: any schedule, and its tiles of all sparsified tensors. table: of pointers.
        """
        for number, mask in enumerate(masks):
            if mask is None or self._identities[number] == (identity := _identity(mask.bits, mask.dense)):
                continue
            for listed in lists:
                launching.launch(
                    triton_kernels.list_kernel,
                    (len(listed),),
                    listed,
                    table,
                    mask.bits,
                    int(not mask.dense),
                    self._lists[number],
                    self.k,
                    warps=tiles.warps,
                    **tiles.units(8),
                )
            self._identities[number] = identity
        return self._lists[0], self._lists[1]


def _identity(bits: Tensor, dense: bool = False) -> tuple[int, int, bool]:
    """Return what changes if PyTorch writes to the tensor. Kernels and collectives do not change it."""
    return bits.data_ptr(), bits._version, dense
