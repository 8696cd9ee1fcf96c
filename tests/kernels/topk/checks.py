"""Checks that top-k's passes in Triton and PyTorch are bitwise equal, on any device."""

import torch
from torch import Tensor

from torchtitan_scape.kernels.backends import cosine_passes, topk_passes
from torchtitan_scape.kernels.topk.cosine import Basis
from torchtitan_scape.methods.topk.blocks import BlockGrid
from torchtitan_scape.methods.topk.messages import TopkMessages, valid_offsets

# Grid and k: complete blocks and a short last one, tiles with padding on both sides, a message with offsets of whole
# low bits, a block with fewer entries than k, and DeMo's tiles.
CASES = [
    (BlockGrid(1, 200, 1, 64), 3),
    (BlockGrid(13, 21, 5, 8), 4),
    (BlockGrid(1, 40, 1, 32), 32),
    (BlockGrid(1, 70, 1, 64), 20),
    (BlockGrid(16, 24, 16, 8), 1),
]


def check_selection(grid: BlockGrid, k: int, ties: bool, applied: bool, device: str = "cpu") -> None:
    """Compare selection, and error feedback after applied and skipped steps."""
    twin, kernels = topk_passes("torch"), topk_passes("triton")
    x = values(grid.rows * grid.columns, 1, ties).to(device)
    (v, o), (kernel_v, kernel_o) = twin.select(x, grid, k), kernels.select(x, grid, k)
    assert torch.equal(o, kernel_o) and torch.equal(v, kernel_v)
    if grid.coded:
        assert torch.equal(twin.encode_offsets(o, grid.size), kernels.encode_offsets(o, grid.size))
    residuals = [values(x.numel(), 2, False).to(device) for _ in range(2)]
    flag = torch.tensor(applied, device=device)
    for passes, residual in zip((twin, kernels), residuals, strict=True):
        passes.accumulate_(residual, x, 0.5, 3.0 if ties else 1.0, flag)  # other decays: a CPU may round the product
        passes.keep_(residual, grid, o, v / 2, flag)
    assert torch.equal(*residuals)


def check_mean(grid: BlockGrid, k: int, form: str, over_senders: bool, device: str = "cpu") -> None:
    """Compare the mean of three messages, between two other tensors, over replicas or senders."""
    grids, selected = [BlockGrid(1, 37, 1, 8), grid, BlockGrid(3, 5, 3, 5)], [2, k, 4]
    messages = TopkMessages(grids, selected, form)
    rows = []
    for replica in range(3):
        found = [
            topk_passes("torch").select(values(g.rows * g.columns, 10 * replica + i, False).to(device), g, n)
            for i, (g, n) in enumerate(zip(grids, selected, strict=True))
        ]
        valid = [valid_offsets(o, g) for (_, o), g in zip(found, grids, strict=True)]
        rows.append(messages.encode([v for v, _ in found], [o for _, o in found], valid)[0])
    received = torch.stack(rows)
    part = messages.received(received, 1, messages.decode_blocks(received))
    means = [torch.full((grid.rows * grid.columns,), torch.nan, device=device) for _ in range(2)]
    for backend, x in zip(("torch", "triton"), means, strict=True):
        topk_passes(backend).mean_(x, grid, part, over_senders)
    assert torch.equal(*means) and means[0].isfinite().all()


def check_components(grid: BlockGrid, k: int, applied: bool, device: str = "cpu") -> None:
    """Compare DeMo's selection of components, the momentum, and the inverse transform, up to rounding."""
    twin, kernels = cosine_passes("torch"), cosine_passes("triton")
    x, basis = values(grid.rows * grid.columns, 3, False).to(device), Basis.of(grid, torch.device(device))
    momenta, flag = [torch.full_like(x, 7.0) for _ in range(2)], torch.tensor(applied, device=device)
    (v, o), (kernel_v, kernel_o) = (
        passes.largest_components(momentum, x, grid, basis, k, flag)
        for passes, momentum in zip((twin, kernels), momenta, strict=True)
    )
    assert torch.equal(o, kernel_o)
    torch.testing.assert_close(kernel_v, v, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(momenta[1], momenta[0], rtol=1e-5, atol=1e-5)
    assert applied or torch.equal(momenta[1], torch.full_like(x, 7.0))
    inverted = [x.clone(), x.clone()]
    for passes, one in zip((twin, kernels), inverted, strict=True):
        passes.inverse_(one, grid, basis)
    torch.testing.assert_close(inverted[1], inverted[0], rtol=1e-5, atol=1e-5)


def values(n: int, seed: int, ties: bool) -> Tensor:
    """Draw FP32 (n,). ties: small integers, with many equal magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n, generator=generator)
    return (2 * drawn).round() if ties else drawn
