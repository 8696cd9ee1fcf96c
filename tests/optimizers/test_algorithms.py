"""Methods accept an optimizer by its algorithm, not by its name or the keys of its param groups."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

from torchtitan_scape import AdamS, SignSGD, replicate
from torchtitan_scape.methods.quantized_update.method import ELEMENTWISE
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.pytorch import has_step_of
from torchtitan_scape.replica.checks import check_optimizer
from torchtitan_scape.topology.in_process import SimulatedReplicas


class Logged(AdamW):
    """A subclass with the step of AdamW."""

    def report(self) -> float:
        return float(self.param_groups[0]["lr"])


class Doubled(AdamW):
    """A subclass with another step."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step()
        super().step()


class OwnState(AdamS):
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        pass


class ThreeBetas(Optimizer):
    """As Adan and AdEMAMix."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, dict(lr=0.1, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.0))

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        pass


Foreign = type("AdamW", (ThreeBetas,), {})  # bitsandbytes and other packages have classes of this name


def parameters() -> list[Tensor]:
    return [nn.Parameter(torch.ones(4, 4))]


@pytest.mark.parametrize("kind", [Adamax, NAdam, RAdam, ThreeBetas, Foreign, Doubled, OwnState, Adadelta, SGD, SignSGD])
def test_methods_that_compute_with_moments_refuse_other_algorithms(kind: Any) -> None:
    for method in ("radius", "onebit_adam", "scape"):
        accepted = " or ".join(METHODS[method].optimizers)
        text = rf"method '{method}' works with {accepted}, not with {kind.__name__} \({kind.__module__}\); pass one"
        with pytest.raises(ValueError, match=text):
            check_optimizer(kind(parameters()), method)


@pytest.mark.parametrize(
    "settings, found",
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"maximize": True}, "maximize"),
        ({"maximize": True, "amsgrad": True}, "amsgrad and maximize"),
        ({"decoupled_weight_decay": False, "weight_decay": 0.1}, "L2 weight decay"),
    ],
)
def test_methods_that_compute_with_moments_refuse_other_settings(settings: dict[str, Any], found: str) -> None:
    optimizer = Adam(parameters(), **{"decoupled_weight_decay": True} | settings)
    for method in ("radius", "onebit_adam"):
        with pytest.raises(ValueError, match=rf"this Adam has {found}; pass torch.optim.AdamW without it"):
            check_optimizer(optimizer, method)


def test_adam_without_l2_decay_and_subclasses_with_its_step_are_accepted() -> None:
    for optimizer in (AdamW(parameters()), Adam(parameters()), Logged(parameters()), AdamW(parameters(), fused=True)):
        for method in METHODS.keys() - {"scape"}:
            check_optimizer(optimizer, method)
    for method in METHODS.keys() - {"onebit_adam"}:
        check_optimizer(AdamS(parameters()), method)
    for kind in (Doubled, OwnState, ThreeBetas, NAdam):
        check_optimizer(kind(parameters()), "topk")


def test_the_refusal_comes_before_training() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="method 'radius' works with AdamW or AdamS, not with Adamax"):
        replicate(model, Adamax(model.parameters()), "radius", SimulatedReplicas(2))


def test_parts_of_tensors_are_updated_by_known_algorithms_only() -> None:
    assert all(has_step_of(kind(parameters()), *ELEMENTWISE) for kind in (Adam, AdamW, Logged, SGD, AdamS, SignSGD))
    assert not any(has_step_of(kind(parameters()), *ELEMENTWISE) for kind in (Foreign, Doubled, NAdam, OwnState))
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"interval = 2 with \S+Doubled: a step for several is known for .*AdamW, SGD"):
        options = {"method": "quantized_update", "interval": 2}
        replicate(model, Doubled(model.parameters()), options, SimulatedReplicas(2))
