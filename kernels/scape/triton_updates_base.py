"""Common part of the Triton passes that depend on the updater."""

from typing import Any

from torch import Tensor

from torchtitan_scape.kernels.common.launching import Range, TileSchedule, as_flag
from torchtitan_scape.kernels.dense.triton_passes import DTYPES
from torchtitan_scape.kernels.scape.triton_passes import TritonPasses
from torchtitan_scape.kernels.scape.triton_visits import EnteringCount
from torchtitan_scape.kernels.scape.visits import MIN_VISIT_RATE, VisitRates


class UpdatesBase:
    """Common part of `TritonReplicated` and `TritonOwner`."""

    @property
    def leaves_state(self) -> bool:
        return False

    def __init__(self, passes: TritonPasses) -> None:
        self._passes = passes
        self._entering: EnteringCount | None = None

    def count_entering(self, visits: VisitRates) -> None:
        p = self._passes
        if self._entering is None:
            self._entering = EnteringCount(p.updater.tensors, visits)
        self._entering(p.step.in_use, p.step.previous)

    def _axes(self, tensor: int) -> tuple[int, int, int]:
        """Return the columns ROW, VISITED_ROWS and VISITED_COLUMNS of a sparsified tensor in the pointer table."""
        visits = self._passes.visits
        if visits is None:
            return 1, 0, 0
        rows, columns = visits.starts[2 * tensor : 2 * tensor + 2]
        return visits.columns[tensor], rows, columns

    def begin_step(self) -> None:
        """Do nothing: the state contains the moments."""

    def rotate(self, density: float, in_use: Tensor, previous: Tensor) -> Tensor | None:
        """Return None: there are no lists."""
        return None

    def decoded(self, in_use: Tensor) -> None:
        """Do nothing: there are no lists."""

    def store_moments(self) -> None:
        """Do nothing: the state contains the moments."""

    def _update(
        self, kernel: Any, tiles: TileSchedule, ranges: tuple[Range, ...], *between: Tensor, **constants: Any
    ) -> None:
        """Launch an update kernel. between: its arguments after `corrections`, up to `fresh_counts`."""
        p, step = self._passes, self._passes.step
        relative = p.fresh if p.stale is None else p.stale.relative
        corrections = p.corrections()
        for listed, full, dtype in tiles.lists(ranges, p.parameter_kinds):
            p.launch(
                kernel,
                tiles,
                listed,
                corrections,
                *between,
                relative,
                p.max_staleness,
                step.clip,
                as_flag(step.applied),
                ALIGNED_TILE=full,
                DTYPE=DTYPES[dtype],
                MOMENT_SHARE=p.keeps,
                MIN_VISIT_RATE=MIN_VISIT_RATE,
                CLIP_MOMENT=step.clip_moment,
                **{"SCALED": p.stale is not None, **constants},
            )
