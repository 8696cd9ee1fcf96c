"""The passes of top-k in plain PyTorch: the specification, and the CPU implementation."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.codec.reference import unpack
from torchtitan_scape.kernels.common.ordered import divisor_of
from torchtitan_scape.kernels.scape.mask_code import decode_offsets, encode_offsets
from torchtitan_scape.kernels.scape.reference import select_rows, unpack_bits
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
        layout = self.layout
        for i, (grid, k) in enumerate(zip(layout.grids, layout.selected, strict=True)):
            residual = residuals[i].view(-1)
            accumulate_(residual, gradients[i].view(-1), decay, factor, applied)
            # In a skipped step the residual keeps its values, and what is sent is not used.
            selected, offsets = select(residual, grid, k)
            values[layout.first_values[i] : layout.first_values[i + 1]] = selected.view(-1)
            write_offsets(message, layout, i, offsets)
            if layout.code == "float32":
                keep_(residual, grid, offsets, torch.zeros_like(selected), applied)

    def keep_(self, residuals: Sequence[Tensor], message: Tensor, errors: Tensor, applied: Tensor) -> None:
        """Replace the selected entries of the residuals by `errors`, FP32 (values,), if `applied`.

        Args:
            message: uint8 (bytes,), with the encoded offsets.
        """
        layout = self.layout
        for i, grid in enumerate(layout.grids):
            offsets = offsets_of(layout, i, message[None])[0]
            own = errors[layout.first_values[i] : layout.first_values[i + 1]]
            keep_(residuals[i].view(-1), grid, offsets, own.view(offsets.shape), applied)

    def mean_(self, outputs: Sequence[Tensor], messages: Tensor, decoded: Tensor | None, over_senders: bool) -> None:
        """Set the outputs, FP32, to the mean of the messages of N replicas, zero where none has an entry.

        Values are added in the order of the replicas.

        Args:
            messages: uint8 (N, bytes).
            decoded: Values of a block code, FP32 (N, values or more); otherwise None.
            over_senders: Divide each sum by the number of messages that contain the entry, otherwise by N.
        """
        for i, (x, grid) in enumerate(zip(outputs, self.layout.grids, strict=True)):
            offsets, values = offsets_of(self.layout, i, messages), values_of(self.layout, i, messages, decoded)
            mean_(x.view(-1), grid, offsets, values, over_senders)


def write_offsets(message: Tensor, layout: MessageLayout, tensor: int, offsets: Tensor) -> None:
    """Write the offsets of one tensor, int64 (tiles, k), to a message."""
    grid = layout.grids[tensor]
    coded = encode_offsets(offsets, grid.size) if grid.coded else offsets.int().view(-1).view(torch.uint8)
    message[layout.first_offsets[tensor] : layout.first_offsets[tensor + 1]] = coded


def select(x: Tensor, grid: BlockGrid, k: int) -> tuple[Tensor, Tensor]:
    """Return values, FP32 (tiles, k), and offsets, int64 (tiles, k), of the k largest |x| of every tile.

    Offsets are ascending. Ties go to the lower index; padding is selected only in tiles with fewer than k entries, and
    has the value 0.
    """
    tiles = to_blocks(x, grid)
    offsets = select_rows(tiles, k, valid_mask(grid, x.device))
    return tiles.gather(1, offsets), offsets


def accumulate_(residual: Tensor, x: Tensor, decay: float, factor: float, applied: Tensor) -> None:
    """Set residual = factor * x + decay * residual, FP32 (n,), if `applied`, bool ()."""
    if applied.is_cpu and not applied:
        return
    x = x if factor == 1.0 else x * factor
    if applied.is_cpu:
        torch.add(x, residual, alpha=decay, out=residual)
    else:
        torch.where(applied, torch.add(x, residual, alpha=decay), residual, out=residual)


def keep_(residual: Tensor, grid: BlockGrid, offsets: Tensor, errors: Tensor, applied: Tensor) -> None:
    """Replace the selected entries of the residual, FP32 (n,), by `errors`, if `applied`, bool ().

    offsets and errors: (tiles, k).
    """
    if applied.is_cpu and not applied:
        return
    kept = from_blocks(to_blocks(residual, grid).scatter(1, offsets, errors), grid)
    if applied.is_cpu:
        residual.copy_(kept)
    else:
        torch.where(applied, kept, residual, out=residual)


def mean_(x: Tensor, grid: BlockGrid, offsets: Tensor, values: Tensor, over_senders: bool) -> None:
    """Set x, FP32 (n,), to the mean of `values` at `offsets`, (N, tiles, k), as `TorchTopk.mean_`."""
    total = torch.zeros(grid.tiles, grid.size, dtype=torch.float32, device=x.device)
    senders = torch.zeros_like(total) if over_senders else None
    replicas = len(values)
    if x.is_cpu:  # in the order of the index
        offsets, values = (t.transpose(0, 1).reshape(1, grid.tiles, -1) for t in (offsets, values))
    for own, added in zip(offsets, values, strict=True):  # on a GPU the order of equal indices is undefined
        total.scatter_add_(1, own, added)
        if senders is not None:
            senders.scatter_add_(1, own, torch.ones_like(added))
    total.div_(divisor_of(total, replicas) if senders is None else senders.clamp_(min=1.0))
    x.copy_(from_blocks(total, grid))


def values_of(layout: MessageLayout, tensor: int, messages: Tensor, decoded: Tensor | None) -> Tensor:
    """Return the values of one tensor in all messages, FP32 (N, tiles, k); a view if they are FP32.

    Args:
        messages, decoded: See `TorchTopk.mean_`.
    """
    # The views as FP32 are aligned, since the size of every message is a multiple of 16 bytes.
    values = messages.view(torch.float32) if decoded is None else decoded
    if layout.form == "float32":
        values = values[:, layout.first_values[tensor] :][:, : layout.counts[tensor]]
    else:
        levels = MEANS[layout.form]
        means = values[:, levels * tensor : levels * (tensor + 1)]
        packed = messages[:, layout.first_codes[tensor] : layout.first_codes[tensor + 1]].reshape(-1)
        if layout.form == "2bit":
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
