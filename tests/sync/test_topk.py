"""Top-k with error feedback against a literal form, entry by entry."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.replicas import run_replicas
from tests.sync.test_contract import SHAPES, STEPS, Case, gradients, play
from topology.collectives import ReplicaCollectives
from torchtitan_scape.sync.topk import TopkOptions


class Literal:
    """All replicas at once; Python's sort, which keeps the order of equals, finds the largest."""

    def __init__(self, replicas: int, density: float, block: int | None, decay: float) -> None:
        self.density, self.block, self.decay = density, block, decay
        self.residual = [[torch.zeros(torch.Size(s).numel()) for s in SHAPES] for _ in range(replicas)]

    def step(self, given: list[list[Tensor]]) -> list[Tensor]:
        found = []
        for i, shape in enumerate(SHAPES):
            rows = [replica[i] for replica in given]
            if len(shape) < 2:
                found.append(sum(rows) / len(rows))
                continue
            total = torch.zeros_like(rows[0])
            for own, row in zip(self.residual, rows, strict=True):
                x = self.decay * own[i] + row
                own[i] = x.clone()
                for place in self.chosen(x):
                    total[place] += x[place]
                    own[i][place] = 0.0
            found.append(total / len(rows))
        return found

    def chosen(self, x: Tensor) -> list[int]:
        length = self.block or max(1, x.numel())
        places: list[int] = []
        for start in range(0, x.numel(), length):
            k = max(1, round(self.density * (self.block or x.numel())))
            block = list(range(start, min(start + length, x.numel())))
            places += sorted(block, key=lambda place: -abs(float(x[place])))[:k]
        return places


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"density": 0.1, "block_size": 16},
        {"density": 0.5, "block_size": 64},  # the last block of (33, 5) has fewer entries than it is to send
        {"density": 0.03, "selection": "tensor"},
        {"density": 0.1, "block_size": 16, "decay": 0.9},
    ],
)
def test_it_is_the_literal_form(replicas: int, options: dict[str, Any]) -> None:
    block = None if options.get("selection") == "tensor" else options["block_size"]
    literal = Literal(replicas, options["density"], block, options.get("decay", 1.0))
    ranks = run_replicas(replicas, lambda collectives: play(collectives, Case("topk", options)))
    for number in range(1, STEPS + 1):
        expected = literal.step([gradients(number, replica) for replica in range(replicas)])
        for got, wanted in zip(ranks[0].given[number - 1], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        for replica, rank in enumerate(ranks):
            for i, shape in enumerate(SHAPES):
                if len(shape) > 1 and f"residual.p{i}" in rank.kept[number - 1]:
                    kept = rank.kept[number - 1][f"residual.p{i}"].view(-1)
                    torch.testing.assert_close(kept, literal.residual[replica][i], rtol=1e-6, atol=1e-6)


def test_equal_entries_go_in_their_order() -> None:
    def work(collectives: ReplicaCollectives) -> Tensor:
        from tests.sync.test_contract import make
        from torchtitan_scape.sync.base import Step

        method = make(Case("topk", {"density": 0.25, "block_size": 8}), collectives)
        ones = [torch.ones(torch.Size(shape).numel()) for shape in SHAPES]
        return method.synchronize(ones, Step(1, torch.tensor(True)))[0]

    assert run_replicas(2, work)[0].view(-1, 8)[0].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"density": 0.0}, r"\[sync.topk\] density = 0.0; it must lie in \(0, 1\]"),
        ({"density": "a"}, r"\[sync.topk\] density = 'a'; it must be a number"),
        ({"block_size": 12}, "block_size = 12; it must be a multiple of 8"),
        ({"decay": 1.5}, "decay = 1.5; it must lie in"),
        ({"start": -1}, "start = -1; it must be 0 or more"),
        ({"selection": "model"}, "selection = 'model'; it must be 'block' | 'tensor'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("|", r"\|")):
        TopkOptions(**options)
