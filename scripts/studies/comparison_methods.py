"""What the comparison compares: the methods of every budget of its grid, as far as their cells are stored."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scripts.studies.comparison_costs import shares
from scripts.studies.quality_cells import Grid, Set, Store, described
from scripts.studies.quality_settings import BETA2, OfRuns
from scripts.studies.quality_tuning import Tuning


@dataclass
class Compared(OfRuns):
    """A method at a budget, at the best of what it was tuned in so far."""

    label: str
    tuning: Tuning
    runs: dict[int, dict[str, Any]]

    @property
    def kind(self) -> str:
        """As [sync] method says."""
        return str(self.options["sync.method"])

    @property
    def optimizer(self) -> str:
        return str(self.options["optimizer.name"])

    @cached_property
    def shares(self) -> tuple[float, float]:
        """Bytes over those of dense FP32: of a step, planned; of the whole run, counted."""
        return shares(self.first)

    @property
    def rate(self) -> str:
        """What it was tuned in, at its best, and what is lacking of that."""
        best = self.tuning.best
        assert best is not None
        lacks = "tuning not finished" if not self.tuning.done else "edge" if self.tuning.at_edge else ""
        return f"{best.learning_rate:g}{described(best.also)}" + (f" ({lacks})" if lacks else "")

    def gaps(self, to: "Compared | None") -> list[float]:
        """Final loss above that of another method, in percent, by the seeds that both have."""
        others = to.losses if to else {}
        return [100 * (loss / others[seed] - 1) for seed, loss in self.losses.items() if seed in others]


@dataclass
class Budget:
    """Steps, batch and replicas, and the methods that ran with them: the most bytes first."""

    steps: int
    batch: int
    replicas: int
    methods: list[Compared]
    missing: int

    @property
    def title(self) -> str:
        return f"{self.steps:,} steps x {self.batch:,} tokens, {self.replicas} replicas"

    def dense(self, optimizer: str) -> Compared | None:
        """Dense training with an optimizer, its b2 as in the recipe."""
        found = (one for one in self.methods if one.is_dense and one.optimizer == optimizer)
        return next((one for one in found if one.first["options"]["optimizer.beta2"] == BETA2), None)

    @property
    def others(self) -> list[Compared]:
        """All but the dense ones."""
        return [one for one in self.methods if not one.is_dense]


def budgets(grid: Grid, store: Store) -> list[Budget]:
    """Those of the grid with dense AdamW and another method, in its order."""
    found = []
    for _, sets in itertools.groupby(grid.sets, key=lambda one: (one.steps, one.batch, one.replicas)):
        budget = _budget(list(sets), grid, store)
        if budget.dense("AdamW") and budget.others:
            found.append(budget)
    return found


def _budget(sets: Sequence[Set], grid: Grid, store: Store) -> Budget:
    methods, missing, first = [], 0, sets[0]
    for one, name in ((each, name) for each in sets for name in each.methods):
        tuning = Tuning(grid, one, name, store.loss, store.failed)
        missing += sum(tuning.waits_for([cell]) for cell in tuning.cells)
        best = tuning.best
        if best is None:
            missing += len(one.seeds) - 1
            continue
        cells = [grid.cell(one, name, best.learning_rate, seed, best.also) for seed in one.seeds]
        runs = {cell.seed: content for cell in cells if (content := store.read(cell)) is not None}
        missing += len(cells) - len(runs)
        methods.append(Compared(best.label, tuning, runs))
    methods.sort(key=lambda compared: (not compared.is_dense, -compared.shares[0], compared.label))
    return Budget(first.steps, first.batch, first.replicas, methods, missing)
