"""SCAPE's step in plain PyTorch, the baseline of the kernels."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.scape.blocks import entries_per_block
from kernels.scape.reference import unpack_bits
from torchtitan_scape import Scape
from torchtitan_scape.core.parameters import flat_gradient, stored


def plain_step(optimizer: Scape) -> Callable[[], None]:
    """Return a step on an optimizer's parameters, gradients and masks, tensor by tensor.

    It uses bool masks, boolean indexing and torch.topk.
    """
    passes, layout = optimizer.method.passes, optimizer.method.passes.layout
    parameters = [stored(shard.parameter).detach().view(-1) for shard in optimizer.method.ordered]
    gradients = [flat_gradient(shard) for shard in optimizer.method.ordered]
    states = [torch.zeros_like(p) for p in parameters]
    masks: list[list[Tensor]] = []
    for mask in (optimizer.method.masks.in_use, optimizer.method.masks.previous):
        packed = [layout.bits(mask, i) for i in range(passes.sparsified)]
        bits = [unpack_bits(b, len(p)) for b, p in zip(packed, parameters, strict=False) if b is not None]
        masks.append(bits + [torch.ones_like(p, dtype=torch.bool) for p in parameters[len(bits) :]])
    r, k = optimizer.method._rates(optimizer.method.ordered[0]), entries_per_block(passes.density, layout.block_size)
    size = layout.block_size

    def step() -> None:
        if not all(bool(g.isfinite().all()) for g in gradients):
            return
        squares, kept = torch.zeros((), device=passes.device), []
        for i, (g, s) in enumerate(zip(gradients, states, strict=True)):
            used, held = masks[0][i], masks[1][i]
            mt = torch.where(held, r.beta1 * s, s) + (1 - r.beta1) * g
            start, end = layout.owned(i, passes.first_run) if i < passes.sparsified else (0, 0)
            if end - start >= size:
                torch.topk(mt[start:end][: (end - start) // size * size].abs().view(-1, size), k, dim=1)
            payload, last = mt[used], torch.where(held, s, 0.0)[used]
            states[i] = torch.where(used, 0.0, mt)
            gh = (payload - r.beta1 * last) / (1 - r.beta1)
            squares = squares + gh.square().sum()
            kept.append((gh, last))
        factor = (1.0 / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for i, ((gh, last), p) in enumerate(zip(kept, parameters, strict=True)):
            used, held = masks[0][i], masks[1][i]
            gh = gh * factor
            m = r.beta1 * last + (1 - r.beta1) * gh
            v = r.beta2 * last.square() + (1 - r.beta2) * gh.square()
            u = torch.zeros_like(p)
            u[used] = m / (v.sqrt() + r.eps)
            fresh = used & ~held
            u[fresh] *= (len(p) - used.sum()) / fresh.sum().clamp(min=1)
            states[i][used] = m
            p -= r.lr * (u + r.weight_decay * p)

    return step
