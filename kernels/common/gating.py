"""What the PyTorch passes share: writes that a flag gates on the device, and weight decay."""

import torch
from torch import Tensor


def known_false(flag: Tensor) -> bool:
    """Whether the host can see at once that the flag is false: on a CPU. A GPU is not waited for."""
    return flag.is_cpu and not flag


def gated(applied: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` where the step is applied; after `known_false`."""
    return new if applied.is_cpu else torch.where(applied, new, old)


def decay_(parameter: Tensor, rate: float, applied: Tensor) -> None:
    """parameter -= rate * parameter. A factor 1 - rate, rounded to FP32, would err the same way every step."""
    parameter.addcmul_(parameter, applied.to(parameter.dtype), value=-rate)
