"""Top-k with error feedback, compared with a reference algorithm, entry by entry."""

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.methods.cases import SHAPES, Case
from tests.methods.steps import check_steps, make
from tests.replicas import run_replicas
from torchtitan_scape import replicate
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.kernels.scape.blocks import offset_code
from torchtitan_scape.kernels.topk.layout import MessageLayout, block_grid, selected_per_block
from torchtitan_scape.kernels.topk.reference import (
    from_blocks,
    offsets_of,
    to_blocks,
    valid_mask,
    values_of,
    write_offsets,
)
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.topk.method import Topk, TopkMessages, encode_two_bits
from torchtitan_scape.methods.topk.options import TopkOptions
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.in_process import SimulatedReplicas

# No side is a multiple of 64: 3 x 2 tiles of 44 x 35, the last of 42 rows, and slices of 2500 and 2499 entries.
LARGE = [(130, 70), (4999,)]


class Literal:
    """All replicas in one process. Python's stable sort finds the largest entries."""

    def __init__(self, replicas: int, shapes: list[tuple[int, ...]], **options: Any) -> None:
        self.shapes, self.options = shapes, {"decay": 1.0, "code": "float32", "divisor": "replicas", **options}
        self.residual = [[torch.zeros(math.prod(s)) for s in shapes] for _ in range(replicas)]

    def step(self, given: list[list[Tensor]]) -> list[Tensor]:
        found = []
        for i, shape in enumerate(self.shapes):
            rows = [replica[i] for replica in given]
            if len(shape) < 2 and self.options.get("selection") != "tile":
                found.append(sum(rows) / len(rows))
                continue
            total, senders = torch.zeros_like(rows[0]), torch.zeros_like(rows[0])
            for own, row in zip(self.residual, rows, strict=True):
                x = self.options["decay"] * own[i] + row
                own[i] = x.clone()
                places = self.chosen(x, shape)
                for place, value in zip(
                    places, self.received_values([float(x[place]) for place in places]), strict=True
                ):
                    total[place] += value
                    senders[place] += 1
                    own[i][place] -= value
            found.append(total / (len(rows) if self.options["divisor"] == "replicas" else senders.clamp(min=1)))
        return found

    def received_values(self, values: list[float]) -> list[float]:
        """SparseLoCo's quantizer: centered values in bins of 6/4 standard deviations, each decoded as its mean."""
        if self.options["code"] == "float32" or not values:
            return values
        mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        step = 6 * deviation / 4
        codes = [min(3, max(0, round((value - mean) / step + 2))) if step else 2 for value in values]
        bins = {code: [v for v, c in zip(values, codes, strict=True) if c == code] for code in codes}
        return [statistics.fmean(bins[code]) for code in codes]

    def chosen(self, x: Tensor, shape: tuple[int, ...]) -> list[int]:
        places: list[int] = []
        for tile, size in self.tiles(shape):
            k = max(1, round(self.options["density"] * size))
            places += sorted(tile, key=lambda place: -abs(float(x[place])))[:k]
        return places

    def tiles(self, shape: tuple[int, ...]) -> list[tuple[list[int], int]]:
        """Yield the indices of every tile and the size of a full tile."""
        n = math.prod(shape)
        if self.options.get("selection") != "tile":
            length = n if self.options.get("selection") == "tensor" else self.options["block_size"]
            return [(list(range(start, min(start + length, n))), length) for start in range(0, n, max(1, length))]
        (rows, columns), most = (shape, (64, 64)) if len(shape) > 1 else ((1, n), (1, 4096))
        if not n:
            return []
        height, width = (-(-side // -(-side // limit)) for side, limit in zip((rows, columns), most, strict=True))
        return [
            (
                [
                    i * columns + j
                    for i in range(top, min(top + height, rows))
                    for j in range(left, min(left + width, columns))
                ],
                height * width,
            )
            for top in range(0, rows, height)
            for left in range(0, columns, width)
        ]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"density": 0.1, "block_size": 16},
        {"density": 0.5, "block_size": 64},  # the last block of (33, 5) has fewer than k entries
        {"density": 0.03, "selection": "tensor"},
        {"density": 0.1, "block_size": 16, "decay": 0.9},
        {"density": 0.5, "block_size": 64, "code": "2bit", "divisor": "senders"},
        {"density": 0.05, "selection": "tile", "code": "2bit", "decay": 0.95},
    ],
)
def test_equals_the_reference_algorithm(replicas: int, options: dict[str, Any]) -> None:
    rounding = 5e-6 if "code" in options else 1e-6  # means of bins are summed in another order
    literal = Literal(replicas, SHAPES, **options)
    check_steps(Case("topk", options), replicas, literal, rtol=1e-6, atol=rounding)


@pytest.mark.parametrize("code, divisor", [("float32", "replicas"), ("2bit", "senders")])
def test_tiles_of_sides_that_are_not_multiples_of_64(code: str, divisor: str) -> None:
    options = {"density": 64 / 4096, "selection": "tile", "code": code, "divisor": divisor}

    def drawn(step: int, replica: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(10 * step + replica)
        return [torch.randn(math.prod(shape), generator=generator) for shape in LARGE]

    def work(collectives: ReplicaCollectives) -> list[list[Tensor]]:
        named = [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(LARGE)]
        optimizer = torch.optim.SGD(named)
        setting = MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer)
        method, found = Topk(setting, TopkOptions(**options)), []
        for number in (1, 2, 3):
            given = method.synchronize(drawn(number, collectives.replica), StepInfo(number, torch.tensor(True)))
            found.append([g.clone() for g in given])
        # 6 tiles of 44 x 35, two slices of 2500 entries.
        sent = sum(collectives.ledger.sent_by_level().values()) / 3
        cuts = [block_grid(shape, "tile", 0) for shape in LARGE]
        assert sent == method.planned_bytes() == MessageLayout(cuts, selected_per_block(cuts, 1 / 64), code).nbytes
        return found

    literal = Literal(2, LARGE, **options)
    first, second = run_replicas(2, work)
    for number in (1, 2, 3):
        expected = literal.step([drawn(number, replica) for replica in range(2)])
        for one, other, wanted in zip(first[number - 1], second[number - 1], expected, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(128, 64), (130, 70), (1, 1), (3, 5, 7), (67, 1), (4097,), (5,), ()])
def test_every_entry_is_in_one_tile(shape: tuple[int, ...]) -> None:
    n, found = math.prod(shape), block_grid(shape, "tile", 0)
    x = torch.arange(1, n + 1, dtype=torch.float32)
    tiles, real = to_blocks(x, found), valid_mask(found, x.device)
    assert tiles.shape == (found.tiles, found.size) and found.size <= 4096
    assert sorted(tiles[tiles > 0].tolist()) == x.tolist()
    assert torch.equal(tiles > 0, torch.ones_like(tiles, dtype=torch.bool) if real is None else real)
    assert torch.equal(from_blocks(tiles, found), x)
    if len(shape) == 2:
        first = x.view(shape)[: found.height, : found.width]
        assert torch.equal(tiles[0].view(found.height, found.width)[: len(first), : first.shape[1]], first)


def test_message_bytes_of_64_of_4096_in_two_bits() -> None:
    """Per tile 16 bytes of codes and 64 of offsets (96 with 12 bits per offset); four means per tensor."""
    assert offset_code(64, 4096).nbytes == 64
    tiles = 3 * 2 + 1
    grids = [block_grid((192, 128), "tile", 0), block_grid((4096,), "tile", 0)]
    assert MessageLayout(grids, [64, 64], "2bit").nbytes == tiles * (16 + 64) + 2 * 16


@pytest.mark.parametrize("values", [[], [3.0], [2.0, 2.0], [-1.0, -1.0, 5.0]])
def test_two_bits_represent_up_to_four_values_exactly(values: list[float]) -> None:
    """If they are far enough from each other. Padding does not change the means."""
    x = torch.tensor([*values, 100.0])
    real = torch.tensor([True] * len(values) + [False])
    means, codes = encode_two_bits(x, real)
    decoded = means[codes.long()]
    assert decoded[: len(values)].tolist() == values


def test_fp32_values_are_decoded_without_a_copy() -> None:
    """All replicas' messages are in memory at once, so that a copy would double the peak."""
    cut = block_grid((24,), "block", 8)
    layout = MessageLayout([cut], [2], "float32")
    messages = TopkMessages(layout)
    values, offsets = torch.arange(6.0).view(3, 2), torch.tensor([[0, 7], [1, 2], [5, 6]])
    message, sent = messages.allocate(values.device)
    sent.copy_(values.view(-1))
    write_offsets(message, layout, 0, offsets)
    arrived = message.repeat(3).view(3, -1)
    found = values_of(layout, 0, arrived)[2]
    assert torch.equal(found, values) and found.data_ptr() == arrived[2].data_ptr()
    assert torch.equal(offsets_of(layout, 0, arrived)[2], offsets)


def test_ties_are_selected_in_index_order() -> None:
    def work(collectives: ReplicaCollectives) -> Tensor:
        method = make(Case("topk", {"density": 0.25, "block_size": 8}), collectives)
        ones = [torch.ones(torch.Size(shape).numel()) for shape in SHAPES]
        return method.synchronize(ones, StepInfo(1, torch.tensor(True)))[0]

    assert run_replicas(2, work)[0].view(-1, 8)[0].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("method", [{"method": "topk", "density": 0.5, "start": 0}, {"method": "demo", "chunk": 4}])
def test_a_gradient_may_be_missing_in_one_simulated_replica(method: dict[str, Any]) -> None:
    model = nn.Linear(8, 4, bias=False)
    optimizer = replicate(model, torch.optim.AdamW, method, replicas=SimulatedReplicas(2))
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones(4, 8)
    optimizer.stash_replica_gradients()
    optimizer.stash_replica_gradients()  # none in the second one
    optimizer.step()
    assert not torch.equal(model.weight, before)
