"""Optimizers with two modes, such as schedule-free ones, whose weights differ between training and evaluation."""

from typing import Any, Literal

import torch

from torchtitan_scape.methods.base import GradientMethod


@torch.no_grad()
def switch_mode(optimizer: Any, mode: Literal["train", "eval"]) -> None:
    """Call `train()` or `eval()` of the optimizer that a `ReplicaOptimizer` wraps, if it has them.

    Raises:
        ValueError: the method exchanges weights or updates, and not the second weights in the optimizer's state.
    """
    inner = optimizer.inner
    if not hasattr(inner, mode):
        return
    if not isinstance(optimizer.methods[0], GradientMethod):
        raise ValueError(
            f"{type(inner).__name__} has two modes, with weights of its own in its state, which the method "
            f"{optimizer.options.method_name()!r} does not exchange; choose a method that exchanges gradients, such as "
            "'dense' or 'topk', or another optimizer"
        )
    optimizer.finish_previous_step()
    getattr(inner, mode)()
    optimizer.sharding.version.changed()
