"""The optimizer step of this process's replicas: check, synchronize, clip, update."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only

from torchtitan_scape.core.consistency import (
    DamagedParametersError,
    ReplicatedTensors,
    check_plausible,
    check_replicas_equal,
    is_plausible,
)
from torchtitan_scape.core.observer import ObservedState, Observer
from torchtitan_scape.core.parameters import Shard, collect_shards, contiguous_gradient, stored
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.core.workloads import local_shapes
from torchtitan_scape.methods.base import GradientMethod, LocalMethod
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.overlap import BackwardOverlap, ForwardOverlap
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.registry import release_state
from torchtitan_scape.replica import checks, simulation
from torchtitan_scape.replica.checks import JointCalls
from torchtitan_scape.replica.guard import NonFiniteGradientError, guard_of
from torchtitan_scape.replica.simulation import MakeOptimizer, ReplicaWeights
from torchtitan_scape.sharding.base import Sharding
from torchtitan_scape.sharding.levels import ThreeLevelState
from torchtitan_scape.topology.collectives import OneReplica, ReplicaCollectives
from torchtitan_scape.topology.in_process import DryRunCollectives, SimulatedReplicas

Replicas = OneReplica | SimulatedReplicas


class ReplicaOptimizer(torch.optim.Optimizer):
    """Synchronizes the replicas, clips by the synchronized norm and updates, in `step`. `replicate` builds one.

    It shares `param_groups` with the wrapped optimizer, so that learning-rate schedulers work on either. `step` is
    collective and uses the storage of the gradients as scratch space. A step with a non-finite gradient on any rank is
    skipped on all of them, with nothing changed; the host reads that flag one step later, so that it never waits for
    the device within a step.

    Args:
        options: those of the synchronization method, which determine its class.
        replicas: the replicas of this process: a real one, or several simulated ones.
        optimizer, model, max_norm and others: see `replicate`.

    Attributes:
        inner: the wrapped optimizer.
        options: the method's options, with values chosen for this model (`MethodOptions.resolve`).
        consistency_interval: see `replicate`.
        methods: one per replica of this process.
        guard: the check for non-finite gradients.
        sharding: replaces FSDP2's collectives, if configured.
        levels: three-level partitioning, if configured: parameters here are slices of the masters.
        grad_norm: FP32 (), norm of the synchronized gradient over the model, before clipping. With per-replica weights:
            that of this process's first replica.
        clip_factor: FP32 ().
        repairs: repair replicas that differ from the majority, see `check_consistency`.
        first_step_check: the hook that refuses DDP around the parameters; `remove()` allows it.
    """

    repairs = False
    levels: ThreeLevelState | None = None
    attempted_steps = 0
    _counted_from = 0  # the step from which the ledger counts
    _full_exchange_next = _full_exchange_in_flight = False  # requested for the next, the last step
    _active_replica = 0  # whose weights the model contains
    _shows_shared_weights = False  # inside `shared_weights`, with weights of each replica
    _is_first_step = True
    _step_supports_amp_scaling = True  # `GradScaler` then calls `step`, which refuses it

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | MakeOptimizer,
        options: MethodOptions,
        replicas: Replicas,
        *,
        model: nn.Module | None = None,
        max_norm: float | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        total_steps: int = 0,
        overlap: bool = False,
        max_skipped_steps: int = 10,
        consistency_interval: int = 0,
        kernels: str = "auto",
    ) -> None:
        checks.check_arguments(max_norm, reduction)
        optimizer, make_optimizer = simulation.build_optimizer(optimizer, model)
        method = METHODS[options.method_name()].method
        checks.check_optimizer(optimizer, options.method_name())
        if options.holds_optimizer_state:
            release_state(optimizer)
        self.inner, self.model, self.replicas = optimizer, model, replicas
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._shards, self._stashed = collect_shards(optimizer.param_groups), list[list[Tensor]]()
        checks.count_copies_once(self._shards, self.collectives)
        self.joint_calls, self.sharding = JointCalls(self.collectives), Sharding()
        device = self._shards[0].device
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)
        self.clip_factor = torch.ones((), dtype=torch.float32, device=device)
        self.timer, self.consistency_interval = PhaseTimer(device), consistency_interval
        # The shapes of the first rank's shards on all ranks, so that all choose the same options.
        shapes = local_shapes([tuple(shard.parameter.shape) for shard in self._shards], self.collectives.model_ranks)
        self.options = options.resolve(shapes, self.collectives.replicas)
        run_settings = dict(
            max_norm=max_norm,
            total_steps=total_steps,
            max_skipped_steps=max_skipped_steps,
            consistency_interval=consistency_interval,
        )
        settings = {"method": options.method_name(), "reduction": reduction, **self.options.fingerprint()}
        self.settings = checks.make_equal(
            self.collectives, self._shards, optimizer, model, kernels, settings, run_settings
        )
        self.weights: list[ReplicaWeights] = []
        if options.per_replica_weights:
            count = len(replicas.endpoints)
            self.weights = simulation.weights_of_replicas(count, self._shards, optimizer, make_optimizer)
        scale = float(self.collectives.replicas) if reduction == "sum" else 1.0
        common = {"gradient_scale": scale, "total_steps": total_steps, "kernels": kernels, "max_norm": max_norm}
        self.methods = replicas.run(lambda replica: method(self._context(replica, common), self.options))
        for made in self.methods:
            made.declared_states()  # before an exchange is in flight
        if options.divides_update:
            release_state(optimizer)
        groups = partial(getattr, self, "param_groups")
        self.guard = guard_of(self.methods[0], self._shards, replicas, groups, self.timer, kernels, max_skipped_steps)
        self._overlap = BackwardOverlap.of(self.methods, self._shards) if overlap else None
        self._arriving = ForwardOverlap.of(self.methods[0], model, self._shards) if self._overlap else None
        self.first_step_check = self.register_step_pre_hook(self._before_step)

    def _context(self, replica: int, common: dict[str, Any]) -> MethodContext:
        """Return a replica's context. The first one shares `grad_norm`, `clip_factor` and `timer` with this object."""
        own = {} if replica else {"grad_norm": self.grad_norm, "clip_factor": self.clip_factor, "timer": self.timer}
        weights = self.weights[replica] if self.weights else None
        shards, optimizer = (weights.shards, weights.optimizer) if weights else (self._shards, self.inner)
        return MethodContext(shards, self.replicas.endpoints[replica], optimizer, **common, **own)

    # The groups and the state are the wrapped optimizer's, which replaces both lists when it loads a state.
    # `Optimizer.__init__` assigns empty ones.
    param_groups = property(lambda self: self.inner.param_groups, lambda self, value: None)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state, lambda self, value: None)  # type: ignore[assignment]

    @property
    def collectives(self) -> ReplicaCollectives:
        return self.replicas.all

    def shards(self) -> list[Shard]:
        """Return all parameters in constructor order."""
        return self._shards

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError after construction, because the method's state is laid out then."""
        if hasattr(self, "_shards"):
            raise ValueError("all parameters must be passed at construction; build a new optimizer")

    # ------------------------------------------------------------------------------------------ the step

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run one optimizer step. Collective. Returns the closure's value, None without one.

        Raises:
            NonFiniteGradientError: on every rank, after `max_skipped_steps` skipped steps in a row.
        """
        if hasattr(self, "grad_scale"):
            raise ValueError(
                "torch.amp.GradScaler is not supported: it skips a step on some ranks only; train in BF16 without it"
            )
        if self.inner._optimizer_step_pre_hooks and not self.methods[0].steps_optimizer:
            raise ValueError(
                f"method {self.options.method_name()!r} makes the update without the step of "
                f"{type(self.inner).__name__}, so that its pre-hooks could not change the gradients; register them on "
                "the optimizer that replicate() returns, where they run before the exchange"
            )
        self.refuse_inside_shared_weights("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.timer.phase("exchange"):
            self.finish_previous_step()
        with self.timer.phase("check"):
            gradients = self._gradients()
            if self._is_first_step:  # after the chunks that this rank's backward pass has not started
                if self.options.divides_update:
                    checks.refuse_converted(self._shards, self.options.method_name(), self.collectives)
                checks.refuse_unreduced(self._shards, gradients[0], self.collectives)
            complete = self._overlap.complete if self._overlap else ()
            was_sent = self._overlap is not None and self._overlap.active
            applied = self.guard.check([gradient for row in gradients for gradient in row], complete, was_sent)
            self.guard.limit_norms(gradients, self.methods[0].multiply_gradients)
        self.attempted_steps += 1
        self._full_exchange_in_flight, self._full_exchange_next = self._full_exchange_next, False
        norms = self.guard.norms_by_replica(len(gradients)) if self.weights else [None] * len(gradients)
        infos = [StepInfo(self.attempted_steps, applied, each) for each in norms]
        for weights in self.weights[1:]:
            weights.copy_rates(self.param_groups)  # a scheduler sets those of the first optimizer
        with self._without_post_hooks(), torch._C._DisableAutocast():  # autocast would round products of FP32 matrices
            self.replicas.run(lambda i: self.methods[i].step(gradients[i], infos[i]))
        self.guard.conclude(self.grad_norm)
        if self.guard.rates is not None:
            self.guard.rates.after_step()
        for weights in self.weights[1:]:
            weights.optimizer.zero_grad()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # or its scheduler warns that no step was taken
        self.sharding.unsent.after_optimizer_step(applied)
        if self.weights:
            self.sharding.version.changed()  # a delayed exchange may land at a step that is skipped
        else:
            self.sharding.version.changed_if(self.guard.last_applied)
        if (interval := self.consistency_interval) and (self._is_first_step or self.attempted_steps % interval == 0):
            self.check_consistency(self.attempted_steps)
        self._is_first_step = False
        # Here, because the wrapped optimizer may step on parts of the parameters, or not at all.
        if hooks := list(self.inner._optimizer_step_post_hooks.values()):
            self.wait_for_weights()
            for hook in hooks:
                hook(self.inner, (), {})
        return loss

    @contextmanager
    def _without_post_hooks(self) -> Iterator[None]:
        """Inside, the step of the wrapped optimizer runs none of its post-hooks."""
        hooks, self.inner._optimizer_step_post_hooks = self.inner._optimizer_step_post_hooks, OrderedDict()
        try:
            yield
        finally:
            self.inner._optimizer_step_post_hooks = hooks

    def stash_replica_gradients(self) -> None:
        """Store the gradients of a simulated replica after its backward passes, and set them to None.

        With a single replica in this process the gradients stay where they are.
        """
        if len(self.replicas.endpoints) == 1:
            return
        self._stashed.append([contiguous_gradient(shard) for shard in self._shards])
        for shard in self._shards:
            shard.parameter.grad = None
        if len(self.weights) > 1:
            self._activate(len(self._stashed) % len(self.weights))

    def _activate(self, replica: int) -> None:
        """Put a replica's weights into the model. The first one's are stored in its place meanwhile."""
        for other in (self._active_replica, replica):  # back, then forth
            if other:
                self.weights[other].swap(self._shards)
        self._active_replica = replica
        self.sharding.version.changed()

    def _gradients(self) -> list[list[Tensor]]:
        """Return the gradients of every replica of this process."""
        if self._overlap is not None and self._overlap.active:
            with self.timer.phase("exchange"):
                return [self._overlap.start_remaining()]
        rows, self._stashed = self._stashed, []
        if len(self.replicas.endpoints) == 1:
            rows = [[contiguous_gradient(shard) for shard in self._shards]]
        elif len(rows) != len(self.replicas.endpoints):
            if self._active_replica:
                self._activate(0)
            simulation.refuse_stash(len(rows), len(self.replicas.endpoints))
        dtype = self.methods[0].gradient_dtype
        return rows if dtype is None else [[g if g.dtype is dtype else g.to(dtype) for g in row] for row in rows]

    def prepare_last_backward(self) -> None:
        """With `overlap`: call this before the backward pass of the step's last micro-batch."""
        if self._overlap is not None:
            self._read_previous_step()  # it may request a full exchange, so it comes before the first chunk
            self._overlap.begin(self.attempted_steps + 1, self.guard.extra_flags_all_true)

    def train(self) -> None:
        """Switch an optimizer with two modes, such as a schedule-free one, to training."""
        self._switch_mode("train")

    def eval(self) -> None:
        """Switch an optimizer with two modes to evaluation: its weights are then those to evaluate and to save."""
        self._switch_mode("eval")

    @torch.no_grad()
    def _switch_mode(self, mode: Literal["train", "eval"]) -> None:
        if not hasattr(self.inner, mode):
            return
        if not isinstance(self.methods[0], GradientMethod):
            raise ValueError(
                f"{type(self.inner).__name__} has two modes, with weights of its own in its state, which the method "
                f"{self.options.method_name()!r} does not exchange; choose a method that exchanges gradients, such as "
                "'dense' or 'topk', or another optimizer"
            )
        self.finish_previous_step()
        getattr(self.inner, mode)()
        self.sharding.version.changed()
        self._reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Collective if a backward pass failed whose exchange had started."""
        if self._overlap is not None and self._overlap.cancel() and self._full_exchange_next:
            self.request_full_exchange()  # its step was not taken
        self.inner.zero_grad(set_to_none)

    def finish_previous_step(self) -> None:
        """Read whether the previous step was applied, and commit or drop its running exchanges. `step` calls it.

        Call it before weights are read outside of the model's forward pass, if they may arrive during that.
        """
        self.wait_for_weights()
        self._read_previous_step()

    def wait_for_weights(self) -> None:
        """Wait for changes of the weights that would arrive during the next forward pass."""
        if self._arriving is not None:
            self._arriving.finish()

    def _read_previous_step(self) -> None:
        """Read whether the previous step was applied, without waiting for changes of the weights."""
        try:
            applied = self.guard.finish_previous_step()
        except (NonFiniteGradientError, DamagedParametersError):
            self._finish(False)
            self.check_parameters(self.attempted_steps)  # a restart heals these two causes
            self.check_consistency(self.attempted_steps)
            raise
        self._finish(bool(applied))
        if applied is False and self._full_exchange_in_flight:
            self.request_full_exchange()  # its step was skipped

    def _finish(self, applied: bool) -> None:
        self.replicas.run(lambda i: self.methods[i].finish_previous_step(applied))

    def prepare_to_load(self) -> None:
        """Drop exchanges in flight, requests, and state that a checkpoint may lack, before a load. Collective."""
        self.finish_previous_step()
        self._full_exchange_next = self._full_exchange_in_flight = False
        for usual in self.guard.usual_norms:
            usual.zero_()
        self.replicas.run(lambda i: self.methods[i].prepare_to_load())

    def request_full_exchange(self) -> None:
        """Make the next exchange complete, so that nothing stays pending after it. Collective."""
        self.finish_previous_step()
        self._full_exchange_next = True
        self.sharding.unsent.request_full_exchange()
        self.replicas.run(lambda i: self.methods[i].request_full_exchange())

    @torch.no_grad()
    def flush(self) -> None:
        """Send everything that is pending, if no further step will do it. Collective.

        With per-replica weights this is an exchange alone: the replicas' optimizers do not step. Clears the gradients
        that it has sent.
        """
        self.refuse_inside_shared_weights("flush")
        self.joint_calls.expect("flush")
        if self.weights:
            self.request_full_exchange()
            self._full_exchange_next = False
            info = StepInfo(self.attempted_steps, torch.ones_like(self.grad_norm, dtype=torch.bool))
            with self.timer.phase("exchange"):
                self.replicas.run(lambda i: self._local(i).exchange(info))
            self.sharding.version.changed()
        elif self.sharding.unsent.described("exact") or any(s.is_gradient for s in self.methods[0].declared_states()):
            self.zero_grad()
            self.request_full_exchange()
            self.sharding.unsent.as_gradients(self._shards)
            for _ in self.replicas.endpoints:
                self.stash_replica_gradients()
            self.step()
            self.zero_grad()  # or the next backward pass adds to what was sent
        self._reshard()

    def _local(self, replica: int) -> LocalMethod:
        method = self.methods[replica]
        assert isinstance(method, LocalMethod)
        return method

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside, the model contains the weights of `saved_model`: for evaluation and export. Collective."""
        if not self.weights or self._shows_shared_weights:
            self.wait_for_weights()
            yield
            return
        anchors = self.saved_model()
        kept = [stored(shard.parameter).clone() for shard in self._shards]
        self.replace_weights([anchors[shard.name] for shard in self._shards])
        self._shows_shared_weights = True
        try:
            yield
        finally:
            self._shows_shared_weights = False
            self.replace_weights(kept)

    def refuse_inside_shared_weights(self, call: str) -> None:
        """Raise ValueError for a function that needs the replica's own weights in the model."""
        if self._shows_shared_weights:
            raise ValueError(
                f"{call}() was called inside shared_weights(), where the model does not contain the replica's own "
                "weights; leave it first"
            )

    @torch.no_grad()
    def replace_weights(self, values: list[Tensor]) -> None:
        """Copy values into the model's parameters."""
        self.sharding.version.changed()
        for shard, value in zip(self._shards, values, strict=True):
            stored(shard.parameter).copy_(value)
        self._reshard()

    def _reshard(self) -> None:
        """Drop weights that FSDP2 has gathered for a forward pass without a backward pass: they are outdated."""
        for module in self.model.modules() if self.model is not None else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def saved_model(self) -> dict[str, Tensor]:
        """Return local tensors that checkpoints store instead of the parameters of these names. Collective."""
        if not self.weights:
            return self.levels.model_saved() if self.levels else {}
        if not self._local(0).model_state().per_replica:
            return self._local(0).model_state().tensors
        self.joint_calls.expect("shared_weights")
        each = [self._local(i).model_state().tensors for i in range(len(self.weights))]
        mean, collectives = simulation.mean_of_rows, self.collectives
        return {name: mean(torch.stack([tensors[name] for tensors in each]), collectives) for name in each[0]}

    @torch.no_grad()
    def model_loaded(self) -> None:
        """Call this after weights were loaded into the model: all replicas start from them."""
        self.sharding.version.changed()
        if self.levels is not None:
            self.levels.masters_loaded()
        for i, replica in enumerate(self.weights):
            anchors = self._local(i).anchors()
            for shard, own in zip(self._shards, replica.shards, strict=True):
                values = stored(shard.parameter)
                stored(own.parameter).copy_(values)
                anchors[shard.name].copy_(values)

    def attach_levels(self, levels: ThreeLevelState) -> None:
        """Use three-level partitioning: it supplies the gradients and distributes the updated weights."""
        self.levels, self.sharding = levels, levels.sharding
        timed = self.timer.timed
        self.register_step_pre_hook(lambda *_: timed("exchange", levels.before_step)())
        self.register_step_post_hook(lambda *_: timed("exchange", levels.after_step)(self.guard.applied))

    # ------------------------------------------------------------- the state of this rank, for `torch.save`

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs besides the model's parameters. Collective.

        Ranks differ: every rank has to save its own, unless `_is_equal_on_all_ranks`. Weights of each replica are part
        of it, because `replicate` would overwrite those that were loaded before it.

        Returns:
            The state of the wrapped optimizer, and "replica": the method's. The tensors are those in use, not copies.

        Raises:
            ValueError: called by `torch.distributed.checkpoint`, which would lose the state of other replicas; or, on
                the first rank, not called on all ranks although each needs its own state.
        """
        self.refuse_inside_shared_weights("state_dict")
        self.finish_previous_step()
        if self.collectives.replicas > 1:
            checks.refuse_dcp(sys._getframe(1).f_globals["__name__"])
        if not self._is_equal_on_all_ranks():
            self.joint_calls.expect(
                "state_dict", f"ranks differ, so every rank has to save its own state. {checks.DCP}"
            )
        return self.inner.state_dict() | {"replica": self._replica_state()}

    def __getstate__(self) -> NoReturn:
        raise ValueError(
            "a replica optimizer cannot be copied or pickled, which would lose the method's state; save "
            "optimizer.state_dict() in its place"
        )

    def _is_equal_on_all_ranks(self) -> bool:
        """Return whether the state of one rank is that of all, as with `dense` and unsharded parameters."""
        first = self.methods[0]
        differs = self.weights or any(s.per_replica for s in first.declared_states()) or self.options.divides_update
        return self.collectives.model_ranks == 1 and not differs

    def _replica_state(self) -> dict[str, Any]:
        return {
            "layout": self._layout(),
            "methods": self.replicas.run(lambda i: self.methods[i].state_dict()),
            "weights": [[stored(shard.parameter) for shard in one.shards] for one in self.weights],
            "optimizers": [one.optimizer.state_dict() for one in self.weights[1:]],
            "usual_norms": list(self.guard.usual_norms),
            "attempted_steps": self.attempted_steps,
            "skipped": (self.guard.skipped, self.guard.skipped_in_a_row),
            "sent_bytes": dict(self.collectives.ledger.sent),
        }

    def _layout(self) -> dict[str, Any]:
        """Return the settings that a state depends on, and this rank's position."""
        own = {"replicas": self.collectives.replicas, "replica": self.collectives.replica}
        own["shard"] = self.collectives.model_rank
        return self.settings | ({} if self._is_equal_on_all_ranks() else own)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`. Collective. Load the model's parameters as well.

        Raises:
            ValueError: on every rank, if the state of one is of another layout, replica or method, or of other options.
        """
        self.refuse_inside_shared_weights("load_state_dict")
        saved = state_dict.get("replica")
        checks.raise_on_all_ranks(self.collectives, checks.state_mismatch(saved, self._layout()))
        assert saved is not None
        # Tensors that are still in use are copied, because the load begins to overwrite them.
        in_use = {values.data_ptr() for values in tree_leaves(self._replica_state()) if isinstance(values, Tensor)}
        saved = tree_map_only(Tensor, lambda values: values.clone() if values.data_ptr() in in_use else values, saved)
        self.prepare_to_load()
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "replica"})
        if self.weights:
            self.weights[0] = ReplicaWeights.of(self._shards, self.inner)
            self.replace_weights(saved["weights"][0])
        for i, one in enumerate(self.weights[1:]):
            for shard, value in zip(one.shards, saved["weights"][i + 1], strict=True):
                stored(shard.parameter).copy_(value)
            one.optimizer.load_state_dict(saved["optimizers"][i])
            self.weights[i + 1] = ReplicaWeights.of(one.shards, one.optimizer)
        self.replicas.run(lambda i: self.methods[i].load_state_dict(saved["methods"][i]))
        for usual, values in zip(self.guard.usual_norms, saved["usual_norms"], strict=True):
            usual.copy_(values)
        self.attempted_steps = saved["attempted_steps"]
        self.guard.skipped, self.guard.skipped_in_a_row = saved["skipped"]
        self.collectives.ledger.sent.clear()
        self.collectives.ledger.sent.update(saved["sent_bytes"])
        self.sharding.version.changed()

    # ------------------------------------------------------------------------------------------- checks

    def _before_step(self, *_: Any) -> None:
        """Check in the first step how the model was used after the optimizer was built."""
        if not self._is_first_step:
            return  # the hook stays: PyTorch does not permit its removal while the hooks run
        checks.refuse_synchronized(self._shards)
        if self.weights:
            checks.refuse_converted(self._shards, self.options.method_name(), self.collectives)
        if self.weights and not self.attempted_steps:
            # Local updates would otherwise send the difference to the weights before as the first displacement.
            anchors = self._local(0).anchors()  # those of this replica: a mean over replicas is rounded
            if checks.broadcast_loaded_weights(self.collectives, self._shards, anchors):
                self.model_loaded()

    def replicated_tensors(self) -> list[ReplicatedTensors]:
        """Return the tensors that must be bitwise equal on all replicas. Call `finish_previous_step` first."""
        return self.methods[0].replicated_tensors()

    def check_parameters(self, step: int) -> None:
        """Check that the parameters have values that training can produce. Collective; waits for the device.

        Raises:
            DamagedParametersError: on every rank, with ranks and parameters.
        """
        self.wait_for_weights()
        if self.collectives.is_fake:
            return
        named = []
        for shard in () if self.weights else self._shards:
            named.append((f"parameter {shard.name!r}", is_plausible(stored(shard.parameter))))
        for i, replica in enumerate(self.weights):
            anchors, label = self._local(i).anchors(), self.replicas.endpoints[i].label
            for shard in replica.shards:
                plausible = is_plausible(stored(shard.parameter), anchors[shard.name])
                named.append((f"parameter {shard.name + label!r}", plausible))
        check_plausible(named, self.collectives, step)

    def check_consistency(self, step: int) -> None:
        """Compare the tensors that all replicas share, bit by bit, after `step`. Collective; waits for the device.

        Raises:
            ReplicasDifferError: on every rank, if they differ and are not, or cannot be, repaired.
        """
        if self.levels is not None:
            self.finish_previous_step()
            self.levels.check_consistency(self.grad_norm.device, step, self.repairs)
        if self.collectives.replicas == 1 or isinstance(self.collectives, DryRunCollectives):
            return
        with self.timer.phase("compare"):
            self.finish_previous_step()
            tensors, device = self.replicated_tensors(), self.grad_norm.device
            if not check_replicas_equal(self.collectives, tensors, device, step, self.repairs):
                self.sharding.version.changed()

    # ------------------------------------------------------------------------------------------ reports

    def observe(self, observer: Observer | None) -> None:
        """Pass the synchronized gradients of the next steps to an observer; None to stop."""
        self.methods[0].observer = observer
        for method in self.methods:
            method.is_observed = observer is not None

    def observed_state(self, shard: Shard) -> ObservedState:
        """Return a parameter's first moment and residuals. Collective; call `finish_previous_step` first."""
        each = self.replicas.run(lambda i: self.methods[i].moment_and_residual(shard))
        return ObservedState(each[0][0], [residual for _, residual in each if residual is not None])

    def planned_bytes(self) -> float:
        """Return the bytes that a rank sends per step after the warm-up, averaged over steps and replicas."""
        return self.methods[0].planned_bytes()

    def dense_bytes(self) -> float:
        """Return the bytes that this rank would send per step with an FP32 all-reduce of all gradients."""
        return self.collectives.reduced_bytes(sum(shard.size for shard in self._shards))

    def count_bytes_from_here(self) -> None:
        """Let `stats` count from the present step on: a checkpoint was loaded."""
        self.collectives.ledger.sent.clear()
        self._counted_from = self.attempted_steps

    def stats(self) -> dict[str, float]:
        """Return figures of the last step without communication, so that any rank may call it alone.

        Keys: those of `metrics`, as values of this rank; "grad_norm" and "clip_factor" of the whole model; "steps"; and
        per step and rank "sent_bytes" and "dense_bytes", counted from the start or from the last `load_checkpoint`.
        """
        sent = sum(self.collectives.ledger.sent.values())
        return self.metrics(local=True) | {
            "grad_norm": self.grad_norm.item(),
            "steps": float(self.attempted_steps),
            "sent_bytes": sent / max(1, self.attempted_steps - self._counted_from),
            "dense_bytes": self.dense_bytes(),
        }

    def metrics(self, local: bool = False) -> dict[str, float]:
        """Return the figures of the last step for the log. Collective unless `local`, which returns those of this rank.

        Keys: "density", "residual_norm" if the method has a residual, "clip_factor", "skipped_steps", and the method's
        own.
        """
        figures: dict[str, float] = self.replicas.run(lambda i: self.methods[i].metrics(local))[0]
        if (squares := self.sharding.unsent.squares()) is not None:
            total = squares if local else self.collectives.sum_over_all(squares)
            figures["residual_norm"] = total.item() ** 0.5
        return figures | {"clip_factor": self.clip_factor.item(), "skipped_steps": float(self.guard.skipped)}
