"""Messages of top-k: values and offsets of the selected entries of every tile."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.core.tensors import indices_by_key, packed_bits
from torchtitan_scape.kernels.backends import topk_passes
from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.codec.reference import pack
from torchtitan_scape.kernels.topk.layout import MEANS, BlockGrid, MessageLayout
from torchtitan_scape.kernels.topk.reference import offsets_of

LEVELS = MEANS["2bit"]  # reconstruction values of the two-bit code
RANGE = 6.0  # standard deviations that its bins cover


def valid_offsets(offsets: Tensor, grid: BlockGrid) -> Tensor:
    """Return bool (tiles, k), False for offsets of padding."""
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
        valid: Bool (..., m), False for padding, which does not enter the means; None without padding.

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
    """Messages of one `MessageLayout`, and the passes over the tensors.

    Tensors with as many values are encoded together, so that the number of operators does not depend on the number of
    tensors.

    Args:
        layout: Positions in a message.
        backend: Implementation of the passes, "torch" or "triton".
    """

    def __init__(self, layout: MessageLayout, backend: str = "torch") -> None:
        self.layout, self.passes = layout, topk_passes(backend, layout)

    def allocate(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a message of zeros, uint8 (bytes,), and memory for all values, FP32 (values,).

        Without encoding the values are a view of the message.
        """
        message = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        if self.layout.code == "float32":
            return message, message[: self.layout.value_bytes].view(torch.float32)
        return message, torch.empty(self.layout.first_values[-1], dtype=torch.float32, device=device)

    def encode(self, message: Tensor, values: Tensor) -> Tensor:
        """Write the encoded values to a message, which contains the offsets. `code` is not "float32".

        Returns:
            The values that a receiver decodes, FP32 (values,).
        """
        layout = self.layout
        short = [grid.fewest < k for grid, k in zip(layout.grids, layout.selected, strict=True)]
        parts, count = values.split(layout.counts), len(layout.grids)
        means, codes, decoded = ([values] * count for _ in range(3))
        for numbers in indices_by_key(zip(layout.counts, short, strict=True)).values():
            rows = torch.stack([parts[i] for i in numbers])
            if layout.code == "2bit":
                valid = self._valid(message, numbers) if short[numbers[0]] else None
                row_means, levels = encode_two_bits(rows, valid)
                packed, sent = pack_two_bits(levels), row_means.gather(1, levels.long())
            else:
                row_means, positive = rows.abs().mean(-1, keepdim=True), rows >= 0
                packed = packed_bits(pad(positive, (0, -positive.shape[1] % 8)).view(-1)).view(len(rows), -1)
                sent = row_means * (positive.float() * 2 - 1)
            for outputs, new in ((means, row_means), (codes, packed), (decoded, sent)):
                for i, row in zip(numbers, new.unbind(), strict=True):
                    outputs[i] = row
        message[: layout.value_bytes].copy_(torch.cat([torch.cat(means).view(torch.uint8), *codes]))
        return torch.cat(decoded)

    def _valid(self, message: Tensor, numbers: list[int]) -> Tensor:
        """Return bool (tensors, values), False for selected padding."""
        rows = (offsets_of(self.layout, i, message[None])[0] for i in numbers)
        return torch.stack(
            [valid_offsets(offsets, self.layout.grids[i]).view(-1) for i, offsets in zip(numbers, rows, strict=True)]
        )
