"""What every rank of a strong-scaling sweep runs: the trainer, with its steps timed. strong_scaling.py starts it.

The environment variable SCALING holds what to measure, as JSON:

    output      file for the measurement, written by rank 0
    warm_up     steps that are left out (the first, dense one among them)
    compute     seconds; forward and backward become a wait of that length, and every step gets the gradients of the
                first one, which is real. Absent: all of them are real
    peer        "ddp", "ddp-bf16" or "powersgd": PyTorch's DistributedDataParallel synchronises, overlapped with the
                backward pass, plainly or with its own hooks; AdamS and clipping stay ours
    rank        of powersgd
    plain       true: no FSDP around the model, as with a peer, whose forward and backward are faster without
    calibrate   {name: options}; every method takes steps whose compute and exchange take no time: what is left is what
                passes and trainer cost with so many ranks on these cores

Everything else is the trainer's command line.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.common import write
from topology.dry_run import DryRunCollectives
from topology.groups import Ring
from topology.lanes import Handle
from topology.stages import all_gather_into
from torchtitan_scape import train
from torchtitan_scape.report.metrics import LEVELS
from torchtitan_scape.sync.base import Message, Method, Step
from torchtitan_scape.sync.shards import local

PASSES = ("check", "pack", "clip", "update")


class ScalingTrainer(train.ScapeTrainer):
    """The trainer; it times every step by phase, and can wait instead of computing."""

    def __init__(self, job_config: Any) -> None:
        self.wanted: dict[str, Any] = json.loads(os.environ["SCALING"])
        unwrapped = patch("torchtitan_scape.specs.parallelize", _unwrapped)
        with unwrapped if self.wanted.get("peer") or self.wanted.get("plain") else nullcontext():
            super().__init__(job_config)
        if self.wanted.get("peer"):
            _use_ddp(self, self.wanted)
        self._micro_batches = 0
        self._kept: list[tuple[Any, Tensor]] = []
        self._loss: Tensor | None = None
        self._steps: list[dict[str, float]] = []
        self._events: list[torch.cuda.Event] = []
        self._sent_before: dict[str, float] = {}

    def forward_backward_step(self, **kwargs: Any) -> Tensor:
        self._micro_batches += 1
        ddp = self.model_parts[0]
        if isinstance(ddp, _Ddp) and self._micro_batches % self.gradient_accumulation_steps:
            with ddp.no_sync():  # once a step, after the last one
                return super().forward_backward_step(**kwargs)
        seconds = self.wanted.get("compute")
        if seconds is None or self._loss is None:
            self._loss = super().forward_backward_step(**kwargs)
            if seconds is not None:
                parameters = self.model_parts[0].parameters()
                self._kept = [(p, local(p.grad).clone()) for p in parameters if p.grad is not None]
                self._shapes = [p.grad for p, _ in self._kept]
            return self._loss
        with self.optimizers.timer.phase("forward_backward"):
            end = time.perf_counter() + seconds
            for (parameter, values), gradient in zip(self._kept, self._shapes, strict=True):
                local(gradient).copy_(values)  # the step before used their storage up
                parameter.grad = gradient
            time.sleep(max(0.0, end - time.perf_counter()))
        return self._loss

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        if self.steps_taken == self.wanted["warm_up"]:
            self._sent_before = self.optimizers.collectives.traffic.sent_by_level()
            self.optimizers.timer.take()  # what is left at the end is of the measured steps
        if torch.cuda.is_available():
            # By events: to wait for the device would end the overlap with the masks' exchange.
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
            super().train_step(data_iterator)
            return
        begin = time.perf_counter()
        super().train_step(data_iterator)
        self._steps.append({"step": time.perf_counter() - begin, **self.optimizers.timer.take()})

    def summarise(self) -> None:
        taken = self.optimizers.timer.take()  # the summary takes what is left
        super().summarise()
        warm_up = self.wanted["warm_up"]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)][warm_up:]
            phases = {name: value / (len(times) + 1) for name, value in taken.items()}
            peak, kind = torch.cuda.max_memory_allocated(), "CUDA allocator"
        else:
            times = [step["step"] for step in self._steps[warm_up:]]
            names = {name for step in self._steps[warm_up:] for name in step} - {"step"}
            phases = {n: statistics.median(s.get(n, 0.0) for s in self._steps[warm_up:]) for n in names}
            peak, kind = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "resident set"
        sent = self.optimizers.collectives.traffic.sent_by_level()
        count = self.steps_taken - warm_up
        grown = {level: (sent.get(level, 0.0) - self._sent_before.get(level, 0.0)) / count for level in LEVELS}
        own = {
            "times": times,
            "phases": phases,
            "peak": float(peak),
            "sent": {} if self.wanted.get("peer") else grown,  # DDP counts nothing; the interfaces do
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        self.measured = {**_joined(ranks), "memory_kind": kind}
        if dist.get_rank() == 0 and "calibrate" not in self.wanted:
            summary = json.loads((Path(self.job_config.job.dump_folder) / "summary.json").read_text())
            write(Path(self.wanted["output"]), {**self.measured, "summary": summary})


def _joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One measurement of all ranks': steps by the slowest, phases by the mean, memory by the largest."""

    def mean(kind: str, name: str) -> float:
        return statistics.fmean(rank[kind].get(name, 0.0) for rank in ranks)

    times = [max(step) for step in zip(*(rank["times"] for rank in ranks), strict=True)]
    phases = {name: mean("phases", name) for name in sorted({n for rank in ranks for n in rank["phases"]})}
    median = statistics.median(times)
    passes, compute = sum(phases.get(n, 0.0) for n in PASSES), phases.get("forward_backward", 0.0)
    exposed = phases.get("exchange", 0.0)
    return {
        "steps": times,
        "step_seconds": median,
        "quartiles": [statistics.quantiles(times, n=4)[i] for i in (0, 2)] if len(times) > 1 else [median, median],
        "by_phase": phases,
        "phases": {
            "compute": compute,
            "exposed": exposed,
            "optimizer": passes,
            "other": max(0.0, median - compute - exposed - passes),
        },
        "peak_memory_bytes": max(rank["peak"] for rank in ranks),
        "sent": {level: mean("sent", level) for level in LEVELS if mean("sent", level)},
    }


# ------------------------------------------------------------------------------- PyTorch's own, as baselines


def _unwrapped(model: Any, parallel_dims: Any, job_config: Any) -> Any:
    """No FSDP: plain parameters, which DDP takes."""
    if parallel_dims.dp_shard > 1 or parallel_dims.tp > 1:
        raise ValueError("a model without FSDP needs shard and tensor degrees of 1; set parallelism accordingly")
    return model


class _Ddp(torch.nn.parallel.DistributedDataParallel):
    """With the attributes of its model, which the trainer asks for."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _Sums(Method):
    """DDP has averaged already, and the trainer's loss wants sums."""

    def synchronize(self, gradients: list[Tensor], step: Step) -> list[Tensor]:
        torch._foreach_mul_(gradients, self.setting.scale)
        return gradients

    def messages(self) -> list[Message]:
        return []


def _use_ddp(trainer: ScalingTrainer, wanted: dict[str, Any]) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    group = trainer.optimizers.collectives.groups.replicate
    buckets = {}
    if wanted["peer"] == "powersgd":
        # One bucket: the hook chains all-reduces in callbacks, which gloo runs in another order on every rank when
        # two buckets are on their way.
        dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 40  # as DDP's documentation has it
        buckets = {"bucket_cap_mb": 1 << 20}
    ddp = _Ddp(trainer.model_parts[0], process_group=group, **buckets)
    match wanted["peer"]:
        case "ddp":
            pass
        case "ddp-bf16":
            # Under another name: DDP refuses this hook by its name where there is no NCCL, though gloo can do it.
            ddp.register_comm_hook(group, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
        case "powersgd":
            # Compressing from the third step on, the earliest that error feedback and warm start allow.
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=wanted["rank"], start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        case other:
            raise ValueError(f"there is no peer {other!r}; known are ddp, ddp-bf16 and powersgd")
    trainer.model_parts[0] = ddp
    dense = trainer.optimizers.methods[0]
    trainer.optimizers.methods = [_Sums(dense.setting, dense.options)]


# ----------------------------------------------------------------------------------- passes without an exchange


class _Silent(DryRunCollectives):
    """Replicas, all ranks of the world, whose payloads stay where they are."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas=replicas)
        if replicas != dist.get_world_size():
            raise ValueError(f"{replicas} replicas on {dist.get_world_size()} ranks; the sweep takes no shards here")
        self.replica = dist.get_rank()
        self.rings = (Ring("network", replicas, self.replica),)

    def _gather(self, output: Tensor, own: Tensor) -> Handle:
        # The masks are real: others would not have as many entries as the layout says.
        return Handle(all_gather_into(output, own, async_op=True).wait)


def calibrate(arguments: list[str], names: dict[str, list[str]], output: str) -> None:
    """Stores what a step of each method costs beside compute and exchange, all ranks at once."""
    found = {}
    for name, options in names.items():
        config = train.parse([*arguments, *options])
        replicas = train.layout_of(config).replicate
        with patch("torchtitan_scape.optimizer.build.collectives_of", lambda _, n=replicas: _Silent(n)):
            trainer = ScalingTrainer(config)
        trainer.train()
        trainer.close()
        found[name] = trainer.measured
    if dist.get_rank() == 0:
        write(Path(output), found)


def main() -> None:
    wanted = json.loads(os.environ.get("SCALING", "{}"))
    if "output" not in wanted:
        raise SystemExit("error: SCALING is not set; start a sweep with python -m scripts.studies.strong_scaling")
    if "calibrate" in wanted:
        calibrate(sys.argv[1:], wanted["calibrate"], wanted["output"])
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # as the trainer does
    with patch.object(train, "ScapeTrainer", ScalingTrainer):
        train.main()


if __name__ == "__main__":
    main()
