"""Top-k of the gradient with error feedback: every replica sends its own largest entries to all others.

Error feedback: Seide et al., "1-Bit Stochastic Gradient Descent" (2014). Convergence with top-k: Stich, Cordonnier,
Jaggi, "Sparsified SGD with Memory" (2018). The SCAPE and Radius papers use this method as a baseline.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.core.tensors import flat, indices_by_key, packed_bits
from torchtitan_scape.kernels.backends import topk_passes
from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.codec.reference import pack
from torchtitan_scape.kernels.common.launching import LatestResult
from torchtitan_scape.kernels.scape.blocks import density_at
from torchtitan_scape.kernels.topk.layout import MEANS, MessageLayout, block_grid, selected_per_block
from torchtitan_scape.kernels.topk.reference import offsets_of
from torchtitan_scape.methods.base import ResidualMethod
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.topk.options import TopkOptions

LEVELS = MEANS["2bit"]  # reconstruction values of the two-bit code
RANGE = 6.0  # standard deviations that its bins cover


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
                padded = pad(levels, (0, -levels.shape[1] % 4)).reshape(-1)
                packed, sent = pack(padded, FORMATS["2bit"]).view(len(rows), -1), row_means.gather(1, levels.long())
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
        valid = []
        for i in numbers:
            grid, offsets = self.layout.grids[i], offsets_of(self.layout, i, message[None])[0]
            tile = torch.arange(grid.tiles, device=offsets.device)[:, None]
            rows = (tile // grid.across) * grid.height + offsets // grid.width
            columns = (tile % grid.across) * grid.width + offsets % grid.width
            valid.append(((rows < grid.rows) & (columns < grid.columns)).view(-1))
        return torch.stack(valid)


class Topk(ResidualMethod):
    """One step, with x = decay * residual + gradient (all in mean units):

    1. Select the k = max(1, round(density * entries)) largest |x| of each block, ties to the lower index.
    2. All-gather one message per replica, with their values (encoded by `code`) and encoded offsets.
    3. The synchronized gradient is the sum of the decoded messages, in replica order, divided by the number of replicas
       or by the number of replicas that sent the entry. It is zero elsewhere.
    4. The residual is x minus the decoded values that were sent.

    Parameters of one dimension are uncompressed unless selection is "tile", and all-reduced. Each replica holds N
    messages at once.
    """

    def __init__(self, context: MethodContext, options: TopkOptions) -> None:
        super().__init__(context, options, compresses_vectors=options.selection == "tile")
        shapes = [tuple(context.shards[i].local_shape) for i in self.sparse]
        self._grids = [block_grid(shape, options.selection, options.block_size) for shape in shapes]
        self._device = context.shards[0].device
        self._messages = LatestResult[TopkMessages]()  # of the present density

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        sparse, uncompressed = ([gradients[i] for i in each] for each in (self.sparse, self.uncompressed))
        density = self._density(info.number)
        if density >= 1.0 or not sparse:
            return self.exchange_all(gradients, info, self.options.decay)
        messages = self._messages.get(density, lambda: TopkMessages(self._layout_at(density), self.backend))
        scale, residuals = self.context.gradient_scale, self.residuals
        message, values = messages.allocate(self._device)
        messages.passes.select(residuals, sparse, self.options.decay, scale, info.applied, message, values)
        decoded = None if self.options.code == "float32" else messages.encode(message, values)
        received = torch.empty(self.collectives.replicas * message.numel(), dtype=torch.uint8, device=message.device)
        handle = self.collectives.all_gather(received, message, kind="payload")
        self.scale_to_mean(uncompressed)
        self.collectives.all_reduce_chunked(flat(uncompressed))
        if decoded is not None:
            messages.passes.keep_(residuals, message, values.sub_(decoded), info.applied)
        handle.wait()
        received = received.view(self.collectives.replicas, -1)
        over_senders = self.options.divisor == "senders"
        self.collectives.write_once(sparse, lambda means: messages.passes.mean_(means, received, over_senders))
        return gradients

    def density(self) -> float:
        entries = sum(shard.size for shard in self.context.shards)
        sent = sum(self._layout_at(self.options.density).counts)
        return (sent + sum(self.context.shards[i].size for i in self.uncompressed)) / max(1, entries)

    def _density(self, number: int) -> float:
        """Return the density of step `number`; 1 for a dense step."""
        if self.take_full_exchange_request() or number <= self.options.start:
            return 1.0
        target = self.options.density
        density = density_at(number - self.options.start, target, self.options.density_warmup_steps)
        if density <= target:
            return density
        message_bytes = self._layout_at(density).nbytes
        entries = sum(grid.entries for grid in self._grids)
        larger = self.collectives.gathered_bytes(message_bytes) > self.collectives.reduced_bytes(entries)
        return 1.0 if larger else density

    def _layout_at(self, density: float) -> MessageLayout:
        return MessageLayout(self._grids, selected_per_block(self._grids, density), self.options.code)
