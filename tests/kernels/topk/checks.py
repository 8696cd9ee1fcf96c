"""Checks that top-k's passes in Triton and PyTorch are bitwise equal, on any device."""

import torch
from torch import Tensor

from torchtitan_scape.core.patching import replaced
from torchtitan_scape.kernels.backends import cosine_passes, topk_passes
from torchtitan_scape.kernels.topk import triton_passes
from torchtitan_scape.kernels.topk.layout import BlockGrid, MessageLayout
from torchtitan_scape.kernels.topk.reference import TorchTopk
from torchtitan_scape.methods.topk.method import TopkMessages

# Grid and k: complete blocks and a short last one, tiles with padding on both sides, a message with offsets of whole
# low bits, a block with fewer entries than k, and DeMo's tiles.
CASES = [
    (BlockGrid(1, 200, 1, 64), 3),
    (BlockGrid(13, 21, 5, 8), 4),
    (BlockGrid(1, 40, 1, 32), 32),
    (BlockGrid(1, 70, 1, 64), 20),
    (BlockGrid(16, 24, 16, 8), 1),
]
# Between two other tensors, of which the first has tiles of one form with some cases.
OTHERS = [(BlockGrid(1, 37, 1, 64), 3), (BlockGrid(3, 5, 3, 5), 4)]


def layout_of(grid: BlockGrid, k: int, code: str) -> MessageLayout:
    pairs = OTHERS[0], (grid, k), OTHERS[1]
    return MessageLayout([each for each, _ in pairs], [each for _, each in pairs], code)


def tensors(layout: MessageLayout, seed: int, device: str, ties: bool = False) -> list[Tensor]:
    return [values(g.entries, 10 * seed + i, ties).to(device).view(g.rows, -1) for i, g in enumerate(layout.grids)]


def check_selection(grid: BlockGrid, k: int, code: str, ties: bool, applied: bool, device: str = "cpu") -> None:
    """Compare selection, and error feedback after applied and skipped steps."""
    layout, flag, found = layout_of(grid, k, code), torch.tensor(applied, device=device), []
    factor = 3.0 if ties else 1.0
    for passes in topk_passes("torch", layout), topk_passes("triton", layout):
        residuals, gradients = tensors(layout, 2, device), tensors(layout, 1, device, ties)
        message, selected = TopkMessages(layout).allocate(torch.device(device))
        # With other decays a CPU may round the product.
        passes.select(residuals, gradients, 0.5, factor, flag, message, selected)
        if code != "float32":
            passes.keep_(residuals, message, selected / 2, flag)
        found.append([message, selected, *residuals])
    assert all(map(torch.equal, *found))
    before = tensors(layout, 2, device)
    assert all(map(torch.equal, found[0][2:], before)) != applied


def check_mean(grid: BlockGrid, k: int, code: str, over_senders: bool, device: str = "cpu") -> None:
    """Compare the mean of three messages, over replicas or senders."""
    layout, rows = layout_of(grid, k, code), []
    messages, flag = TopkMessages(layout), torch.tensor(True, device=device)
    for replica in range(3):
        message, selected = messages.allocate(torch.device(device))
        zeros = [torch.zeros_like(x) for x in tensors(layout, 0, device)]
        TorchTopk(layout).select(zeros, tensors(layout, replica, device), 1.0, 1.0, flag, message, selected)
        if code != "float32":
            messages.encode(message, selected)
        rows.append(message)
    received, means = torch.stack(rows), []
    for passes in topk_passes("torch", layout), topk_passes("triton", layout):
        means.append([torch.full_like(x, torch.nan) for x in tensors(layout, 0, device)])
        with replaced(triton_passes, "_PROGRAMS", 1):  # a program of the grid takes several of the list
            passes.mean_(means[-1], received, over_senders)
    assert all(map(torch.equal, *means)) and all(bool(x.isfinite().all()) for x in means[0])


def check_components(grid: BlockGrid, k: int, applied: bool, device: str = "cpu") -> None:
    """Compare DeMo's selection of components, the momenta, and the inverse transform, up to rounding."""
    other, target = BlockGrid(8, 12, 8, 6), torch.device(device)
    layout, flag, found = MessageLayout([other, grid, grid], [2, k, k]), torch.tensor(applied, device=device), []
    for backend in ("torch", "triton"):
        passes, momenta = cosine_passes(backend, layout, target), tensors(layout, 2, device)
        message, selected = TopkMessages(layout).allocate(target)
        passes.select(momenta, tensors(layout, 1, device), 0.5, 2.0, flag, message, selected)
        inverted = tensors(layout, 3, device)
        passes.inverse_(inverted)
        offsets = message[layout.value_bytes :]
        found.append([offsets, selected, *momenta, *inverted])
    (offsets, *expected), (kernel_offsets, *computed) = found
    assert torch.equal(offsets, kernel_offsets)
    for got, wanted in zip(computed, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, computed[1:4], tensors(layout, 2, device))) != applied


def values(n: int, seed: int, ties: bool) -> Tensor:
    """Draw FP32 (n,). ties: small integers, with many equal magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n, generator=generator)
    return (2 * drawn).round() if ties else drawn
