"""One rank of a timed run: the trainer with a clock. The launchers `emulated` and `slurm` start it.

The environment variable TIMED_RUN contains, as JSON:

    output         file for the measurement, written by rank 0
    warm_up        steps that are not measured, the first, dense one included
    period         steps over which means are taken; 1: medians
    compute        seconds that forward and backward wait, with the gradients of the first step. Absent: they are real
    plain          true: no FSDP around the model
    synthetic      true: random tokens of the model's vocabulary in the place of the recipe's data
    peer, rank     data-parallel training of peers.py in the place of our method, and PowerSGD's rank
    every_forward  true: weights that cross nodes once per update (hpZ) do so in every forward pass, as published
    last_only      true: FSDP2 reduce-scatters gradients in the last micro-batch of a step only, and adds up whole
                   gradients before it (`set_requires_gradient_sync`)
    calibrate      true: payloads are not sent, so that steps without compute cost passes and trainer alone

All other arguments are the trainer's command line.
"""

import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from scripts.common import write
from scripts.interfaces import CountingTrainer
from scripts.study.peers import PEERS, without_fsdp
from torchtitan_scape.core.parameters import local
from torchtitan_scape.core.patching import replaced
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.sharding.base import GRADIENTS, KINDS, WEIGHTS, CountedAllGather, CountedReduceScatter
from torchtitan_scape.topology import shard_collectives
from torchtitan_scape.topology.in_process import DryRunCollectives
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.stages import Handle
from torchtitan_scape.topology.torch_version import all_gather_into
from torchtitan_scape.trainer import command, optimizers, specs
from torchtitan_scape.trainer.metrics import LEVELS
from torchtitan_scape.trainer.trainer import ScapeTrainer

ENVIRONMENT = "TIMED_RUN"
PASSES = ("check", "pack", "clip", "update")
SHARD = {kind: f"shard {kind}" for kind in KINDS}  # phases of the shard axis's collectives
SILENT_PASSES = 3  # passes without an exchange, which separate compute from exchange


class TimedTrainer(CountingTrainer):
    """The trainer. It times every step by phase, and can wait instead of computing."""

    def __init__(self, job_config: Any) -> None:
        self.wanted: dict[str, Any] = json.loads(os.environ[ENVIRONMENT])
        self.peer = PEERS[self.wanted["peer"]](self.wanted.get("rank", 0)) if self.wanted.get("peer") else None
        parallelize = self.peer.parallelize if self.peer else without_fsdp if self.wanted.get("plain") else None
        with replaced(specs, "parallelize", parallelize) if parallelize else nullcontext():
            super().__init__(job_config)
        if self.peer:
            self.peer.install(self)
        self.interfaces.first = max(1, self.wanted["warm_up"])
        self._passes_started = 0
        self._silent_seconds: list[float] = []
        self._last_batch: dict[str, Any] = {}  # arguments of the last forward and backward pass
        self._gradients: list[tuple[Any, Any, Tensor]] = []  # parameter, gradient, its values in the first step
        self._loss: Tensor | None = None
        self._steps: list[dict[str, float]] = []
        self._events: list[torch.cuda.Event] = []
        self._sent_before: dict[str, float] = {}

    @property
    def beside(self) -> bool:
        """Whether the collectives of the shard axis run on streams beside the passes: their phases overlap with these,
        so that passes without them are measured."""
        return self.device.type == "cuda" and self.layout.shard > 1

    def train(self) -> None:
        with shard_axis(self.replica_optimizer.timer) if self.layout.shard > 1 else nullcontext():
            super().train()

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        return self._random_batches() if self.wanted.get("synthetic") else super().batch_generator(data_iterable)

    def _random_batches(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield batches of uniformly distributed tokens. They differ between ranks and need no files."""
        training, entries = self.job_config.training, self.model_args.vocab_size
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        while True:
            shape = (training.local_batch_size, training.seq_len + 1)
            tokens = torch.randint(entries, shape, generator=generator)
            self.ntokens_seen += tokens[:, 1:].numel()
            self.metrics_processor.ntokens_since_last_log += tokens[:, 1:].numel()
            self.metrics_processor.data_loading_times.append(0.0)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def forward_backward_step(self, **kwargs: Any) -> Tensor:
        self._passes_started += 1
        self._last_batch = kwargs
        last = self._passes_started % self.gradient_accumulation_steps == 0
        if self.wanted.get("every_forward"):
            self.replica_optimizer.sharding.version.changed()
        if self.wanted.get("last_only"):
            cast(FSDPModule, self.model_parts[0]).set_requires_gradient_sync(last)
        if self.peer is not None:
            before_measuring = self.steps_taken == self.wanted["warm_up"] - 1
            if before_measuring and not self._silent_seconds and not self.peer.counted:
                self._silent_seconds = [self._silent_pass(**kwargs) for _ in range(SILENT_PASSES)]
            with self.peer.exchanging(last):
                return super().forward_backward_step(**kwargs)
        seconds = self.wanted.get("compute")
        if seconds is None:
            return super().forward_backward_step(**kwargs)
        if self._loss is None:
            self._loss = super().forward_backward_step(**kwargs)
            with_gradient = (p for p in self.model_parts[0].parameters() if p.grad is not None)
            self._gradients = [(p, p.grad, local(p.grad).clone()) for p in with_gradient]
            return self._loss
        with self.replica_optimizer.timer.phase("forward_backward"):
            end = time.perf_counter() + seconds
            for parameter, gradient, values in self._gradients:
                local(gradient).copy_(values)  # the previous step overwrote them
                parameter.grad = gradient
            time.sleep(max(0.0, end - time.perf_counter()))
        return self._loss

    def _silent_pass(self, **kwargs: Any) -> float:
        """Return the seconds of a step's forward and backward passes without an exchange; keeps no gradients."""
        before = [p.grad for p in self.model_parts[0].parameters()]
        _synchronize()
        begin = time.perf_counter()
        with self.peer.silent() if self.peer else nullcontext(), shard_axis(None) if self.beside else nullcontext():
            # The method of TorchTitan: an overlapped exchange of ours does not start.
            super(ScapeTrainer, self).forward_backward_step(**kwargs)
        _synchronize()
        seconds = time.perf_counter() - begin
        for parameter, gradient in zip(self.model_parts[0].parameters(), before, strict=True):
            parameter.grad = gradient
        return seconds * self.gradient_accumulation_steps

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        if self.steps_taken == self.wanted["warm_up"]:
            self._sent_before = self.replica_optimizer.collectives.ledger.sent_by_level()
            self.replica_optimizer.timer.take()  # leaves the measured steps' phases
        if torch.cuda.is_available():
            # Events: waiting for the device would end the overlap with the exchange of masks.
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
            super().train_step(data_iterator)
            return
        begin = time.perf_counter()
        super().train_step(data_iterator)
        self._steps.append({"step": time.perf_counter() - begin, **self.replica_optimizer.timer.take()})

    def _middle(self, values: Sequence[float]) -> float:
        """Return the median, or the mean for a method that exchanges once in several steps."""
        return (statistics.fmean if self.wanted.get("period", 1) > 1 else statistics.median)(values)

    def summarize(self) -> None:
        remaining = self.replica_optimizer.timer.take()  # before the summary takes it
        super().summarize()
        if self.beside and not self._silent_seconds:
            # After the last step: the gathered weights are arbitrary values, which caches and residuals would keep.
            self._silent_seconds = [self._silent_pass(**self._last_batch) for _ in range(SILENT_PASSES)]
        warm_up = self.wanted["warm_up"]
        if torch.cuda.is_available():
            _synchronize()
            times = [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)][warm_up:]
            phases = {name: value / (len(times) + 1) for name, value in remaining.items()}
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
            "sent": {} if self.peer and not self.peer.counted else grown,  # of the others the interfaces count them
            "silent": statistics.median(self._silent_seconds) if self._silent_seconds else None,
            "beside": self.beside,
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        flops = self.metrics_processor.num_flops_per_token
        measured = {**_joined(ranks, self._middle), "memory_kind": kind, "flops_per_token": flops}
        if dist.get_rank() == 0:
            summary = json.loads((Path(self.job_config.job.dump_folder) / "summary.json").read_text())
            write(Path(self.wanted["output"]), measured | {"summary": summary})


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _joined(ranks: list[dict[str, Any]], middle: Callable[[Sequence[float]], float]) -> dict[str, Any]:
    """Return the measurement of all ranks: steps by the slowest, phases by the mean, memory by the largest."""

    def mean(kind: str, name: str) -> float:
        return statistics.fmean(rank[kind].get(name, 0.0) for rank in ranks)

    times = [max(step) for step in zip(*(rank["times"] for rank in ranks), strict=True)]
    phases = {name: mean("phases", name) for name in sorted({n for rank in ranks for n in rank["phases"]})}
    seconds = middle(times)
    passes, compute = sum(phases.get(n, 0.0) for n in PASSES), phases.get("forward_backward", 0.0)
    waited = 0.0 if ranks[0]["beside"] else sum(phases.get(n, 0.0) for n in SHARD.values())
    exposed = phases.get("exchange", 0.0) + waited
    if ranks[0]["silent"] is not None:  # exposed: by how much the exchange makes the passes slower
        silent = min(compute, statistics.fmean(rank["silent"] for rank in ranks))
        compute, exposed = silent, exposed + compute - silent
    exposed += phases.get("wait", 0.0)  # a rank waits for the others: for their exchange, or for slower ranks
    other = max(0.0, seconds - compute - exposed - passes)
    return {
        "steps": times,
        "step_seconds": seconds,
        "quartiles": [statistics.quantiles(times, n=4)[i] for i in (0, 2)] if len(times) > 1 else [seconds, seconds],
        "by_phase": phases,
        "phases": {"compute": compute, "exposed": exposed, "optimizer": passes, "other": other},
        "peak_memory_bytes": max(rank["peak"] for rank in ranks),
        "sent": {level: mean("sent", level) for level in LEVELS if mean("sent", level)},
    }


@contextmanager
def shard_axis(timer: PhaseTimer | None) -> Iterator[None]:
    """Inside, the collectives of the shard axis are phases of the timer, by the kinds of their content; without a timer
    they send nothing, and their outputs have arbitrary values.

    gloo has no streams: FSDP2 waits for each of them. Coding belongs to the passes that contain it. On a GPU the phases
    are the times on FSDP2's streams, which overlap with the passes.
    """

    def replacement(send: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if timer is None:
                return None
            with timer.phase(SHARD[kind or args[-1]]):
                return send(*args, **kwargs)

        return call

    own = [(shard_collectives, name, "") for name in ("all_gather", "all_to_all")]  # the kind is their last argument
    hooks = [(CountedAllGather, "__call__", WEIGHTS), (CountedReduceScatter, "__call__", GRADIENTS)]
    with ExitStack() as stack:
        for owner, name, kind in (*own, *hooks):
            stack.enter_context(replaced(owner, name, replacement(getattr(owner, name), kind)))
        yield


class _SilentCollectives(DryRunCollectives):
    """Replicas, all ranks of the world, whose payloads are not sent."""

    def __init__(self) -> None:
        super().__init__(replicas=dist.get_world_size())
        self.replica = dist.get_rank()
        self.levels = (RankGroup("network", self.replicas, self.replica),)

    def _all_gather(self, output: Tensor, input: Tensor) -> Handle:
        # Masks are sent: others would not have as many entries as the layout says.
        return Handle(all_gather_into(output, input, async_op=True).wait)


def main() -> None:
    wanted = json.loads(os.environ.get(ENVIRONMENT, "{}"))
    if "output" not in wanted:
        raise SystemExit(f"error: {ENVIRONMENT} is not set; start a study with python -m scripts.study run")
    silent = replaced(optimizers, "collectives_of", lambda _: _SilentCollectives())
    with replaced(command, "ScapeTrainer", TimedTrainer), silent if wanted.get("calibrate") else nullcontext():
        command.main()


if __name__ == "__main__":
    main()
