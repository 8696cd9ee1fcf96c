"""Three-level sharding on four ranks against one optimizer on the whole model."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.pool import Pool
from tests.toy import sum_gradients
from torchtitan_scape.sharding.levels import LevelGroup, build_levels
from torchtitan_scape.sharding.options import LevelsOptions, ShardingOptions
from torchtitan_scape.topology.groups import build_level_groups
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import get_machine
from torchtitan_scape.topology.traffic import TrafficLedger

RANKS, MICRO_BATCHES, WIDTH = 4, 2, 24
DEGREES, STEPS = [(2, 4), (2, 2), (1, 2)], 4


def make_model(middle: int = 37) -> nn.Sequential:
    """Groups with a matrix, its bias and a norm, whose rows two ranks cannot divide evenly, and the root group."""
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.LayerNorm(n), nn.Linear(n, m), nn.Tanh()) for n, m in ((WIDTH, middle), (middle, WIDTH))]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 8, bias=False))


def batch(rank: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro_batch)
    inputs = torch.randn(8, WIDTH, generator=generator)
    return inputs, torch.tanh(inputs[:, :8] + inputs[:, 8:16])


def loss_of(model: nn.Module, rank: int, step: int, micro_batch: int) -> Tensor:
    inputs, targets = batch(rank, step, micro_batch)
    return (model(inputs) - targets).square().sum() / (8 * 8 * RANKS * MICRO_BATCHES)


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def train_whole_model(steps: int) -> dict[str, Tensor]:
    """Train the whole model on all batches with one AdamW."""
    model = make_model()
    optimizer = make_adamw(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(RANKS):
            for micro_batch in range(MICRO_BATCHES):
                loss_of(model, rank, step, micro_batch).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


class Run:
    """One rank of a run."""

    def __init__(self, w: int, g: int, bf16: bool = False, middle: int = 37, **options: Any) -> None:
        levels = {key: options.pop(key) for key in ("sum_code", "update_code", "secondary") if key in options}
        self.options = ShardingOptions(levels=LevelsOptions(w, g, **levels), **options)
        layout = plan_layout(RANKS, ranks_per_node=g, machine=get_machine("frontier"), replicate=-1, shard=g)
        groups = build_level_groups(layout, w, timedelta(seconds=60))
        mesh = init_device_mesh("cpu", (RANKS // w, w), mesh_dim_names=("holders", "fsdp"))["fsdp"]
        self.model, self.traffic = make_model(middle), TrafficLedger()
        for module in (self.model[0], self.model[1], self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        sum_gradients(self.model)
        self.levels = build_levels(
            self.model, self.options, layout, groups, self.traffic, sums=True, bf16=bf16, kernels="torch"
        )
        self.optimizer = make_adamw(p for _, p in self.levels.parameters)

    def step(self, number: int, watch: Any = None) -> float:
        """Return the loss of this rank's batches. `watch` is called between the optimizer's step and the weight
        update.
        """
        rank, total = dist.get_rank(), 0.0
        for micro_batch in range(MICRO_BATCHES):
            self.levels.sharding.before_micro_batch(micro_batch, micro_batch == MICRO_BATCHES - 1)
            loss = loss_of(self.model, rank, number, micro_batch)
            loss.backward()
            assert all(p.grad is None for p in self.model.parameters())
            total += loss.item()
        self.levels.before_step()
        self.optimizer.step()
        if watch is not None:
            watch(self)
        self.levels.after_step(None)
        return total

    def weights(self) -> dict[str, Tensor]:
        return {name: p.full_tensor().detach() for name, p in self.model.named_parameters()}


def _follow(degrees: tuple[int, int], steps: int, options: dict[str, Any]) -> dict[str, Any]:
    run = Run(*degrees, **options)
    for step in range(steps):
        run.step(step)
    return {
        "weights": run.weights(),
        "places": [dist.get_rank() % degrees[0], [p.to_local().detach() for p in run.model.parameters()]],
        "masters": {name: (p.start, p.detach().view(-1)) for name, p in run.levels.parameters},
    }


def _follow_all(rows: list[tuple[tuple[int, int], int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [_follow(*row) for row in rows]


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    flat, want = (torch.cat([values[name].reshape(-1) for name in expected]) for values in (found, expected))
    return float((flat - want).norm() / want.norm())


def test_raw_messages_equal_one_optimizer_on_the_whole_model(pool4: Pool) -> None:
    """Equality up to FP32 rounding; ranks with the same weights have the same bits."""
    expected = train_whole_model(STEPS)
    rows = [(degrees, STEPS, {"update_code": "float32"}) for degrees in DEGREES]
    for found in zip(*pool4(_follow_all, rows), strict=True):
        check_raw(found, expected)


def check_raw(found: Sequence[dict[str, Any]], expected: dict[str, Tensor]) -> None:
    assert distance(found[0]["weights"], expected) < 1e-6
    places: dict[int, Any] = {}
    for one in found:
        group_rank, own = one["places"]
        assert all(torch.equal(a, b) for a, b in zip(own, places.setdefault(group_rank, own), strict=True))
    # Every entry has one master.
    for name, want in expected.items():
        whole = torch.full((want.numel(),), torch.nan)
        for one in found:
            start, values = one["masters"][name]
            assert whole[start : start + len(values)].isnan().all()
            whole[start : start + len(values)] = values
        assert torch.equal(whole.view(want.shape), found[0]["weights"][name])


def _differences(degrees: tuple[int, int]) -> float:
    """Check that the remaining difference is less than half a quantization level of its block; return the largest."""
    run, last, worst = Run(*degrees, weights_code="int8", gradients_code="int4"), [], 0.0

    def record(run: Run) -> None:
        last[:] = [(group, group.master - weights_of(group)) for group in run.levels.groups]

    def weights_of(group: LevelGroup) -> Tensor:
        return group.layout.row_slice(group.weights(), group.parts)

    for step in range(4):
        run.step(step, record)
        for group, difference in last:
            coded = group.layout.slice_coded
            left, largest = (
                x[:coded].view(-1, 256).abs().amax(1) for x in (group.master - weights_of(group), difference)
            )
            assert (left <= largest / 254 * 1.001 + 1e-7).all()
            assert torch.equal(group.master[coded:], weights_of(group)[coded:])  # Norms and biases are sent raw.
            worst = max(worst, left.max().item())
    return worst


def test_weights_stay_within_a_level_of_their_masters(pool4: Pool) -> None:
    assert max(pool4(_differences, (2, 4))) > 0


def _sums(degrees: tuple[int, int]) -> list[tuple[Tensor, Tensor, int]]:
    """Return per group this node's contribution, this rank's result, and the quantized entries of a slice."""
    run = Run(*degrees, sum_code="int8")
    run.levels.sharding.before_micro_batch(0, True)
    loss_of(run.model, dist.get_rank(), 0, 0).backward()
    own = [group.reduce.buffer.clone() for group in run.levels.groups]
    run.levels.before_step()
    found = []
    for buffer, group in zip(own, run.levels.groups, strict=True):
        with run.levels.sharding.uncounted():
            total = group.reduce.across_nodes(run.levels._nodes)
        found.append((buffer, total, group.layout.slice_coded))
    return found


def test_a_quantized_sum_is_within_half_a_level_per_node(pool4: Pool) -> None:
    """Ranks 0 and 2 have the same position in their nodes, and the first and second slice; norms and biases are
    exact.
    """
    found = pool4(_sums, (2, 2))
    for first, second in ((0, 2), (1, 3)):
        for (one, total, coded), (other, *_) in zip(found[first], found[second], strict=True):
            assert torch.equal(total[coded:], one[0, coded:] + other[0, coded:])
            error, *largest = (
                x[:coded].view(-1, 256).abs().amax(1) for x in (total - one[0] - other[0], one[0], other[0])
            )
            assert (error <= sum(largest) / 254 * 1.001).all() and error.max() > 0


def _kept_messages() -> tuple[bool, float, float]:
    """Return whether kept messages change a loss, and the bytes of gathers with and without them."""
    runs = [Run(2, 4, weights_code="int8", secondary=secondary) for secondary in (2, 0)]
    kept, again = ([run.step(number) for number in range(3)] for run in runs)
    sent = [sum(nbytes for (_, _, kind), nbytes in run.traffic.sent.items() if kind == "weights") for run in runs]
    return kept == again, *sent


def test_a_secondary_copy_changes_no_bit(pool4: Pool) -> None:
    for equal, kept, again in pool4(_kept_messages):
        assert equal and kept == again > 0


CODED = {"weights_code": "int8", "gradients_code": "int4"}


def _losses(options: list[tuple[tuple[int, int], dict[str, Any]]]) -> list[tuple[float, list[Tensor]]]:
    found = []
    for degrees, more in options:
        run = Run(*degrees, middle=36, **more)
        losses = [run.step(step) for step in range(40)]
        found.append((sum(losses[-10:]), [p.to_local().detach() for p in run.model.parameters()]))
    return found


@pytest.mark.slow
def test_coded_training_is_within_a_percent_of_dense(pool4: Pool) -> None:
    """40 steps; ranks with the same weights have the same bits with every encoding."""
    raw = {"update_code": "float32"}
    options = [((2, 4), raw), ((2, 4), CODED), ((2, 4), CODED | {"gradients_code": "int8", "bf16": True})]
    options += [
        ((1, 2), CODED | {"weights_code": "dense"}),
        ((2, 2), CODED | {"sum_code": "int8", "update_code": "bfloat16", "secondary": 2}),
    ]
    every = pool4(_losses, options)
    losses = [sum(rank[number][0] for rank in every) for number in range(len(options))]
    assert losses[1:] == pytest.approx([losses[0]] * (len(losses) - 1), rel=0.01)
    for number, (degrees, _) in enumerate(options):
        for rank in range(RANKS):
            first = every[rank % degrees[0]][number][1]
            assert all(torch.equal(a, b) for a, b in zip(every[rank][number][1], first, strict=True))


def _flipped(degrees: tuple[int, int], repair: bool) -> tuple[str, bool]:
    """Return the error if a bit of the weights flips on rank 3, and whether all weights are unchanged."""
    from torchtitan_scape.core.consistency import ReplicasDifferError

    run, message = Run(*degrees), ""
    run.step(0)
    before = [p.to_local().detach().clone() for p in run.model.parameters()]
    run.levels.check_consistency(torch.device("cpu"), 1, repair)
    if dist.get_rank() == 3:
        next(run.model.parameters()).to_local().view(torch.int32)[0] ^= 1
    try:
        run.levels.check_consistency(torch.device("cpu"), 1, repair)
    except ReplicasDifferError as error:
        message = str(error)
    now = [p.to_local().detach() for p in run.model.parameters()]
    return message, all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_ranks_with_the_same_weights_are_compared(pool4: Pool) -> None:
    """The comparison spans all nodes and pairs. With four ranks the majority identifies the error, with two it
    cannot.
    """
    assert pool4(_flipped, (1, 2), True) == [("", True)] * RANKS
    found = pool4(_flipped, (2, 4), False)
    assert all("ranks 1 and 3 differ in '0.0.weight'" in message for message, _ in found)
    assert [same for _, same in found] == [True, True, True, False]


def _frozen() -> str:
    model = make_model()
    model[0][1].requires_grad_(False)
    with patch(f"{__name__}.make_model", lambda _: model), pytest.raises(ValueError) as error:
        Run(2, 4)
    return str(error.value)


def test_frozen_parameters_are_refused(pool4: Pool) -> None:
    for message in pool4(_frozen):
        assert "[sharding.levels] weights = 2: '0.1.weight' is frozen" in message and "train it, or omit" in message
