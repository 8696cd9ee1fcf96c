"""SparseLoCo compared with arXiv:2508.15706."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.methods import test_local_updates as local
from tests.methods import test_topk as topk
from tests.methods.test_local_updates import SHAPES, compared, far
from tests.pool import Pool
from tests.replicas import run_replicas
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.interface import MethodContext
from torchtitan_scape.methods.local_options import SparselocoOptions
from torchtitan_scape.methods.local_updates import LocalUpdates
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.traffic import LevelSize

PUBLISHED = {"density": 64 / 4096, "decay": 0.95, "code": "2bit", "divisor": "senders"}


class Literal(local.Literal):
    """N replicas in one process.

    e_i = decay e_i + (anchor - theta_i). A replica sends the largest entries of every tile in two bits, and stores the
    rest in e_i. The anchor moves by the mean over the senders of each entry.
    """

    def __init__(self, replicas: int, inner_steps: int, **options: Any) -> None:
        super().__init__(replicas, inner_steps, 1.0, 0.0)
        self.due = [-1]  # never
        self.codec = topk.Literal(replicas, list(SHAPES.values()), selection="tile", **options)

    def step(self) -> None:
        super().step()
        if self.t % self.rounds:
            return
        moved = [[(self.anchor[n].data - theta[n]).flatten() for n in SHAPES] for theta in self.theta]
        for n, mean in zip(SHAPES, self.codec.step(moved), strict=True):
            self.anchor[n].data -= mean.view(SHAPES[n])
            for theta in self.theta:
                theta[n] = self.anchor[n].data.clone()


@pytest.mark.parametrize("changes", [{}, {"divisor": "replicas", "code": "float32"}], ids=["published", "equations"])
def test_equals_the_reference_algorithm(changes: dict[str, Any], pool1: Pool, pool2: Pool) -> None:
    def literal_of(replicas: int) -> Literal:
        return Literal(replicas, 6, **{**PUBLISHED, **changes})

    for literal, i, states in compared(literal_of, "sparseloco", {"inner_steps": 6, **changes}, pool1, pool2):
        assert far(states["anchor"], {n: a.data for n, a in literal.anchor.items()}) < 1e-6
        residual = {n: value.flatten() for n, value in states["residual"].items()}
        assert far(residual, dict(zip(SHAPES, literal.codec.residual[i], strict=True))) < 1e-5


def test_defaults_equal_the_published_settings() -> None:
    options = SparselocoOptions()
    assert (options.inner_steps, options.outer_lr, options.outer_momentum) == (30, 1.0, 0.0)
    assert {key: getattr(options, key) for key in PUBLISHED} == PUBLISHED


def test_the_cost_has_the_bytes_and_memory() -> None:
    """One message per round; tiles include one-dimensional parameters."""
    shapes = [(192, 128), (4096,), (7,)]

    def work(collectives: ReplicaCollectives) -> float:
        named = {f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
        optimizer = torch.optim.SGD(named.items())
        shards = collect_shards(optimizer.param_groups)
        return LocalUpdates(
            MethodContext(shards, collectives, optimizer=optimizer), SparselocoOptions()
        ).planned_bytes()

    own = 3 * 2 * (16 + 64) + 16 + (16 + 64) + 16 + (1 + 1) + 16 + 14  # padded to 16 bytes
    planned, model = PlannedRun(SparselocoOptions(), "AdamW"), LocalModel.of_shapes(shapes)
    levels = [LevelSize("network", 4)]
    call, rest = planned.options.collective_calls(model, levels)
    assert call.count == own and own % 16 == 0 and rest.count == 0
    sent = sum(stage.sent for stage in call.stages(levels))
    assert sent == pytest.approx(3 * own / 30)
    assert run_replicas(4, work) == pytest.approx([sent] * 4)
    n, alone = 192 * 128 + 4096 + 7, PlannedRun(DenseOptions(), "AdamW").simulated_memory(model, 1)
    kept = dict.fromkeys(("anchor", "displacements", "residual"), 4.0 * n)
    assert planned.simulated_memory(model, 1) == alone | kept | {"messages": own}
