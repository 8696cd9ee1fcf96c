"""SPARTA with Muon: the sum of the mean steps of a round is orthogonalized again."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.methods.test_local_updates import DECAY, LR, SHAPES, far, final, trained
from tests.methods.test_sparta import LiteralSparta
from tests.optimizers import test_muon as muon
from tests.optimizers.test_muon import HIDDEN
from tests.pool import Pool
from torchtitan_scape.methods.sparta import options
from torchtitan_scape.optimizers.muon import orthogonalized

FP32 = {"interval": 3, "code": "float32", "warmup_steps": 0, "orthogonalize": True}
ROUND = "round_step.layers.0.weight"


class LiteralRounds(muon.Literal, LiteralSparta):
    """SPARTA with Muon, and at the end of a round Muon's step along the sum of the mean steps, in their place."""

    def step(self) -> None:
        if not hasattr(self, "begin"):
            self.begin = {n: self.anchor[n].data.clone() for n in HIDDEN}
        super().step()
        if self.t % self.interval:
            return
        for n in HIDDEN:
            moved = self.begin[n] - self.anchor[n].data - self.interval * LR * DECAY * self.anchor[n].data
            length = self.interval * LR * 0.2 * math.sqrt(max(SHAPES[n]))
            missing = length * orthogonalized(moved.bfloat16()).float() - moved
            for theta in (*(each[n] for each in self.theta), self.anchor[n].data):
                theta -= missing
            self.begin[n] = self.anchor[n].data.clone()


def trained_with_few(steps: int) -> list[tuple[list[Any], list[Any]]]:
    """Run `trained` as if two replicas were many."""
    with patch.object(options, "MANY_REPLICAS", 1):
        return final(steps, "sparta", FP32, 1, inner="Muon")


def test_equals_the_reference_algorithm(pool1: Pool, pool2: Pool) -> None:
    """Five replicas of one process, and two gloo ranks. Sums in another FP32 order may round differently in BF16."""
    for replicas in (5, 2):
        literal = LiteralRounds(replicas, 3)
        for _ in range(20):
            literal.step()
        if replicas == 5:
            ((own, states),) = (run[-1] for run in pool1(final, 20, "sparta", FP32, 5, inner="Muon"))
        else:
            ranks = [run[-1] for run in pool2(trained_with_few, 20)]
            own, states = [rank[0][0] for rank in ranks], [rank[1][0] for rank in ranks]
        for i in range(replicas):
            assert far(own[i], literal.theta[i]) < 1e-3
            moved = {n: states[i][f"round_step.{n}"] for n in HIDDEN}  # two steps of a round
            assert far(moved, {n: literal.begin[n] - literal.anchor[n].data for n in HIDDEN}) < 2e-2


@pytest.mark.parametrize("code", ["float32", "1bit"])
def test_the_mean_step_of_a_round_has_the_length_of_muons(code: str, pool1: Pool) -> None:
    """Without it the mean of replicas with other gradients is shorter; the anchor is the same on all replicas."""
    lengths = {}
    for orthogonalize in (False, True):
        own = FP32 | {"code": code, "orthogonalize": orthogonalize}
        (history,) = pool1(trained, 9, "sparta", own, 6, inner="Muon")
        states = [states for _, states in history]
        assert all(
            torch.equal(states[-1][0][f"anchor.{n}"], other[f"anchor.{n}"]) for other in states[-1] for n in SHAPES
        )
        assert (ROUND in states[-1][0]) == orthogonalize
        moved = states[8][0]["anchor.layers.0.weight"] - states[5][0]["anchor.layers.0.weight"] * (1 - LR * DECAY) ** 3
        singular_values = torch.linalg.svdvals(moved) / (3 * LR * 0.2 * math.sqrt(9))
        lengths[orthogonalize] = float(singular_values.median())
    # Those of Newton-Schulz are between 0.7 and 1.2. The errors of one bit remain in the replicas' parameters.
    assert lengths[False] < 0.8 and (code == "1bit" or 0.9 < lengths[True] < 1.2), lengths


def test_other_optimizers_and_few_replicas_are_not_changed(pool1: Pool) -> None:
    for inner, replicas in (("AdamW", 5), ("Muon", 4)):
        runs = []
        for orthogonalize in (False, True):
            ((own, states),) = (
                run[-1]
                for run in pool1(trained, 7, "sparta", FP32 | {"orthogonalize": orthogonalize}, replicas, inner=inner)
            )
            runs.append(own)
            assert ROUND not in states[0]
        assert all(torch.equal(a[n], b[n]) for a, b in zip(*runs, strict=True) for n in SHAPES)


@pytest.mark.parametrize("nan_at", [5, 6])
def test_a_skipped_step_changes_nothing(nan_at: int, pool1: Pool) -> None:
    """In a round, and at its end: the round then ends three steps later, with the rates of its applied steps."""
    (history,) = pool1(trained, 9, "sparta", FP32, 5, inner="Muon", nan_at=nan_at)
    before, after = history[nan_at - 2], history[nan_at - 1]
    for a, b in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert float(history[7][1][0]["round_learning_rate.all"]) == pytest.approx(LR * (2 if nan_at == 5 else 4))
    for state in history[8][1]:
        assert not state[ROUND].any() and not state["round_learning_rate.all"].any()
    assert all(t.isfinite().all() for own in history[-1][0] for t in own.values())
