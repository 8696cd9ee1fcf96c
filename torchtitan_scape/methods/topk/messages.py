"""What a top-k message says: where the largest entries of every tile are, and their values, coded or not."""

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

LEVELS = MEANS  # of the code of two bits
RANGE = 6.0  # standard deviations that they cover


# --------------------------------------------------------------------------------------------- tiles


def to_blocks(x: Tensor, cut: BlockGrid) -> Tensor:
    """(tiles, entries of a tile) of flat x; what is missing of a short tile is 0 (False). A view of x where it can."""
    right, below = cut.across * cut.width - cut.columns, cut.down * cut.height - cut.rows
    matrix = x.view(cut.rows, cut.columns)
    if right or below:
        matrix = pad(matrix, (0, right, 0, below))
    split = matrix.view(cut.down, cut.height, cut.across, cut.width)
    return split.transpose(1, 2).reshape(cut.tiles, cut.size)


def from_blocks(tiles: Tensor, cut: BlockGrid) -> Tensor:
    """The inverse of `to_blocks`: flat."""
    split = tiles.view(cut.down, cut.across, cut.height, cut.width).transpose(1, 2)
    matrix = split.reshape(cut.down * cut.height, cut.across * cut.width)
    return matrix[: cut.rows, : cut.columns].reshape(-1)


def valid_mask(cut: BlockGrid, device: torch.device) -> Tensor | None:
    """bool (tiles, entries of a tile): what is an entry of the tensor; None where all are."""
    if cut.tiles * cut.size == cut.rows * cut.columns:
        return None
    return to_blocks(torch.ones(cut.rows * cut.columns, dtype=torch.bool, device=device), cut)


# --------------------------------------------------------------------------------- the code of two bits


def encode_two_bits(values: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """(means FP32 (4,), codes uint8 (ceil(m / 4),)) of FP32 (m,), the quantiser of SparseLoCo (2508.15706).

    Values less their mean are cut into four bins of 6/4 standard deviations; a value is decoded as the mean of its bin.
    real: bool (m,), those that are to be told; None for all.
    """
    weights = torch.ones_like(values) if real is None else real.to(values.dtype)
    count = weights.sum()
    centred = values - (values * weights).sum() / count.clamp(min=1.0)
    variance = (centred.square() * weights).sum() / (count - 1.0).clamp(min=1.0)
    step = variance.sqrt() * (RANGE / LEVELS)
    bins = torch.where(step > 0, centred / step, 0.0) + LEVELS // 2
    codes = bins.round_().nan_to_num_().clamp_(0, LEVELS - 1).to(torch.uint8)
    means = []
    for level in range(LEVELS):  # no scattered sums, whose order a GPU does not keep
        inside = weights * (codes == level)
        means.append((values * inside).sum() / inside.sum().clamp(min=1.0))
    return torch.stack(means), pack(pad(codes, (0, -codes.numel() % 4)), FORMATS["2bit"])


def decode_two_bits(means: Tensor, codes: Tensor, count: int) -> Tensor:
    """FP32 (count,)."""
    return means[unpack(codes, FORMATS["2bit"])[:count].long()]


# ------------------------------------------------------------------------------------------- messages


class TopkMessages:
    """How the selected entries of some tensors travel: all values, then all offsets.

    chosen: entries of each tile, by tensor.
    values: "float32"; "2bit", by four means of each tensor; "1bit", by sign and the tensor's mean magnitude; or a block
        code, over all tensors' values end to end.
    backend: that of the block code, "torch" or "triton".
    """

    def __init__(self, cuts: Sequence[BlockGrid], chosen: Sequence[int], values: str, backend: str = "torch") -> None:
        self.cuts, self.chosen, self.values, self._backend = cuts, chosen, values, backend
        self.counts = [cut.count(k) for cut, k in zip(cuts, chosen, strict=True)]
        self.nbytes = topk_message_bytes(cuts, chosen, values)
        self._offset_bytes = [cut.offset_bytes(k) for cut, k in zip(cuts, chosen, strict=True)]
        self._value_bytes = topk_value_bytes(self.counts, values)

    def encode(self, values: Sequence[Tensor], offsets: Sequence[Tensor], real: Sequence[Tensor | None]) -> Tensor:
        """uint8 (nbytes,). Of every tensor FP32, int64 and bool (tiles, k), or None for bool where all are real."""
        parts = self._encode_values([v.reshape(-1) for v in values], [r if r is None else r.view(-1) for r in real])
        for cut, places in zip(self.cuts, offsets, strict=True):
            parts.append(encode_offsets(places, cut.size) if cut.coded else places.int().view(-1).view(torch.uint8))
        length = sum(part.numel() for part in parts)
        assert -length % 16 + length == self.nbytes
        return torch.cat([*parts, parts[0].new_zeros(-length % 16)])

    def decode_values(self, message: Tensor, tensor: int) -> Tensor:
        """FP32 (tiles, k) of one tensor: a view of the message where it has FP32."""
        # Messages, of which each is a multiple of 16 bytes, begin where words of 32 bits may.
        before, count = self.counts[:tensor], self.counts[tensor]
        if self.values == "float32":
            flat = message[4 * sum(before) :][: 4 * count].view(torch.float32)
        elif self.values == "2bit":
            head = 4 * LEVELS * len(self.cuts)
            means = message[:head].view(torch.float32).view(-1, LEVELS)[tensor]
            codes = message[head + sum(-(-n // 4) for n in before) :][: -(-count // 4)]
            flat = decode_two_bits(means, codes, count)
        elif self.values == "1bit":
            head = 4 * len(self.cuts)
            codes = message[head + sum(-(-n // 8) for n in before) :][: -(-count // 8)]
            flat = message[:head].view(torch.float32)[tensor] * (unpack_bits(codes, count).float() * 2 - 1)
        else:
            flat = self._decode_blocks(message, sum(before), count)
        return flat.view(self.cuts[tensor].tiles, -1)

    def decode_offsets(self, message: Tensor, tensor: int) -> Tensor:
        """int64 (tiles, k) of one tensor."""
        cut, first = self.cuts[tensor], self._value_bytes + sum(self._offset_bytes[:tensor])
        packed = message[first : first + self._offset_bytes[tensor]]
        if cut.coded:
            return decode_offsets(packed, cut.tiles, self.chosen[tensor], cut.size)
        return packed.clone().view(torch.int32).long().view(cut.tiles, -1)

    def mean(self, arrived: Tensor, tensor: int, over_senders: bool) -> Tensor:
        """FP32 (tiles, entries of a tile) of one tensor: what messages, uint8 (replicas, nbytes), say, added up in
        their order and divided by their number, or by that of those that have the entry."""
        cut = self.cuts[tensor]
        total = torch.zeros(cut.tiles, cut.size, dtype=torch.float32, device=arrived.device)
        senders = torch.zeros_like(total) if over_senders else None
        for message in arrived:
            offsets, received_values = self.decode_offsets(message, tensor), self.decode_values(message, tensor)
            total.scatter_add_(1, offsets, received_values)
            if senders is not None:
                senders.scatter_add_(1, offsets, torch.ones_like(received_values))
        return total.div_(float(len(arrived)) if senders is None else senders.clamp_(min=1.0))

    def _encode_values(self, values: list[Tensor], real: list[Tensor | None]) -> list[Tensor]:
        if self.values == "2bit":
            coded = [encode_two_bits(*both) for both in zip(values, real, strict=True)]
            return [*(means.view(torch.uint8) for means, _ in coded), *(codes for _, codes in coded)]
        if self.values == "1bit":
            means = [flat.abs().mean().view(1).view(torch.uint8) for flat in values]
            return [*means, *(packed_bits(flat >= 0) for flat in values)]
        if self.values == "float32":
            return [flat.view(torch.uint8) for flat in values]
        code = block_code(self._backend, self.values)
        flat = torch.cat(values)
        return [code.encode(pad(flat, (0, -flat.numel() % code.block_size)).view(1, -1)).view(-1)]

    def _decode_blocks(self, message: Tensor, first: int, count: int) -> Tensor:
        """FP32 (count,) of a block code: so many values from `first` on."""
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
