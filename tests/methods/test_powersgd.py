"""PowerSGD compared with the paper's algorithm in FP64, and with PyTorch's hook on equal inputs."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.methods.cases import SHAPES, STEPS, Case
from tests.methods.steps import gradients, make, play
from tests.pool import Pool
from tests.replicas import run_replicas
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.powersgd.method import Powersgd, orthonormalize
from torchtitan_scape.methods.powersgd.options import PowersgdOptions
from torchtitan_scape.topology.collectives import ReplicaCollectives

FACTORED = (0, 4)  # indices in SHAPES; the factors of the others would not be smaller


def gram_schmidt(matrix: np.ndarray) -> np.ndarray:
    columns: list[np.ndarray] = []
    for column in matrix.T:
        for before in columns:
            column = column - (before @ column) * before
        norm = np.linalg.norm(column)
        columns.append(column / norm if norm > 0 else column * 0.0)
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("rank", [1, 2])
def test_equals_the_algorithm_of_the_paper(replicas: int, rank: int) -> None:
    case = Case("powersgd", {"rank": rank, "start": 0})
    first: dict[str, Tensor] = {}

    def work(collectives: ReplicaCollectives) -> Any:
        method = make(case, collectives)
        if collectives.replica == 0:
            first.update({name: q.clone() for name, q in method.states()[1].tensors.items()})
        return play(collectives, case, method=method)

    ranks = run_replicas(replicas, work)
    for i in FACTORED:
        q, errors = first[f"p{i}"].double().numpy(), [np.zeros(SHAPES[i]) for _ in range(replicas)]
        for number in range(1, STEPS + 1):
            every = [gradients(number, r)[i].view(SHAPES[i]).double().numpy() + e for r, e in enumerate(errors)]
            p = gram_schmidt(sum(m @ q for m in every) / replicas)
            new = sum(m.T @ p for m in every) / replicas
            q = np.where(np.linalg.norm(new, axis=0) > 0, new, q)
            errors = [m - p @ new.T for m in every]
            got = ranks[0].given[number - 1][i].view(SHAPES[i]).double().numpy()
            np.testing.assert_allclose(got, p @ new.T, rtol=1e-3, atol=1e-4)
            for replica, error in enumerate(errors):
                kept = ranks[replica].kept[number - 1][f"residual.p{i}"].double().numpy()
                np.testing.assert_allclose(kept, error, rtol=1e-3, atol=1e-4)


def test_a_low_rank_gradient_is_exact() -> None:
    """After two steps in which Q converges; the accumulated residual is included."""

    def work(collectives: ReplicaCollectives) -> tuple[Tensor, Tensor]:
        method = make(Case("powersgd", {"rank": 3, "start": 0}), collectives)
        generator = torch.Generator().manual_seed(5)
        low = torch.randn(40, 3, generator=generator) @ torch.randn(3, 24, generator=generator)
        for number in range(1, 5):
            given = [torch.zeros(torch.Size(shape).numel()) for shape in SHAPES]
            given[0] = low.clone().view(-1)
            result = method.synchronize(given, StepInfo(number, torch.tensor(True)))[0]
        return result.view(40, 24), low

    for result, low in run_replicas(2, work):
        assert (result - low).norm() < 1e-4 * low.norm()


@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-6, 1e-4])
def test_nearly_parallel_columns_are_orthonormalized(noise: float) -> None:
    """As those of M Q for a gradient of rank 1: one pass of Gram-Schmidt leaves products of up to 0.96 in FP32."""
    generator = torch.Generator().manual_seed(0)
    column = torch.randn(300, 1, generator=generator)
    matrix = column @ torch.tensor([[1.0, -3.0]]) + noise * torch.randn(300, 2, generator=generator)
    q = orthonormalize(matrix)
    assert (q.T @ q - torch.eye(2)).abs().max() < 1e-5
    assert (q @ (q.T @ matrix) - matrix).norm() < 1e-5 * matrix.norm()


@pytest.mark.parametrize("columns", [1, 2, 3, 5])
def test_orthonormalized_columns_are_orthonormal(columns: int) -> None:
    matrix = torch.randn(20, columns, generator=torch.Generator().manual_seed(0))
    q = orthonormalize(matrix)
    torch.testing.assert_close(q.T @ q, torch.eye(columns), rtol=0, atol=1e-5)
    assert not orthonormalize(torch.zeros(20, columns)).isnan().any()


def against_the_hook(rank: int, shape: tuple[int, int], steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of DDP with PyTorch's hook and of this implementation, with the hook's initial Q."""
    me = dist.get_rank()
    model = nn.Linear(shape[1], shape[0], bias=False)
    wrapped = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1, random_seed=7
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD([("w", nn.Parameter(torch.zeros(shape)))])
    setting = MethodContext(collect_shards(optimizer.param_groups), ReplicaCollectives(dist.group.WORLD), optimizer)
    method = Powersgd(setting, PowersgdOptions(rank=rank, start=2))
    theirs, ours = [], []
    for number in range(1, steps + 1):
        inputs = torch.randn(6, shape[1], generator=torch.Generator().manual_seed(10 * number + me))
        model.zero_grad()
        wrapped(inputs).square().sum().backward()
        assert model.weight.grad is not None
        theirs.append(model.weight.grad.clone())
        local = nn.Linear(shape[1], shape[0], bias=False)
        local.weight.data.copy_(model.weight.data)
        local(inputs).square().sum().backward()
        assert local.weight.grad is not None
        if number == 3:  # the hook draws its initial Q now
            seed = np.random.RandomState(7).randint(1_000_000_000)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                drawn = torch.randn(shape[1], rank)
            method.states()[1].tensors["w"].copy_(orthonormalize(drawn))
        with torch.no_grad():
            ours.append(
                method.synchronize([local.weight.grad.view(-1)], StepInfo(number, torch.tensor(True)))[0].view(shape)
            )
    return theirs, [g.clone() for g in ours]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_equals_the_powersgd_hook_of_pytorch(rank: int, pool2: Pool) -> None:
    for theirs, ours in pool2(against_the_hook, rank, (24, 40), 7):
        for number, (a, b) in enumerate(zip(theirs, ours, strict=True), 1):
            assert (a - b).norm() <= 1e-4 * a.norm(), number
