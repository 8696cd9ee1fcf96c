"""Messages of top-k: values and offsets of the selected entries of every tile."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import block_code
from kernels.codec.formats import FORMATS
from kernels.codec.reference import pack, unpack
from kernels.scape.mask_code import decode_offsets, encode_offsets
from kernels.scape.reference import unpack_bits
from torchtitan_scape.core.tensors import packed_bits
from torchtitan_scape.methods.topk.blocks import MEANS, BlockGrid, topk_message_bytes, topk_value_bytes

LEVELS = MEANS  # reconstruction values of the two-bit code
RANGE = 6.0  # standard deviations that its bins cover


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
    if grid.tiles * grid.size == grid.rows * grid.columns:
        return None
    return to_blocks(torch.ones(grid.rows * grid.columns, dtype=torch.bool, device=device), grid)


# --------------------------------------------------------------------------------------- two-bit code


def encode_two_bits(values: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Encode values with the quantizer of SparseLoCo (arXiv:2508.15706).

    Centered values are divided into four bins of 6/4 standard deviations each. A value is decoded as the mean of its
    bin.

    Args:
        values: FP32 (m,).
        valid: bool (m,), False for padding, which does not enter the means; None without padding.

    Returns:
        The means, FP32 (4,), and the codes, uint8 (ceil(m / 4),).
    """
    weights = torch.ones_like(values) if valid is None else valid.to(values.dtype)
    count = weights.sum()
    centered = values - (values * weights).sum() / count.clamp(min=1.0)
    variance = (centered.square() * weights).sum() / (count - 1.0).clamp(min=1.0)
    step = variance.sqrt() * (RANGE / LEVELS)
    bins = torch.where(step > 0, centered / step, 0.0) + LEVELS // 2
    codes = bins.round_().nan_to_num_().clamp_(0, LEVELS - 1).to(torch.uint8)
    means = []
    for level in range(LEVELS):  # not `scatter_add_`, which sums in an undefined order on a GPU
        inside = weights * (codes == level)
        means.append((values * inside).sum() / inside.sum().clamp(min=1.0))
    return torch.stack(means), pack(pad(codes, (0, -codes.numel() % 4)), FORMATS["2bit"])


def decode_two_bits(means: Tensor, codes: Tensor, count: int) -> Tensor:
    """Return the decoded values, FP32 (count,)."""
    return means[unpack(codes, FORMATS["2bit"])[:count].long()]


# ------------------------------------------------------------------------------------------- messages


class TopkMessages:
    """Format of a message with the selected entries of several tensors: all values, then all offsets.

    Args:
        grids: division of each tensor into tiles.
        selected: number of entries per tile, for each tensor.
        values: "float32"; "2bit", four means per tensor; "1bit", signs and one mean magnitude per tensor; or a block
            code of the concatenated values of all tensors.
        backend: implementation of the block code, "torch" or "triton".
    """

    def __init__(
        self, grids: Sequence[BlockGrid], selected: Sequence[int], values: str, backend: str = "torch"
    ) -> None:
        self.grids, self.selected, self.values, self._backend = grids, selected, values, backend
        self.counts = [grid.count(k) for grid, k in zip(grids, selected, strict=True)]
        self.nbytes = topk_message_bytes(grids, selected, values)
        self._offset_bytes = [grid.offset_bytes(k) for grid, k in zip(grids, selected, strict=True)]
        self._value_bytes = topk_value_bytes(self.counts, values)

    def encode(self, values: Sequence[Tensor], offsets: Sequence[Tensor], valid: Sequence[Tensor | None]) -> Tensor:
        """Return the message, uint8 (nbytes,).

        Args:
            values: FP32 (tiles, k) per tensor.
            offsets: int64 (tiles, k) per tensor, positions within a tile.
            valid: bool (tiles, k) per tensor, False for padding; None without padding.
        """
        parts = self._encode_values([v.reshape(-1) for v in values], [v if v is None else v.view(-1) for v in valid])
        for grid, indices in zip(self.grids, offsets, strict=True):
            parts.append(encode_offsets(indices, grid.size) if grid.coded else indices.int().view(-1).view(torch.uint8))
        length = sum(part.numel() for part in parts)
        assert -length % 16 + length == self.nbytes
        return torch.cat([*parts, parts[0].new_zeros(-length % 16)])

    def decode_values(self, message: Tensor, tensor: int) -> Tensor:
        """Return the values of one tensor, FP32 (tiles, k); a view of the message if `values` is "float32"."""
        # The views as FP32 are aligned, since the size of every message is a multiple of 16 bytes.
        before, count = self.counts[:tensor], self.counts[tensor]
        if self.values == "float32":
            flat = message[4 * sum(before) :][: 4 * count].view(torch.float32)
        elif self.values == "2bit":
            head = 4 * LEVELS * len(self.grids)
            means = message[:head].view(torch.float32).view(-1, LEVELS)[tensor]
            codes = message[head + sum(-(-n // 4) for n in before) :][: -(-count // 4)]
            flat = decode_two_bits(means, codes, count)
        elif self.values == "1bit":
            head = 4 * len(self.grids)
            codes = message[head + sum(-(-n // 8) for n in before) :][: -(-count // 8)]
            flat = message[:head].view(torch.float32)[tensor] * (unpack_bits(codes, count).float() * 2 - 1)
        else:
            flat = self._decode_blocks(message, sum(before), count)
        return flat.view(self.grids[tensor].tiles, -1)

    def decode_offsets(self, message: Tensor, tensor: int) -> Tensor:
        """Return the offsets of one tensor, int64 (tiles, k)."""
        grid, first = self.grids[tensor], self._value_bytes + sum(self._offset_bytes[:tensor])
        packed = message[first : first + self._offset_bytes[tensor]]
        if grid.coded:
            return decode_offsets(packed, grid.tiles, self.selected[tensor], grid.size)
        return packed.clone().view(torch.int32).long().view(grid.tiles, -1)

    def mean(self, received: Tensor, tensor: int, over_senders: bool) -> Tensor:
        """Return the mean of one tensor over the received messages, FP32 (tiles, entries of a tile).

        Args:
            received: uint8 (replicas, nbytes); decoded values are added in this order.
            over_senders: divide each sum by the number of messages that contain the entry, otherwise by the number of
                messages.
        """
        grid = self.grids[tensor]
        total = torch.zeros(grid.tiles, grid.size, dtype=torch.float32, device=received.device)
        senders = torch.zeros_like(total) if over_senders else None
        for message in received:
            offsets, values = self.decode_offsets(message, tensor), self.decode_values(message, tensor)
            total.scatter_add_(1, offsets, values)
            if senders is not None:
                senders.scatter_add_(1, offsets, torch.ones_like(values))
        return total.div_(float(len(received)) if senders is None else senders.clamp_(min=1.0))

    def _encode_values(self, values: list[Tensor], valid: list[Tensor | None]) -> list[Tensor]:
        if self.values == "2bit":
            encoded = [encode_two_bits(*both) for both in zip(values, valid, strict=True)]
            return [*(means.view(torch.uint8) for means, _ in encoded), *(codes for _, codes in encoded)]
        if self.values == "1bit":
            means = [flat.abs().mean().view(1).view(torch.uint8) for flat in values]
            return [*means, *(packed_bits(flat >= 0) for flat in values)]
        if self.values == "float32":
            return [flat.view(torch.uint8) for flat in values]
        code = block_code(self._backend, self.values)
        flat = torch.cat(values)
        return [code.encode(pad(flat, (0, -flat.numel() % code.block_size)).view(1, -1)).view(-1)]

    def _decode_blocks(self, message: Tensor, first: int, count: int) -> Tensor:
        """Return `count` values of a block code from index `first`, FP32 (count,)."""
        code, total = block_code(self._backend, self.values), sum(self.counts)
        start, end = (
            first // code.block_size * code.block_size,
            -(-(first + count) // code.block_size) * code.block_size,
        )
        out = torch.empty(1, end - start, dtype=torch.float32, device=message.device)
        code.decode(
            code.slice_message(message, -(-total // code.block_size) * code.block_size, start, end - start), out
        )
        return out.view(-1)[first - start :][:count]
