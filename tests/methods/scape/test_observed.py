"""Values that an observer of SCAPE receives by parameter: gh on the mask, first moment and residual."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.replicas import ThreadCollectives, run_replicas
from tests.toy import DENSE, SPARSE, train
from torchtitan_scape import Scape

NAMES = [f"p{i}" for i in range(len(SPARSE + DENSE))]


class Seen:
    """An observer that stores the gradients of the last step."""

    def __init__(self, names: Sequence[str] = NAMES) -> None:
        self.names = names
        self.gradients: dict[str, Tensor] = {}

    def synchronized(self, gradient: Callable[[str], Tensor], applied: Tensor) -> None:
        assert bool(applied)
        self.gradients = {name: gradient(name).clone() for name in self.names}


def moment_and_residual(optimizer: Scape, name: str) -> tuple[Tensor, Tensor]:
    return optimizer.method.moment_and_residual(next(s for s in optimizer.shards() if s.name == name))


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (1, {}),
        (3, dict(code="int4")),
        (3, dict(offload=["state"], chunk_bytes=800)),
        (3, dict(update="sharded")),
        (2, dict(update="sharded", bf16_weights=True, selection="tensor")),
    ],
    ids=str,
)
def test_the_moment_follows_from_the_observed_gradient(replicas: int, options: dict[str, Any]) -> None:
    """m = b1 q + (1 - b1) gh on A, also in the warm-up with an in-place payload; gh is NaN elsewhere."""

    def work(collectives: ThreadCollectives) -> list[Tensor]:
        seen, before = Seen(), dict[str, Tensor]()

        def probe(optimizer: Scape, step: int) -> None:
            optimizer.finish_previous_step()
            for name in NAMES if seen.gradients else ():
                gh, (moment, residual) = seen.gradients[name], moment_and_residual(optimizer, name)
                on = ~gh.isnan()
                assert bool(on.any()) and not moment[~on].any() and (coded or not residual[on].any())
                last = before[name]
                torch.testing.assert_close(moment[on], (0.9 * last + 0.1 * gh)[on], rtol=1e-5, atol=1e-7)
            if seen.gradients:
                total = torch.stack([gh.nan_to_num().double().square().sum() for gh in seen.gradients.values()]).sum()
                torch.testing.assert_close(total.sqrt().float(), optimizer.grad_norm, rtol=1e-5, atol=0)
            before.update({name: moment_and_residual(optimizer, name)[0] for name in NAMES})
            optimizer.observe(seen)
            kept.append(
                torch.cat([gh.nan_to_num() for gh in seen.gradients.values()]) if seen.gradients else torch.zeros(1)
            )

        kept: list[Tensor] = []
        coded = "code" in options
        # As printed in the paper: gh enters the moment unscaled, and there is no staleness scaling.
        form = dict(density=0.2, density_warmup_steps=4, clip_mode="literal", staleness_scaling=False)
        train(collectives, 8, probe=probe, **form, **options)
        return kept

    first, *others = run_replicas(replicas, work)
    for other in others:  # all observers receive the same bits
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
