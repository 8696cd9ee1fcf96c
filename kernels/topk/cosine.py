"""DeMo's passes in plain PyTorch: the specification, and the CPU implementation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.gating import masked_copy_
from torchtitan_scape.kernels.topk.layout import BlockGrid, MessageLayout
from torchtitan_scape.kernels.topk.reference import from_blocks, select, to_blocks


@dataclass(frozen=True)
class Basis:
    """DCT-II matrices of a tile, orthogonal: FP32 (height, height) and (width, width)."""

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, grid: BlockGrid, device: torch.device) -> "Basis":
        return cls(_cosines(grid.height).to(device), _cosines(grid.width).to(device))

    def transform(self, tiles: Tensor) -> Tensor:
        """Return the orthonormal two-dimensional DCT-II of each tile, FP32 (tiles, entries of a tile)."""
        return (self.rows @ tiles.view(-1, len(self.rows), len(self.columns)) @ self.columns.T).view(tiles.shape)

    def inverse(self, components: Tensor) -> Tensor:
        """Return the inverse of `transform`."""
        tiles = components.view(-1, len(self.rows), len(self.columns))
        return (self.rows.T @ tiles @ self.columns).view(components.shape)


class TorchCosine:
    """The passes over all tensors of a message, one tensor after the other. Tensors are contiguous, of any shape."""

    def __init__(self, layout: MessageLayout, device: torch.device) -> None:
        """Compute the bases. No tile is shorter than others."""
        self.layout, self.bases = layout, bases(layout.grids, device)

    def select(
        self,
        momenta: Sequence[Tensor],
        gradients: Sequence[Tensor],
        beta: float,
        factor: float,
        applied: Tensor,
        message: Tensor,
        values: Tensor,
    ) -> None:
        """Select the k largest components of every tile of x = factor * gradient + beta * momentum.

        If `applied`, the momentum becomes x without them.

        Args:
            momenta, gradients: FP32, of every tensor; the gradients are overwritten.
            applied: bool ().
            message: uint8 (bytes,), zeros; receives the encoded offsets.
            values: FP32 (values,), receives the components.
        """
        for i, grid in enumerate(self.layout.grids):
            momentum, x, basis = momenta[i].view(-1), gradients[i].view(-1), self.bases[grid.height, grid.width]
            if factor != 1.0:
                x.mul_(factor)
            x.add_(momentum, alpha=beta)
            components = basis.transform(to_blocks(x, grid))
            selected, offsets = select(self.layout, i, components, message, values)
            represented = basis.inverse(torch.zeros_like(components).scatter_(1, offsets, selected))
            masked_copy_(momentum, x - from_blocks(represented, grid), applied)

    def inverse_(self, outputs: Sequence[Tensor]) -> None:
        """Replace the components in the tiles of FP32 tensors by their inverse transform."""
        for output, grid in zip(outputs, self.layout.grids, strict=True):
            x = output.view(-1)
            x.copy_(from_blocks(self.bases[grid.height, grid.width].inverse(to_blocks(x, grid)), grid))


def bases(grids: Sequence[BlockGrid], device: torch.device) -> dict[tuple[int, int], Basis]:
    """Return the basis of every height and width of a tile."""
    sides = {(grid.height, grid.width): grid for grid in grids}
    return {side: Basis.of(grid, device) for side, grid in sides.items()}


def _cosines(size: int) -> Tensor:
    i = torch.arange(size, dtype=torch.float64, device="cpu")
    table = torch.cos(i[:, None] * (i + 0.5) * math.pi / size) * math.sqrt(2.0 / size)
    table[0] *= math.sqrt(0.5)
    # Entries that are exactly 0 in real arithmetic: the sign of a rounding error would become an update of SignSGD.
    return table.masked_fill(table.abs() < 1e-12, 0.0).float()
