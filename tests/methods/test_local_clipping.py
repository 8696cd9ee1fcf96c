"""Scaling and clipping of local updates in one pass over the gradients."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.methods.cases import Case
from tests.methods.steps import gradients, make
from tests.replicas import run_replicas
from torchtitan_scape.methods.interface import StepInfo
from torchtitan_scape.topology.collectives import ReplicaCollectives


@pytest.mark.parametrize("observed", [False, True], ids=["", "observed"])
@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6], ids=["not clipped", "clipped", "below the limit"])
def test_local_updates_scale_and_clip_in_one_pass(max_norm: float | None, observed: bool) -> None:
    """A scale is exact for powers of two, also as part of clipping; an observer receives scaled gradients."""

    def work(collectives: ReplicaCollectives) -> list[Any]:
        found = []
        for scale in (1.0, 4.0):
            method, seen = make(Case("diloco", {"inner_steps": 3}), collectives, scale), []
            method.context = replace(method.context, max_norm=max_norm)
            if observed:
                names = [shard.name for shard in method.context.shards]
                method.observer = SimpleNamespace(
                    synchronized=lambda of, _, seen=seen, names=names: seen.extend(of(n).clone() for n in names)
                )
            for number in (1, 2, 3):
                own = [g / scale for g in gradients(number, collectives.replica)]
                with torch.no_grad():
                    method.step(own, StepInfo(number, torch.tensor(True)))
            weights = [shard.parameter.detach().clone() for shard in method.context.shards]
            found.append([*weights, method.context.grad_norm.clone(), method.context.clip_factor.clone(), *seen])
        return found

    for one, other in run_replicas(2, work):
        assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
