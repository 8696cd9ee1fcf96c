"""The steps that are looked at, what is seen in them, and where it goes."""

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
from torchtitan_scape.observe import figures
from torchtitan_scape.observe.record import Record, Row
from torchtitan_scape.observe.tensors import Observed, chosen, whole
from torchtitan_scape.optimizers.registry import FIRST, OPTIMIZERS
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

logger = logging.getLogger(__name__)

Log = Callable[[dict[str, Any], int], None]


class Observation:
    """Of a run. The optimizers know of it in the steps of `[observe]` alone; it reads, and changes nothing.

    The ranks that hold the first replica put the tensors together, and rank 0 computes and writes; all others take part
    where a replica has a piece only. Where replicas differ, what is seen is the first one's own.

    Args:
        config: of the run; `[observe]` is enabled.
        log: takes scalars by their tags, and the step.

    Raises ValueError for names that match nothing.
    """

    def __init__(self, config: JobConfig, optimizers: ReplicaOptimizer, log: Log) -> None:
        self.options, self.optimizers, self._log = config.observe, optimizers, log
        self.tensors = chosen(self.options.names, optimizers.shards(), config.model.name)
        self.names = {shard.name for one in self.tensors for shard in one.shards}
        collectives = optimizers.collectives
        self._group = collectives.groups.model
        self._first_replica, self._writes = collectives.replica == 0, dist.get_rank() == 0
        optimizer = config.optimizer.name
        facts = {
            "model": f"{config.model.name} {config.model.flavor}",
            "method": config.sync.method,
            "optimizer": optimizer,
            "steps": str(config.training.steps),
            "replicas": str(collectives.replicas),
        }
        self.record = Record(Path(config.job.dump_folder), facts)
        states, unsent = describe_states(optimizers, "exact"), optimizers.sharding.unsent.described("exact")
        # What a method of the shard axis keeps lies by its groups, and is not looked at.
        self._has_residual = any(state["carries"] == "gradient" for kind, state in states.items() if kind not in unsent)
        # Of replicas that differ no gradient is exchanged, and what shards send in part is not the whole one.
        self._shadows = not any(state["carries"] in ("gradient", "model") for state in states.values())
        self._moments = [
            one for one in self.tensors if all(FIRST in OPTIMIZERS[optimizer].moments(s) for s in one.shards)
        ]
        self._before: dict[str, Tensor] = {}  # where the largest first moments of the last step were
        self._shadow: dict[str, figures.ShadowResidual] = {}
        self._rows: dict[str, Row] = {}  # of this step
        self._last: int | None = None  # the last step of this process
        self._window: list[int] | None = None
        self._from_first = False  # whether this process has seen the window from its first step, skipped or not
        self._counts = False
        self._tell(optimizer)

    def _tell(self, optimizer: str) -> None:
        options, labels = self.options, ", ".join(one.label for one in self.tensors)
        windows = ", ".join(f"{first} to {first + count - 1}" for first, count in options.windows) or "none"
        at = ", ".join(map(str, options.histograms)) or "none"
        logger.info(f"Observed: {labels}; windows: steps {windows}; histograms: {at}; into {self.record.path}")
        if len(self._moments) < len(self.tensors):
            logger.info(f"{optimizer} keeps no first moment: the overlap of the largest is left out")
        if self._shadows and options.windows:
            share = f"{100 * options.density:g} %"
            logger.info(
                f"A shadow residual of these tensors begins with every window (e += g, the largest {share} go out, the "
                "rest stays): it stands beside training and changes nothing in it"
            )

    # ------------------------------------------------------------------------------------------ a step

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Before the gradients of `step`, which follows the one before. A collective call."""
        if self._last is None and self._writes:
            self.record.begin(step - 1)
        windows = (window for window in self.options.windows if window[0] <= step < sum(window))
        window, before = next(windows, None), self._window
        self._window, self._counts = window, step in self.options.histograms
        self._rows, resumed, self._last = {}, self._last is None, step
        self.optimizers.observe(self if window or self._counts else None)
        if window is None:
            self._before, self._shadow = {}, {}
        elif window is not before:
            with self.optimizers.timer.phase("observe"):
                self._before = self._largest()
            self._shadow, self._from_first = {}, step == window[0]
            if resumed and step > window[0] and self._shadows:
                logger.warning(
                    f"The shadow residual of the window from step {window[0]} was not saved: its norms are left out "
                    f"from step {step} on"
                )

    @torch.no_grad()
    def synchronised(self, gradient: Callable[[str], Tensor], applied: Tensor) -> None:
        """See `sync.observed.Observer`. Waits for the device."""
        if not bool(applied):
            if self._counts:
                logger.warning(f"Step {self._step} was skipped: there are no histograms of it")
            return
        for one in self.tensors:
            values = self._whole(one, [gradient(shard.name) for shard in one.shards])
            if values is None:
                continue
            if bool(values.isinf().any()):  # the guard sees what each replica has, and not their sum
                logger.warning(f"Step {self._step}: the sum of the gradients of {one.label} overflows; it is not shown")
                continue
            real = ~values.isnan()
            values = values if bool(real.all()) else values[real]
            if self._window is not None:
                self._rows[one.label] = self._row(one, values)
            if self._counts:
                found = figures.distribution(values)
                self.record.add_histogram(self._step, one.label, found)
                tags = {"kurtosis": found.kurtosis, "within_tenth": found.within_tenth}
                self._scalars(one, tags)

    def _row(self, one: Observed, gradient: Tensor) -> Row:
        length = figures.norm(gradient)
        row = Row(self._step, one.label, self.options.density, gradient=length, sent=length)
        if self._shadows:
            if self._from_first and one.label not in self._shadow:
                self._shadow[one.label] = figures.ShadowResidual(gradient)
            row.shadow, row.sent = True, math.nan
            if (shadow := self._shadow.get(one.label)) is not None:
                shadow.add(gradient, self.options.density)
                row.sent, row.residual = figures.norm(shadow.sent), figures.norm(shadow.observed_state)
        return row

    @torch.no_grad()
    def after_step(self) -> None:
        """After the update. A collective call."""
        if self._window is None and not self._counts:
            return
        with self.optimizers.timer.phase("observe"):
            if self._window is not None:
                self._after()
            if self._counts or self._window is None or self._step + 1 == sum(self._window):
                self.record.write()

    def _after(self) -> None:
        now = self._largest()
        left = self._residual_norms() if self._has_residual else {}
        if not self._writes:
            return
        for one in self.tensors:
            row = self._rows.get(one.label)
            if row is None:  # the step was skipped: moments are as they were
                self.record.add(Row(self._step, one.label, self.options.density))
                continue
            if one.label in now and one.label in self._before:
                row.overlap = figures.overlap(self._before[one.label], now[one.label])
            row.residual = left.get(one.label, row.residual)
            self.record.add(row)
            self._scalars(one, {key: getattr(row, key) for key in ("overlap", "gradient", "sent", "residual")})
        self._before = now

    def _scalars(self, one: Observed, found: dict[str, float]) -> None:
        tags = {f"observe/{one.label}/{key}": value for key, value in found.items() if math.isfinite(value)}
        if tags:
            self._log(tags, self._step)

    @property
    def _step(self) -> int:
        assert self._last is not None
        return self._last

    # ------------------------------------------------------------------------------------- what is there

    def _whole(self, one: Observed, parts: Sequence[Tensor]) -> Tensor | None:
        """The tensor, on the rank that writes."""
        if not self._first_replica:
            return None
        wholes = [whole(shard, values, self._group) for shard, values in zip(one.shards, parts, strict=True)]
        return (wholes[0] if len(wholes) == 1 else torch.cat(wholes)) if self._writes else None

    def _largest(self) -> dict[str, Tensor]:
        """Where the largest first moments are, by label."""
        self.optimizers.finish_previous_step()
        found = {}
        for one in self._moments:
            moments = [self.optimizers.observed_state(shard).moment for shard in one.shards]
            parts = [moment for moment in moments if moment is not None]
            if len(parts) == len(moments) and (values := self._whole(one, parts)) is not None:
                found[one.label] = figures.largest(values, self.options.density)
        return found

    def _residual_norms(self) -> dict[str, float]:
        """By label: of what replicas have not delivered, the root mean square over those of this process."""
        squares = []
        for one in self.tensors:
            total = torch.zeros((), dtype=torch.float64, device=self.optimizers.grad_norm.device)
            for shard in one.shards:
                residuals = self.optimizers.observed_state(shard).residuals
                for residual in residuals if shard.counted else ():
                    total += residual.to(total.device).double().square().sum() / len(residuals)
            squares.append(total)
        every = torch.stack(squares)
        if self._group is not None:
            dist.all_reduce(every, group=self._group)
        return dict(zip((one.label for one in self.tensors), every.sqrt().tolist(), strict=True))

    def write(self) -> None:
        """Puts what is new on the disk: in front of a checkpoint, and at the end."""
        self.record.write()
