"""The runs that tune a method's learning rate, and its further options, within a declared budget of runs."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from scripts.study.grid import BudgetSet, Grid, RunSpec


@dataclass
class Tuning:
    """The runs of a method with the first seed of a set: the set's learning rates, then at most `further` more.

    If the best rate is at an edge of the rates tried, a further run takes the next rate beyond it. Otherwise it takes
    the best rate with another value of the options that the grid declares under `also`.

    Args:
        loss: Returns the loss of a run; None if it has not run or has failed.
        failed: Keys of runs that are not waited for.
    """

    grid: Grid
    one: BudgetSet
    method: str
    loss: Callable[[RunSpec], float | None]
    failed: Collection[str] = ()

    def _spec(self, rate: float | None, also: dict[str, float] | None = None) -> RunSpec:
        return self.grid.spec(self.one, self.method, rate, self.one.seeds[0], also)

    @property
    def declared(self) -> list[RunSpec]:
        return [self._spec(rate) for rate in self.one.learning_rates]

    @cached_property
    def runs(self) -> list[RunSpec]:
        """All runs that are known so far, the declared ones first."""
        found, others = self.declared, self.grid.also(self.method)
        most = len(found) + self.one.further
        while len(found) < most and not self.waits_for(found) and (best := best_of(found, self.loss)):
            if (rate := beyond(best, found)) is not None:
                found.append(self._spec(rate, best.also))
            elif others:
                found.append(self._spec(best.learning_rate, others.pop(0)))
            else:
                break
        return found

    def waits_for(self, runs: Collection[RunSpec]) -> bool:
        return any(self.loss(spec) is None and spec.key not in self.failed for spec in runs)

    def other_seeds(self, guess: bool) -> list[RunSpec]:
        """Return the runs of the other seeds at the best rate.

        While the tuning is not done: none, or with `guess` as many as there will be.
        """
        best = best_of(self.runs, self.loss)
        if self.waits_for(self.runs):
            best = self.declared[0] if guess else None
        seeds = self.one.seeds[1:] if best else ()
        return [self.grid.spec(self.one, self.method, best.learning_rate, seed, best.also) for seed in seeds]


def best_of(runs: Collection[RunSpec], loss: Callable[[RunSpec], float | None]) -> RunSpec | None:
    """Return the run of the lowest finite loss so far; of equal losses the one of the lower rate."""
    losses = [(found, spec.learning_rate, spec) for spec in runs if (found := loss(spec)) is not None]
    finite = [one for one in losses if math.isfinite(one[0])]
    return min(finite, key=lambda one: one[:2])[-1] if finite else None


def beyond(best: RunSpec, tried: Collection[RunSpec]) -> float | None:
    """Return the next learning rate if `best` has the lowest or the highest of at least two rates tried; else None.

    Only rates that were tried with the same further options count.
    """
    rates = sorted({spec.learning_rate for spec in tried if spec.also == best.also and spec.learning_rate is not None})
    if len(rates) < 2 or best.learning_rate not in (rates[0], rates[-1]):
        return None
    edge, neighbour = (rates[0], rates[1]) if best.learning_rate == rates[0] else (rates[-1], rates[-2])
    return float(f"{edge * edge / neighbour:.6g}")
