"""MuLoCo: DiLoCo with Muon inside and with displacements in four bits, whose errors are kept."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.methods.test_local_updates import (
    BETAS,
    DECAY,
    DILOCO,
    EPS,
    LR,
    MAX_NORM,
    SHAPES,
    WITHOUT,
    far,
    gradient,
    start,
    trained,
)
from tests.pool import Pool
from torchtitan_scape.methods.local_options import DilocoOptions, StreamingDilocoOptions

MULOCO = DILOCO | {"code": "e2m1", "decay": 0.9}
STEPS = 24  # four rounds


class Literal:
    """Algorithm 1 of arXiv:2505.23725 with error feedback, for N replicas in one process.

    Every replica runs Muon on its own clipped gradient. After a round its displacement, plus `decay` times the error
    that it kept, is encoded; the outer optimizer is PyTorch's SGD with Nesterov momentum. The errors come from the code
    under test: `close` receives them, so that everything but the code is independent.
    """

    def __init__(self, replicas: int) -> None:
        from torchtitan_scape.optimizers.muon import Muon

        self.weights = [{n: nn.Parameter(value) for n, value in start().items()} for _ in range(replicas)]
        rates = dict(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        self.inner = [Muon(list(weights.items()), **rates) for weights in self.weights]
        self.anchor = {n: nn.Parameter(value) for n, value in start().items()}
        momentum = MULOCO["outer_momentum"]
        self.outer = torch.optim.SGD(self.anchor.values(), MULOCO["outer_lr"], momentum=momentum, nesterov=True)
        self.errors = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(replicas)]
        self.number = 0

    def step(self) -> None:
        """Take one inner step on every replica."""
        self.number += 1
        for replica, (weights, inner) in enumerate(zip(self.weights, self.inner, strict=True)):
            for name, weight in weights.items():
                weight.grad = gradient(name, weight.detach(), self.number, replica)
            weights[WITHOUT].grad = torch.zeros(SHAPES[WITHOUT])
            nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)
            inner.step()

    @torch.no_grad()
    def close(self, errors: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Take the outer step of a round after which the replicas keep these errors. Return what they encoded."""
        encoded = [
            {n: self.anchor[n] - weights[n] + MULOCO["decay"] * kept[n] for n in SHAPES}
            for weights, kept in zip(self.weights, self.errors, strict=True)
        ]
        for name, anchor in self.anchor.items():
            sent = [own[name] - kept[name] for own, kept in zip(encoded, errors, strict=True)]
            anchor.grad = torch.stack(sent).mean(0)
        self.outer.step()
        for weights in self.weights:
            for name, weight in weights.items():
                weight.copy_(self.anchor[name])
        self.errors = errors
        return encoded


def named(states: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {n: states[f"{kind}.{n}"] for n in SHAPES}


@pytest.mark.parametrize("replicas", [2, 3])
def test_equals_the_reference_algorithm(replicas: int, pool1: Pool, pool2: Pool) -> None:
    """Weights and anchor of all rounds, with simulated replicas and with two gloo ranks.

    Muon rounds to BF16, so that gradients which differ in the last bit may give steps that differ by 2^-8 of an
    entry.
    """
    train = partial(trained, STEPS, "diloco", MULOCO, inner="Muon")
    if replicas == 3:
        ((*history,),) = pool1(train, simulated=3)
    else:
        ranks = pool2(train, simulated=1)
        history = [tuple(one + other for one, other in zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
    literal = Literal(replicas)
    for number, (own, states) in enumerate(history, 1):
        literal.step()
        if number % MULOCO["inner_steps"] == 0:
            errors = [named(each, "residual") for each in states]
            for encoded, error in zip(literal.close(errors), errors, strict=True):
                # An owner adds the error of N times its mean to that of its own message.
                assert 0.0 < far_from_zero(error, encoded) < 0.2 * (1 + replicas)
        anchor = named(states[0], "anchor")
        assert far(anchor, {n: value.detach() for n, value in literal.anchor.items()}) < 1e-5
        for replica in range(replicas):
            weights = literal.weights[replica]
            assert far(own[replica], {n: weight.detach() for n, weight in weights.items()}) < 1e-4
            for name, weight in weights.items():  # so that roundings do not add up
                weight.data.copy_(own[replica][name])


def far_from_zero(values: dict[str, Tensor], unit: dict[str, Tensor]) -> float:
    """Return the norm of all values over that of `unit`."""
    return float((sum(v.square().sum() for v in values.values()) / sum(u.square().sum() for u in unit.values())) ** 0.5)


def test_without_decay_no_error_is_kept(pool1: Pool) -> None:
    ((*history,),) = pool1(trained, 6, "diloco", MULOCO | {"decay": 0.0}, 2, inner="Muon")
    assert not any(key.startswith("residual") for key in history[-1][1][0])


@pytest.mark.parametrize("options", [DilocoOptions, partial(StreamingDilocoOptions, code="float32")])
def test_an_exchange_in_fp32_has_no_error_to_keep(options: Any) -> None:
    with pytest.raises(ValueError, match=r"decay = 0.9; only a code has an error; set code"):
        options(decay=0.9)


def test_streaming_fragments_keep_their_errors(pool1: Pool) -> None:
    """Of every fragment after its own exchange, until its next one."""
    options: dict[str, Any] = MULOCO | {"fragments": 3, "delay": 1, "mix": 0.0}
    ((*history,),) = pool1(trained, 14, "streaming_diloco", options, 2, inner="Muon")
    changed = {n: [] for n in SHAPES if n != WITHOUT}
    for number in range(1, 14):
        before, after = (named(history[i][1][0], "residual") for i in (number - 1, number))
        for name, steps in changed.items():
            if not torch.equal(before[name], after[name]):
                steps.append(number + 1)
    # Exchanges start at the steps 2, 4 and 6 of a round. A state is read after waiting for the exchange in flight.
    assert changed["embed"] == changed["norm"] == [2, 8, 14]
    assert changed["layers.0.weight"] == changed["layers.2.weight"] == [4, 10]
    assert changed["layers.1.weight"] == [6, 12]
