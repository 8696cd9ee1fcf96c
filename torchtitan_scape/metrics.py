"""What the replicas said to each other and where the time went, in the log and in TensorBoard."""

from collections import defaultdict
from typing import Any

import torch
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from torchtitan_scape.job_config import JobConfig
from torchtitan_scape.optimizer.container import ReplicaOptimizers

LEVELS = ("gcd_pair", "node", "network")
PHASES = ("forward_backward", "check", "pack", "exchange", "clip", "update")


class ReplicaMetrics(MetricsProcessor):
    """TorchTitan's metrics, and one line more about the replicate axis.

    Bytes are what a rank sends on the replicate axis in a step, averaged over ranks and over the steps since
    the last line, by the level of the link; FSDP's own collectives on the shard axis are not among them.
    """

    optimizers: ReplicaOptimizers

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self.last_loss: float | None = None
        self.steps_since_log = 0
        self._sent_before: dict[str, float] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        steps, self.steps_since_log = max(1, self.steps_since_log), 0
        self.last_loss = global_avg_loss
        figures = self.optimizers.statistics()
        sent, dense = self.bytes_per_step(steps, self._sent_before)
        self._sent_before = self.optimizers.collectives.traffic.sent_by_level()
        seconds = {name: total / steps for name, total in self._take_seconds().items()}
        extra = dict(extra_metrics or {})
        extra |= {f"sync/{name}": value for name, value in figures.items()}
        extra |= {f"sync/bytes_sent/{level}": value for level, value in sent.items()}
        extra["sync/bytes_sent/dense_equivalent"] = dense
        extra |= {f"step_time/{name}(s)": seconds.get(name, 0.0) for name in PHASES}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
        logger.info(_sync_line(step, figures, sent, dense, seconds))

    def _take_seconds(self) -> dict[str, float]:
        seconds = self.optimizers.timer.take()
        for name, value in seconds.items():
            self._seconds[name] += value
        return seconds

    def mean_seconds(self, steps: int) -> dict[str, float]:
        """Seconds by phase and step over the `steps` of this run."""
        self._take_seconds()
        return {name: self._seconds[name] / steps for name in PHASES if name in self._seconds}

    def bytes_per_step(self, steps: int, since: dict[str, float]) -> tuple[dict[str, float], float]:
        """(bytes sent by level, bytes a dense exchange sends), per step and rank, over the last `steps` steps.

        since: what this rank had sent before those steps, by level. A collective call: the mean over all ranks.
        """
        collectives = self.optimizers.collectives
        sent = collectives.traffic.sent_by_level()
        grown = [sent.get(level, 0.0) - since.get(level, 0.0) for level in LEVELS]
        device = self.optimizers.grad_norm.device
        values = torch.tensor([*grown, self.optimizers.dense_bytes() * steps, 1.0], dtype=torch.float64, device=device)
        total = collectives.sum_over_all(values).tolist()
        mean = [value / total[-1] / steps for value in total[:-1]]
        by_level = {level: value for level, value in zip(LEVELS, mean[:-1], strict=True) if value > 0}
        return by_level, mean[-1]


def build_metrics_processor(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any = None, tag: str | None = None
) -> ReplicaMetrics:
    return ReplicaMetrics(job_config, parallel_dims, tag)


def size_text(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError


def sent_text(sent: dict[str, float], dense: float) -> str:
    """Bytes by level, and the factor against dense."""
    if not sent:
        return "nothing (one replica)"
    levels = ", ".join(f"{level} {size_text(value)}" for level, value in sent.items())
    if dense == 0:
        return f"{levels} (one replica: scalars alone)"
    return f"{levels} (dense {size_text(dense)}, {dense / sum(sent.values()):.1f} x)"


def _sync_line(
    step: int, figures: dict[str, float], sent: dict[str, float], dense: float, seconds: dict[str, float]
) -> str:
    parts = [f"sync step: {step:2}", f"sent per step and rank: {sent_text(sent, dense)}"]
    if "nnz" in figures:
        parts.append(
            f"density: {figures['density']:.4f}  nnz: {figures['nnz']:,.0f}  "
            f"overlap: {figures['mask_overlap']:.3f}  residual: {figures['residual_norm']:.3g}"
        )
    parts.append(f"clip: {figures['clip_factor']:.3f}")
    if figures["skipped_steps"]:
        parts.append(f"skipped: {figures['skipped_steps']:.0f}")
    parts.append("ms: " + " ".join(f"{name} {1e3 * seconds[name]:.0f}" for name in PHASES if name in seconds))
    return "  ".join(parts)
