"""CO2 compared with Algorithm 1 of arXiv:2401.16265."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.methods import test_local_updates as local
from tests.methods.test_local_updates import SHAPES, Weights, compared, far, flushed, flushed_alone, start, trained
from tests.pool import Pool
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.local_options import Co2Options
from torchtitan_scape.methods.local_updates import Co2, staleness_gap
from torchtitan_scape.topology.traffic import LevelSize

# A bound that limits some entries of the momentum and not others, see `test_equals_the_reference_algorithm`.
CO2 = {"inner_steps": 6, "outer_lr": 0.8, "outer_momentum": 0.5, "momentum_clip": 0.1}


class Literal(local.Literal):
    """N replicas in one process, with the names of the paper. It averages parameters, not displacements.

    x_{t,0} of all rounds is kept, and the staleness gap is computed from it.
    """

    def __init__(
        self,
        replicas: int,
        inner_steps: int,
        outer_lr: float,
        outer_momentum: float,
        momentum_clip: float,
        gap_penalty: bool = True,
    ) -> None:
        super().__init__(replicas, inner_steps, outer_lr, outer_momentum)
        self.due = [-1]  # never
        self.alpha, self.beta, self.phi, self.penalty = outer_lr, outer_momentum, momentum_clip, gap_penalty
        self.x0: list[Weights] = [start()]  # x_{t,0} of every round t
        self.x_tau: list[Weights] = []  # the all-reduced mean of x_{t,tau} over replicas, of every round t
        self.m: Weights = {n: torch.zeros(shape) for n, shape in SHAPES.items()}
        self.clipped = 0

    def step(self) -> None:
        super().step()
        if self.t % self.rounds:
            return
        t = self.t // self.rounds - 1
        self.x_tau.append({n: sum(x[n] for x in self.theta) / self.replicas for n in SHAPES})  # type: ignore[misc]
        if t > 0:
            moved = {n: self.x0[t - 1][n] - self.x_tau[t - 1][n] for n in SHAPES}
            gap = 1.0
            if self.penalty:
                gap += norm({n: self.x0[t][n] - self.x0[t - 1][n] for n in SHAPES}) / norm(moved)
            self.m = {n: self.beta * self.m[n] + moved[n] / gap for n in SHAPES}
            if self.phi:
                self.clipped += sum(int((m.abs() > self.phi).sum()) for m in self.m.values())
                self.m = {n: m.clamp(-self.phi, self.phi) for n, m in self.m.items()}
        self.x0.append({n: self.x0[t][n] - self.alpha * self.m[n] for n in SHAPES})
        self.theta = [{n: x.clone() for n, x in self.x0[-1].items()} for _ in range(self.replicas)]


def norm(values: Weights) -> float:
    return float(sum(v.double().square().sum() for v in values.values())) ** 0.5


@pytest.mark.parametrize(
    "changes",
    [{}, {"gap_penalty": False, "momentum_clip": 0.0}, {"outer_momentum": 0.0}],
    ids=["both terms", "neither", "no momentum"],
)
def test_equals_the_reference_algorithm(changes: dict[str, Any], pool1: Pool, pool2: Pool) -> None:
    options = CO2 | changes
    entries = 3 * sum(torch.Size(shape).numel() for shape in SHAPES.values())  # of three outer steps
    for literal, _, states in compared(partial(Literal, **options), "co2", options, pool1, pool2):
        assert 0 < literal.clipped < entries if options["momentum_clip"] else not literal.clipped
        assert far(states["anchor"], literal.x0[-1]) < 1e-6
        assert far(states["outer_momentum"], literal.m) < 1e-6


def test_a_result_is_used_a_round_after_its_start(pool1: Pool) -> None:
    """Replicas restart from the anchor at the end of every round, also of the first one, which has no result yet."""
    (history,) = pool1(trained, 24, "co2", CO2, 2)
    anchors = [states[0]["anchor.embed"] for _, states in history]
    moves = [i + 2 for i in range(23) if not torch.equal(anchors[i], anchors[i + 1])]
    assert moves == [12, 18, 24]
    for number, (own, states) in enumerate(history, 1):
        ends = number % 6 == 0
        assert all(torch.equal(weights["embed"], states[0]["anchor.embed"]) == ends for weights in own), number
        assert ("displacement_in_flight.embed" in states[0]) == (number >= 6), number


@pytest.mark.parametrize("nan_at, moves", [(6, [18]), (12, [18]), (13, [12, 18])])
def test_a_skipped_step_delays_a_round(nan_at: int, moves: list[int], pool1: Pool) -> None:
    """The end of a round that is skipped starts and applies nothing; its round continues to the next end."""
    (history,) = pool1(trained, 23, "co2", CO2, 2, nan_at=nan_at)
    for a, b in zip(*([*own, *states] for own, states in history[nan_at - 2 : nan_at]), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    anchors = [states[0]["anchor.embed"] for _, states in history]
    assert [i + 2 for i in range(22) if not torch.equal(anchors[i], anchors[i + 1])] == moves
    assert all(t.isfinite().all() for own in history[-1][0] for t in own.values())


def test_a_full_exchange_uses_the_round_in_flight_and_the_present_one(pool1: Pool) -> None:
    """First the older result, then that of the present round, each as an outer step of its own."""
    options = {"inner_steps": 6, "outer_lr": 0.8, "outer_momentum": 0.0, "gap_penalty": False, "momentum_clip": 0.0}
    ((before, after, same),) = pool1(flushed_alone, "co2", options)
    assert same
    for n in SHAPES:
        stale, anchor = before[2][f"displacement_in_flight.{n}"], before[2][f"anchor.{n}"]
        present = anchor - (before[0][n] + before[1][n]) / 2
        torch.testing.assert_close(after[0][n], anchor - 0.8 * (stale + present), rtol=1e-6, atol=1e-6)
        assert torch.equal(after[0][n], after[1][n]) and torch.equal(after[0][n], after[2][f"anchor.{n}"])
    assert not any(key.startswith("displacement_in_flight") for key in after[2])
    (history,) = pool1(flushed, "co2", CO2)  # requested in the skipped step 7
    assert history[6][1] == history[5][1] and history[7][1] == 0.0


@pytest.mark.parametrize("changes", [{}, {"outer_momentum": 0.0, "gap_penalty": False}])
def test_states_in_host_memory_have_the_same_bits(changes: dict[str, Any], pool1: Pool) -> None:
    plain, host = (pool1(trained, 14, "co2", CO2 | changes | {"host": on}, 2)[0][-1] for on in (False, True))
    assert ("outer_momentum.embed" in plain[1][0]) == (not changes)
    for a, b in zip([*plain[0], *plain[1]], [*host[0], *host[1]], strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_the_staleness_gap_is_1_without_an_earlier_step() -> None:
    """And finite effects without any displacement."""
    zero, one, two = (torch.tensor(x) for x in (0.0, 1.0, 2.0))
    pairs = ((zero, one), (one, two), (two, one), (zero, zero))
    assert [float(staleness_gap(*pair)) for pair in pairs] == [1, 1.5, 3, 1]
    assert float(torch.zeros(()) / staleness_gap(one, zero)) == 0.0


def test_the_outer_momentum_is_limited_entry_by_entry() -> None:
    """The limited momentum is stored, so that it does not grow beyond the bound in later rounds."""
    anchor, momentum = torch.zeros(3), torch.tensor([0.4, -0.4, 0.1])
    options = Co2Options(outer_lr=2.0, outer_momentum=0.5, momentum_clip=0.5)
    Co2.move_anchor(SimpleNamespace(options=options), anchor, momentum, torch.tensor([0.9, -0.9, 0.1]))
    torch.testing.assert_close(momentum, torch.tensor([0.5, -0.5, 0.15]))
    torch.testing.assert_close(anchor, torch.tensor([-1.0, 1.0, -0.3]))
    options = Co2Options(outer_lr=1.0, momentum_clip=0.5)
    Co2.move_anchor(SimpleNamespace(options=options), anchor, None, torch.tensor([0.9, 0.0, 0.3]))
    torch.testing.assert_close(anchor, torch.tensor([-1.5, 1.0, -0.6]))


def test_the_cost_has_the_bytes_and_memory() -> None:
    """All parameters once per round, beside compute. Three copies of the displacements while a round ends."""
    model, n, levels = LocalModel.of_shapes([(1024, 512), (1024,)]), 1024 * 512 + 1024, [LevelSize("network", 4)]
    calls = Co2Options().collective_calls(model, levels)
    assert all(call.hidden for call in calls)
    assert sum(s.sent for call in calls for s in call.stages(levels)) == pytest.approx(6 * n / 48, rel=1e-3)
    kept = {"anchor": 4.0 * n, "outer momentum": 4.0 * n}
    assert Co2Options().held_memory(model, 4) == kept | {"displacements": 12.0 * n}
    plain = Co2Options(gap_penalty=False, outer_momentum=0.0)
    assert "outer momentum" not in plain.held_memory(model, 4)
    on_host = Co2Options(host=True)
    assert on_host.host_memory(model, 4) == kept and on_host.held_memory(model, 4) == {"displacements": 12.0 * n}
    assert Co2Options().steps_per_round() == 96 and Co2Options().delays_exchanges()
