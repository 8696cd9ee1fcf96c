"""EF21-Muon of the study: the owner steps along the orthogonalized mean of the replicas' momenta."""

from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.study.ef21 import Ef21Muon
from scripts.study.grid import GRIDS, Grid
from scripts.study.launchers import process_command
from tests.methods.test_bases import SHAPES, gradients
from tests.methods.test_quantized_update import MATRICES, run_replicas, start_of, steps, weights
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.methods.interface import MethodContext
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.optimizers.muon import Muon, orthogonalized
from torchtitan_scape.topology.collectives import ReplicaCollectives

LR, BETA, STEPS = 0.02, 0.95, 4


def make(collectives: ReplicaCollectives, **options: Any) -> Ef21Muon:
    optimizer = Muon([(name, start_of(name)) for name in SHAPES], lr=LR, betas=(BETA, 0.95), weight_decay=0.0)
    context = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
    codes = {"block": 32, "whiten_every": 0, "code": "int8", "update_code": "int8"}
    return Ef21Muon(context, QuantizedUpdateOptions(**(codes | options)))


def reference(name: str, replicas: int) -> Tensor:
    """Return a matrix after steps along the orthogonalized momentum of the mean gradient, without Nesterov's term."""
    number = list(SHAPES).index(name)
    value, momentum = start_of(name).detach(), torch.zeros(SHAPES[name])
    for n in range(1, STEPS + 1):
        mean = sum(gradients(n, i)[number].view(SHAPES[name]) for i in range(replicas)) / replicas
        momentum = BETA * momentum + (1.0 - BETA) * mean
        value = value - LR * 0.2 * max(SHAPES[name]) ** 0.5 * orthogonalized(momentum.bfloat16()).float()
    return value


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_owner_steps_along_the_momentum_of_the_mean(replicas: int) -> None:
    def train(collectives: ReplicaCollectives) -> list[Tensor]:
        method = make(collectives)
        steps(method, range(1, STEPS + 1))
        return weights(method)

    (found, *_) = run_replicas(replicas, train)
    for name in MATRICES:
        moved = (reference(name, replicas) - start_of(name)).norm()
        error = (found[list(SHAPES).index(name)] - reference(name, replicas)).norm()
        assert error < (1e-3 if replicas == 1 else 0.1) * moved


def test_an_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="EF21-Muon needs"):
        run_replicas(1, lambda collectives: make(collectives, interval=2))


def test_a_grid_names_the_program(tmp_path: Any) -> None:
    grid = Grid(GRIDS / "many_replicas.toml")
    (one,) = grid.choose(["245-4"])
    spec = grid.spec(one, "ef21-muon", 0.032, 0)
    assert "scripts.study.ef21" in process_command(spec, tmp_path)
    assert spec.key != grid.spec(one, "quantized-update-2-1-muon", 0.032, 0).key
