"""Checks of hyperparameters that all optimizers share."""


def check_hyperparameters(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Check the arguments of an optimizer's constructor.

    Raises:
        ValueError: A value is out of range.
    """
    if lr < 0:
        raise ValueError(f"lr is {lr}; it must be 0 or more")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} is {beta}; it must lie in [0, 1)")
    if eps < 0 or weight_decay < 0:
        raise ValueError(f"eps is {eps} and weight_decay {weight_decay}; both must be 0 or more")
