"""The passes of top-k and DeMo in plain PyTorch: the specification, and the CPU implementation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.codec.reference import unpack
from torchtitan_scape.kernels.common.tensors import divisor_of, masked_copy_
from torchtitan_scape.kernels.scape.reference import decode_offsets, encode_offsets, select_rows, unpack_bits
from torchtitan_scape.kernels.topk.layout import MEANS, BlockGrid, MessageLayout

# --------------------------------------------------------------------------------------------- tiles


def to_blocks(x: Tensor, grid: BlockGrid) -> Tensor:
    """Return the tiles of flat x, (tiles, entries of a tile), padded with 0 (False). A view of x if possible."""
    right, below = grid.across * grid.width - grid.columns, grid.down * grid.height - grid.rows
    matrix = x.view(grid.rows, grid.columns)
    if right or below:
        matrix = pad(matrix, (0, right, 0, below))
    split = matrix.view(grid.down, grid.height, grid.across, grid.width)
    return split.transpose(1, 2).reshape(grid.tiles, grid.size)


def from_blocks(tiles: Tensor, grid: BlockGrid) -> Tensor:
    """Return the flat tensor with these tiles, the inverse of `to_blocks`."""
    split = tiles.view(grid.down, grid.across, grid.height, grid.width).transpose(1, 2)
    matrix = split.reshape(grid.down * grid.height, grid.across * grid.width)
    return matrix[: grid.rows, : grid.columns].reshape(-1)


def valid_mask(grid: BlockGrid, device: torch.device) -> Tensor | None:
    """Return bool (tiles, entries of a tile), False for padding; None without padding."""
    if not grid.padded:
        return None
    return to_blocks(torch.ones(grid.rows * grid.columns, dtype=torch.bool, device=device), grid)


# -------------------------------------------------------------------------------------------- passes


class TorchTopk:
    """The passes over all tensors of a message, one tensor after the other. Tensors are contiguous, of any shape."""

    def __init__(self, layout: MessageLayout) -> None:
        self.layout = layout

    def select(
        self,
        residuals: Sequence[Tensor],
        gradients: Sequence[Tensor],
        decay: float,
        factor: float,
        applied: Tensor,
        message: Tensor,
        values: Tensor,
    ) -> None:
        """Add gradients to residuals, and select the largest entries of each tile.

        residual = factor * gradient + decay * residual if `applied`.

        If values are not encoded, the selected entries of the residuals become zero, if `applied`.

        Args:
            residuals, gradients: FP32, of every tensor.
            applied: bool ().
            message: uint8 (bytes,), zeros; receives the encoded offsets.
            values: FP32 (values,), receives the selected values.
        """
        for i, grid in enumerate(self.layout.grids):
            residual, x = residuals[i].view(-1), gradients[i].view(-1)
            x = x if factor == 1.0 else x * factor
            masked_copy_(residual, torch.add(x, residual, alpha=decay), applied)
            # In a skipped step the residual keeps its values, and what is sent is not used.
            selected, offsets = select(self.layout, i, to_blocks(residual, grid), message, values)
            if self.layout.code == "float32":
                self._keep_(i, residual, offsets, torch.zeros_like(selected), applied)

    def keep_(self, residuals: Sequence[Tensor], message: Tensor, errors: Tensor, applied: Tensor) -> None:
        """Replace the selected entries of the residuals by `errors`, FP32 (values,), if `applied`.

        Args:
            message: uint8 (bytes,), with the encoded offsets.
        """
        layout = self.layout
        for i, residual in enumerate(residuals):
            own = errors[layout.first_values[i] : layout.first_values[i + 1]]
            self._keep_(i, residual.view(-1), offsets_of(layout, i, message[None])[0], own, applied)

    def _keep_(self, tensor: int, residual: Tensor, offsets: Tensor, errors: Tensor, applied: Tensor) -> None:
        grid = self.layout.grids[tensor]
        kept = to_blocks(residual, grid).scatter(1, offsets, errors.view(offsets.shape))
        masked_copy_(residual, from_blocks(kept, grid), applied)

    def mean_(self, outputs: Sequence[Tensor], messages: Tensor, over_senders: bool) -> None:
        """Set the outputs, FP32, to the mean of the messages of N replicas, zero where none has an entry.

        Values are added in the order of the replicas.

        Args:
            messages: uint8 (N, bytes).
            over_senders: Divide each sum by the number of messages that contain the entry, otherwise by N.
        """
        replicas = len(messages)
        for i, (output, grid) in enumerate(zip(outputs, self.layout.grids, strict=True)):
            offsets, values = offsets_of(self.layout, i, messages), values_of(self.layout, i, messages)
            total = torch.zeros(grid.tiles, grid.size, dtype=torch.float32, device=output.device)
            senders = torch.zeros_like(total) if over_senders else None
            if output.is_cpu:  # in the order of the index
                offsets, values = (t.transpose(0, 1).reshape(1, grid.tiles, -1) for t in (offsets, values))
            for own, added in zip(offsets, values, strict=True):  # on a GPU the order of equal indices is undefined
                total.scatter_add_(1, own, added)
                if senders is not None:
                    senders.scatter_add_(1, own, torch.ones_like(added))
            total.div_(divisor_of(total, replicas) if senders is None else senders.clamp_(min=1.0))
            output.view(-1).copy_(from_blocks(total, grid))


def write_offsets(message: Tensor, layout: MessageLayout, tensor: int, offsets: Tensor) -> None:
    """Write the offsets of one tensor, int64 (tiles, k), to a message."""
    grid = layout.grids[tensor]
    coded = encode_offsets(offsets, grid.size) if grid.coded else offsets.int().view(-1).view(torch.uint8)
    message[layout.first_offsets[tensor] : layout.first_offsets[tensor + 1]] = coded


def select(layout: MessageLayout, tensor: int, tiles: Tensor, message: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Store the entries with the k largest magnitudes of every tile of one tensor, (tiles, entries of a tile).

    Offsets are ascending. Ties go to the lower index; padding is selected only in tiles with fewer than k entries, and
    has the value 0.

    Args:
        message, values: See `TorchTopk.select`.

    Returns:
        Values, FP32 (tiles, k), and offsets, int64 (tiles, k).
    """
    offsets = select_rows(tiles, layout.selected[tensor], valid_mask(layout.grids[tensor], tiles.device))
    selected = tiles.gather(1, offsets)
    values[layout.first_values[tensor] : layout.first_values[tensor + 1]] = selected.view(-1)
    write_offsets(message, layout, tensor, offsets)
    return selected, offsets


def values_of(layout: MessageLayout, tensor: int, messages: Tensor) -> Tensor:
    """Return the values of one tensor in all messages, uint8 (N, bytes), as FP32 (N, tiles, k); a view if possible."""
    # The views as FP32 are aligned, since the size of every message is a multiple of 16 bytes.
    values = messages.view(torch.float32)
    if layout.code == "float32":
        values = values[:, layout.first_values[tensor] :][:, : layout.counts[tensor]]
    else:
        levels = MEANS[layout.code]
        means = values[:, levels * tensor : levels * (tensor + 1)]
        packed = messages[:, layout.first_codes[tensor] : layout.first_codes[tensor + 1]].reshape(-1)
        if layout.code == "2bit":
            codes = unpack(packed, FORMATS["2bit"]).view(len(messages), -1)[:, : layout.counts[tensor]]
            values = means.gather(1, codes.long())
        else:
            bits = unpack_bits(packed, 8 * packed.numel()).view(len(messages), -1)
            values = means * (bits[:, : layout.counts[tensor]].float() * 2 - 1)
    return values.view(len(messages), -1, layout.selected[tensor])


def offsets_of(layout: MessageLayout, tensor: int, messages: Tensor) -> Tensor:
    """Return the offsets of one tensor in all messages, int64 (N, tiles, k)."""
    grid, k, replicas = layout.grids[tensor], layout.selected[tensor], len(messages)
    packed = messages[:, layout.first_offsets[tensor] : layout.first_offsets[tensor + 1]].reshape(-1)
    if grid.coded:
        offsets = decode_offsets(packed, replicas * grid.tiles, k, grid.size)
    else:
        offsets = packed.clone().view(torch.int32).long()
    return offsets.view(replicas, grid.tiles, k)


# ------------------------------------------------------------------------------------------ cosine components


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
