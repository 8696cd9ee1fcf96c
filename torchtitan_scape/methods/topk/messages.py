"""Messages of top-k: values and offsets of the selected entries of every tile."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.core.tensors import indices_by_key, packed_bits
from torchtitan_scape.kernels.backends import block_code, topk_passes
from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.codec.reference import pack
from torchtitan_scape.kernels.topk.layout import Received
from torchtitan_scape.kernels.topk.reference import offsets_of, values_of
from torchtitan_scape.methods.topk.blocks import MEANS, BlockGrid, topk_message_bytes, topk_value_bytes

LEVELS = MEANS  # reconstruction values of the two-bit code
RANGE = 6.0  # standard deviations that its bins cover


def valid_offsets(offsets: Tensor, grid: BlockGrid) -> Tensor | None:
    """Return bool (tiles, k), False for offsets of padding; None if the grid has no padding."""
    if grid.tiles * grid.size == grid.rows * grid.columns:
        return None
    tile = torch.arange(grid.tiles, device=offsets.device)[:, None]
    rows = (tile // grid.across) * grid.height + offsets // grid.width
    columns = (tile % grid.across) * grid.width + offsets % grid.width
    return (rows < grid.rows) & (columns < grid.columns)


def encode_two_bits(values: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Encode values with the quantizer of SparseLoCo (arXiv:2508.15706).

    Centered values are divided into four bins of 6/4 standard deviations each. A value is decoded as the mean of its
    bin.

    Args:
        values: FP32 (..., m); every row is encoded separately.
        valid: bool (..., m), False for padding, which does not enter the means; None without padding.

    Returns:
        The means, FP32 (..., 4), and the codes, uint8 (..., m), one per byte.
    """
    weights = torch.ones_like(values) if valid is None else valid.to(values.dtype)
    count = weights.sum(-1, keepdim=True)
    centered = values - (values * weights).sum(-1, keepdim=True) / count.clamp(min=1.0)
    variance = (centered.square() * weights).sum(-1, keepdim=True) / (count - 1.0).clamp(min=1.0)
    step = variance.sqrt() * (RANGE / LEVELS)
    bins = torch.where(step > 0, centered / step, 0.0) + LEVELS // 2
    codes = bins.round_().nan_to_num_().clamp_(0, LEVELS - 1).to(torch.uint8)
    means = []
    for level in range(LEVELS):  # not `scatter_add_`, which sums in an undefined order on a GPU
        inside = weights * (codes == level)
        means.append((values * inside).sum(-1) / inside.sum(-1).clamp(min=1.0))
    return torch.stack(means, -1), codes


def pack_two_bits(codes: Tensor) -> Tensor:
    """Pack codes, uint8 (rows, m), into uint8 (rows, ceil(m / 4))."""
    padded = pad(codes, (0, -codes.shape[-1] % 4))
    return pack(padded.reshape(-1), FORMATS["2bit"]).view(len(codes), -1)


class TopkMessages:
    """Format of a message with the selected entries of several tensors: all values, then all offsets.

    Tensors of the same form are encoded together, so that the number of operators depends on the number of forms.

    Args:
        grids: division of each tensor into tiles.
        selected: number of entries per tile, for each tensor.
        code: "float32"; "2bit", four means per tensor; "1bit", signs and one mean magnitude per tensor; or a block
            code of the concatenated values of all tensors.
        backend: implementation of the block code, of offsets and of `mean_`, "torch" or "triton".
    """

    def __init__(self, grids: Sequence[BlockGrid], selected: Sequence[int], code: str, backend: str = "torch") -> None:
        self.grids, self.selected, self.code, self._backend = grids, selected, code, backend
        self.counts = [grid.count(k) for grid, k in zip(grids, selected, strict=True)]
        self.nbytes = topk_message_bytes(grids, selected, code)
        self._offset_bytes = [grid.offset_bytes(k) for grid, k in zip(grids, selected, strict=True)]
        self._value_bytes = topk_value_bytes(self.counts, code)

    def encode(
        self, values: Sequence[Tensor], offsets: Sequence[Tensor], valid: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Encode the selected entries.

        Args:
            values: FP32 (tiles, k) per tensor.
            offsets: int64 (tiles, k) per tensor, positions within a tile.
            valid: bool (tiles, k) per tensor, False for padding; None without padding.

        Returns:
            The message, uint8 (nbytes,), and the values that a receiver decodes, FP32 (tiles, k) per tensor.
        """
        parts, decoded = self._encode_values(
            [v.reshape(-1) for v in values], [v if v is None else v.view(-1) for v in valid]
        )
        parts += self._encode_offsets(offsets)
        length = sum(part.numel() for part in parts)
        assert -length % 16 + length == self.nbytes
        message = torch.cat([*parts, parts[0].new_zeros(-length % 16)])
        return message, [d.view(v.shape) for d, v in zip(decoded, values, strict=True)]

    # ------------------------------------------------------------------------------------------- decoding

    def decode_blocks(self, messages: Tensor) -> Tensor | None:
        """Return the values of messages, uint8 (N, nbytes), as FP32 (N, values); None without a block code."""
        if self.code in ("float32", "2bit", "1bit"):
            return None
        code, total = block_code(self._backend, self.code), sum(self.counts)
        padded = -(-total // code.block_size) * code.block_size
        out = torch.empty(len(messages), padded, dtype=torch.float32, device=messages.device)
        code.decode(messages[:, : self._value_bytes], out)
        return out

    def received(self, messages: Tensor, tensor: int, decoded: Tensor | None) -> Received:
        """Return the parts of messages, uint8 (N, nbytes), that belong to one tensor.

        Args:
            decoded: the result of `decode_blocks`.
        """
        # The views as FP32 are aligned, since the size of every message is a multiple of 16 bytes.
        before, count, form = self.counts[:tensor], self.counts[tensor], "float32"
        if decoded is not None:
            values = means = decoded[:, sum(before) :][:, :count]
        elif self.code == "float32":
            values = means = messages[:, 4 * sum(before) :][:, : 4 * count].view(torch.float32)
        else:
            form, (levels, per_byte) = self.code, (LEVELS, 4) if self.code == "2bit" else (1, 8)
            head = 4 * levels * len(self.grids)
            means = messages[:, :head].view(torch.float32)[:, levels * tensor :][:, :levels]
            codes = head + sum(-(-n // per_byte) for n in before)
            values = messages[:, codes:][:, : -(-count // per_byte)]
        first = self._value_bytes + sum(self._offset_bytes[:tensor])
        offsets = messages[:, first:][:, : self._offset_bytes[tensor]]
        return Received(self.selected[tensor], form, values, means, offsets)

    def mean_(self, x: Tensor, messages: Tensor, tensor: int, decoded: Tensor | None, over_senders: bool) -> None:
        """Set flat x, FP32 (n,), to the mean of one tensor over messages, uint8 (N, nbytes); see `reference.mean_`."""
        received = self.received(messages, tensor, decoded)
        topk_passes(self._backend).mean_(x, self.grids[tensor], received, over_senders)

    def decode_values(self, message: Tensor, tensor: int) -> Tensor:
        """Return the values of one tensor, FP32 (tiles, k); a view of the message if `code` is "float32"."""
        messages = message[None]
        return values_of(self.received(messages, tensor, self.decode_blocks(messages)), self.grids[tensor])[0]

    def decode_offsets(self, message: Tensor, tensor: int) -> Tensor:
        """Return the offsets of one tensor, int64 (tiles, k)."""
        return offsets_of(self.received(message[None], tensor, None), self.grids[tensor])[0]

    # ------------------------------------------------------------------------------------------- encoding

    def _encode_offsets(self, offsets: Sequence[Tensor]) -> list[Tensor]:
        """Return the encoded offsets of every tensor."""
        encoded: dict[int, Tensor] = {}
        forms = [(grid.size, grid.coded, k) for grid, k in zip(self.grids, self.selected, strict=True)]
        for (size, coded, _), numbers in indices_by_key(forms).items():
            if coded:
                together = topk_passes(self._backend).encode_offsets(torch.cat([offsets[i] for i in numbers]), size)
                encoded |= zip(numbers, together.split([self._offset_bytes[i] for i in numbers]), strict=True)
            else:
                encoded |= {i: offsets[i].int().view(-1).view(torch.uint8) for i in numbers}
        return [encoded[i] for i in range(len(offsets))]

    def _encode_values(self, values: list[Tensor], valid: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parts of the message with the values, uint8, and the decoded values, FP32 (m,) per tensor."""
        if self.code == "float32":
            return [flat.view(torch.uint8) for flat in values], values
        if self.code in ("2bit", "1bit"):
            return self._encode_few_bits(values, valid)
        code, flat = block_code(self._backend, self.code), torch.cat(values)
        padded = pad(flat, (0, -flat.numel() % code.block_size)).view(1, -1)
        message, decoded = code.encode(padded), torch.empty_like(padded)
        code.decode(message, decoded)
        return [message.view(-1)], list(decoded.view(-1)[: flat.numel()].split(self.counts))

    def _encode_few_bits(self, values: list[Tensor], valid: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """Encode as `_encode_values`, tensors with as many values together. Every tensor has its own means."""
        means: dict[int, Tensor] = {}
        codes: dict[int, Tensor] = {}
        decoded: dict[int, Tensor] = {}
        for numbers in indices_by_key([(v.numel(), r is None) for v, r in zip(values, valid, strict=True)]).values():
            rows = torch.stack([values[i] for i in numbers])
            masks = [mask for i in numbers if (mask := valid[i]) is not None]
            if self.code == "2bit":
                row_means, levels = encode_two_bits(rows, torch.stack(masks) if masks else None)
                packed, sent = pack_two_bits(levels), row_means.gather(1, levels.long())
            else:
                row_means, positive = rows.abs().mean(-1, keepdim=True), rows >= 0
                packed = packed_bits(pad(positive, (0, -positive.shape[1] % 8)).view(-1)).view(len(rows), -1)
                sent = row_means * (positive.float() * 2 - 1)
            for found, new in ((means, row_means), (codes, packed), (decoded, sent)):
                found |= zip(numbers, new, strict=True)
        order = range(len(values))
        return [*(means[i].view(torch.uint8) for i in order), *(codes[i] for i in order)], [decoded[i] for i in order]
