"""The passes of top-k in plain PyTorch: the specification, and the CPU implementation."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.codec.reference import unpack
from torchtitan_scape.kernels.common.ordered import divisor_of
from torchtitan_scape.kernels.scape.mask_code import decode_offsets
from torchtitan_scape.kernels.scape.mask_code import encode_offsets as encode_offsets
from torchtitan_scape.kernels.scape.reference import select_rows, unpack_bits
from torchtitan_scape.kernels.topk.layout import Received, TileGrid

# --------------------------------------------------------------------------------------------- tiles


def to_blocks(x: Tensor, grid: TileGrid) -> Tensor:
    """Return the tiles of flat x, (tiles, entries of a tile), padded with 0 (False). A view of x if possible."""
    right, below = grid.across * grid.width - grid.columns, grid.down * grid.height - grid.rows
    matrix = x.view(grid.rows, grid.columns)
    if right or below:
        matrix = pad(matrix, (0, right, 0, below))
    split = matrix.view(grid.down, grid.height, grid.across, grid.width)
    return split.transpose(1, 2).reshape(grid.tiles, grid.size)


def from_blocks(tiles: Tensor, grid: TileGrid) -> Tensor:
    """Return the flat tensor with these tiles, the inverse of `to_blocks`."""
    split = tiles.view(grid.down, grid.across, grid.height, grid.width).transpose(1, 2)
    matrix = split.reshape(grid.down * grid.height, grid.across * grid.width)
    return matrix[: grid.rows, : grid.columns].reshape(-1)


def valid_mask(grid: TileGrid, device: torch.device) -> Tensor | None:
    """Return bool (tiles, entries of a tile), False for padding; None without padding."""
    if grid.tiles * grid.size == grid.rows * grid.columns:
        return None
    return to_blocks(torch.ones(grid.rows * grid.columns, dtype=torch.bool, device=device), grid)


# -------------------------------------------------------------------------------------------- passes


def select(x: Tensor, grid: TileGrid, k: int) -> tuple[Tensor, Tensor]:
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


def keep_(residual: Tensor, grid: TileGrid, offsets: Tensor, errors: Tensor, applied: Tensor) -> None:
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


def mean_(x: Tensor, grid: TileGrid, received: Received, over_senders: bool) -> None:
    """Set x, FP32 (n,), to the mean of the messages of N replicas, zero where none has an entry.

    Values are added in the order of the replicas.

    Args:
        over_senders: Divide each sum by the number of messages that contain the entry, otherwise by N.
    """
    offsets, values = offsets_of(received, grid), values_of(received, grid)
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


def values_of(received: Received, grid: TileGrid) -> Tensor:
    """Return the values of all replicas, FP32 (N, tiles, k); a view if they are FP32."""
    count = grid.tiles * received.k
    if received.form == "2bit":
        codes = unpack(received.values.reshape(-1), FORMATS["2bit"]).view(len(received.values), -1)[:, :count]
        values = received.means.gather(1, codes.long())
    elif received.form == "1bit":
        bits = unpack_bits(received.values.reshape(-1), 8 * received.values.numel()).view(len(received.values), -1)
        values = received.means * (bits[:, :count].float() * 2 - 1)
    else:
        values = received.values
    return values.view(-1, grid.tiles, received.k)


def offsets_of(received: Received, grid: TileGrid) -> Tensor:
    """Return the offsets of all replicas, int64 (N, tiles, k)."""
    packed, replicas = received.offsets, len(received.offsets)
    if grid.coded:
        offsets = decode_offsets(packed.reshape(-1), replicas * grid.tiles, received.k, grid.size)
    else:
        offsets = packed.clone(memory_format=torch.contiguous_format).view(torch.int32).long()
    return offsets.view(replicas, grid.tiles, received.k)
