"""Radius in the optimizer, compared with Algorithms 1 and 2 of its paper, line by line in FP64."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.methods.cases import SHAPES as CONTRACT_SHAPES
from tests.methods.cases import Case
from tests.methods.steps import gradients, kept, make, play, update
from tests.pool import Pool
from tests.replicas import run_replicas
from torchtitan_scape import AdamS
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.methods.interface import MethodContext, State, StepInfo
from torchtitan_scape.methods.radius.method import Radius
from torchtitan_scape.methods.radius.options import RadiusOptions
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.replica.replicate import replicate
from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives
from torchtitan_scape.topology.in_process import SimulatedReplicas

# Three blocks, the last one short; less than a block; one entry; none; one without a gradient; uncompressed parameters.
SHAPES = [(40, 60), (33, 5), (1, 1), (0, 4), (16, 16), (7,), (1,)]
WITHOUT = 4
STEPS = 50
LR, BETAS, EPS, DECAY, MAX_NORM = 1e-2, (0.9, 0.95), 1e-8, 0.1, 20.0


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def given(step: int, replica: int, nan_at: tuple[int, ...]) -> list[Tensor]:
    found = drawn(1000 * step + replica)
    found[WITHOUT].zero_()
    if step in nan_at and replica == 0:
        found[0][0, 0] = torch.nan
    return found


class Literal:
    """All replicas in one process. Comments contain the line numbers of Algorithm 1."""

    def __init__(self, replicas: int, rule: str, options: dict[str, Any]) -> None:
        self.options = options
        self.rule, self.t, self.applied = rule, 0, 0
        self.w = [w.double().view(-1) for w in drawn(0)]
        self.m, self.v = ([torch.zeros_like(w) for w in self.w] for _ in range(2))
        self.residual = [[torch.zeros_like(w) for w in self.w] for _ in range(replicas)]
        self.top: list[Tensor] | None = None  # indices in the mask of every tensor
        self.threshold = -(-options["start"] // options["interval"]) * options["interval"]

    def step(self, g: list[list[Tensor]]) -> None:
        """g: of every replica."""
        self.t += 1
        g = [[x.double().view(-1) for x in own] for own in g]
        if not all(x.isfinite().all() for own in g for x in own):
            return
        self.applied += 1
        refresh = self.t >= self.threshold and self.t % self.options["interval"] == 0
        if self.t < self.threshold or (self.top is None and not refresh):
            # Lines 3 to 5; also if the first refresh was skipped.
            delivered = [mean(tensors) for tensors in zip(*g, strict=True)]
        elif refresh:
            whole = [[r + x for r, x in zip(*pair, strict=True)] for pair in zip(self.residual, g, strict=True)]  # 8
            delivered = [mean(tensors) for tensors in zip(*whole, strict=True)]  # 9
            self.residual = [[torch.zeros_like(x) for x in own] for own in g]  # 10
        else:
            delivered = [self._masked(i, [own[i] for own in g]) for i in range(len(SHAPES))]
        norm = sum(float(x.square().sum()) for x in delivered) ** 0.5
        delivered = [x * min(1.0, MAX_NORM / (norm + 1e-6)) for x in delivered]  # 20
        corrected = [self._correction(i, x) for i, x in enumerate(delivered)]  # 21
        if refresh:
            self.top = [self._selected(i, u + DECAY * self.w[i]) for i, u in enumerate(corrected)]  # 22 to 24
        for i, u in enumerate(corrected):
            self.w[i] -= LR * (u + DECAY * self.w[i])  # 25

    def _masked(self, i: int, rows: list[Tensor]) -> Tensor:
        if len(SHAPES[i]) < 2:
            return mean(rows)
        assert self.top is not None
        found = torch.zeros_like(rows[0])
        found[self.top[i]] = mean([row[self.top[i]] for row in rows])  # 13 to 15
        for own, row in zip(self.residual, rows, strict=True):
            off = row.clone()
            off[self.top[i]] = 0.0
            own[i] += off  # 16
        return found  # 17

    def _correction(self, i: int, g: Tensor) -> Tensor:
        """Algorithm 2 without decay; for AdamS v is computed from the previous moment."""
        b1, b2 = BETAS
        self.v[i] = b2 * (self.m[i].square() if self.rule == "AdamS" else self.v[i]) + (1 - b2) * g.square()
        self.m[i] = b1 * self.m[i] + (1 - b1) * g
        return (self.m[i] / (1 - b1**self.applied)) / ((self.v[i] / (1 - b2**self.applied)).sqrt() + EPS)

    def _selected(self, i: int, u: Tensor) -> Tensor:
        n, d = u.numel(), self.options["density"]
        found = sorted(range(n), key=lambda place: -abs(float(u[place])))[: max(1, round(d * n))]
        return torch.tensor(found, dtype=torch.long)


def mean(tensors: Any) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def train(replicas: int, name: str, options: dict[str, Any], nan_at: tuple[int, ...]) -> dict[str, Any]:
    """Train the optimizer on random gradients, with all replicas in this process."""
    model = nn.ParameterList(drawn(0))
    rates: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    rule, _, form = name.partition(" ")
    make = partial(AdamS, **rates) if rule == "AdamS" else partial(torch.optim.AdamW, **rates, **{form: True})
    optimizers = ReplicaOptimizer(
        make,
        RadiusOptions(**options),
        SimulatedReplicas(replicas) if replicas > 1 else OneReplica(ReplicaCollectives(dist.group.WORLD)),
        model=model,
        max_norm=MAX_NORM,
        reduction="sum",
        total_steps=STEPS,
        max_skipped_steps=5,
    )
    history = []
    for number in range(1, STEPS + 1):
        for replica in range(replicas):
            for i, (p, g) in enumerate(zip(model, given(number, replica, nan_at), strict=True)):
                p.grad = None if i == WITHOUT else g / replicas  # the loss is divided by the global token count
            optimizers.stash_replica_gradients()
        optimizers.step()
        history.append([p.detach().clone() for p in model])
    states = [{s.kind: s for s in one.states()} for one in optimizers.methods]
    return {
        "history": history,
        "masks": [by_entry(one["mask"]) for one in states],
        "residuals": [list(one["residual"].tensors.values()) for one in states],
    }


def by_entry(state: State) -> list[Tensor]:
    return [state.entries(str(i), torch.Size(shape)) for i, shape in enumerate(SHAPES) if len(shape) > 1]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    a, b = ([x.double().view(-1) for x in tensors] for tensors in (a, b))
    return float((torch.cat(a) - torch.cat(b)).norm() / torch.cat(b).norm().clamp(min=1e-30))


TWO = {"density": 0.3, "interval": 20, "start": 12}  # refreshes at 20 and 40
FOUR = {"density": 0.3, "interval": 10, "start": 12}  # 20, 30, 40, 50


@pytest.mark.parametrize(
    "replicas, name, options, nan_at",
    [
        (1, "AdamW foreach", TWO, ()),
        (2, "AdamW fused", TWO, ()),
        (3, "AdamS", TWO, (25,)),
        # The first refresh and the one at step 40 are skipped: the residual remains until step 50.
        (3, "AdamW foreach", FOUR, (20, 25, 40)),
        (2, "AdamW foreach", FOUR, (40,)),
        (2, "AdamS", FOUR | {"density": 0.1}, (20,)),
    ],
)
def test_equals_the_algorithm_of_the_paper(
    replicas: int, name: str, options: dict[str, Any], nan_at: tuple[int, ...], pool1: Pool
) -> None:
    """Parameters after every step, and masks and residuals at the end."""
    (found,) = pool1(train, replicas, name, options, nan_at)
    literal = Literal(replicas, name.split()[0], options)
    for number, parameters in enumerate(found["history"], 1):
        literal.step([given(number, replica, nan_at) for replica in range(replicas)])
        assert distance(parameters, literal.w) < 1e-6, number
    compressed = [i for i, shape in enumerate(SHAPES) if len(shape) > 1]
    assert literal.top is not None
    for masks in found["masks"]:
        for i, mask in zip(compressed, masks, strict=True):
            assert mask.view(-1).nonzero().view(-1).tolist() == sorted(literal.top[i].tolist())
    for own, wanted in zip(found["residuals"], literal.residual, strict=True):
        assert distance(own, [wanted[i] for i in compressed]) < 1e-6


OLD = Case("radius", {"density": 0.25, "interval": 3, "start": 0})


def test_entries_outside_the_mask_stop_with_adamw_but_not_with_adams() -> None:
    """By the multiples of the learning rate in docs/reference/methods/radius.md."""
    moved = {}
    for make_optimizer in (torch.optim.AdamW, AdamS):
        w = nn.Parameter(torch.zeros(1))
        optimizer: Any = make_optimizer([w], lr=1.0, betas=BETAS, eps=EPS, weight_decay=0.0)
        generator = torch.Generator().manual_seed(0)
        for number in range(300):
            w.grad = 1e-3 * torch.randn(1, generator=generator) if number < 100 else torch.zeros(1)
            optimizer.step()
            if number == 99:
                left = w.item()
        moved[make_optimizer] = abs(w.item() - left)
    assert moved[torch.optim.AdamW] < 12 and 60 < moved[AdamS] < 110


def sizes(compressed: bool) -> list[int]:
    found = [torch.Size(s).numel() for s in CONTRACT_SHAPES if (len(s) > 1) == compressed]
    return [n for n in found if n]


def filled(entries: int) -> int:
    return -(-entries // 4) * 4


@pytest.mark.parametrize("replicas", [2, 4])
def test_bytes_of_steps_with_and_without_a_refresh(replicas: int) -> None:
    """8 (N - 1) / N bytes per entry, padded to multiples of four: mask entries and uncompressed ones, or all."""
    on_mask = sum(max(1, round(0.25 * n)) for n in sizes(True))
    one = 8 * (replicas - 1) / replicas
    for rank in run_replicas(replicas, lambda collectives: play(collectives, OLD)):
        for number, sent in enumerate(rank.sent[3:], 4):
            entries = on_mask if number % 3 else sum(sizes(True))
            assert sent == pytest.approx(one * filled(entries + sum(sizes(False)))), number


def test_a_mask_remains_valid_under_other_options() -> None:
    """Until the next refresh, as after resuming with another density, interval or start."""

    def work(collectives: ReplicaCollectives) -> tuple[list[Tensor], float, Tensor]:
        old = make(OLD, collectives)
        play(collectives, OLD, method=old)
        method = make(OLD, collectives, density=0.5, interval=100, start=4)
        for state in method.states():
            for name, values in state.tensors.items():
                values.copy_(kept(old)[f"{state.kind}.{name}"])
        before = sum(collectives.ledger.sent_by_level().values())
        with torch.no_grad():
            found = method.synchronize(gradients(9, collectives.replica), StepInfo(9, torch.tensor(True)))
        sent = sum(collectives.ledger.sent_by_level().values()) - before
        mask = next(s for s in method.states() if s.kind == "mask").entries("p0", torch.Size(CONTRACT_SHAPES[0]))
        return found, sent, mask

    on_mask = sum(max(1, round(0.25 * n)) for n in sizes(True)) + sum(sizes(False))
    for found, sent, mask in run_replicas(2, work):
        assert sent == pytest.approx(4 * filled(on_mask))
        assert int(mask.sum()) == round(0.25 * mask.numel())
        assert torch.equal(found[0] != 0, mask.view(-1).bool())


def test_masks_are_stored_packed_and_saved_by_entry() -> None:
    """A checkpoint has one byte per entry, in the parameter's shape, so that other layouts can read it."""

    def work(collectives: ReplicaCollectives) -> None:
        method = make(OLD, collectives)
        play(collectives, OLD, method=method)
        _, mask = method.states()
        other = make(OLD, collectives).states()[1]
        for i, shape in enumerate(CONTRACT_SHAPES):
            if len(shape) > 1:
                name, size = f"p{i}", torch.Size(shape)
                assert mask.tensors[name].numel() == -(-size.numel() // 8)
                values = mask.entries(name, size)
                assert values.shape == size and values.dtype == torch.uint8
                other.load_entries(name, values.view(-1))
                assert torch.equal(other.tensors[name], mask.tensors[name])

    run_replicas(2, work)


def test_a_refresh_before_the_first_applied_step_keeps_the_mask() -> None:
    """An optimizer that creates its state in the first step has none yet, so that the mask remains all ones."""

    def work(collectives: ReplicaCollectives) -> None:
        shards = collect_shards([{"params": [nn.Parameter(torch.zeros(4, 4))], "param_names": ["w"]}])
        optimizer = torch.optim.AdamW([shards[0].parameter], betas=BETAS)
        method = Radius(MethodContext(shards, collectives, optimizer), RadiusOptions(interval=1, start=0))
        with torch.no_grad():
            step = StepInfo(1, torch.tensor(False))
            method.synchronize([torch.full((16,), torch.nan)], step)
            method.after_optimizer_step(step)
        residual, mask = method.states()
        assert not residual.tensors["w"].any() and bool(mask.entries("w", torch.Size((4, 4))).all())

    run_replicas(2, work)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamS])
def test_parameters_of_other_dtypes_have_the_mask_of_fp32(kind: Any) -> None:
    """PyTorch's AdamW keeps its moments in the dtype of the parameter."""
    masks = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(model.weight)
        model.to(dtype)
        options = RadiusOptions(density=0.25, start=0, interval=2)
        optimizer = replicate(model, kind(model.parameters(), lr=1e-2), options, SimulatedReplicas(2))
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            for _ in range(2):
                model.weight.grad = torch.randn(64, 64, generator=generator).to(dtype)
                optimizer.stash_replica_gradients()
            optimizer.step()
        masks[dtype] = optimizer.methods[0].states()[1].entries("weight", model.weight.shape) > 0
    for dtype, least in ((torch.float64, 0.999), (torch.bfloat16, 0.95)):
        assert int(masks[dtype].sum()) == 1024 and int((masks[dtype] & masks[torch.float32]).sum()) > least * 1024


def test_a_full_exchange_is_a_refresh() -> None:
    def work(collectives: ReplicaCollectives) -> bool:
        method = make(OLD, collectives)
        play(collectives, OLD, method=method)
        before = kept(method)
        method.request_full_exchange()
        with torch.no_grad():
            step = StepInfo(10, torch.tensor(True))
            update(method, method.synchronize(gradients(10, collectives.replica), step), step)
            method.after_optimizer_step(step)
        after = kept(method)
        assert not any(values.any() for key, values in after.items() if key.startswith("residual"))
        return not torch.equal(before["mask.p0"], after["mask.p0"])

    assert all(run_replicas(2, work))


def test_betas_with_growing_updates_outside_the_mask_are_refused() -> None:
    def work(collectives: ReplicaCollectives) -> None:
        named = [("w", nn.Parameter(torch.zeros(4, 4)))]
        for optimizer, text in (
            (torch.optim.AdamW(named, betas=(0.98, 0.95)), r"beta1 = 0.98 .*; set beta1 below 0.9747, or beta2 above"),
            (AdamS(named, betas=(0.0, 0.95)), r"beta1 = 0 with .* set beta1 above 0, or \[optimizer\] name = 'AdamW'"),
        ):
            with pytest.raises(ValueError, match=text):
                Radius(MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer), RadiusOptions())

    run_replicas(1, work)
