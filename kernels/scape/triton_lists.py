"""Lists of the entries of the masks A and P, for `triton_compact`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import TileSchedule
from torchtitan_scape.kernels.scape import triton_compact
from torchtitan_scape.kernels.scape.blocks import BlockLayout, entries_per_block


class MaskLists:
    """The position of every entry of A and P in its block, int16 (blocks, k), ascending.

    They are written when a mask is decoded. A mask that was changed otherwise, as by loading a checkpoint, is listed
    when it is needed.

    Args:
        layout: Blocks of the masks.
        density: Target density, which determines k. Masks of other densities are not listed.
        device: Device of the lists.
    """

    def __init__(self, layout: BlockLayout, density: float, device: torch.device) -> None:
        self.k = entries_per_block(density, layout.block_size)
        shape = layout.total_blocks, self.k
        self._lists = [torch.zeros(shape, dtype=torch.int16, device=device) for _ in range(2)]
        self._identities: list[tuple[int, int] | None] = [None, None]  # the masks' bits when they were listed

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
        self, masks: Sequence[Tensor | None], tiles: TileSchedule, lists: Sequence[Tensor], table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the lists of A and P, rebuilt if necessary. That of a mask that is None may be invalid.

        masks: the bits of A and P. tiles, lists: any schedule, and its tiles of all sparsified tensors. table: of
            pointers.
        """
        for number, bits in enumerate(masks):
            if bits is None or self._identities[number] == _identity(bits):
                continue
            for listed in lists:
                launching.launch(
                    triton_compact.list_kernel,
                    (len(listed),),
                    listed,
                    table,
                    bits,
                    self._lists[number],
                    self.k,
                    warps=tiles.warps,
                    **tiles.shape,
                )
            self._identities[number] = _identity(bits)
        return self._lists[0], self._lists[1]


def _identity(bits: Tensor) -> tuple[int, int]:
    """Return what changes if PyTorch writes to the tensor. Kernels and collectives do not change it."""
    return bits.data_ptr(), bits._version
