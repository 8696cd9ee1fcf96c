"""Dense AdamS and the finite check in plain PyTorch: the specification, and what runs on a CPU."""

import torch
from torch import Tensor

from kernels.common.gating import decay_, gated, known_false


def finite(gradients: list[Tensor]) -> Tensor:
    """bool (len(gradients),): whether each flat gradient is free of NaN and Inf. One read, no temporary."""
    one = torch.ones((), dtype=torch.bool, device=gradients[0].device)
    verdicts = []
    for gradient in gradients:
        if gradient.numel() == 0:
            verdicts.append(one)
            continue
        low, high = gradient.aminmax()  # NaN propagates through both
        verdicts.append(low.isfinite() & high.isfinite())
    return torch.stack(verdicts)


def adams_update_(
    parameter: Tensor,
    gradient: Tensor,
    moment: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_corrections: tuple[Tensor, Tensor],
    applied: Tensor,
) -> None:
    """Dense AdamS: v = beta2 * m^2 + (1 - beta2) * g^2 from last step's m (AdamS paper, Algorithm 1)."""
    if known_false(applied):
        return
    beta1, beta2 = betas
    second = moment.square().mul_(beta2).add_(gradient.square(), alpha=1.0 - beta2)
    new = (moment * beta1).add_(gradient, alpha=1.0 - beta1)
    step = (new / bias_corrections[0]).div_((second / bias_corrections[1]).sqrt_().add_(eps))
    decay_(parameter, lr * weight_decay, applied)
    parameter.sub_(gated(applied, step * lr, torch.zeros_like(step)))
    moment.copy_(gated(applied, new, moment))
