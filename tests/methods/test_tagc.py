"""TAGC between replicas, compared with a second implementation, and its counted bytes."""

import pytest
import torch
from torch import Tensor

from tests.methods.cases import SHAPES, Case
from tests.methods.steps import check_steps, gradients, make
from tests.replicas import run_replicas
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.interface import StepInfo
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.methods.tagc.options import TagcOptions
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.traffic import LevelSize


class Literal:
    """All replicas in one process, with sets of indices in Python."""

    def __init__(self, replicas: int, density: float) -> None:
        self.k, self.replicas = max(1, round(density * 1024)), replicas
        self.compressed = [len(shape) > 1 for shape in SHAPES]
        self.residual = [[torch.zeros(torch.Size(shape).numel()) for shape in SHAPES] for _ in range(replicas)]

    def step(self, given: list[list[Tensor]]) -> list[Tensor]:
        delivered = []
        for i, compressed in enumerate(self.compressed):
            x = [given[r][i] + self.residual[r][i] for r in range(self.replicas)]
            places = set(range(x[0].numel()))
            if compressed:
                places = {place for one in x for place in self.choice(one)}
            index = torch.tensor(sorted(places), dtype=torch.int64)
            mean = torch.zeros_like(x[0])
            mean[index] = sum(one[index] for one in x) / self.replicas
            delivered.append(mean)
            for r, one in enumerate(x):
                one[index] = 0.0
                self.residual[r][i] = one
        return delivered

    def choice(self, x: Tensor) -> set[int]:
        found, sizes = set(), x.abs().tolist()
        for first in range(0, len(sizes), 1024):
            block = range(first, min(first + 1024, len(sizes)))
            found |= set(sorted(block, key=lambda i: (-sizes[i], i))[: self.k])
        return found


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("density", [0.05, 0.3])
def test_equals_the_reference_algorithm(replicas: int, density: float) -> None:
    """Both encodings of the index: offsets at the first density, a bitmap at the second."""
    check_steps(Case("tagc", {"density": density}), replicas, Literal(replicas, density), rtol=0, atol=0)


def test_index_and_values_are_counted_separately() -> None:
    """Two replicas select 307 of 1024 entries each; 8 entries are uncompressed. The index is two times 128 bytes."""

    def work(collectives: ReplicaCollectives) -> dict[str, float]:
        method = make(Case("tagc", {"density": 0.3}), collectives)
        method.synchronize(gradients(1, collectives.replica), StepInfo(1, torch.tensor(True)))
        return {kind: sent for (_, _, kind), sent in collectives.ledger.sent.items()}

    blocks = 4  # of (40, 24), (33, 5), (1, 1), (16, 16)
    expected = {"index": blocks * 128.0, "payload": 4.0 * (blocks * 616 + 8)}
    assert run_replicas(2, work) == [expected, expected]
    shapes = [(3 * 1024, 8), (100,)]
    model = LocalModel.of_shapes(shapes)
    index, values = TagcOptions(density=0.3).collective_calls(model, [LevelSize("network", 2)])
    assert (index.kind, index.count) == ("all_reduce", 24 * 128 // 4)
    assert (values.kind, values.count) == ("all_reduce", 24 * 616 + 100)
    sparse = TagcOptions(density=0.0125)
    index, values = sparse.collective_calls(model, [LevelSize("network", 4)])
    assert (index.kind, index.count) == ("all_gather", 24 * 14)
    assert values.count == 24 * 52 + 100
    alone = PlannedRun(DenseOptions()).simulated_memory(model, 1)
    held = {"residual": 4.0 * 24 * 1024, "messages": 24 * 14}
    assert PlannedRun(sparse).simulated_memory(model, 1) == alone | held
