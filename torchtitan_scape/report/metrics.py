"""What the replicas said to each other and where the time went, in the log and in TensorBoard."""

import socket
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module, device_type

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.optimizer.container import ReplicaOptimizers
from torchtitan_scape.report.stragglers import gather_waits, slowest_rank, waits_text
from torchtitan_scape.report.text import sent_text

LEVELS = ("gcd_pair", "node", "network")
# Figures of a method that keeps what it did not send: label and format in the log.
SPARSE = {
    "density": ("density", ".4f"),
    "nnz": ("nnz", ",.0f"),
    "mask_overlap": ("overlap", ".3f"),
    "residual_norm": ("residual", ".3g"),
}
PHASES = ("forward_backward", "check", "wait", "pack", "exchange", "clip", "update", "compare")


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
        self._peak = 0.0
        self._hosts: list[str] = []  # of all ranks
        self.forecast = ""  # what a simulation is predicted to take, for every line
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
        self.take_peak()  # which logging resets
        figures = self.optimizers.statistics()
        sent, dense = self.bytes_per_step(steps, self._sent_before)
        self._sent_before = self.optimizers.collectives.traffic.sent_by_level()
        seconds = {name: total / steps for name, total in self._take_seconds().items()}
        extra = dict(extra_metrics or {})
        extra |= {f"sync/{name}": value for name, value in figures.items()}
        extra |= {f"sync/bytes_sent/{level}": value for level, value in sent.items()}
        extra["sync/bytes_sent/dense_equivalent"] = dense
        extra |= {f"step_time/{name}(s)": seconds.get(name, 0.0) for name in PHASES}
        waits, step_seconds = self._gather_waits(seconds)
        extra |= {"sync/wait_max(s)": max(waits), "sync/wait_min(s)": min(waits)}
        extra["sync/slowest_rank"] = slowest_rank(waits, step_seconds)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
        line = _sync_line(step, figures, sent, dense, seconds)
        logger.info(line + (f"  {self.forecast}" if self.forecast else ""))
        if len(waits) > 1:
            logger.info(waits_text(waits, step_seconds, self._hosts))

    def take_peak(self) -> float:
        """Bytes in use at once at most, since the start: of a GPU's allocator, on a CPU of the process."""
        kind = "reserved" if device_type == "cpu" else "active"
        self._peak = max(self._peak, device_module.memory_stats().get(f"{kind}_bytes.all.peak", 0))
        return self._peak

    def _take_seconds(self) -> dict[str, float]:
        seconds = self.optimizers.timer.take()
        for name, value in seconds.items():
            self._seconds[name] += value
        return seconds

    def mean_seconds(self, steps: int) -> dict[str, float]:
        """Seconds by phase and step over the `steps` of this run."""
        self._take_seconds()
        return {name: self._seconds[name] / steps for name in PHASES if name in self._seconds}

    def mean_waits(self, steps: int) -> list[float]:
        """Seconds a step that every rank has waited for the others, over the `steps` of this run. A collective call."""
        return self._gather_waits(self.mean_seconds(steps))[0]

    def _gather_waits(self, seconds: dict[str, float]) -> tuple[list[float], float]:
        collectives, device = self.optimizers.collectives, self.optimizers.grad_norm.device
        if not self._hosts and not collectives.is_fake:
            found = collectives.gather_objects((dist.get_rank(), socket.gethostname()))
            self._hosts = [host for _, host in sorted(found)]
        return gather_waits(collectives, seconds.get("wait", 0.0), sum(seconds.values()), device)

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


def _sync_line(
    step: int, figures: dict[str, float], sent: dict[str, float], dense: float, seconds: dict[str, float]
) -> str:
    parts = [f"sync step: {step:2}", f"sent per step and rank: {sent_text(sent, dense)}"]
    if "residual_norm" in figures:  # of a method that does not send everything
        parts += [f"{label}: {figures[name]:{form}}" for name, (label, form) in SPARSE.items() if name in figures]
    parts.append(f"clip: {figures['clip_factor']:.3f}")
    if figures["skipped_steps"]:
        parts.append(f"skipped: {figures['skipped_steps']:.0f}")
    parts.append("ms: " + " ".join(f"{name} {1e3 * seconds[name]:.0f}" for name in PHASES if name in seconds))
    return "  ".join(parts)
