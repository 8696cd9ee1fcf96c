"""Communication volume and phase times, in the log and in TensorBoard, and signs that a model no longer learns."""

import logging
import math
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.consistency import DamagedParametersError
from torchtitan_scape.core.text import duration_text, sent_text, shards_text
from torchtitan_scape.sharding.base import KINDS
from torchtitan_scape.titan.components import MetricsProcessor
from torchtitan_scape.titan.distributed import ParallelDims, device_module, device_type
from torchtitan_scape.topology.traffic import REPLICATE, SHARD, Entry, TrafficLedger
from torchtitan_scape.trainer.optimizers import TitanOptimizers
from torchtitan_scape.trainer.parallelize import from_last_stage

logger = logging.getLogger(__name__)

LEVELS = ("gcd_pair", "node", "network")
# Metrics of methods with a residual: (label, format) in the log.
SPARSE = {
    "density": ("density", ".4f"),
    "mask_overlap": ("mask overlap", ".3f"),
    "residual_norm": ("residual norm", ".3g"),
}
PHASES = ("forward_backward", "check", "wait", "pack", "exchange", "clip", "update", "compare", "observe")
PATIENCE = 3  # logged steps in a row with such a sign, after which the run ends
_RANDOM, _LEARNED = 0.98, 0.8  # of ln(vocabulary): a loss of random output, and one of a model that has learned
# Share of a step below which differences between the waits of ranks are ignored; number of slow ranks that are named.
MIN_SHARE, _MAX_NAMED = 0.05, 3


class Health:
    """Judges the loss and the gradient norm of logged steps. Every rank must be given the same values.

    A model with random output has the loss ln(vocabulary). `alarm` is what is wrong at the last logged step, "" if
    nothing is. Meanwhile no checkpoint is written or deleted.
    """

    def __init__(self, vocabulary: int) -> None:
        self._random = math.log(vocabulary)
        self._lowest = math.inf
        self._in_a_row = 0
        self.alarm = ""

    def judge(self, step: int, loss: float, zero_gradient: bool, last: bool = False) -> str:
        """Return the new `alarm`.

        Raises DamagedParametersError if it has been there for `PATIENCE` logged steps, or is there at the last step.
        """
        self.alarm = ""
        if zero_gradient:
            self.alarm = f"the gradient norm is exactly 0 at step {step}"
        elif self._lowest < _LEARNED * self._random and _RANDOM * self._random <= loss < math.inf:
            self.alarm = (
                f"the loss was {self._lowest:.3g} and is {loss:.3g} at step {step}, that of a model with random output"
            )
        else:
            self._lowest = min(self._lowest, loss)
        self._in_a_row = self._in_a_row + 1 if self.alarm else 0
        if self._in_a_row >= PATIENCE or (last and self.alarm):
            raise DamagedParametersError(
                f"{self.alarm}, for {self._in_a_row} logged steps; a parameter may be damaged, or the learning rate is "
                "too high. Nothing was saved meanwhile: start the run again, or lower the rate if it comes back"
            )
        return self.alarm


class SentBytes(NamedTuple):
    """Bytes that a rank sends per step, averaged over ranks, without validation.

    On the replicate axis by level; on the shard axis, by FSDP's collectives or their replacements and by the optimizer,
    by level and kind; and in an all-reduce of all gradients on the replicate axis in FP32, for comparison.
    """

    replicas: dict[str, float]
    shards: dict[tuple[str, str], float]
    dense: float


def name_write_errors(writer: Any) -> None:
    """Make a SummaryWriter raise ValueError, with its folder and the fix, if its file cannot be written.

    A thread writes the file, and its OSError, without a path, is raised by a later call: it is printed only once.
    """

    def named(call: Callable[..., None]) -> Callable[..., None]:
        def call_named(*args: Any) -> None:
            try:
                call(*args)
            except OSError as error:
                raise ValueError(
                    f"TensorBoard's file in {writer.log_dir} cannot be written: {error.strerror or error}; free space "
                    "there, choose another job.dump_folder, or set --metrics.no-enable_tensorboard"
                ) from error

        return call_named

    events = writer.file_writer.event_writer
    for name in ("add_event", "flush", "close"):
        setattr(events, name, named(getattr(events, name)))
    others = threading.excepthook

    def leave_out(args: threading.ExceptHookArgs) -> None:
        is_writer = type(args.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(args.exc_value, OSError)):
            others(args)

    threading.excepthook = leave_out


class ReplicaMetrics(MetricsProcessor):
    """TorchTitan's metrics, and one line with the bytes per step since the last log line, see `SentBytes`."""

    optimizers: TitanOptimizers

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any = None, tag: str | None = None
    ) -> None:
        if job_config.metrics.enable_wandb and find_spec("wandb") is None:  # TorchTitan would train without it
            raise ValueError("[metrics] enable_wandb = true needs the package wandb: pip install wandb")
        super().__init__(job_config, parallel_dims, tag)
        self.last_loss: float | None = None
        self.zero_gradient = False  # whether some rank's gradient norm was exactly 0 at the last logged step
        self.steps_since_log = 0
        self._peak = 0.0
        self._logged = (0, 0.0)  # last logged step, and when
        self._hosts: list[str] = []  # host of each rank
        self.forecast = ""  # predicted step time of a simulated run, appended to every line
        self._sent_before: dict[Entry, float] = {}
        self._sent_earlier: dict[str, float] | None = {}  # before this process, see `total_sent`
        self._seconds: dict[str, float] = defaultdict(float)
        for writer in self._writers():
            name_write_errors(writer)

    def begin(self, step: int, sent: dict[str, float] | None) -> None:
        """Start the clock of the throughput, and mark the first step of this process in TensorBoard's file.

        Names of folders end with the minute: a run that is started again within it writes to the same folder.
        TensorBoard then drops the values of the earlier start from `step` on, as with `purge_step`. `sent` is the
        result of `total_sent` in the checkpoint that the run continues from; {} without one.
        """
        self._sent_earlier = sent
        self.time_last_log = time.perf_counter()  # not at construction: building and loading a run takes minutes
        for writer in self._writers():
            start = SessionLog(status=SessionLog.START)
            writer.file_writer.add_event(Event(step=step, session_log=start))

    def flush(self) -> None:
        """Write TensorBoard's buffered values: a run that resumes from a checkpoint does not repeat earlier steps."""
        for writer in self._writers():
            writer.flush()

    def _writers(self) -> list[Any]:
        return [one.writer for one in getattr(self.logger, "_loggers", ()) if hasattr(one, "writer")]

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        steps, self.steps_since_log = max(1, self.steps_since_log), 0
        device = self.optimizers.replica.grad_norm.device
        losses = [float(global_avg_loss), float(global_max_loss)]
        global_avg_loss, global_max_loss = from_last_stage(self.parallel_dims, losses, device)
        self.last_loss = global_avg_loss
        self.take_peak()  # before the parent's `log` resets it
        # TorchTitan counts all tokens of a sequence on each of the ranks that share it by context parallelism.
        global_max_loss *= self.parallel_dims.cp
        figures = self.optimizers.replica.metrics()
        sent = self.bytes_per_step(steps, self._sent_before)
        self._sent_before = dict(self.optimizers.replica.collectives.ledger.sent)
        seconds = {name: total / steps for name, total in self._take_seconds().items()}
        extra = dict(extra_metrics or {})
        if "n_tokens_seen" in extra:
            extra["n_tokens_seen"] /= self.parallel_dims.cp
        extra |= {f"sync/{name}": value for name, value in figures.items()}
        if "lr" in extra:  # TorchTitan writes it to TensorBoard, but not to its log line.
            figures["lr"] = extra["lr"]
        extra |= {f"sync/bytes_sent/{level}": value for level, value in sent.replicas.items()}
        extra["sync/bytes_sent/dense_equivalent"] = sent.dense
        extra |= {f"shard/bytes_sent/{level}/{kind}": value for (level, kind), value in sent.shards.items()}
        extra |= {f"step_time/{name}(s)": seconds.get(name, 0.0) for name in PHASES}
        waits, step_seconds = self._gather_waits(seconds)
        extra |= {"sync/wait_max(s)": max(waits), "sync/wait_min(s)": min(waits)}
        extra["sync/slowest_rank"] = slowest_rank(waits, step_seconds)
        # TorchTitan divides by `log_freq`, but step 1 and a start between two log lines have fewer steps.
        extra["time_metrics/end_to_end(s)"] = (time.perf_counter() - self.time_last_log) / steps
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
        # Replicas with weights of their own have gradient norms of their own.
        zero = torch.tensor(float(grad_norm == 0.0), dtype=torch.float32, device=device)
        self.zero_gradient = bool(self.optimizers.replica.collectives.sum_over_all(zero).item())
        fields = _sync_fields(step, figures, sent, seconds)
        if len(waits) > 1:
            fields.append(delay_text(waits, step_seconds, self._hosts))
        logger.info("sync: " + " | ".join(field for field in (*fields, self.forecast, self._remaining(step)) if field))

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        self.take_peak()  # before the parent resets it
        super().log_validation(loss, step, extra_metrics)

    def _remaining(self, step: int) -> str:
        """Return the remaining time of the run at the rate since the last log line; "" for the first one."""
        now, (step_before, before) = time.monotonic(), self._logged
        self._logged = (step, now)
        if not 0 < step_before < step or step >= self.job_config.training.steps:
            return ""
        left = (self.job_config.training.steps - step) * (now - before) / (step - step_before)
        return f"{duration_text(left)} left"

    def take_peak(self) -> float:
        """Return the peak memory in bytes since the start: of the GPU's allocator, or of the process on a CPU."""
        kind = "reserved" if device_type == "cpu" else "active"
        self._peak = max(self._peak, device_module.memory_stats().get(f"{kind}_bytes.all.peak", 0))
        return self._peak

    def _take_seconds(self) -> dict[str, float]:
        seconds = self.optimizers.replica.timer.take()
        for name, value in seconds.items():
            self._seconds[name] += value
        return seconds

    def mean_seconds(self, steps: int) -> dict[str, float]:
        """Return the mean seconds per step by phase, over the `steps` of this run."""
        self._take_seconds()
        return {name: self._seconds[name] / steps for name in PHASES if name in self._seconds}

    def mean_waits(self, steps: int) -> list[float]:
        """Return each rank's mean seconds per step waiting for others, over the `steps` of this run. Collective."""
        return self._gather_waits(self.mean_seconds(steps))[0]

    def _gather_waits(self, seconds: dict[str, float]) -> tuple[list[float], float]:
        """Return each rank's wait, and the mean step over ranks, in seconds. Collective; its bytes are not counted."""
        collectives, device = self.optimizers.replica.collectives, self.optimizers.replica.grad_norm.device
        wait, step = seconds.get("wait", 0.0), sum(seconds.values())
        if collectives.is_fake:
            return [wait], step
        if not self._hosts:
            hosts_by_rank = collectives.gather_objects((dist.get_rank(), socket.gethostname()))
            self._hosts = [host for _, host in sorted(hosts_by_rank)]
        world = dist.get_world_size()
        values = torch.zeros(world + 2, dtype=torch.float64, device=device)
        values[dist.get_rank()], values[-2], values[-1] = wait, step, 1.0
        *waits, steps, times = collectives.sum_over_all(values).tolist()
        # Each process adds its values once per simulated replica.
        return [value * world / times for value in waits], steps / times

    def bytes_per_step(self, steps: int, since: Mapping[Entry, float]) -> SentBytes:
        """Return the mean bytes that a rank sends per step over the last `steps` steps. Collective.

        The mean is over all ranks; with several replicas in a process, it is that of one replica. `since` are the bytes
        of the ledger before these steps.
        """
        collectives, simulated = self.optimizers.replica.collectives, self.job_config.topology.simulate_replicas
        grown = TrafficLedger(sent=defaultdict(float))
        for entry, sent in collectives.ledger.sent.items():
            grown.sent[entry] = sent - since.get(entry, 0.0)
        replicas, shards = grown.sent_by_level(REPLICATE), grown.sent_by_level_and_kind(SHARD)
        pairs = [(level, kind) for level in LEVELS for kind in KINDS]
        own = [replicas.get(level, 0.0) for level in LEVELS] + [shards.get(pair, 0.0) / simulated for pair in pairs]
        device = self.optimizers.replica.grad_norm.device
        values = torch.tensor(
            [*own, self.optimizers.replica.dense_bytes() * steps, 1.0], dtype=torch.float64, device=device
        )
        total = collectives.sum_over_all(values).tolist()
        mean = [value / total[-1] / steps for value in total[:-1]]
        return SentBytes(
            {level: value for level, value in zip(LEVELS, mean, strict=False) if value > 0},
            {pair: value for pair, value in zip(pairs, mean[len(LEVELS) : -1], strict=True) if value > 0},
            mean[-1],
        )

    def total_sent(self) -> dict[str, float] | None:
        """Return the bytes that a rank has sent on the replicate axis since step 1, as a mean over ranks, by level.
        Collective.

        Earlier starts of the run are included; None if its checkpoint does not contain theirs.
        """
        sent = self.bytes_per_step(1, since={}).replicas
        if (earlier := self._sent_earlier) is None:
            return None
        return {level: earlier.get(level, 0.0) + sent.get(level, 0.0) for level in LEVELS if level in earlier | sent}


def _sync_fields(step: int, figures: dict[str, float], sent: SentBytes, seconds: dict[str, float]) -> list[str]:
    fields = [f"step {step}"]
    if "lr" in figures:
        fields.append(f"lr {figures['lr']:.4g}")
    fields.append(f"sent/step: {sent_text(sent.replicas, sent.dense)}")
    if sent.shards:
        fields.append(f"shard axis: {shards_text(sent.shards)}")
    if "residual_norm" in figures:  # only methods with a residual return it
        fields += [f"{label} {figures[name]:{form}}" for name, (label, form) in SPARSE.items() if name in figures]
    fields.append(f"clip factor {figures['clip_factor']:.3f}")
    if figures["skipped_steps"]:
        fields.append(f"skipped steps {figures['skipped_steps']:.0f}")
    times = ", ".join(f"{name} {1e3 * seconds[name]:.0f}" for name in PHASES if name in seconds)
    return [*fields, f"ms/step: {times}"]


# Stragglers: in a synchronized step, the rank that the others wait for does not wait itself. Phase "wait" covers the
# count of the step's tokens, which reveals slow data loading, and the flag of finite gradients, which reveals a slow
# forward or backward pass. If FSDP shards a replica over ranks, its own collectives wait inside these passes, so all
# ranks of a slow rank's shard group look slow.


def slowest_rank(waits: list[float], step: float) -> int:
    """Return the rank with the shortest wait, or -1 if all waits are about equal relative to a step. In seconds."""
    return waits.index(min(waits)) if max(waits) - min(waits) > MIN_SHARE * step else -1


def delay_text(waits: list[float], step: float, hosts: list[str]) -> str:
    """Return the slow ranks in words, or "" if no rank delays the others.

    Args:
        waits, step: seconds.
        hosts: host of each rank, named if there are several hosts.
    """
    if slowest_rank(waits, step) < 0:
        return ""
    order = sorted(range(len(waits)), key=lambda rank: waits[rank])

    def name(rank: int) -> str:
        return f"rank {rank}" + (f" on {hosts[rank]}" if len(set(hosts)) > 1 else "")

    usual = median(waits[rank] for rank in order[1:])
    if waits[order[1]] - waits[order[0]] > MIN_SHARE * step:
        return f"{name(order[0])} delays the others by {1e3 * (usual - waits[order[0]]):.0f} ms"
    least = ", ".join(f"{name(rank)} {1e3 * waits[rank]:.0f} ms" for rank in order[:_MAX_NAMED])
    return f"slow ranks wait least: {least}; median {1e3 * usual:.0f} ms"
