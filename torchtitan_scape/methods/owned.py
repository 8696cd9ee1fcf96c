"""The parts of the parameters that one replica alone updates, and an optimizer with the state of these parts only."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtitan_scape.core.parameters import Shard, local, placed_like
from torchtitan_scape.kernels.common.tensors import in_dry_run
from torchtitan_scape.methods.base import scaled_for_steps
from torchtitan_scape.methods.interface import State
from torchtitan_scape.optimizers.elementwise import AdamS, SignSGD
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.pytorch import create_state, has_step_of, initial_value, set_counter, state_by_kind
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.partition import Slice

OTHER_SHAPES = "optimizer_"  # begins the kinds of state in checkpoints that do not have the parameters' shapes


@dataclass(frozen=True)
class Part:
    """A part of a shard.

    Attributes:
        slice: Its entries of the shard's flat local tensor.
        shard: The part as a parameter of its own: FP32, of the shard's shape if it is the whole shard, else (n,).
        values: Its local tensor.
    """

    slice: Slice
    shard: Shard
    values: Tensor

    @classmethod
    def of(cls, shard: Shard, entries: Slice, whole: bool) -> "Part":
        shape = shard.local_shape if whole else (entries.length,)
        values = torch.zeros(shape, dtype=torch.float32, device=shard.device)
        placed = placed_like(shard.parameter, values) if whole else values
        return cls(entries, Shard(shard.name, nn.Parameter(placed), shard.group, shard.counted), values)

    def within(self, values: Tensor) -> Tensor:
        """Return the part of a shard's contiguous tensor of any shape, as a view of the shape of `values`."""
        if values.numel() == self.values.numel():
            return values if values.shape == self.values.shape else values.view(self.values.shape)
        return values.view(-1)[self.slice.first : self.slice.first + self.slice.length].view(self.values.shape)


class OwnedParts:
    """Parts of the parameters, by number of the shard, and the state that the wrapped optimizer has of them.

    Args:
        shards: All parameters of this rank.
        slices: The entries that this replica updates, by number of the shard.
        whole: The numbers of the shards that no replica divides.
        optimizer: Supplies the class, the rates, and the state if it has one.
        collectives: Communication with the other replicas.

    Attributes:
        shards: All parameters of this rank.
        parts: By number of the shard.
        optimizer: Has the parts as parameters; None if there are none.
        moments: The state of the shapes of the parts by kind and name of the parameter, FP32 (n,).
        others: The state of other shapes, in the same way.
        applied: The number of applied steps, float64 () on the host. The optimizer's own counters are set from it.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        slices: Mapping[int, Slice],
        whole: Sequence[int],
        optimizer: Optimizer,
        collectives: ReplicaCollectives,
    ) -> None:
        self.shards, self._rates = list(shards), optimizer
        self.parts = {i: Part.of(shards[i], each, i in whole) for i, each in sorted(slices.items())}
        self._by_name = {part.shard.name: part for part in self.parts.values()}
        wholes = {part.shard.name: shards[i].parameter for i, part in self.parts.items()}
        self.optimizer = optimizer_of_parts(optimizer, [part.shard for part in self.parts.values()], wholes)
        self.moments: dict[str, dict[str, Tensor]] = {}
        self.others: dict[str, dict[str, Tensor]] = {}
        self.applied = torch.zeros((), dtype=torch.float64, device="cpu")
        if self.optimizer is not None:
            self._take_state(optimizer)
        # Replicas with parts of other kinds, or without any, declare the same kinds of state.
        each = collectives.gather_from_replicas((list(self.moments), list(self.others)))
        kinds, others = ({kind for own in each for kind in own[i]} for i in range(2))
        self.others |= {kind: self.moments[kind] for kind in others & self.moments.keys()}
        self.moments = {kind: self.moments.get(kind, {}) for kind in sorted(kinds - others)}
        self.others = {kind: self.others.get(kind, {}) for kind in sorted(others)}

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what another optimizer has of the parts, and create the state of the others."""
        assert self.optimizer is not None
        for number, part in self.parts.items():
            if before := optimizer.state.get(self.shards[number].parameter):
                of_part = {kind: _of_part(kind, value, part, self.shards[number]) for kind, value in before.items()}
                self.optimizer.state[part.shard.parameter] = of_part
                if (counter := before.get("step")) is not None and not in_dry_run():
                    self.applied.fill_(float(counter))
        create_state(self.optimizer)
        moments, self.others = state_by_kind(self.optimizer, [part.shard for part in self.parts.values()])
        self.moments = {
            kind: {name: values.view(-1) for name, values in each.items()} for kind, each in moments.items()
        }

    def reset(self) -> None:
        """Return to the state before a first step."""
        for kind, tensors in (*self.moments.items(), *self.others.items()):
            for values in tensors.values():
                values.fill_(initial_value(kind))
        self.applied.zero_()

    @contextmanager
    def step_for(self, numbers: Sequence[int], steps: int, since: int) -> Iterator[list[Part]]:
        """Prepare a step of the optimizer on parts, and yield them.

        Args:
            numbers: The shards, at least one, of which this replica owns parts.
            steps: The step stands for so many.
            since: The steps that were applied since the previous one of these shards.
        """
        assert self.optimizer is not None
        parts = [self.parts[i] for i in numbers]
        groups = list(zip(self.optimizer.param_groups, self._rates.param_groups, strict=True))
        for group, rates in groups:
            group.update({key: value for key, value in rates.items() if key not in ("params", "param_names")})
        before = [dict(group) for group, _ in groups]
        # With `betas` to the power of `steps`, bias corrections need the number of steps divided by it.
        self._set_counters(parts, (self.applied.item() - since) / steps)
        try:
            with scaled_for_steps(self.optimizer, steps):
                yield parts
        finally:
            for part in parts:
                part.shard.parameter.grad = None
        for (group, rates), old in zip(groups, before, strict=True):  # counters and estimates of the optimizer
            rates.update({key: value for key, value in group.items() if value is not old.get(key)})

    def _set_counters(self, parts: Sequence[Part], value: float) -> None:
        assert self.optimizer is not None
        states = [self.optimizer.state[part.shard.parameter] for part in parts]
        counters = [state["step"] for state in states if isinstance(state.get("step"), Tensor)]
        if counters:
            torch._foreach_zero_(counters)
            torch._foreach_add_(counters, value)
        else:
            for state in states:
                set_counter(state, value)

    def steps(self) -> list[Tensor]:
        """Return the counter of applied steps."""
        return [self.applied]

    def set_steps(self, steps: float) -> None:
        """Set that counter."""
        self.applied.fill_(steps)

    def within(self, name: str, values: Tensor) -> Tensor:
        """Return the owned part of a parameter's contiguous local tensor of any shape, (n,)."""
        return self._by_name[name].within(values).view(-1)

    def starts(self) -> dict[str, int]:
        """Return the position of the first entry of each part, by name of the parameter."""
        return {name: part.slice.first for name, part in self._by_name.items()}

    def states(self) -> list[State]:
        """Return the optimizer's state of the parts."""
        starts = self.starts()
        moments = [State(kind, each, False, "copy", starts=starts) for kind, each in self.moments.items()]
        return moments + [State(f"{OTHER_SHAPES}{k}", each, False, "rebuild", False) for k, each in self.others.items()]


def optimizer_of_parts(optimizer: Optimizer, parts: Sequence[Shard], wholes: Mapping[str, Tensor]) -> Optimizer | None:
    """Return an optimizer as another one, for parts of its parameters, without their state; None if there are no parts.

    Args:
        optimizer: Supplies class, rates and pre-hooks of its step. It is not changed.
        parts: Have the indices of its param groups.
        wholes: Its parameters, by the names of the parts.

    Raises:
        ValueError: It is a subclass of an optimizer of this project with a step of its own, or contains an optimizer.
    """
    known = isinstance(optimizer, Muon | AdamS | SignSGD)
    if inner := [] if known else [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]:
        raise ValueError(
            f"{type(optimizer).__name__} contains another optimizer, {type(inner[0]).__name__}, which would update "
            "whole parameters where each replica updates its share; pass the inner one, or use method 'quantized'"
        )
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        own = [part for part in parts if part.group == index]
        of_group = {"params": [part.parameter for part in own], "param_names": [part.name for part in own]}
        groups.append({**group, **of_group})
    if not parts:
        return None
    made: Optimizer
    if isinstance(optimizer, Muon | AdamS | SignSGD):
        if not has_step_of(optimizer, Muon, AdamS, SignSGD):
            raise ValueError(
                f"{type(optimizer).__name__} has a step of its own, which would be lost: its updates are divided among "
                "replicas; pass an optimizer that is no subclass of Muon, AdamS or SignSGD"
            )
        made = optimizer.for_parts(groups, wholes) if isinstance(optimizer, Muon) else optimizer.for_parts(groups)
        made._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        return made
    made = object.__new__(type(optimizer))
    # A learning-rate scheduler replaces the step of an object, by one that is bound to it.
    made.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    made.param_groups, made.state = groups, defaultdict(dict)
    made._optimizer_step_post_hooks = OrderedDict()  # `ReplicaOptimizer` runs them
    return made


def _of_part(kind: str, value: Any, part: Part, shard: Shard) -> Any:
    """Return a copy of an optimizer's state of a parameter, of one of its parts and placed like it, in FP32."""
    if not isinstance(value, Tensor) or kind == "step" or not value.is_floating_point():
        return value.clone() if isinstance(value, Tensor) else value
    if value.shape != shard.parameter.shape:
        return value.to(torch.float32, copy=True)
    return placed_like(part.shard.parameter, part.within(local(value)).to(torch.float32, copy=True))
