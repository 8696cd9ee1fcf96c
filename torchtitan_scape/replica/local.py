"""The container where replicas differ between exchanges: each steps by its own gradient, alone.

Every replica of this process has parameters and an optimizer of its own. The first one's are the model's; while
simulated replicas take turns in the forward and backward pass, the model has the values of the one whose turn it is.
What replicas share, the method's state that carries the "model", is validated, exported and saved in its place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_scape.checkpoint.local_migration import load_local
from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import Shard, collect_shards, local, store_gradient, stored
from torchtitan_scape.methods.interface import MethodContext, State, StepInfo
from torchtitan_scape.methods.pending import REPLICA_WEIGHTS, CheckpointReader
from torchtitan_scape.methods.update import clip, norm_over_model, update
from torchtitan_scape.replica.optimizer import SyncedOptimizers
from torchtitan_scape.replica.rows import rows_of


@dataclass(frozen=True)
class ReplicaWeights:
    """What a replica has of its own. moments: the optimizer's state by kind and parameter's name, local tensors."""

    shards: list[Shard]
    optimizer: torch.optim.Optimizer
    moments: dict[str, dict[str, Tensor]]

    def states(self) -> list[State]:
        parameters = {shard.name: stored(shard.parameter) for shard in self.shards}
        moments = [
            State(kind, tensors, per_replica=True, on_migration="copy") for kind, tensors in self.moments.items()
        ]
        return [State(REPLICA_WEIGHTS, parameters, per_replica=True, on_migration="displacement"), *moments]

    def steps(self) -> list[Tensor]:
        """Of the optimizer's state of every parameter: how many steps were applied."""
        return [state["step"] for state in self.optimizer.state.values()]


class LocalOptimizers(SyncedOptimizers):
    """Finite flag, which is one for all replicas; then each scales, clips and updates by itself, and its method's
    `after_optimizer_step` exchanges what parameters have moved.

    `grad_norm` and the clip factor are of this process's first replica: its own gradient in mean units, before
    clipping; NaN where the step was skipped.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # Of every replica, while nothing is in flight: these tensors stay, and to look at them nothing is waited for.
        self._kept = [method.states() for method in self.methods]

    def _settings(self, scale: float, steps: int, kernels: str) -> list[MethodContext]:
        self.each = [_of(self._shards, self.optimizers[0])]
        for _ in self.replicas.endpoints[1:]:
            twins = [(s.name, nn.Parameter(s.parameter.detach().clone())) for s in self._shards]
            optimizer = self._make_optimizer(twins)
            self.each.append(_of(collect_shards(optimizer.param_groups), optimizer))
        self._turn = 0  # whose values the model has
        return [
            MethodContext(one.shards, endpoint, one.optimizer, scale, steps, kernels)  # type: ignore[arg-type]
            for one, endpoint in zip(self.each, self.replicas.endpoints, strict=True)
        ]

    # ------------------------------------------------------------------------------------------- a step

    def stash_replica_gradients(self) -> None:
        super().stash_replica_gradients()
        if len(self.each) > 1:
            self._take_turn(len(self._stashed) % len(self.each))

    def _take_turn(self, replica: int) -> None:
        """The model gets the replica's values. The first one's lie meanwhile where the replica has its own."""
        for turn in (self._turn, replica):  # back, and there
            for shard, other in zip(self._shards, self.each[turn].shards, strict=True) if turn else ():
                values, theirs = stored(shard.parameter), stored(other.parameter)
                kept = values.clone()
                values.copy_(theirs)
                theirs.copy_(kept)
        self._turn = replica
        self.sharding.version.changed()

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> None:
        phase = self.timer.phase
        rows, step = self._checked()
        self._follow_the_schedule()
        with phase("clip"):
            for one, method, gradients in zip(self.each, self.methods, rows, strict=True):
                torch._foreach_mul_(gradients, method.setting.scale)
                if self.observer is not None and one is self.each[0]:
                    self._show(self.observer, gradients, step)
                norms = torch._foreach_norm(gradients, 2, torch.float64)
                norm = norm_over_model(one.shards, norms, method.collectives, self.grad_norm.device)
                factor = clip(gradients, norm, self.max_norm)
                if one is self.each[0]:
                    self.grad_norm.copy_(torch.where(step.applied, norm, torch.nan))
                    self.clip_factor.copy_(factor)
                for shard, gradient in zip(one.shards, gradients, strict=True):
                    store_gradient(shard, gradient)
        with phase("update"):
            for one in self.each:
                update(one.optimizer, step.applied)
        for one in self.each[1:]:
            one.optimizer.zero_grad()
        with phase("exchange"):
            self.replicas.run(lambda i: self.methods[i].after_optimizer_step(step))
        self.sharding.version.changed()  # an exchange may land at a step that is skipped

    @torch.no_grad()
    def flush(self) -> None:
        """An exchange alone: no inner optimizer steps, and its moments do not decay."""
        self.finish_previous_step()
        self.request_full_exchange()
        self._whole_next = False
        step = StepInfo(self.attempted_steps, torch.ones_like(self.grad_norm, dtype=torch.bool))
        with self.timer.phase("exchange"):
            self.replicas.run(lambda i: self.methods[i].after_optimizer_step(step))
        self.sharding.version.changed()

    def _follow_the_schedule(self) -> None:
        """The rates of the first optimizer, which the schedule sets, are those of all."""
        first = self.optimizers[0].param_groups
        for one in self.each[1:]:
            for group, rates in zip(one.optimizer.param_groups, first, strict=True):
                group.update({k: v for k, v in rates.items() if k not in ("params", "param_names")})

    # ----------------------------------------------------------------------------- what replicas share

    def _anchors(self, replica: int = 0) -> dict[str, Tensor]:
        return next(state.tensors for state in self._kept[replica] if state.on_migration == "model")

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        anchors = self._anchors()
        kept = [stored(shard.parameter).clone() for shard in self._shards]
        self._put([anchors[shard.name] for shard in self._shards])
        try:
            yield
        finally:
            self._put(kept)

    def _put(self, values: list[Tensor]) -> None:
        """Into the model's parameters."""
        self.sharding.version.changed()
        for shard, value in zip(self._shards, values, strict=True):
            stored(shard.parameter).copy_(value)
        for module in (module for part in self.model_parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()  # what was gathered for a forward pass without a backward pass is of other values

    def model_saved(self) -> dict[str, Tensor]:
        return self._anchors()

    @torch.no_grad()
    def model_loaded(self) -> None:
        super().model_loaded()
        for i, one in enumerate(self.each):
            anchors = self._anchors(i)
            for shard, own in zip(self._shards, one.shards, strict=True):
                values = stored(shard.parameter)
                stored(own.parameter).copy_(values)
                anchors[shard.name].copy_(values)

    def shared(self) -> list[ReplicatedTensors]:
        kept = [state for state in self.methods[0].states() if not state.per_replica and state.by_parameter]
        return [
            ReplicatedTensors(shard.name, [(s.kind, s.tensors[shard.name]) for s in kept if shard.name in s.tensors])
            for shard in self._shards
        ]

    # ------------------------------------------------------------------------------------- checkpoints

    def _beside_the_model(self, replica: int, kept: list[State]) -> list[State]:
        return [*(state for state in kept if state.on_migration != "model"), *self.each[replica].states()]

    def states(self, residual: str) -> list[State]:
        found = rows_of(self.replicas.run(lambda i: self._beside_the_model(i, self.methods[i].states())))
        if residual == "exact":
            return found
        means = [s for s in found if s.per_replica and not (residual == "drop" and s.on_migration == "displacement")]
        return [
            *(state for state in found if not state.per_replica),
            *(State(s.kind, self._means(s), per_replica=False, on_migration=s.on_migration) for s in means),
        ]

    def describe_states(self, residual: str) -> dict[str, dict[str, Any]]:
        found = {}
        for state in self._beside_the_model(0, self._kept[0]):
            if residual == "drop" and state.on_migration == "displacement":
                continue
            found[state.kind] = state.describe() | {"own": state.per_replica and residual == "exact"}
        return found

    def optimizer_state(self) -> dict[str, Any]:
        return {}  # `states` has it

    def counters(self) -> dict[str, Any]:
        return super().counters() | {"applied_steps": float(self.each[0].steps()[0])}

    def needs_second_moment(self, optimizer: str) -> bool:
        return True

    def load(self, reader: CheckpointReader, same_layout: bool, step: int) -> str:
        self.sharding.unsent.loading(reader, self._shards)
        migration_summary, whole = load_local(self.each, self.methods, self.grad_norm.device, reader, same_layout)
        self.attempted_steps = reader.saved.get("attempted_steps", step)
        if whole:
            self.request_full_exchange()
        return migration_summary

    def checkpoint_sizes(self, residual: str) -> dict[str, int]:
        """But for what is in flight."""
        entries = {shard.name: shard.parameter.numel() for shard in self._shards}
        sizes: dict[str, int] = {}
        for state in self._beside_the_model(0, self._kept[0]):
            if not state.by_parameter or (residual == "drop" and state.on_migration == "displacement"):
                continue
            rows = self.collectives.replicas if state.per_replica and residual == "exact" else 1
            size = sum(entries[name] * values.element_size() for name, values in state.tensors.items())
            sizes[state.kind] = rows * size
        return {kind: size for kind, size in sizes.items() if size}

    # ------------------------------------------------------------------------------------------ reports

    def statistics(self) -> dict[str, float]:
        """residual_norm: of what replicas have moved, or left unsent, and the anchor has not; the root mean square over
        replicas."""
        squares = torch.zeros((), dtype=torch.float64, device=self.grad_norm.device)
        for i, one in enumerate(self.each):
            anchors = self._anchors(i)
            kept = [state.tensors for state in self._kept[i] if state.on_migration == "displacement"]
            for shard in (shard for shard in one.shards if shard.counted):
                own = stored(shard.parameter).double()
                moved = anchors[shard.name].to(own.device) - own
                for tensors in (tensors for tensors in kept if shard.name in tensors):
                    moved += tensors[shard.name].to(own.device)
                squares += moved.square().sum() / len(self.each)
        total = self.collectives.sum_over_all(squares) / self.collectives.replicas
        return {
            "density": self.methods[0].density(),
            "residual_norm": total.item() ** 0.5,
            "clip_factor": self.clip_factor.item(),
            "skipped_steps": float(self.guard.skipped),
        }


def _of(shards: list[Shard], optimizer: torch.optim.Optimizer) -> ReplicaWeights:
    """A replica, with all of its optimizer's state made: checkpoints read and write it in place."""
    if not all(optimizer.state.get(shard.parameter) for shard in shards):
        _make_state(optimizer)
    moments: dict[str, dict[str, Tensor]] = {}
    for shard in shards:
        for kind, values in optimizer.state[shard.parameter].items():
            if kind != "step" and isinstance(values, Tensor):
                moments.setdefault(kind, {})[shard.name] = local(values)
    return ReplicaWeights(shards, optimizer, moments)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """That of an optimizer which makes it in its first step: by a step of no length, taken back."""
    kept = [{key: group[key] for key in group.keys() & {"lr", "eps"}} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group |= {"lr": 0.0} | ({"eps": 1.0} if "eps" in group else {})  # with an eps of 0 it would be 0 / 0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for values in state.values():
            values.zero_()
    for group, rates in zip(optimizer.param_groups, kept, strict=True):
        group.update(rates)
