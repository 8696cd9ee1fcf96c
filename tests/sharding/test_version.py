"""Version of the weights: the optimizer container reports every change."""

from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from tests.pool import Pool
from torchtitan_scape.methods.registry import METHODS


def versions() -> None:
    from torchtitan_scape.optimizers.elementwise import AdamS
    from torchtitan_scape.replica import optimizer as container
    from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives

    model, entry = nn.Linear(4, 3), METHODS["dense"]
    optimizers = container.ReplicaOptimizer(
        partial(AdamS, lr=1e-3),
        entry.options(),
        OneReplica(ReplicaCollectives(dist.group.WORLD)),
        model=model,
        max_norm=1.0,
        reduction="sum",
        total_steps=100,
        max_skipped_steps=5,
    )
    version = optimizers.sharding.version

    def step(nan: bool) -> bool:
        """Return whether the step has changed the version of the weights."""
        before = version.now()
        for p in model.parameters():
            p.grad = torch.full_like(p, float("nan") if nan and dist.get_rank() else 1.0)
        optimizers.step()
        return version.now() != before

    assert [step(nan=False), step(nan=True), step(nan=False)] == [True, False, True]
    before = version.now()
    optimizers.model_loaded()
    assert version.now() == before + 1
    optimizers.check_consistency(3)
    assert version.now() == before + 1
    with patch.object(container, "check_replicas_equal", lambda *_: False):  # A repair took place.
        optimizers.check_consistency(4)
    assert version.now() == before + 2
    # Steps without a read of the version in between.
    step(nan=False)
    optimizers.step()
    optimizers.step()
    assert version.now() > before + 3


def test_changes_of_weights_advance_the_version(pool2: Pool) -> None:
    pool2(versions)
