"""Collection of observations during the steps that `[observe]` selects."""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.checkpoint.state import describe_states
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.tensors import sum_of_squares
from torchtitan_scape.methods.interface import PENDING_GRADIENTS
from torchtitan_scape.observe import figures
from torchtitan_scape.observe.figures import Observed, chosen, whole
from torchtitan_scape.observe.record import Frequency, Record, Row
from torchtitan_scape.optimizers.registry import OPTIMIZERS
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

logger = logging.getLogger(__name__)

Log = Callable[[dict[str, Any], int], None]


class Observation:
    """Observations of a run. The optimizers call it only in the steps of `[observe]`; it does not change training.

    The ranks of the first replica assemble the tensors, and rank 0 computes and writes. Other ranks take part if a
    replica's tensors are sharded. If replicas differ, those of the first replica are observed. `log` receives scalars
    by tag, and the step. Raises ValueError if a name matches no parameter.
    """

    def __init__(self, config: JobConfig, optimizers: ReplicaOptimizer, log: Log) -> None:
        self.options, self.optimizers, self._log = config.observe, optimizers, log
        self.tensors = chosen(self.options.names, optimizers.shards(), config.model.name)
        self.names = {shard.name for observed in self.tensors for shard in observed.shards}
        collectives = optimizers.collectives
        self._group = collectives.groups.model
        self._first_replica, self._is_writer = collectives.replica == 0, dist.get_rank() == 0
        optimizer = config.optimizer.name
        facts = {
            "model": config.model.title,
            "method": config.sync.method,
            "optimizer": optimizer,
            "steps": str(config.training.steps),
            "replicas": str(collectives.replicas),
        }
        self.record = Record(Path(config.job.dump_folder), facts)
        states, unsent = describe_states(optimizers, "exact"), optimizers.sharding.unsent.described("exact")
        # Residuals of the shard axis are stored per parameter group and are not observed.
        self._has_residual = any(
            state["on_migration"] in PENDING_GRADIENTS for kind, state in states.items() if kind not in unsent
        )
        # A shadow residual requires a complete gradient exchange: no error feedback and no local updates.
        self._shadows = not any(state["on_migration"] in (*PENDING_GRADIENTS, "model") for state in states.values())
        self._moments = self.tensors if OPTIMIZERS[optimizer].has_moment else []
        self._before: dict[str, Tensor] = {}  # Masks of the largest first moments of the last step.
        self._shadow: dict[str, figures.ShadowResidual] = {}
        self._frequencies: dict[str, figures.IndexFrequency] = {}
        self._rows: dict[str, Row] = {}  # Rows of this step.
        self._last: int | None = None  # Last step of this process.
        self._window: list[int] | None = None
        self._from_first = False  # This process took part in the window from its first step, skipped or not.
        self._takes_histograms = False
        self._log_options(optimizer)

    def _log_options(self, optimizer: str) -> None:
        options, labels = self.options, ", ".join(observed.label for observed in self.tensors)
        windows = ", ".join(f"{first} to {first + count - 1}" for first, count in options.windows) or "none"
        at = ", ".join(map(str, options.histograms)) or "none"
        logger.info(f"Observed: {labels}; windows: steps {windows}; histograms: {at}; written to {self.record.path}")
        if len(self._moments) < len(self.tensors):
            logger.info(f"{optimizer} has no first moment: the overlap of the largest entries is omitted")
        if self._shadows and options.windows:
            share = f"{100 * options.density:g} %"
            logger.info(
                f"Every window starts a shadow residual of these tensors (e += g, the largest {share} are removed, the "
                "rest remains); it does not affect training"
            )

    # ------------------------------------------------------------------------------------------ a step

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Prepare the observation of `step` before its gradients. Collective."""
        if self._last is None and self._is_writer:
            self.record.begin(step - 1)
        windows = (window for window in self.options.windows if window[0] <= step < sum(window))
        window, previous = next(windows, None), self._window
        self._window, self._takes_histograms = window, step in self.options.histograms
        self._rows, resumed, self._last = {}, self._last is None, step
        self.optimizers.observe(self if window or self._takes_histograms else None)
        if window is None:
            self._before, self._shadow, self._frequencies = {}, {}, {}
        elif window is not previous:
            with self.optimizers.timer.phase("observe"):
                self._before = self._largest()
            self._shadow, self._frequencies, self._from_first = {}, {}, step == window[0]
            if resumed and step > window[0] and self._shadows:
                logger.warning(
                    f"The shadow residual of the window from step {window[0]} was not saved: its norms are omitted "
                    f"from step {step} on"
                )

    @torch.no_grad()
    def synchronized(self, gradient: Callable[[str], Tensor], applied: Tensor) -> None:
        """Record the synchronized gradients; see `core.observer.Observer`. Waits for the device."""
        if not bool(applied):
            if self._takes_histograms:
                logger.warning(f"Step {self._step} was skipped: it has no histograms")
            return
        for observed in self.tensors:
            values = self._whole(observed, [gradient(shard.name) for shard in observed.shards])
            if values is None:
                continue
            if bool(values.isinf().any()):  # The guard checks the gradient of each replica, not their sum.
                logger.warning(
                    f"Step {self._step}: the sum of the gradients of {observed.label} overflows; not recorded"
                )
                continue
            valid = ~values.isnan()
            if not bool(valid.any()):  # the step exchanges other parameters
                continue
            values = values if bool(valid.all()) else values[valid]
            if self._window is not None:
                self._rows[observed.label] = self._row(observed, values)
                if self._from_first and bool(valid.all()):
                    counted = self._frequencies.setdefault(observed.label, figures.IndexFrequency(values))
                    counted.add(values, self.options.density)
            if self._takes_histograms:
                histogram = figures.distribution(values)
                self.record.add_histogram(self._step, observed.label, histogram)
                tags = {"kurtosis": histogram.kurtosis, "within_tenth": histogram.within_tenth}
                self._scalars(observed, tags)

    def _row(self, observed: Observed, gradient: Tensor) -> Row:
        gradient_norm = figures.norm(gradient)
        row = Row(self._step, observed.label, self.options.density, gradient=gradient_norm, sent=gradient_norm)
        if self._shadows:
            if self._from_first and observed.label not in self._shadow:
                self._shadow[observed.label] = figures.ShadowResidual(gradient)
            row.shadow, row.sent = True, math.nan
            if (shadow := self._shadow.get(observed.label)) is not None:
                shadow.add(gradient, self.options.density)
                row.sent, row.residual = figures.norm(shadow.sent), figures.norm(shadow.residual)
        return row

    @torch.no_grad()
    def after_step(self) -> None:
        """Record and write after the update. Collective."""
        if self._window is None and not self._takes_histograms:
            return
        with self.optimizers.timer.phase("observe"):
            if self._window is not None:
                self._record_step()
                if self._step + 1 == sum(self._window):
                    self._record_frequencies(self._window[0])
            if self._takes_histograms or self._window is None or self._step + 1 == sum(self._window):
                self.record.write()

    def _record_step(self) -> None:
        largest = self._largest()
        residual_norms = self._residual_norms() if self._has_residual else {}
        if not self._is_writer:
            return
        for observed in self.tensors:
            row = self._rows.get(observed.label)
            if row is None:  # The step was skipped, so moments are unchanged.
                self.record.add(Row(self._step, observed.label, self.options.density))
                continue
            if observed.label in largest and observed.label in self._before:
                row.overlap = figures.overlap(self._before[observed.label], largest[observed.label])
            row.residual = residual_norms.get(observed.label, row.residual)
            self.record.add(row)
            self._scalars(observed, {key: getattr(row, key) for key in ("overlap", "gradient", "sent", "residual")})
        self._before = largest

    def _record_frequencies(self, first: int) -> None:
        for label, one in self._frequencies.items():
            frequency = Frequency(first, one.steps, label, self.options.density, one.histogram().cpu().numpy())
            self.record.add_frequency(frequency)

    def _scalars(self, observed: Observed, values: dict[str, float]) -> None:
        tags = {f"observe/{observed.label}/{key}": value for key, value in values.items() if math.isfinite(value)}
        if tags:
            self._log(tags, self._step)

    @property
    def _step(self) -> int:
        assert self._last is not None
        return self._last

    # ------------------------------------------------------------------------------------------ tensors

    def _whole(self, observed: Observed, parts: Sequence[Tensor]) -> Tensor | None:
        """Return the assembled tensor on the writing rank, None on the others."""
        if not self._first_replica:
            return None
        wholes = [whole(shard, values, self._group) for shard, values in zip(observed.shards, parts, strict=True)]
        return (wholes[0] if len(wholes) == 1 else torch.cat(wholes)) if self._is_writer else None

    def _largest(self) -> dict[str, Tensor]:
        """Return the masks of the largest first moments, by label."""
        self.optimizers.finish_previous_step()
        masks = {}
        for observed in self._moments:
            moments = [self.optimizers.observed_state(shard).moment for shard in observed.shards]
            parts = [moment for moment in moments if moment is not None]
            if len(parts) == len(moments) and (values := self._whole(observed, parts)) is not None:
                masks[observed.label] = figures.largest(values, self.options.density)
        return masks

    def _residual_norms(self) -> dict[str, float]:
        """Return the norms of the residuals by label: the root mean square over the replicas of this process."""
        squares = []
        for observed in self.tensors:
            total = torch.zeros((), dtype=torch.float64, device=self.optimizers.grad_norm.device)
            for shard in observed.shards:
                residuals = self.optimizers.observed_state(shard).residuals
                for residual in residuals if shard.counted else ():
                    total += sum_of_squares(residual.to(total.device)) / len(residuals)
            squares.append(total)
        total_squares = torch.stack(squares)
        if self._group is not None:
            dist.all_reduce(total_squares, group=self._group)
        return dict(zip((observed.label for observed in self.tensors), total_squares.sqrt().tolist(), strict=True))

    def write(self) -> None:
        """Write new records to disk, before a checkpoint and at the end."""
        self.record.write()
