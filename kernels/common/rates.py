"""Hyper-parameters of the passes over one tensor."""

from dataclasses import dataclass


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
