"""Small operations on tensors."""

import pytest
import torch

from scripts.benchmarks.step_operators import StepCounter
from tests.methods.cases import Case
from tests.methods.steps import make
from tests.replicas import run_replicas
from torchtitan_scape.core import tensors
from torchtitan_scape.core.tensors import sum_of_squares
from torchtitan_scape.methods import base
from torchtitan_scape.topology.collectives import ReplicaCollectives


def test_a_sum_of_squares_needs_no_copy_of_the_whole_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "PART", 1000)
    values = torch.randn(100, 101, dtype=torch.float32)
    with StepCounter("cpu") as counter:
        total = sum_of_squares(values)
    assert total.dtype == torch.float64 and torch.allclose(total, values.double().square().sum(), rtol=1e-12)
    assert counter.count.peak < 3 * 8 * 1000 < values.numel() * 8
    assert torch.equal(sum_of_squares(values[:5]), values[:5].double().square().sum())  # one part has the same bits


@pytest.mark.parametrize("name", ["topk", "diloco", "sparta"])
def test_log_statistics_have_small_temporaries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few copies of a part in FP64, for residuals and for distances to the anchor."""
    for module in (tensors, base):
        monkeypatch.setattr(module, "PART", 1000)

    def work(collectives: ReplicaCollectives) -> int:
        method = make(Case(name), collectives, shapes=[(100, 100), (300,)])
        with torch.no_grad(), StepCounter("cpu") as counter:
            method.metrics()
        return counter.count.peak

    assert all(peak < 4 * 8 * 1000 for peak in run_replicas(1, work))
