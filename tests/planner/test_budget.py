"""SCAPE's budget of bytes: the chosen options keep it, and an impossible budget names the minimum."""

import logging
import math
import re
from typing import Any

import pytest
import torch

from tests.replicas import run_replicas
from torchtitan_scape import Scape
from torchtitan_scape.core.workloads import LocalModel, Shapes
from torchtitan_scape.methods.options import share_of_dense
from torchtitan_scape.methods.scape.options import BUDGET_BLOCK, BUDGET_ENTRIES, ScapeOptions

LARGE: Shapes = [(4096, 1024)] * 8 + [(1024,)] * 8
SMALL: Shapes = [(260, 80), (80,), *[(80, 80)] * 8]


def within(budget: float, shapes: Shapes, replicas: int, **options: Any) -> ScapeOptions:
    return ScapeOptions(bytes=budget, **options).resolve(shapes, replicas)


def share(options: ScapeOptions, shapes: Shapes, replicas: int) -> float:
    return share_of_dense(options, LocalModel.of_shapes(shapes), replicas)


@pytest.mark.parametrize(("budget", "replicas"), [(0.005, 4), (0.012, 4), (0.012, 16), (0.022, 64)])
@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_the_chosen_options_use_the_budget_without_exceeding_it(budget: float, replicas: int, update: str) -> None:
    chosen = within(budget, LARGE, replicas, update=update)
    # Owners send FP32 values, so that one more entry of each block is a larger part of the budget.
    assert (0.97 if update == "replicated" else 0.85) * budget <= share(chosen, LARGE, replicas) <= budget
    assert chosen.code == ("2bit" if budget < 0.009 else "int4")


def test_a_large_budget_is_not_fully_used() -> None:
    assert within(0.12, LARGE, 4) == within(0.05, LARGE, 4)
    assert within(0.05, LARGE, 4).density == pytest.approx(BUDGET_ENTRIES / BUDGET_BLOCK)


@pytest.mark.parametrize("replicas", [4, 64])
def test_the_minimum_budget_in_the_error_is_exact(replicas: int) -> None:
    with pytest.raises(ValueError, match="a step of this model sends at least") as refused:
        within(1e-6, SMALL, replicas)
    (share_text,) = re.findall(r"at least ([\d.]+) of", str(refused.value))
    assert share(within(float(share_text), SMALL, replicas), SMALL, replicas) <= float(share_text)
    with pytest.raises(ValueError):
        within(float(share_text) - 2e-5, SMALL, replicas)


def test_one_replica_and_an_empty_shard_are_supported() -> None:
    assert within(0.012, LARGE, 1) == within(0.012, LARGE, 2)
    assert share(within(0.012, [(0, 4)], 2), [(0, 4)], 2) == 0.0


def test_scape_logs_the_budget_and_sends_the_bytes(caplog: pytest.LogCaptureFixture) -> None:
    shapes, steps = [(512, 256), (256,)], 4
    dense = 2 * 3 / 4 * 4 * sum(map(math.prod, shapes))

    def work(collectives: object) -> tuple[float, ScapeOptions]:
        torch.manual_seed(0)
        named = [(f"p{i}", torch.nn.Parameter(torch.randn(shape))) for i, shape in enumerate(shapes)]
        scape = Scape(named, lr=1e-3, options=ScapeOptions(bytes=0.02, density=0.5), replicas=collectives)  # type: ignore[arg-type]
        sent = []
        for _ in range(steps):
            for _, parameter in named:
                parameter.grad = torch.randn_like(parameter)
            before = sum(scape.collectives.ledger.sent_by_level().values())
            scape.step()
            sent.append(sum(scape.collectives.ledger.sent_by_level().values()) - before)
        return sent[-1], scape.method.options

    with caplog.at_level(logging.INFO):
        results = run_replicas(4, work)
    for sent, options in results:
        assert options.code == "int4" and options.density < 0.1 and options.bytes == 0
        # The scalars of the finite flag and the norm are not part of the budget.
        assert 0.9 * 0.02 <= sent / dense <= 0.02 + 64 / dense
    assert "a step sends" in caplog.text and "bytes = 0.02: density" in caplog.text


def test_an_impossible_budget_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.randn(300, 100))
    for wrong, why in (
        ({"bytes": 1.0}, r"bytes = 1\.0; it must lie in \(0, 1\)"),
        ({"bytes": 0.01, "selection": "tensor"}, "it requires selection = "),
        ({"bytes": 1e-5}, r"bytes = 1e-05: a step .* sends at least .* set a larger budget"),
    ):
        with pytest.raises(ValueError, match=why):
            Scape([("p", parameter)], lr=1e-3, options=ScapeOptions(**wrong))  # type: ignore[arg-type]
