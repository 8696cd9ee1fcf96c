"""What TorchTitan's trainer sees as its optimizers: they synchronise the replicas, clip, and update.

TorchTitan clips before `step()`, where replicas still disagree. Its call is turned into `grad_norm`, a tensor
that `step()` fills in place and the trainer logs afterwards.

One process plays one replica, or several that are simulated: everything here has a method (or an optimizer) for each
and runs them in step. Which method it is, nothing here knows.
"""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torchtitan.components.optimizer import OptimizersContainer

from kernels import choose_backend, finite_check
from topology.collectives import ReplicaCollectives
from topology.dry_run import DryRunCollectives
from topology.in_process import OneReplica, SimulatedReplicas
from torchtitan_scape.checkpoint.migration import load_synced
from torchtitan_scape.core.consistency import ReplicatedTensors, check_replicas_equal, replicated_by_optimizer
from torchtitan_scape.core.observer import ObservedState, Observer
from torchtitan_scape.core.parameters import Shard, collect_shards, flat_gradient, local, store_gradient
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.methods.interface import Method, MethodContext, State, StepInfo
from torchtitan_scape.methods.overlap import BackwardOverlap
from torchtitan_scape.methods.pending import CheckpointReader
from torchtitan_scape.methods.update import clip, norm_over_model, update
from torchtitan_scape.optimizers.registry import FIRST, OPTIMIZERS
from torchtitan_scape.replica.guard import FiniteGuard
from torchtitan_scape.replica.rows import mean_of_rows, residuals_of, rows_of
from torchtitan_scape.sharding.base import Sharding
from torchtitan_scape.sharding.levels import ThreeLevelState

Replicas = OneReplica | SimulatedReplicas
Named = list[tuple[str, nn.Parameter]]


class ReplicaOptimizersBase(OptimizersContainer):
    """The common part: one optimizer over the one model part, on named parameters.

    Attributes:
        replicas: those that this process plays.
        sharding: what stands in for FSDP2's collectives.
        levels: what is between the model and the parameters here, where these are slices of masters; None where not.
        grad_norm: FP32 (), of the synchronised gradient over the model, before clipping.
        repairs: whether replicas that differ from the others are repaired.
        observer: who is shown the synchronised gradients, see `observe`; None for nobody.
    """

    replicas: Replicas
    timer: PhaseTimer
    guard: FiniteGuard
    sharding: Sharding
    levels: ThreeLevelState | None = None
    grad_norm: Tensor
    repairs = False
    observer: Observer | None = None
    _shards: list[Shard]

    def _own(self, model_parts: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.sharding = Sharding()
        self.model_parts = model_parts
        self.optimizers = [optimizer]
        self._stashed: list[list[Tensor]] = []
        self._post_init([p for group in optimizer.param_groups for p in group["params"]], optimizer.defaults)

    @property
    def collectives(self) -> ReplicaCollectives:
        """Speaks for all replicas of this process."""
        return self.replicas.all

    def dense_bytes(self) -> float:
        """Bytes that this rank would send in a step that all-reduces all its gradients in FP32."""
        return self.collectives.reduced_bytes(sum(shard.size for shard in self._shards))

    def stash_replica_gradients(self) -> None:
        """Takes the present gradients for those of the next simulated replica, and sets them to None.

        Where there is one, its gradients stay where they are; where replicas' gradients may be added up, too.
        """
        if len(self.replicas.endpoints) > 1:
            self._stashed.append([flat_gradient(shard) for shard in self._shards])
            for shard in self._shards:
                shard.parameter.grad = None

    def _gradients(self) -> list[list[Tensor]]:
        """The flat gradients of every replica of this process."""
        rows, self._stashed = self._stashed, []
        if len(self.replicas.endpoints) == 1:
            return [[flat_gradient(shard) for shard in self._shards]]
        if len(rows) != len(self.replicas.endpoints):
            raise ValueError(
                f"{len(rows)} replicas' gradients were collected, and {len(self.replicas.endpoints)} replicas are "
                "simulated; call collect() after the backward pass of each of them, then step()"
            )
        return rows

    def before_last_backward(self) -> None:
        """The backward pass that comes next is the last of its step."""

    @abstractmethod
    def finish_previous_step(self) -> None:
        """Learns whether the last step was applied; `step` does it for the one before."""

    def shards(self) -> list[Shard]:
        """Of all parameters, in the order in which checkpoints are read."""
        return self._shards

    @abstractmethod
    def request_full_exchange(self) -> None:
        """Makes the next exchange whole, so that it leaves nothing pending."""

    def flush(self) -> None:
        """Sends what is pending where no step follows: in one without gradients. A collective call."""
        kinds = self.describe_states("exact") | self.sharding.unsent.described("exact")
        if any(what["carries"] == "gradient" for what in kinds.values()):
            self.zero_grad()
            self.request_full_exchange()
            self.sharding.unsent.as_gradients(self._shards)
            for _ in self.replicas.endpoints:
                self.stash_replica_gradients()
            self.step()

    # ------------------------------------------------------------- where replicas' parameters differ

    def shared_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has what replicas share, to be validated: its parameters, where nothing else is said."""
        return nullcontext()

    def model_saved(self) -> dict[str, Tensor]:
        """Local tensors that are saved and exported in the place of the parameters of these names."""
        return self.levels.model_saved() if self.levels else {}

    def model_loaded(self) -> None:
        """Takes the model's parameters, which have been loaded, for those of all."""
        self.sharding.version.changed()
        if self.levels is not None:
            self.levels.masters_loaded()

    def attach_levels(self, levels: ThreeLevelState) -> None:
        """The parameters here are those of `levels`, which gives them gradients, and the model what becomes of them."""
        self.levels, self.sharding = levels, levels.sharding
        timed = self.timer.timed
        self.register_step_pre_hook(lambda *_: timed("exchange", levels.before_step)())
        self.register_step_post_hook(lambda *_: timed("exchange", levels.after_step)(self.guard.applied))

    def weights_saved(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """By name (a parameter of the model, what is kept of it), which no other state tells to the last bit."""
        return self.levels.bits() if self.levels else {}

    def weights_loaded(self) -> None:
        """What `weights_saved` has given has been written."""
        self.sharding.version.changed()

    # ------------------------------------------------------------------------------------- checkpoints

    @abstractmethod
    def states(self, residual: str) -> list[State]:
        """Return the state between steps other than the optimizer's own. Collective; call `finish_previous_step` first.

        Tensors of `per_replica` states have a leading dimension: one row per replica of this process.

        residual: "exact"; "mean", for the replicas' mean of what is pending; or "drop", for none of it.
        """

    @abstractmethod
    def describe_states(self, residual: str) -> dict[str, dict[str, Any]]:
        """What each kind in `states` is, for a checkpoint's record: see `State.describe`. No collective call."""

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's own state for a checkpoint, by TorchTitan's names; empty where `states` has all."""
        return self.state_dict()

    def of_this_shard(self, key: str) -> str:
        """The name of what differs from shard to shard."""
        return f"{key}.{self.collectives.model_rank}"

    def needs_second_moment(self, optimizer: str) -> bool:
        """Whether `load` wants the second moments of this optimizer, by its class's name, parameter by parameter."""
        return False

    @abstractmethod
    def load(self, reader: CheckpointReader, same_layout: bool, step: int) -> str:
        """Takes a checkpoint's state, of this method and layout or of others. A collective call, after the model.

        as_it_lies: they are this run's. step: of the checkpoint. Returns what was done, in words.
        """

    @abstractmethod
    def checkpoint_sizes(self, residual: str) -> dict[str, int]:
        """Bytes of all that `states` and the optimizer's state leave in a checkpoint, by kind."""

    def counters(self) -> dict[str, Any]:
        """For a checkpoint: what is no tensor, as plain values."""
        self.finish_previous_step()
        return {"counters": {"skipped": self.guard.skipped, "skipped_in_a_row": self.guard.skipped_in_a_row}}

    def put_counters(self, saved: dict[str, int]) -> None:
        """Takes back the "counters" of `counters`."""
        self.guard.skipped, self.guard.skipped_in_a_row = saved["skipped"], saved["skipped_in_a_row"]

    # ------------------------------------------------------------------------------- checks and reports

    @abstractmethod
    def shared(self) -> list[ReplicatedTensors]:
        """What all replicas hold alike, after `finish_previous_step`."""

    def check_consistency(self, step: int) -> None:
        """Compares what replicas hold alike, to the last bit, after `step`. A collective call; waits for the device.

        Raises ReplicasDifferError, on every rank, where it differs and is not to be, or cannot be, repaired.
        """
        if self.levels is not None:
            self.finish_previous_step()
            self.levels.check_consistency(self.grad_norm.device, step, self.repairs)
        if self.collectives.replicas == 1 or isinstance(self.collectives, DryRunCollectives):
            return
        with self.timer.phase("compare"):
            self.finish_previous_step()
            if not check_replicas_equal(self.collectives, self.shared(), self.grad_norm.device, step, self.repairs):
                self.sharding.version.changed()

    def observe(self, observer: Observer | None) -> None:
        """Shows the steps from here on to the observer, or to nobody."""
        self.observer = observer

    @abstractmethod
    def observed_state(self, shard: Shard) -> ObservedState:
        """What is kept of a parameter, after `finish_previous_step`. A collective call over the replicas."""

    @abstractmethod
    def planned_bytes(self) -> float:
        """Bytes that this rank will send in a step, warm-up over."""

    def payload_parts(self) -> int:
        """Parts in which the payload goes, warm-up over."""
        return 1

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Figures of the last step for the log. A collective call."""


class SyncedOptimizers(ReplicaOptimizersBase):
    """An optimizer on gradients that a `Method` synchronises: finite flag, synchronise, norm and clip, update, and
    what the method does after it."""

    def __init__(
        self,
        model_parts: list[nn.Module],
        make_optimizer: Callable[[Named], torch.optim.Optimizer],
        make_method: Callable[[MethodContext], Method],
        replicas: Replicas,
        *,
        max_norm: float,
        max_skipped_steps: int,
        kernels: str,
        steps: int,
        overlap: bool = False,
    ) -> None:
        self.replicas, self.max_norm, self._make_optimizer = replicas, max_norm, make_optimizer
        optimizer = make_optimizer([(name, p) for name, p in model_parts[0].named_parameters() if p.requires_grad])
        self._own(model_parts, optimizer)
        self._shards = collect_shards(optimizer.param_groups)
        device = self._shards[0].device
        self.timer = PhaseTimer(device)
        self.collectives.broadcast_from_first([local(s.parameter).detach() for s in self._shards])
        settings = self._settings(float(self.collectives.replicas), steps, kernels)  # a loss is divided by all tokens
        self.methods = replicas.run(lambda i: make_method(settings[i]))
        self.guard = FiniteGuard(
            [shard.name + endpoint.label for endpoint in replicas.endpoints for shard in self._shards],
            finite_check(choose_backend(kernels, device)),
            self.timer.timed("wait", self.collectives.all_true),
            self.collectives.gather_objects,
            dist.get_rank(),
            max_skipped_steps,
        )
        self._overlap = BackwardOverlap.of(self.methods, self._shards) if overlap else None
        self.attempted_steps = 0
        # Whether the step that is next, or the last one, was asked to send all.
        self._whole_next = self._whole_in_flight = False
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)
        self.clip_factor = torch.ones((), dtype=torch.float32, device=device)

    def _settings(self, scale: float, steps: int, kernels: str) -> list[MethodContext]:
        """Of every replica of this process: they share parameters and optimizer."""
        return [
            MethodContext(self._shards, endpoint, self.optimizers[0], scale, steps, kernels)  # type: ignore[arg-type]
            for endpoint in self.replicas.endpoints
        ]

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> None:
        phase = self.timer.phase
        rows, step = self._checked()
        with phase("exchange"):
            if self._overlap is not None and self._overlap.under_way:
                gradients = self._overlap.take(step)
            else:
                gradients, *_ = self.replicas.run(lambda i: self.methods[i].synchronize(rows[i], step))
        if self.observer is not None:
            self._show(self.observer, gradients, step)
        with phase("clip"):
            norms = self.methods[0].gradient_norms(gradients)
            self.grad_norm.copy_(norm_over_model(self._shards, norms, self.collectives, self.grad_norm.device))
            self.clip_factor.copy_(clip(gradients, self.grad_norm, self.max_norm))
            for shard, gradient in zip(self._shards, gradients, strict=True):
                store_gradient(shard, gradient)
        with phase("update"):
            update(self.optimizers[0], step.applied)
        with phase("exchange"):
            self.replicas.run(lambda i: self.methods[i].after_optimizer_step(step))
            self.sharding.unsent.after_optimizer_step(step.applied)
        self.sharding.version.changed_if(self.guard.last_applied)

    def _checked(self) -> tuple[list[list[Tensor]], StepInfo]:
        """The gradients of every replica of this process, FP32 (n,) a shard, and the step that begins with them."""
        with self.timer.phase("check"):
            self.finish_previous_step()
            rows = [[gradient.float() for gradient in row] for row in self._gradients()]
            complete = self._overlap.complete if self._overlap else ()
            applied = self.guard.check([gradient for row in rows for gradient in row], complete)
        self.attempted_steps += 1
        self._whole_in_flight, self._whole_next = self._whole_next, False
        return rows, StepInfo(self.attempted_steps, applied)

    def _show(self, observer: Observer, gradients: list[Tensor], step: StepInfo) -> None:
        with self.timer.phase("observe"):
            by_name = dict(zip((shard.name for shard in self._shards), gradients, strict=True))
            observer.synchronised(by_name.__getitem__, step.applied)

    def before_last_backward(self) -> None:
        if self._overlap is not None:
            self.finish_previous_step()  # before a chunk is started: it may ask for all to be sent
            self._overlap.begin(self.guard.agreed)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """A collective call where a backward pass has failed whose chunks were on their way."""
        if self._overlap is not None and self._overlap.cancel() and self._whole_next:
            self.request_full_exchange()  # its step did not come
        super().zero_grad(*args, **kwargs)

    def _gradients(self) -> list[list[Tensor]]:
        if self._overlap is None or not self._overlap.under_way:
            return super()._gradients()
        with self.timer.phase("exchange"):
            return [self._overlap.start_remaining()]

    def finish_previous_step(self) -> None:
        if self.guard.finish_previous_step() is False and self._whole_in_flight:
            self.request_full_exchange()  # its step was skipped

    def request_full_exchange(self) -> None:
        self._whole_next = True
        self.sharding.unsent.request_full_exchange()
        for method in self.methods:
            method.request_full_exchange()

    def states(self, residual: str) -> list[State]:
        found = rows_of(self.replicas.run(lambda i: self.methods[i].states()))
        shards = self.sharding.unsent.states(residual, self._shards)
        if residual == "exact":
            return [*found, *shards]
        rest = [*(state for state in found if state.on_migration != "gradient"), *shards]
        if residual == "drop":
            return rest
        pending = [state for state in found if state.on_migration == "gradient"]
        return [*rest, *(State(s.kind, self._means(s), per_replica=False, on_migration="gradient") for s in pending)]

    def _means(self, state: State) -> dict[str, Tensor]:
        """The mean over all replicas of every tensor."""
        return {name: mean_of_rows(rows, self.collectives) for name, rows in state.tensors.items()}

    def counters(self) -> dict[str, Any]:
        return super().counters() | {"attempted_steps": self.attempted_steps}

    def needs_second_moment(self, optimizer: str) -> bool:
        return optimizer != type(self.optimizers[0]).__name__  # else it is read as it lies

    def load(self, reader: CheckpointReader, same_layout: bool, step: int) -> str:
        state = self.state_dict()  # makes the state of an optimizer that has taken no step

        def read_optimizer() -> None:
            reader.fill(state)
            self.load_state_dict(state)

        each = [method.states() for method in self.methods]
        each[0] = [*each[0], *self.sharding.unsent.loading(reader, self._shards)]
        optimizer, device = self.optimizers[0], self.grad_norm.device
        migration_summary, whole = load_synced(
            optimizer, each, self.collectives, device, reader, same_layout, read_optimizer
        )
        self.attempted_steps = reader.saved.get("attempted_steps", step)
        if whole:
            self.request_full_exchange()
        return migration_summary

    def describe_states(self, residual: str) -> dict[str, dict[str, Any]]:
        found = {state.kind: state.describe() for state in self.methods[0].states()}
        for kind, what in list(found.items()):
            if what["carries"] == "gradient" and residual == "drop":
                del found[kind]
            elif what["carries"] == "gradient":
                what["own"] = residual == "exact"
        return found | self.sharding.unsent.described(residual)

    def checkpoint_sizes(self, residual: str) -> dict[str, int]:
        entries = {shard.name: shard.entries for shard in self._shards}
        moments = OPTIMIZERS[type(self.optimizers[0]).__name__].moments
        sizes = {"moments": sum(4 * len(moments(shard)) * entries[shard.name] for shard in self._shards)}
        rows = {"exact": self.collectives.replicas, "mean": 1, "drop": 0}[residual]
        for state in self.methods[0].states():
            if state.by_parameter:
                count = rows if state.on_migration == "gradient" else 1
                size = sum(entries[name] * values.element_size() for name, values in state.tensors.items())
                sizes[state.kind] = count * size
        return {kind: size for kind, size in sizes.items() if size} | self.sharding.unsent.sizes(residual)

    def shared(self) -> list[ReplicatedTensors]:
        kept = [state for state in self.methods[0].states() if not state.per_replica]
        return replicated_by_optimizer(self.optimizers[0], self._shards, kept)

    def observed_state(self, shard: Shard) -> ObservedState:
        moment = self.optimizers[0].state.get(shard.parameter, {}).get(FIRST)
        return ObservedState(None if moment is None else local(moment).view(-1), residuals_of(self.methods, shard.name))

    def planned_bytes(self) -> float:
        return self.methods[0].planned_bytes()

    def statistics(self) -> dict[str, float]:
        figures = {"density": self.methods[0].density()}
        pending = [s for s in rows_of([method.states() for method in self.methods]) if s.on_migration == "gradient"]
        if pending:
            # The root mean square over replicas.
            squares = torch.zeros((), dtype=torch.float64, device=self.grad_norm.device)
            counted = {shard.name for shard in self._shards if shard.counted}
            for rows in (rows for s in pending for name, rows in s.tensors.items() if name in counted):
                squares += rows.double().square().sum() / len(rows)
            total = self.collectives.sum_over_all(squares) / self.collectives.replicas
            figures["residual_norm"] = total.item() ** 0.5
        if (own := self.sharding.unsent.squares()) is not None:
            figures["residual_norm"] = self.collectives.sum_over_all(own).item() ** 0.5
        return figures | {"clip_factor": self.clip_factor.item(), "skipped_steps": float(self.guard.skipped)}
