"""The hyper-parameters that passes over a tensor take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """One tensor's hyper-parameters in a step.

    scale: factor on the gradient, the number of replicas where these are summed.
    counted: whether the tensor counts in the norm over the model.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float = 1.0
    counted: bool = True
