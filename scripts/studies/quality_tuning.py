"""Which runs of a method are to tell its learning rate, and what else it is tuned in, within a declared budget."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from scripts.studies.quality_cells import Cell, Grid, Set


@dataclass
class Tuning:
    """The runs of a method with the first seed of a set: the set's learning rates, and `further` more after them.

    A further run is at the next rate beyond where the best one is at the edge of those that were tried; and where it is
    not, at the best rate with another value of what the grid says that the method is tuned in `also`. Every method may
    have as many, and none that would tell nothing.

    loss: of a cell; None while it has not run or where it failed. failed: identities of cells that are not waited for.
    """

    grid: Grid
    one: Set
    method: str
    loss: Callable[[Cell], float | None]
    failed: Collection[str] = ()

    @property
    def declared(self) -> list[Cell]:
        return [self.grid.cell(self.one, self.method, rate, self.one.seeds[0]) for rate in self.one.learning_rates]

    @cached_property
    def cells(self) -> list[Cell]:
        """All that are known by now, the declared ones first."""
        found, others = self.declared, self.grid.also(self.method)
        while len(found) < len(self.one.learning_rates) + self.one.further and not self.waits_for(found):
            best = self._best(found)
            if best is None:
                break
            rate, seed = beyond(best, found), self.one.seeds[0]
            if rate is not None:
                found.append(self.grid.cell(self.one, self.method, rate, seed, best.also))
            elif others:
                found.append(self.grid.cell(self.one, self.method, best.learning_rate, seed, others.pop(0)))
            else:
                break
        return found

    @property
    def best(self) -> Cell | None:
        """Of those that ran so far: that of the lowest loss, and of two equal ones that of the lower rate."""
        return self._best(self.cells)

    @property
    def done(self) -> bool:
        return not self.waits_for(self.cells)

    @property
    def at_edge(self) -> bool:
        """Whether a learning rate beyond those that ran could be better than the best one."""
        best = self.best
        ran = [cell for cell in self.cells if self.loss(cell) is not None]
        rates = [cell.learning_rate for cell in ran if best is not None and (cell.also == best.also or not cell.also)]
        return best is not None and best.learning_rate in (min(rates), max(rates))

    def waits_for(self, cells: Collection[Cell]) -> bool:
        return any(self.loss(cell) is None and cell.key not in self.failed for cell in cells)

    def _best(self, cells: Collection[Cell]) -> Cell | None:
        losses = [(loss, cell.learning_rate, cell) for cell in cells if (loss := self.loss(cell)) is not None]
        finite = [one for one in losses if math.isfinite(one[0])]
        return min(finite, key=lambda one: one[:2])[-1] if finite else None


def beyond(best: Cell, tried: Collection[Cell]) -> float | None:
    """The next learning rate where `best` has the lowest or the highest of those tried; None where it has neither.

    None as well where rates of its own were not tried: then it is one at another's best rate, or the only one.
    """
    rates = sorted({cell.learning_rate for cell in tried if cell.also == best.also})
    if len(rates) < 2 or best.learning_rate not in (rates[0], rates[-1]):
        return None
    edge, next_to_it = (rates[0], rates[1]) if best.learning_rate == rates[0] else (rates[-1], rates[-2])
    return float(f"{edge * edge / next_to_it:.6g}")
