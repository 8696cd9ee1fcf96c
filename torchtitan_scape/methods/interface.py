"""The interface of a synchronization method of the replicate axis.

A method is written for one replica. It communicates through `ReplicaCollectives` alone, which counts its bytes, and
declares its state as `State` objects. The replica optimizer, checkpoints, the consistency check and the memory report
read these declarations and know no method by name.

Units: a replica's gradient times `MethodContext.gradient_scale` is in mean units: the average over replicas is the
global gradient. Residuals and synchronized gradients are in the same units.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.observer import Observer
from torchtitan_scape.core.parameters import Shard, local, stored
from torchtitan_scape.core.tensors import flat, masked_copy_, packed_bits, sum_of_squares
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.kernels.backends import choose_backend, norms, scaling
from torchtitan_scape.kernels.scape.reference import unpack_bits
from torchtitan_scape.optimizers.muon import hidden_names
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.traffic import CollectiveCall, spanned

logger = logging.getLogger(__name__)

# The kind of state that contains the weights of replicas that differ.
REPLICA_WEIGHTS = "replica_weights"
PENDING_GRADIENTS = ("gradient", "pending")  # values of `on_migration` of gradients that were not delivered yet


@dataclass(frozen=True)
class State:
    """One kind of tensor that a method keeps between steps. Steps and loading change the tensors in place.

    Attributes:
        kind: Its name in checkpoints, for example "residual".
        tensors: By parameter name, of the parameter's local shape if `by_parameter`.
        per_replica: True if every replica has its own values; otherwise they are equal, or parts of equal values.
        on_migration: The treatment under another layout, replica count or method.
            "gradient": pending gradients, FP32 in mean units. Their mean over replicas is preserved.
            "pending": pending gradients in coordinates of their own, see `MethodEntry.decoders_function`. Elsewhere
                they are decoded if the shards are the same, and lost otherwise.
            "displacement": pending changes of the weights, to be subtracted from them: anchor minus weight of a method
                with per-replica weights, or what only the owner of an entry has applied.
            "model": FP32 weights that are saved, validated and exported as the model: those that replicas share, or if
                `per_replica` their mean over replicas. As the state of single replicas they are saved besides it.
            "copy": copied if the next run has a state of that kind.
            "rebuild": dropped, and the next exchange is complete; loaded if method, options and layout are the same.
        by_parameter: False for tensors of this shard with shapes of their own, readable by the same layout only.
        packed: One bit per entry, uint8 (ceil(n / 8),): entry i in bit i % 8 of byte i // 8. Checkpoints store bytes.
        starts: If every replica has a part of each tensor of its own, or none: the position of its first entry in the
            flat local tensor, by parameter name. None for whole tensors.
    """

    kind: str
    tensors: dict[str, Tensor]
    per_replica: bool
    on_migration: Literal["gradient", "pending", "displacement", "model", "copy", "rebuild"]
    by_parameter: bool = True
    packed: bool = False
    starts: Mapping[str, int] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether it holds an update that was not delivered yet."""
        return self.is_gradient or self.on_migration == "displacement"

    @property
    def is_gradient(self) -> bool:
        """Whether it holds gradients that were not delivered yet."""
        return self.on_migration in PENDING_GRADIENTS

    def is_in_model(self, residual: str) -> bool:
        """Whether the model of a checkpoint contains it, for `[checkpoint] residual`."""
        return self.on_migration == "model" and not (self.per_replica and residual == "exact")

    def describe(self) -> dict[str, Any]:
        """Return the description in a checkpoint's record, as plain values."""
        keys = ("per_replica", "on_migration", "by_parameter")
        return {key: getattr(self, key) for key in keys}

    def entries(self, name: str, shape: torch.Size) -> Tensor:
        """Return a parameter's values in its local `shape`: the tensor itself unless `packed`."""
        values = self.tensors[name]
        return unpack_bits(values, shape.numel()).view(shape).byte() if self.packed else values

    def load_entries(self, name: str, values: Tensor) -> None:
        """Load the result of `entries`, of any shape: all values of the local tensor."""
        target = self.tensors[name]
        if self.packed:
            target.copy_(packed_bits(values.bool().view(-1)).to(target.device))
        else:
            start = self.starts[name] if self.starts else 0
            target.copy_(values.view(-1)[start : start + target.numel()].view(target.shape))


class StepInfo(NamedTuple):
    """One optimizer step.

    Attributes:
        number: Attempted steps including this one, from 1; the same on all ranks, a host integer.
        applied: Bool () on the device; False if any gradient on any rank is not finite. It gates every write of state.
        norms: FP64 (n,), of each gradient that `Method.step` receives; None if they are not known.
    """

    number: int
    applied: Tensor
    norms: Tensor | None = None


@dataclass(frozen=True)
class MethodContext:
    """Everything a method receives apart from its options.

    Attributes:
        shards: This rank's parameter shards; gradients are passed in this order.
        collectives: Communication with the other replicas.
        optimizer: The optimizer that updates `shards`; a method may read its rates and moments.
        gradient_scale: Converts a local gradient into mean units: the number of replicas if the loss was divided by
            the global token count, else 1.
        total_steps: Steps of the run, for schedules that depend on them; 0 if unknown.
        kernels: "auto", "triton" or "torch".
        max_norm: Bound on the norm of the synchronized gradient over the whole model; None for no clipping.
        grad_norm: FP32 (), written by `step`: the norm of the synchronized gradient before clipping.
        clip_factor: FP32 (), written by `step`: the factor by which the gradient was scaled: in its memory, or by the
            optimizer as it read it.
        timer: Measures the phases of a step.
    """

    shards: Sequence[Shard]
    collectives: ReplicaCollectives
    optimizer: torch.optim.Optimizer
    gradient_scale: float = 1.0
    total_steps: int = 0
    kernels: str = "auto"
    max_norm: float | None = None
    grad_norm: Tensor = field(default=None)  # type: ignore[assignment]  # None: a tensor of its own
    clip_factor: Tensor = field(default=None)  # type: ignore[assignment]
    timer: PhaseTimer = field(default=None)  # type: ignore[assignment]  # None: a timer that is off

    def __post_init__(self) -> None:
        device = self.shards[0].device if self.shards else torch.device("cpu")
        defaults: dict[str, Callable[[], Any]] = {
            "grad_norm": lambda: torch.zeros((), dtype=torch.float32, device=device),
            "clip_factor": lambda: torch.ones((), dtype=torch.float32, device=device),
            "timer": lambda: PhaseTimer(device),
        }
        for name, make in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, make())

    def part_of_run(self, divisor: int, key: str) -> int:
        """Return the steps of the run divided by `divisor`, the default of the option `key`; 0 if they are unknown."""
        if not self.total_steps and self.collectives.replica == 0:
            logger.warning(
                f"{key} is 0, because the number of steps is unknown; pass total_steps to replicate(), or set {key}, "
                "so that the run begins with more exchanges"
            )
        return self.total_steps // divisor


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, FP32 (), that limits a norm, FP32 (), to `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class Method(ABC):
    """One replica's side of a synchronization method.

    Create all state in `__init__`, and change it in place. The mathematics belongs in functions on local tensors.

    Attributes:
        norms: Returns the norms of tensors, FP64 (n,).
        multiply_gradients: Multiplies tensors, in place, by a factor on their device; see `kernels.backends.scaling`.
        backend: Of passes over the parameters, "triton" or "torch".

    Class attributes:
        gradient_dtype: dtype of the gradients that `step` receives; None for the dtype of the backward pass.
        limits_gradients: True if a replica's gradient is scaled down to a multiple of its usual norm before `step`,
            because the method's state would keep a spike for many steps; see `replica.guard.NormLimits`.
        steps_optimizer: True if the update is the step of the wrapped optimizer, which runs the hooks before it.
        reads_moments: True if the method computes with the optimizer's moments, so that it depends on its algorithm.
        owned: A `methods.owned.OwnedParts` with the optimizer's state, if the options say `divides_update`.
    """

    gradient_dtype: ClassVar[torch.dtype | None] = torch.float32
    limits_gradients: ClassVar[bool] = True
    steps_optimizer: ClassVar[bool] = True
    reads_moments: ClassVar[bool] = False
    owned: Any = None

    def __init__(self, context: MethodContext, options: Any) -> None:
        self.context, self.options, self.collectives = context, options, context.collectives
        self.observer: Observer | None = None  # receives the synchronized gradients of the next steps
        self.is_observed = False  # whether a replica has an observer; equal on all replicas
        self._full_exchange_requested = False
        dtypes = {shard.parameter.dtype for shard in context.shards}
        self.backend = choose_backend(context.kernels, context.shards[0].device, dtypes)
        self.norms, self.multiply_gradients = norms(self.backend), scaling(self.backend)

    @classmethod
    def prepare_model(cls, model: nn.Module, options: Any) -> None:
        """Convert the model's parameters, before the optimizer is built on them."""

    @abstractmethod
    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        """Synchronize, clip and update. Collective.

        Args:
            gradients: Contiguous, one per shard, of `gradient_dtype` and of a shape that is the same on all replicas;
                they may be overwritten. They may contain NaN if not `info.applied`; then no state may change.
            info: The step's number, and the flag that gates every write.
        """

    def finish_previous_step(self, applied: bool) -> None:
        """Wait for exchanges that the previous step started; commit their result, or drop it if not `applied`."""

    def request_full_exchange(self) -> None:
        """Make the next exchange complete, so that nothing stays pending. Collective."""
        self._full_exchange_requested = True

    def take_full_exchange_request(self) -> bool:
        """Return and clear the request of `request_full_exchange`. A method calls it once per exchange."""
        requested, self._full_exchange_requested = self._full_exchange_requested, False
        return requested

    # ---------------------------------------------------------------------------------------------- state

    def states(self) -> list[State]:
        """Return all tensors that later steps depend on, themselves and not copies. Waits for running exchanges."""
        return []

    def declared_states(self) -> list[State]:
        """Return the states that a checkpoint may contain, without communication; tensors may be missing."""
        return self.states()

    def checkpoint_states(self, residual: str) -> list[State]:
        """Return the states for a checkpoint. Collective.

        Args:
            residual: "exact", "mean" or "drop", as in `[checkpoint] residual`. The caller averages or drops the states
                of single replicas; a method overrides this if it has another form for them. Tensors of states that are
                not per replica may be missing where another replica has them.
        """
        return self.states()

    def prepare_to_load(self) -> None:
        """Drop exchanges in flight, requests, and state that starts from zero: a checkpoint may lack them. Collective.

        Every load begins with this call, so that nothing of the present state survives beside the loaded one.
        """
        self._full_exchange_requested = False

    def check_second_moments(self, loaded: bool, step: int) -> None:
        """Raise ValueError if the next steps need second moments that the loaded checkpoint does not have.

        Args:
            loaded: The optimizer continues with saved second moments of all parameters.
            step: Attempted steps of the run that saved.
        """

    def allocate(self, kind: str, name: str) -> None:
        """Create a parameter's state that exists only at times, before it is loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return this replica's state, for the same layout and options. Collective; tensors are not copies."""
        return {state.kind: dict(state.tensors) for state in self.states()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the result of `state_dict` into the present tensors. Collective."""
        self.prepare_to_load()
        for kind, tensors in saved.items():
            for name in tensors:
                self.allocate(kind, name)
        for state in self.states():
            for name, target in state.tensors.items():
                target.copy_(saved[state.kind][name])

    def record(self) -> dict[str, Any]:
        """Return the state that is not a tensor, as plain values for a checkpoint's record."""
        return {}

    def begin_import(self, reader: Any, same_layout: bool) -> Any:
        """Begin to load a checkpoint; only if the options say `holds_optimizer_state`, see `checkpoint.migration`.

        Args:
            reader: A `methods.imported.CheckpointReader`.
            same_layout: Method and layout are those of the run that saved.

        Returns:
            An object with `parameter(shard, imported, row)` and `finish()`, like `methods.scape.state.ScapeImport`.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps its moments in the optimizer")

    def replicated_tensors(self) -> list[ReplicatedTensors]:
        """Return the tensors that must be bitwise equal on all replicas, after `finish_previous_step`."""
        shared = [state for state in self.states() if not state.per_replica]
        tensors = []
        for shard in self.context.shards:
            parts: list[tuple[str | None, Tensor]] = [(None, stored(shard.parameter))]
            state = self.context.optimizer.state.get(shard.parameter, {})  # `[]` would insert an empty state
            of_state = [(key, local(value)) for key, value in sorted(state.items()) if isinstance(value, Tensor)]
            # torchao's states of 4 or 8 bits have no view of their bytes.
            parts += ((key, value) for key, value in of_state if not is_traceable_wrapper_subclass(value))
            parts += ((s.kind, s.tensors[shard.name]) for s in shared if shard.name in s.tensors)
            tensors.append(ReplicatedTensors(shard.name, parts))
        return tensors

    # -------------------------------------------------------------------------------------------- reports

    def moment_and_residual(self, shard: Shard) -> tuple[Tensor | None, Tensor | None]:
        """Return a parameter's first moment and its pending update, FP32 (n,); None where there is none. Collective."""
        moment = self.context.optimizer.state.get(shard.parameter, {}).get("exp_avg")
        states = [s for s in self.states() if s.is_gradient and shard.name in s.tensors]
        residual = torch.stack([self.pending_gradient(s, shard.name) for s in states]).sum(0) if states else None
        return None if moment is None else local(moment).reshape(-1), residual

    def metrics(self, local: bool = False) -> dict[str, float]:
        """Return the metrics of the last step for the log, after `finish_previous_step`. Collective unless `local`.

        "density" is the fraction of the entries that a step sends. "residual_norm" is the norm of the pending updates,
        as the root mean square over replicas.

        Args:
            local: Return those of this rank, without communication.
        """
        figures = {"density": self.density()}
        pending = [state for state in self.states() if state.is_gradient]
        if pending:
            counted = {shard.name for shard in self.context.shards if shard.counted}
            squares = torch.zeros((), dtype=torch.float64, device=self.context.grad_norm.device)
            for state in pending:
                for name in (name for name in state.tensors if name in counted):
                    squares += self.pending_square(state, name)
            figures["residual_norm"] = self.root_mean_square(squares, local)
        return figures

    def pending_gradient(self, state: State, name: str) -> Tensor:
        """Return a parameter's pending gradient of a state, FP32 (n,), in the model's own coordinates."""
        return state.tensors[name].reshape(-1).float()

    def pending_square(self, state: State, name: str) -> Tensor:
        """Return the squared norm of `pending_gradient`, FP64 (), or an estimate of its mean over the replicas."""
        return sum_of_squares(self.pending_gradient(state, name))

    def norm_over_model(self, norms: Sequence[Tensor] | Tensor) -> Tensor:
        """Return the norm over the whole model, FP32 (), from those of the shards, FP64 () each or (n,). Collective.

        The result is bitwise equal on ranks with bitwise equal inputs.
        """
        shards = self.context.shards
        counted = [i for i, shard in enumerate(shards) if shard.counted]
        squares = torch.zeros((), dtype=torch.float32, device=self.context.grad_norm.device)
        if counted:
            if not isinstance(norms, Tensor) or len(counted) < len(shards):
                norms = torch.stack([norms[i] for i in counted])
            squares += norms.square().sum().float()
        return self.collectives.sum_over_model(squares).sqrt()

    def set_norm(self, norm: Tensor, applied: Tensor) -> Tensor | None:
        """Store the norm of the synchronized gradient, FP32 (), and return the factor of clipping, None without it.

        Without `applied`, bool (), the norm is NaN: that of a sparse gradient may not show another replica's NaN.
        """
        context = self.context
        context.grad_norm.copy_(torch.where(applied, norm, torch.nan))
        if context.max_norm is None:
            return None
        factor = clip_factor(context.grad_norm, context.max_norm)
        context.clip_factor.copy_(factor)
        return factor

    def root_mean_square(self, squares: Tensor, local: bool) -> float:
        """Return the root of `mean_over_replicas` of a sum of squares."""
        return self.mean_over_replicas(squares, local).item() ** 0.5

    def mean_over_replicas(self, values: Tensor, local: bool) -> Tensor:
        """Return the sum over all ranks divided by the number of replicas; `values` themselves if `local`."""
        return values if local else self.collectives.sum_over_all(values) / self.collectives.replicas

    def local_model(self) -> LocalModel:
        """Return the names and shapes of this rank's shards."""
        shards, hidden = self.context.shards, hidden_names(self.context.optimizer, self.context.shards)
        return LocalModel(tuple(s.name for s in shards), tuple(tuple(s.local_shape) for s in shards), hidden)

    def collective_calls(self) -> list[CollectiveCall]:
        """Return `options.collective_calls(...)` for this rank."""
        levels, chunk_entries = spanned(self.collectives.levels), self.collectives.chunk_entries
        calls: list[CollectiveCall] = self.options.collective_calls(self.local_model(), levels, chunk_entries)
        return calls

    def planned_bytes(self) -> float:
        """Return the bytes that a rank sends per step after warm-up, averaged over steps and replicas."""
        levels = spanned(self.collectives.levels)
        return sum(stage.sent for call in self.collective_calls() for stage in call.stages(levels))

    def payload_chunks(self) -> int:
        """Return the number of messages that carry the payload of a step."""
        return 1

    def density(self) -> float:
        """Return the fraction of the entries that a step sends after the warm-up."""
        return 1.0

    def _observe(self, gradients: Sequence[Tensor], info: StepInfo) -> None:
        if self.observer is not None:
            with self.context.timer.phase("observe"):
                by_name = dict(zip((shard.name for shard in self.context.shards), flat(gradients), strict=True))
                self.observer.synchronized(by_name.__getitem__, info.applied)


@dataclass
class ErrorFeedback:
    """The pending update of a replica: tensors of the local shapes in mean units, initially zero."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, shards: Sequence[Shard], dtype: torch.dtype = torch.float32) -> "ErrorFeedback":
        return cls({s.name: torch.zeros(s.local_shape, dtype=dtype, device=s.device) for s in shards})

    def clear(self, applied: Tensor) -> None:
        """Set all residuals to zero if `applied`, bool ()."""
        for residual in self.tensors.values():
            masked_copy_(residual, 0.0, applied)

    def state(self) -> State:
        return State("residual", self.tensors, per_replica=True, on_migration="gradient")
