"""DeMo's passes in plain PyTorch: the specification, and the CPU implementation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_scape.kernels.scape.reference import select_rows
from torchtitan_scape.kernels.topk.layout import TileGrid
from torchtitan_scape.kernels.topk.reference import from_blocks, to_blocks


@dataclass(frozen=True)
class Basis:
    """DCT-II matrices of a tile, orthogonal: FP32 (height, height) and (width, width)."""

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, grid: TileGrid, device: torch.device) -> "Basis":
        return cls(_cosines(grid.height).to(device), _cosines(grid.width).to(device))

    def transform(self, tiles: Tensor) -> Tensor:
        """Return the orthonormal two-dimensional DCT-II of each tile, FP32 (tiles, entries of a tile)."""
        return (self.rows @ tiles.view(-1, len(self.rows), len(self.columns)) @ self.columns.T).view(tiles.shape)

    def inverse(self, components: Tensor) -> Tensor:
        """Return the inverse of `transform`."""
        tiles = components.view(-1, len(self.rows), len(self.columns))
        return (self.rows.T @ tiles @ self.columns).view(components.shape)


def largest_components(
    momentum: Tensor, x: Tensor, grid: TileGrid, basis: Basis, k: int, applied: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the k largest components of every tile of x, and set momentum = x without them, if `applied`, bool ().

    Args:
        momentum: FP32 (n,).
        x: FP32 (n,). The grid has no padding.

    Returns:
        Values, FP32 (tiles, k), and ascending offsets, int64 (tiles, k). Ties go to the lower index.
    """
    components = basis.transform(to_blocks(x, grid))
    offsets = select_rows(components, k)
    values = components.gather(1, offsets)
    rest = x - from_blocks(basis.inverse(torch.zeros_like(components).scatter_(1, offsets, values)), grid)
    if not applied.is_cpu:
        torch.where(applied, rest, momentum, out=momentum)
    elif applied:
        momentum.copy_(rest)
    return values, offsets


def inverse_(x: Tensor, grid: TileGrid, basis: Basis) -> None:
    """Replace the components in the tiles of x, FP32 (n,), by their inverse transform."""
    x.copy_(from_blocks(basis.inverse(to_blocks(x, grid)), grid))


def _cosines(size: int) -> Tensor:
    i = torch.arange(size, dtype=torch.float64, device="cpu")
    table = torch.cos(i[:, None] * (i + 0.5) * math.pi / size) * math.sqrt(2.0 / size)
    table[0] *= math.sqrt(0.5)
    # Entries that are exactly 0 in real arithmetic: the sign of a rounding error would become an update of SignSGD.
    return table.masked_fill(table.abs() < 1e-12, 0.0).float()
