"""What the replicas said to each other and where the time went, in the log and in TensorBoard."""

import os
import socket
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module, device_type
from torchtitan.train import Trainer

from topology.interfaces import RankBytes, compare, read_interfaces
from topology.layout import Layout
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.optimizer.container import ReplicaOptimizers
from torchtitan_scape.report.stragglers import gather_waits, slowest_rank, waits_text

LEVELS = ("gcd_pair", "node", "network")
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


class InterfaceCount:
    """What the node's interfaces sent over the training steps, beside what its ranks counted for the same steps.

    On with SCAPE_COUNT_INTERFACES=1, with gloo, where the system has /proc/net/dev. It holds only where nothing else
    uses the interfaces: scripts/emulated_cluster.py sees to that and sets the variable.

    The first step stays outside: process groups, connections and the broadcast of the start are behind it. From then
    on one window stays open over as many steps as follow each other directly. It is closed before a validation, a
    checkpoint and the end, and opens again with the next step. At both ends the masks in flight are settled and all
    ranks wait for each other, so that every byte that is counted has left, and none of another step has. Inside,
    nothing is waited for: the overlap of exchange and compute stays as it is.

    What no rank counts but the wires carry: headers and acknowledgements (1 %), gloo's own messages (2 to 5 kB a
    collective on four nodes, whatever its size), TorchTitan's scalars (a token count at every step, 0.6 kB; losses
    and our figures where it logs, 7 kB), torchrun's heartbeat, and FSDP's own collectives where the shard axis has
    more than one rank. Where a step sends a few hundred kB or more all this is below 5 %; below that it is not.
    """

    def __init__(self, layout: Layout, optimizers: ReplicaOptimizers) -> None:
        self._layout, self._optimizers = layout, optimizers
        self._steps = 0
        self._open: tuple[dict[tuple[str, str], float], dict[str, int]] | None = None
        self._counted: dict[tuple[str, str], float] = defaultdict(float)
        self._moved: dict[str, int] = defaultdict(int)
        self.enabled = os.environ.get("SCAPE_COUNT_INTERFACES") == "1" and not optimizers.collectives.is_fake
        if self.enabled and (optimizers.grad_norm.device.type != "cpu" or read_interfaces() is None):
            logger.warning("SCAPE_COUNT_INTERFACES=1 has no effect: it needs gloo on a system with /proc/net/dev")
            self.enabled = False

    def before_step(self, steps_taken: int) -> None:
        """To be called in front of every step, by all ranks. steps_taken: by this process so far."""
        if self.enabled and steps_taken > 0 and self._open is None:
            self._open = self._look()

    def after_step(self, step_follows: bool) -> None:
        """step_follows: the next thing that this process sends belongs to a step."""
        if self._open is not None:
            self._steps += 1
            if not step_follows:
                self._close()

    def summary(self) -> dict[str, Any] | None:
        """Bytes sent per step by level and node, as `compare` has them; None where nothing was measured.

        A collective call.
        """
        self._close()  # where the data ran out in the middle of a step
        if self._steps == 0:
            return None
        own = RankBytes(self._layout.node(dist.get_rank()), dict(self._counted), dict(self._moved))
        ranks = self._optimizers.collectives.gather_objects(own)
        others = {"shard": self._layout.shard, "context": self._layout.context, "tensor": self._layout.tensor}
        return {
            "steps": self._steps,
            "sent_per_step": compare(ranks, self._steps),
            "not_counted": "headers and acknowledgements, gloo's own messages, the trainer's scalars, the launcher"
            + "".join(f", collectives on the {axis} axis" for axis, degree in others.items() if degree > 1),
        }

    def _close(self) -> None:
        if self._open is None:
            return
        counted, moved = self._look()
        for kind, sent in counted.items():
            self._counted[kind] += sent - self._open[0].get(kind, 0.0)
        for level, bytes_sent in moved.items():
            self._moved[level] += bytes_sent - self._open[1][level]
        self._open = None

    def _look(self) -> tuple[dict[tuple[str, str], float], dict[str, int]]:
        """Bytes so far, while all ranks are silent: counted by this rank, by level and kind; sent by its interfaces."""
        self._optimizers.settle()
        dist.barrier()
        moved = read_interfaces()
        assert moved is not None
        dist.barrier()  # a twin on this node that ran ahead would send before the counters are read
        counted = self._optimizers.collectives.traffic.sent_by_level_and_kind()
        return counted, {level: sent for level, (sent, _) in moved.items()}


def a_step_follows(trainer: Trainer) -> bool:
    """Whether the next step comes before a validation, a checkpoint and the end."""
    last = trainer.step == trainer.job_config.training.steps
    validates = trainer.job_config.validation.enable and trainer.validator.should_validate(trainer.step)
    return not (last or validates or trainer.checkpointer.saves_at(trainer.step, last))


def interface_lines(figures: dict[str, Any] | None) -> list[str]:
    """`InterfaceCount.summary` for the log: all nodes together, and the range of their ratios."""
    lines = []
    for level, nodes in figures["sent_per_step"].items() if figures else ():
        ratios = [node["ratio"] for node in nodes if node["ratio"] is not None]
        counted, moved = (sum(node[key] for node in nodes) for key in ("counted", "interface"))
        if counted or moved:
            text = f"{min(ratios):.3f} to {max(ratios):.3f} x" if ratios else "nothing was counted"
            lines.append(f"{level}: {size_text(counted)} counted, {size_text(moved)} on the interfaces ({text})")
    return lines


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
