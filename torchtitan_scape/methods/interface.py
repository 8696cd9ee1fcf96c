"""The seam: what a method of the replicate axis is.

A method takes one replica's gradients and gives the synchronised ones, and keeps what it did not send. It is written
for one replica, talks through `ReplicaCollectives` alone, which counts its bytes, and declares what it keeps. The
container, checkpoints, the consistency check, the memory report and the forecast read that, and know no method by name.

Units: a replica's gradient times `MethodContext.scale` is in mean units: the replicas' average is the global gradient.
Residuals and the result of `synchronize` are in the same units.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kernels.scape.reference import pack_bits, unpack_bits
from topology.calls import CollectiveCall, level_sizes
from topology.collectives import ReplicaCollectives
from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.core.workloads import LocalModel


@dataclass(frozen=True)
class State:
    """One kind of what a method keeps between steps, as it lies: changed in place by steps, and by whoever loads it.

    kind: its name in checkpoints, for example "residual".
    tensors: by parameter's name, of the parameter's local shape unless not `by_parameter`.
    own: every replica has its own numbers; else all hold the same bits, which the consistency check compares.
    carries: what becomes of it under another layout, replica count or method.
        "gradient": what was not delivered yet, FP32 in mean units. The mean over replicas counts and is never lost.
        "displacement": the same of parameters, anchor minus parameter, of a method whose replicas differ.
        "model": what such replicas share, FP32: validated, exported and saved as the model in the place of a parameter.
        "copy": goes on where the next run has a state of that kind.
        "rebuild": is dropped, and the next exchange is whole.
    by_parameter: else the tensors are of this shard, of shapes of their own, for the same layout alone.
    packed: a bit of each entry, uint8 (ceil(n / 8),): entry i in bit i % 8 of byte i // 8. A checkpoint has bytes.
    """

    kind: str
    tensors: dict[str, Tensor]
    per_replica: bool
    on_migration: Literal["gradient", "displacement", "model", "copy", "rebuild"]
    by_parameter: bool = True
    packed: bool = False

    def describe(self) -> dict[str, Any]:
        """For a checkpoint's record, as plain values."""
        return {"own": self.per_replica, "carries": self.on_migration, "by_parameter": self.by_parameter}

    def entries(self, name: str, shape: torch.Size) -> Tensor:
        """What is kept of a parameter, of its local `shape`: the tensor itself unless `packed`."""
        kept = self.tensors[name]
        return unpack_bits(kept, shape.numel()).view(shape).byte() if self.packed else kept

    def load_entries(self, name: str, values: Tensor) -> None:
        """Takes back what `entries` gave, of any shape."""
        kept = self.tensors[name]
        kept.copy_(packed_bits(values.bool().view(-1)).to(kept.device) if self.packed else values.view(kept.shape))


class StepInfo(NamedTuple):
    """number: of attempted steps, this one included; the same on all ranks, known to the host.

    applied: bool (), on the device: no rank's gradient had a NaN. It gates every write of state.
    """

    number: int
    applied: Tensor


@dataclass(frozen=True)
class MethodContext:
    """What a method is made of, beside its own section of the configuration.

    shards: the parameters, whose gradients `synchronize` is given in this order.
    optimizer: what updates the parameters: its rates and moments are there to be read.
    scale: makes a local gradient one in mean units: the number of replicas where the loss was divided by the global
        token count, so that their gradients are to be summed; else 1.
    steps: of the run, for what begins after a share of them.
    kernels: what runs passes over tensors: "auto", "triton" or "torch".
    """

    shards: Sequence[Shard]
    collectives: ReplicaCollectives
    optimizer: torch.optim.Optimizer
    scale: float = 1.0
    steps: int = 0
    kernels: str = "auto"


class Method:
    """What replicas tell each other. Mathematics in functions on local tensors.

    Made of a Setting and its own `Options`; all state is made in `__init__`.

    local: whether replicas differ between exchanges. Then a replica clips and updates by its own gradient,
        `synchronize` is not called, and `after_optimizer_step` exchanges the change of the parameters. One of its
        states has `on_migration` = "model".
    overlaps: whether gradients may go out while the backward pass leaves them, see `methods.chunked`.
    """

    local: ClassVar[bool] = False
    supports_overlap: ClassVar[bool] = False

    def __init__(self, setting: MethodContext, options: Any) -> None:
        self.setting, self.options, self.collectives = setting, options, setting.collectives
        self._full_exchange_requested = False

    def synchronize(self, gradients: list[Tensor], step: StepInfo) -> list[Tensor]:
        """What the optimizer takes, FP32 (n,) a shard, equal to the last bit on all replicas. A collective call.

        gradients: FP32 (n,) a shard, this replica's; free to be overwritten. Where not `step.applied` they may have
            NaNs and the result means nothing, but no state changes.
        """
        raise NotImplementedError

    def start(self, gradients: list[Tensor], step: StepInfo) -> Callable[[], list[Tensor]]:
        """Begins an exchange; what it returns waits for it, and gives what `synchronize` gives. Both collective calls.

        Meanwhile replicas may tell each other other things, and the gradients are not to be touched. Here nothing
        happens before the result is asked for.
        """
        return lambda: self.synchronize(gradients, step)

    def after_optimizer_step(self, step: StepInfo) -> None:
        """After the optimizer's update: for a mask that follows from it, say. A collective call."""

    def states(self) -> list[State]:
        """All that steps to come depend on, the tensors themselves; waits for what is in flight."""
        return []

    def allocate(self, kind: str, name: str) -> None:
        """Before a checkpoint is taken that has such a state of a parameter: of what exists at times only."""

    def request_full_exchange(self) -> None:
        """Makes the next exchange whole: nothing is pending after it."""
        self._full_exchange_requested = True

    def take_full_exchange_request(self) -> bool:
        """Return and clear the request of `request_full_exchange`. The method calls it once per exchange."""
        asked, self._full_exchange_requested = self._full_exchange_requested, False
        return asked

    def scale_to_mean(self, gradients: list[Tensor]) -> None:
        """Times `setting.scale`, in place."""
        if self.setting.scale != 1.0:
            torch._foreach_mul_(gradients, self.setting.scale)

    def gradient_norms(self, gradients: list[Tensor]) -> list[Tensor]:
        """FP64 () a shard: of what `synchronize` gave, by whose norm over the model it is clipped."""
        return list(torch._foreach_norm(gradients, 2, torch.float64))

    def local_model(self) -> LocalModel:
        """Return names and shapes of this rank's shards."""
        shards = self.setting.shards
        return LocalModel(tuple(s.name for s in shards), tuple(tuple(s.local_shape) for s in shards))

    def collective_calls(self) -> list[CollectiveCall]:
        """Return `options.cost().collective_calls(...)` for this rank."""
        levels, chunk_entries = level_sizes(self.collectives.rings), self.collectives.chunk_entries
        calls: list[CollectiveCall] = self.options.cost().collective_calls(self.local_model(), levels, chunk_entries)
        return calls

    def planned_bytes(self) -> float:
        """Return the bytes that this rank sends per step after warm-up, averaged over steps."""
        levels = level_sizes(self.collectives.rings)
        return sum(stage.sent for call in self.collective_calls() for stage in call.stages(levels))

    def density(self) -> float:
        """Share of the entries that a step sends, warm-up over; for the log."""
        return 1.0


@dataclass
class ErrorFeedback:
    """What a replica has not delivered yet, FP32 of the local shapes in mean units; zeros at the start.

    Most methods with error feedback keep one of these.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> "ErrorFeedback":
        return cls({s.name: torch.zeros(s.local_shape, dtype=torch.float32, device=s.device) for s in shards})

    def clear(self, applied: Tensor) -> None:
        """All of it has been sent, unless not `applied`."""
        for residual in self.tensors.values():
            masked_copy_(residual, 0.0, applied)

    def state(self) -> State:
        return State("residual", self.tensors, per_replica=True, on_migration="gradient")


def packed_bits(bits: Tensor) -> Tensor:
    """bool (n,) as uint8 (ceil(n / 8),), entry i in bit i % 8 of byte i // 8."""
    return pack_bits(torch.nn.functional.pad(bits, (0, -bits.numel() % 8)))


def masked_copy_(kept: Tensor, new: Tensor | float, applied: Tensor) -> None:
    """kept = new, unless not `applied`, bool ()."""
    if applied.is_cpu:  # the host sees it at once
        if applied:
            kept.copy_(new.view(kept.shape)) if isinstance(new, Tensor) else kept.fill_(new)
        return
    value = new if isinstance(new, Tensor) else torch.full_like(kept, new)
    torch.where(applied, value.view(kept.shape), kept, out=kept)
