"""Hyper-parameters of the passes over one tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rates:
    """Hyper-parameters of one tensor in one step.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: As in AdamW.
        scale: Factor on the gradient: the number of replicas if their gradients are summed.
        counted: True if the tensor is part of the gradient norm of the model.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float = 1.0
    counted: bool = True

    @classmethod
    def of(cls, group: Mapping[str, Any], scale: float = 1.0, counted: bool = True) -> "Rates":
        """Return the rates of an optimizer's parameter group."""
        # Numbers, also if a learning rate is a tensor that a scheduler changes in place.
        lr, eps, weight_decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        return cls(lr, beta1, beta2, eps, weight_decay, scale, counted)
