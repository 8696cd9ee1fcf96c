"""What every rank of a strong-scaling sweep runs: the trainer, with its steps timed. strong_scaling.py starts it.

The environment variable SCALING holds what to measure, as JSON:

    output      file for the measurement, written by rank 0
    warm_up     steps that are left out (the first, dense one among them)
    compute     seconds; forward and backward become a wait of that length, and every step gets the gradients of the
                first one, which is real. Absent: all of them are real
    peer        of scaling_peers.py, which exchanges gradients in the place of our method
    rank        of ddp-powersgd
    again       true: weights that cross nodes once an update (hpZ) do so in every forward pass, as published
    period      steps over which means are taken; medians where it is 1
    plain       true: no FSDP around the model, as with a peer, whose forward and backward are faster without
    calibrate   {name: options, warm_up, period}; every method takes steps whose compute and exchange take no time: what
                is left is what passes and trainer cost with so many ranks on these cores

Everything else is the trainer's command line.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.common import write
from scripts.studies.scaling_peers import PEERS, unwrapped
from topology import shard_collectives
from topology.comm_stream import Handle
from topology.dry_run import DryRunCollectives
from topology.primitives import all_gather_into
from topology.rank_group import RankGroup
from torchtitan_scape import train
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.core.parameters import local
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.sharding.base import GRADIENTS, KINDS, WEIGHTS, CountedAllGather, CountedReduceScatter
from torchtitan_scape.trainer.layout import layout_of
from torchtitan_scape.trainer.metrics import LEVELS
from torchtitan_scape.trainer.trainer import ScapeTrainer

PASSES = ("check", "pack", "clip", "update")
SHARD = {kind: f"shard {kind}" for kind in KINDS}  # phases of the shard axis's collectives

ALONE = 3  # passes that tell a peer's compute from its exchange


class ScalingTrainer(ScapeTrainer):
    """The trainer; it times every step by phase, and can wait instead of computing."""

    def __init__(self, job_config: Any) -> None:
        self.wanted: dict[str, Any] = json.loads(os.environ["SCALING"])
        self.peer = PEERS[self.wanted["peer"]](self.wanted.get("rank", 0)) if self.wanted.get("peer") else None
        parallelize = self.peer.parallelize if self.peer else unwrapped if self.wanted.get("plain") else None
        with patch("torchtitan_scape.trainer.specs.parallelize", parallelize) if parallelize else nullcontext():
            super().__init__(job_config)
        if self.peer:
            self.peer.install(self)
        self.interfaces.first = max(1, self.wanted["warm_up"])  # of the steps that are measured alone
        self._passes = 0
        self._alone: list[float] = []
        self._kept: list[tuple[Any, Tensor]] = []
        self._loss: Tensor | None = None
        self._steps: list[dict[str, float]] = []
        self._events: list[torch.cuda.Event] = []
        self._sent_before: dict[str, float] = {}

    def train(self) -> None:
        with shard_axis_timed(self.replica_optimizer.timer) if self.layout.shard > 1 else nullcontext():
            super().train()

    def forward_backward_step(self, **kwargs: Any) -> Tensor:
        self._passes += 1
        if self.wanted.get("again"):
            self.replica_optimizer.sharding.version.changed()
        if self.peer is not None:
            if self.steps_taken == self.wanted["warm_up"] - 1 and not self._alone:
                self._alone = [self._pass_alone(**kwargs) for _ in range(ALONE)]
            with self.peer.exchanging(last=self._passes % self.gradient_accumulation_steps == 0):
                return super().forward_backward_step(**kwargs)
        seconds = self.wanted.get("compute")
        if seconds is None or self._loss is None:
            self._loss = super().forward_backward_step(**kwargs)
            if seconds is not None:
                parameters = self.model_parts[0].parameters()
                self._kept = [(p, local(p.grad).clone()) for p in parameters if p.grad is not None]
                self._shapes = [p.grad for p, _ in self._kept]
            return self._loss
        with self.replica_optimizer.timer.phase("forward_backward"):
            end = time.perf_counter() + seconds
            for (parameter, values), gradient in zip(self._kept, self._shapes, strict=True):
                local(gradient).copy_(values)  # the step before used their storage up
                parameter.grad = gradient
            time.sleep(max(0.0, end - time.perf_counter()))
        return self._loss

    def _pass_alone(self, **kwargs: Any) -> float:
        """Seconds of a step's forward and backward passes that exchange nothing; leaves no gradients."""
        assert self.peer is not None
        kept = [p.grad for p in self.model_parts[0].parameters()]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        with self.peer.silent():
            super().forward_backward_step(**kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        for parameter, gradient in zip(self.model_parts[0].parameters(), kept, strict=True):
            parameter.grad = gradient
        return seconds * self.gradient_accumulation_steps

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        if self.steps_taken == self.wanted["warm_up"]:
            self._sent_before = self.replica_optimizer.collectives.ledger.sent_by_level()
            self.replica_optimizer.timer.take()  # what is left at the end is of the measured steps
        if torch.cuda.is_available():
            # By events: to wait for the device would end the overlap with the masks' exchange.
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
            super().train_step(data_iterator)
            return
        begin = time.perf_counter()
        super().train_step(data_iterator)
        self._steps.append({"step": time.perf_counter() - begin, **self.replica_optimizer.timer.take()})

    def _middle(self, values: Sequence[float]) -> float:
        """The median; where what a step does repeats after several, the mean."""
        return (statistics.fmean if self.wanted.get("period", 1) > 1 else statistics.median)(values)

    def summarise(self) -> None:
        taken = self.replica_optimizer.timer.take()  # the summary takes what is left
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
            phases = {n: self._middle([s.get(n, 0.0) for s in self._steps[warm_up:]]) for n in names}
            peak, kind = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "resident set"
        sent = self.replica_optimizer.collectives.ledger.sent_by_level()
        count = self.steps_taken - warm_up
        grown = {level: (sent.get(level, 0.0) - self._sent_before.get(level, 0.0)) / count for level in LEVELS}
        own = {
            "times": times,
            "phases": phases,
            "peak": float(peak),
            "sent": {} if self.peer else grown,  # peers count nothing; the interfaces do
            "alone": statistics.median(self._alone) if self._alone else None,
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        self.measured = {**_joined(ranks, self._middle), "memory_kind": kind}
        if dist.get_rank() == 0 and "calibrate" not in self.wanted:
            summary = json.loads((Path(self.job_config.job.dump_folder) / "summary.json").read_text())
            write(Path(self.wanted["output"]), {**self.measured, "summary": summary})


def _joined(ranks: list[dict[str, Any]], middle: Callable[[Sequence[float]], float]) -> dict[str, Any]:
    """One measurement of all ranks': steps by the slowest, phases by the mean, memory by the largest."""

    def mean(kind: str, name: str) -> float:
        return statistics.fmean(rank[kind].get(name, 0.0) for rank in ranks)

    times = [max(step) for step in zip(*(rank["times"] for rank in ranks), strict=True)]
    phases = {name: mean("phases", name) for name in sorted({n for rank in ranks for n in rank["phases"]})}
    seconds = middle(times)
    passes, compute = sum(phases.get(n, 0.0) for n in PASSES), phases.get("forward_backward", 0.0)
    exposed = sum(phases.get(n, 0.0) for n in ("exchange", *SHARD.values()))
    if ranks[0]["alone"] is not None:  # of an exchange beside the backward pass what that is slower for it
        alone = min(compute, statistics.fmean(rank["alone"] for rank in ranks))
        compute, exposed = alone, exposed + compute - alone
    return {
        "steps": times,
        "step_seconds": seconds,
        "quartiles": [statistics.quantiles(times, n=4)[i] for i in (0, 2)] if len(times) > 1 else [seconds, seconds],
        "by_phase": phases,
        "phases": {
            "compute": compute,
            "exposed": exposed,
            "optimizer": passes,
            "other": max(0.0, seconds - compute - exposed - passes),
        },
        "peak_memory_bytes": max(rank["peak"] for rank in ranks),
        "sent": {level: mean("sent", level) for level in LEVELS if mean("sent", level)},
    }


@contextmanager
def shard_axis_timed(timer: PhaseTimer) -> Iterator[None]:
    """Inside, the shard axis's collectives are phases by the kinds of what they send.

    gloo has no streams: FSDP2 waits for each of them. Coding stays with the passes that it is part of.
    """

    def by_kind(send: Callable[..., None]) -> Callable[..., None]:
        def call(output: Tensor, input: Tensor, group: RankGroup, ledger: Any, kind: str) -> None:
            with timer.phase(SHARD[kind]):
                send(output, input, group, ledger, kind)

        return call

    with (
        patch.object(shard_collectives, "all_gather", by_kind(shard_collectives.all_gather)),
        patch.object(shard_collectives, "all_to_all", by_kind(shard_collectives.all_to_all)),
        patch.object(CountedAllGather, "__call__", timer.timed(SHARD[WEIGHTS], CountedAllGather.__call__)),
        patch.object(CountedReduceScatter, "__call__", timer.timed(SHARD[GRADIENTS], CountedReduceScatter.__call__)),
    ):
        yield


# ----------------------------------------------------------------------------------- passes without an exchange


class _Silent(DryRunCollectives):
    """Replicas, all ranks of the world, whose payloads stay where they are."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas=replicas)
        if replicas != dist.get_world_size():
            raise ValueError(f"{replicas} replicas on {dist.get_world_size()} ranks; the sweep takes no shards here")
        self.replica = dist.get_rank()
        self.levels = (RankGroup("network", replicas, self.replica),)

    def _all_gather(self, output: Tensor, input: Tensor) -> Handle:
        # The masks are real: others would not have as many entries as the layout says.
        return Handle(all_gather_into(output, input, async_op=True).wait)


def calibrate(arguments: list[str], wanted: dict[str, Any]) -> None:
    """Stores what a step of each method costs beside compute and exchange, all ranks at once."""
    found = {}
    for name, one in wanted["calibrate"].items():
        os.environ["SCALING"] = json.dumps({**wanted, **one})
        config = parse([*arguments, *one["options"]])
        replicas = layout_of(config).replicate
        with patch("torchtitan_scape.trainer.optimizers.collectives_of", lambda _, n=replicas: _Silent(n)):
            trainer = ScalingTrainer(config)
        trainer.train()
        trainer.close()
        found[name] = trainer.measured
    if dist.get_rank() == 0:
        write(Path(wanted["output"]), found)


def main() -> None:
    wanted = json.loads(os.environ.get("SCALING", "{}"))
    if "output" not in wanted:
        raise SystemExit("error: SCALING is not set; start a sweep with python -m scripts.studies.strong_scaling")
    if "calibrate" in wanted:
        calibrate(sys.argv[1:], wanted)
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # as the trainer does
    with patch.object(train, "ScapeTrainer", ScalingTrainer):
        train.main()


if __name__ == "__main__":
    main()
