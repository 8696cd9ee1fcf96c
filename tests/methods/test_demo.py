"""DeMo and sign descent compared with arXiv:2411.19870, entry by entry in float64."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.marks import slow
from tests.methods import test_local_updates as local
from tests.methods.cases import Case
from tests.methods.steps import close, mean, play
from tests.methods.test_local_updates import DECAY, LR, SHAPES, far, final
from tests.pool import Pool
from tests.replicas import run_replicas
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.kernels.scape.blocks import offset_code
from torchtitan_scape.kernels.topk.layout import divisor_grid
from torchtitan_scape.kernels.topk.reference import Basis
from torchtitan_scape.methods.demo.method import Demo
from torchtitan_scape.methods.demo.options import DemoOptions
from torchtitan_scape.methods.interface import MethodContext
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.optimizers.elementwise import SignSGD
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.traffic import LevelSize

OPTIONS: dict[str, Any] = {"chunk": 8, "k": 5, "beta": 0.95}


class Literal:
    """N replicas in one process.

    m = beta m + g. The k largest components of the cosine transform of each tile are subtracted from m and sent. The
    update is the sign of the inverse transform of the mean over the senders of each component.
    """

    def __init__(self, replicas: int, chunk: int, k: int, beta: float, code: str = "float32") -> None:
        self.chunk, self.k, self.beta, self.signs = chunk, k, beta, code == "sign"
        self.theta = local.start()  # FP32, so that the order of a sum does not change a sign
        self.m = [{n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()} for _ in range(replicas)]
        self.t = 0

    def step(self) -> None:
        self.t += 1
        for n, theta in self.theta.items():
            matrix = theta.view(1, -1) if theta.ndim == 1 else theta
            height, width = (max(d for d in range(1, self.chunk + 1) if side % d == 0) for side in matrix.shape)
            sums, counts = (torch.zeros(matrix.shape, dtype=torch.float64) for _ in range(2))
            for i, own in enumerate(self.m):
                if n != local.WITHOUT:
                    own[n] = self.beta * own[n] + local.gradient(n, theta, self.t, i).double()
                received: list[tuple[int, int, float]] = []
                momentum = own[n].view(matrix.shape)
                for top in range(0, matrix.shape[0], height):
                    for left in range(0, matrix.shape[1], width):
                        tile = momentum[top : top + height, left : left + width]
                        found = cosines(height) @ tile @ cosines(width).T
                        flat = found.flatten().tolist()
                        sent = torch.zeros_like(found)
                        for place in sorted(range(len(flat)), key=lambda p: -abs(flat[p]))[: self.k]:
                            row, column = divmod(place, width)
                            sent[row, column] = flat[place]
                            received.append((top + row, left + column, flat[place]))
                        tile -= cosines(height).T @ sent @ cosines(width)
                size = sum(abs(value) for *_, value in received) / len(received)
                for row, column, value in received:
                    sums[row, column] += math.copysign(size, value) if self.signs else value
                    counts[row, column] += 1
            average, g = sums / counts.clamp(min=1), torch.zeros_like(sums)
            for top in range(0, matrix.shape[0], height):
                for left in range(0, matrix.shape[1], width):
                    tile = average[top : top + height, left : left + width]
                    g[top : top + height, left : left + width] = cosines(height).T @ tile @ cosines(width)
            self.theta[n] = (1 - LR * DECAY) * theta - LR * g.view(theta.shape).sign().float()


@cache
def cosines(size: int) -> Tensor:
    """Return the matrix with rows cos(pi k (2 j + 1) / 2 size), normalized, with exact zeros."""
    rows = []
    for k in range(size):
        row = [round(math.cos(math.pi * k * (2 * j + 1) / (2 * size)), 15) for j in range(size)]
        length = math.sqrt(sum(value * value for value in row))
        rows.append([value / length for value in row])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("code", [slow("float32"), "sign"])
def test_equals_the_reference_algorithm(code: str, pool1: Pool, pool2: Pool) -> None:
    """Parameters and momentum of 27 steps, with two simulated replicas and with two gloo ranks."""
    options = OPTIONS | {"code": code}
    literal = Literal(2, **options)
    for _ in range(27):
        literal.step()
    first, second = (run[-1] for run in pool2(final, 27, "demo", options, 1, inner="SignSGD"))
    ((own, states),) = (run[-1] for run in pool1(final, 27, "demo", options, 2, inner="SignSGD"))
    assert all(torch.equal(first[0][0][n], second[0][0][n]) for n in SHAPES)
    for theta in (own[0], first[0][0]):
        assert far(theta, literal.theta) < 1e-6
    for kept, m in zip([*states, first[1][0], second[1][0]], [*literal.m, *literal.m], strict=True):
        assert far({n: kept[f"residual.{n}"] for n in SHAPES}, m) < 1e-6


@pytest.mark.parametrize("shape", [(128, 64), (15, 7), (33, 5), (1, 1), (67, 2), (64,), (7,), (3, 5, 7)])
def test_the_inverse_transform_restores_the_input(shape: tuple[int, ...]) -> None:
    cut = divisor_grid(shape, 64)
    basis = Basis.of(cut, torch.device("cpu"))
    assert cut.rows % cut.height == 0 == cut.columns % cut.width and max(cut.height, cut.width) <= 64
    tiles = torch.randn(cut.tiles, cut.size, generator=torch.Generator().manual_seed(0))
    components = basis.transform(tiles)
    assert float((basis.inverse(components) - tiles).norm() / tiles.norm()) < 1e-6
    assert float(components.norm()) == pytest.approx(float(tiles.norm()), rel=1e-6)
    flat = basis.transform(torch.ones(1, cut.size))
    assert float(flat[0, 0]) == pytest.approx(cut.size**0.5) and float(flat[0, 1:].abs().sum()) < 1e-3


def test_beta_1_conserves_the_gradients() -> None:
    """In every step, each gradient of a single replica was sent or is in its momentum."""
    case = Case("demo", {"chunk": 8, "k": 3, "beta": 1.0})
    (rank,) = run_replicas(1, lambda collectives: play(collectives, case))
    total = [torch.zeros_like(t) for t in mean(0, 1)]
    for i, pending in enumerate(rank.pending):
        for n, given in enumerate(mean(i + 1, 1)):
            total[n] += given
            delivered = sum(step[n].double() for step in rank.given[: i + 1])
            assert close(delivered + pending[n], total[n])
    assert sum(float(pending.norm()) for pending in rank.pending[-1]) > 1.0


def test_the_cost_has_the_bytes_and_memory() -> None:
    """32 of 64 x 64 components take 4 bytes or 1 bit each, and 1.2 bytes of offset; smaller tiles send all."""
    shapes = [(192, 128), (96, 10), (7,)]
    model = LocalModel.of_shapes(shapes)

    def work(collectives: ReplicaCollectives) -> float:
        named = {f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
        optimizer = SignSGD(named.items())
        setting = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
        return Demo(setting, options).planned_bytes()

    places = 6 * offset_code(32, 4096).nbytes + 2 * offset_code(32, 480).nbytes + offset_code(7, 7).nbytes
    assert places < 1.5 * 32 * 8  # 12 bits each
    counts = (6 * 32, 2 * 32, 7)
    for code, own in (("float32", 4 * sum(counts)), ("sign", sum(4 + -(-count // 8) for count in counts))):
        options = DemoOptions(code=code)  # type: ignore[arg-type]
        planned = PlannedRun(options, "SignSGD")
        (call,) = planned.options.collective_calls(model, [LevelSize("network", 4)])
        assert call.count == -(-(own + places) // 16) * 16
        sent = sum(stage.sent for stage in call.stages([LevelSize("network", 4)]))
        assert run_replicas(4, work) == pytest.approx([sent] * 4)
    n = 4.0 * (192 * 128 + 96 * 10 + 7)
    assert planned.simulated_memory(model, 1) == {
        "parameters": n,
        "gradients": n,
        "residual": n,
        "messages": call.count,
    }
    assert planned.name == "demo 32 1bit with signsgd"
    assert "state" not in PlannedRun(DenseOptions(), "SignSGD").simulated_memory(model, 1)
