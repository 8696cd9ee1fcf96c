"""SCAPE: AdamS whose replicas exchange a sparse first moment (SCAPE paper, Algorithm 1)."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from kernels import choose_backend, finite_check
from kernels.common.rates import Rates
from kernels.scape.blocks import density_at
from kernels.scape.step import PassInputs, PayloadChunk
from topology.collectives import ReplicaCollectives
from topology.groups import ReplicaGroups
from topology.process_groups import collectives_of
from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.hyperparameters import check_hyperparameters
from torchtitan_scape.core.observer import Observer
from torchtitan_scape.core.parameters import Shard, collect_shards, flat_gradient, local, model_group_of, split, stored
from torchtitan_scape.core.timing import PhaseTimer
from torchtitan_scape.core.workloads import local_shapes
from torchtitan_scape.methods.interface import State
from torchtitan_scape.methods.scape.agreement import (
    backend_for,
    check_one_device,
    check_replicas_agree,
    check_weights,
    describe,
    warn_of_density,
)
from torchtitan_scape.methods.scape.exchange import PayloadInFlight
from torchtitan_scape.methods.scape.loading import load_scape
from torchtitan_scape.methods.scape.masks import DelayedMasks
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.scape.passes import build_passes
from torchtitan_scape.methods.scape.recorder import GradientRecorder
from torchtitan_scape.methods.scape.shared import replicated_by_scape
from torchtitan_scape.methods.scape.state import StateByParameter
from torchtitan_scape.methods.scape.statistics import statistics
from torchtitan_scape.replica.guard import FiniteGuard, NonFiniteGradientError

logger = logging.getLogger(__name__)


class Scape(Optimizer):
    """AdamS with a sparse, delayed-mask exchange of the first moment over replicas.

    Use it without DDP: it is what synchronises the replicas. `step()` is a collective call. It consumes the
    gradients: their storage is scratch space, so zero them (or set them to None) before the next backward pass.
    The start is that of replica 0: its parameters are broadcast.

    Args:
        params: named parameters (`model.named_parameters()`), or dicts of them with their own `lr`,
            `weight_decay`, `betas` or `eps`; plain tensors or DTensors. Keep them in FP32, or in what
            `weights.hold_in_bfloat16` makes of them: of others no master copy is kept, so that updates smaller than
            their rounding are lost.
        options: what there is to choose of SCAPE, see `ScapeOptions`.
        replicas: the ranks that hold the same parameters: a ProcessGroup, `topology.groups.ReplicaGroups`,
            `ReplicaCollectives`, or None for a single replica.
        max_norm: clips the synchronised gradient's norm over the whole model; None for no clipping.
        reduction: whether the replicas' gradients are to be averaged ("mean") or summed ("sum", for losses
            already divided by the global token count).
        max_skipped_steps: so many steps in a row with a non-finite gradient anywhere raise
            `NonFiniteGradientError`. Single ones are skipped by all ranks, with nothing changed.
        kernels: "auto" (Triton on a GPU, PyTorch on a CPU), "triton" or "torch".

    Parameters that `weights.hold_in_bfloat16` has made are kept in BF16, with an FP32 master here: of the n/N entries
    that this replica owns where the update is sharded, else of all.

    Of replicas that one process plays (`topology.in_process.SimulatedReplicas`) each has an optimizer of its own over
    the same parameters, which the first one writes; all step on gradients that `step` is given.

    On a GPU the host never waits for the step it is in, only for the finite check of the one before.

    Raises ValueError for arguments out of range, integer parameters, and replicas that disagree on any of this.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        options: ScapeOptions | None = None,
        replicas: ProcessGroup | ReplicaGroups | ReplicaCollectives | None = None,
        *,
        max_norm: float | None = 1.0,
        reduction: str = "mean",
        max_skipped_steps: int = 10,
        kernels: str = "auto",
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it must be positive, or None for no clipping")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.max_norm = max_norm
        self._shards = collect_shards(self.param_groups)
        if not isinstance(replicas, ReplicaCollectives):
            model = None if isinstance(replicas, ReplicaGroups) else model_group_of(self._shards)
            replicas = collectives_of(replicas, model)
        self.collectives = replicas
        # Of the first rank's shards, so that all ranks choose alike.
        shapes = local_shapes([tuple(shard.parameter.shape) for shard in self._shards], replicas.model_ranks)
        options = self.options = (options or ScapeOptions()).resolve(shapes, replicas.replicas)
        check_one_device(self._shards)
        check_weights(self._shards, options.weights_dtype)
        self.bf16_weights = options.weights_dtype == "bfloat16"
        self._scale = float(replicas.replicas) if reduction == "sum" else 1.0
        sparse, dense = split(self._shards, options.dense_names)
        self.ordered = sparse + dense  # the order of the state and of the payload
        rank = dist.get_rank() if dist.is_initialized() else 0
        tells = rank == 0 and replicas.is_writer  # of replicas that one process plays one speaks for all
        if tells:
            warn_of_density(sparse, options)
        self.fingerprint = {
            **describe(self.ordered, len(sparse)),
            "replicas": replicas.replicas,
            "max_norm": max_norm,
            "reduction": reduction,
            **options.fingerprint(),
        }
        others = {"max_skipped_steps": max_skipped_steps, "chunk_bytes": options.chunk_bytes}
        check_replicas_agree(replicas, self.fingerprint | others, self.param_groups)
        replicas.broadcast_from_first([stored(s.parameter) for s in self._shards])
        device = local(self._shards[0].parameter).device
        backend = choose_backend(kernels, device, {s.parameter.dtype for s in self._shards})
        self.timer = PhaseTimer(device)
        passes_backend = backend_for(options.selection, kernels, backend, tells)
        self.passes, self.exchange, self.pieces = build_passes(sparse, dense, options, replicas, device, passes_backend)
        self.masks = DelayedMasks(self.passes, replicas, device)
        self._show_state()
        self._watch: GradientRecorder | None = None

        self.guard = FiniteGuard(
            [s.name + replicas.label for s in self.ordered],
            finite_check(backend),
            self.timer.timed("wait", replicas.all_true),
            replicas.gather_objects,
            rank,
            max_skipped_steps,
        )
        self.attempted_steps = 0
        self.applied_steps = torch.zeros((), dtype=torch.float64, device=device)
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)
        self.clip_factor = torch.ones((), dtype=torch.float32, device=device)

    # ------------------------------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, gradients: list[Tensor] | None = None
    ) -> Any:
        """One step of Algorithm 1. Returns the closure's value, None without one.

        gradients: flat local ones (n,) of `ordered`, which are scratch space; None for those of the parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.timer.phase("check"):
            gradients = gradients or [flat_gradient(shard) for shard in self.ordered]
        self._step_on(gradients)
        return loss

    def _step_on(self, gradients: list[Tensor]) -> None:
        """Reads as the page of the paper."""
        phase, passes, exchange = self.timer.phase, self.passes, self.exchange
        with phase("exchange"):
            self.finish_previous_step()
        with phase("check"):
            applied = self.guard.check(gradients)
        with phase("pack"):
            step = self._begin(gradients, applied)
            passes.bind(step)
        arriving: list[PayloadInFlight] = []
        for part in passes.parts:
            with phase("pack"):
                passes.pack(part)
            with phase("exchange"):
                arriving.append(exchange.start(part))
        with phase("pack"):
            selected = passes.selected()
        for part in self._clipped(arriving):
            with phase("update"):
                passes.update(part)
        with phase("exchange"):
            exchange.publish()
        with phase("update"):
            passes.write(own_only=self.collectives.is_fake)
        passes.release()
        with phase("exchange"):
            # Its buffer is that of the payload, which is free from here on.
            self.masks.exchange(selected, step.next_density)

    def _begin(self, gradients: list[Tensor], applied: Tensor) -> PassInputs:
        """Counts the step, and gathers what its passes work on."""
        parameters, options = self.cut([stored(shard.parameter) for shard in self.ordered]), self.options
        rates = [self._rates(self.shard_of(i)) for i in range(len(self.pieces))]
        if self.attempted_steps == 0:
            # Not before: weights may be loaded into the parameters until then.
            self.passes.start_master(parameters)
        self.attempted_steps += 1
        self.applied_steps += applied
        return PassInputs(
            parameters,
            self.cut(gradients),
            rates,
            self.masks.in_use,
            self.masks.previous,
            density_at(self.attempted_steps + 1, options.density, options.density_warmup_steps),
            applied,
            self.applied_steps,
            self.clip_factor,
            options.clip_mode == "moment",
        )

    def _clipped(self, arriving: list[PayloadInFlight]) -> Iterator[PayloadChunk]:
        """Waits for the parts, takes the norm, and gives each as it may be updated: without clipping at once."""
        phase, norm_squared = self.timer.phase, torch.zeros((), dtype=torch.float64, device=self.grad_norm.device)
        for one in arriving:
            with phase("exchange"):
                one.wait()
            if self._watch is not None:
                with phase("observe"):
                    self._watch.arrived(one.part)
            with phase("clip"):
                norm_squared += self.passes.squares(one.part)
            if self.max_norm is None:
                yield one.part
        if self._watch is not None:
            with phase("observe"):
                self._watch.finished()
        with phase("clip"):
            norm = self.exchange.norm_squared(norm_squared.float()).sqrt()
            # A NaN off the mask is not in the payload.
            self.grad_norm.copy_(torch.where(self.passes.step.applied, norm, torch.nan))
            if self.max_norm is not None:
                self.clip_factor.copy_((self.max_norm / (self.grad_norm + 1e-6)).clamp(max=1.0))
        if self.max_norm is not None:
            yield from (one.part for one in arriving)

    def cut(self, tensors: list[Tensor]) -> list[Tensor]:
        """What the passes work on, from the tensors of all shards."""
        return [tensors[i] if p is None else tensors[i].view(-1)[p.start : p.end] for i, p in self.pieces]

    def shard_of(self, tensor: int) -> Shard:
        """The parameter's shard that a tensor of the passes is, or is a piece of."""
        return self.ordered[self.pieces[tensor][0]]

    def _show_state(self) -> None:
        """Names the state in `self.state`, as other optimizers do."""
        for shard in self.ordered:
            self.state[shard.parameter]["moment_residual"] = []
        for i, state in enumerate(self.passes.kept("state")):
            self.state[self.shard_of(i).parameter]["moment_residual"].append(state)

    def finish_previous_step(self) -> None:
        """Takes last step's mask into use, if that step was applied. `step` and `state_dict` do it themselves."""
        try:
            was_applied = self.guard.finish_previous_step()
        except NonFiniteGradientError:
            self.masks.rotate(False)
            raise
        self.masks.rotate(bool(was_applied))

    @torch.no_grad()
    def request_full_exchange(self) -> None:
        """Makes the next step dense: its mask is all ones, and no residual is left after it. A collective call."""
        self.finish_previous_step()
        if self.attempted_steps == 0 or self.masks.in_use.dense:
            return
        self.passes.finish()
        StateByParameter(self).release_wire_residual()
        self.masks.in_use.density = 1.0

    # ------------------------------------------------------------------------------------------- layout

    def _rates(self, shard: Shard) -> Rates:
        group = self.param_groups[shard.group]
        lr, (beta1, beta2), eps, weight_decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
        if self.options.update == "sharded" and self.bf16_weights and lr * weight_decay > 0.5:
            raise ValueError(f"lr * weight_decay is {lr * weight_decay:g}; with weights in BF16 it must be 0.5 or less")
        return Rates(lr, beta1, beta2, eps, weight_decay, self._scale, shard.counted)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError: masks and state are laid out over all parameters at construction."""
        if hasattr(self, "_shards"):
            raise ValueError("Scape takes all its param groups at construction; build a new optimizer")
        super().add_param_group(param_group)

    # --------------------------------------------------------------------------------- state and reports

    def observe(self, observer: Observer | None) -> None:
        """Shows the observer the synchronised gradients of the steps from here on, which clip; None for nobody."""
        self._watch = None if observer is None else GradientRecorder(self, observer)

    @torch.no_grad()
    def moment_and_residual(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a parameter's first moment and this replica's residual, FP32 (n,). Collective.

        Call `finish_previous_step` first.
        """
        return StateByParameter(self).moment_and_residual(name)

    @torch.no_grad()
    def statistics(self) -> dict[str, float]:
        """Of the last step: density, nnz, overlap with the mask before, residual norm. A collective call.

        nnz counts one replica's sparsified entries; `residual_norm` is the root mean square over replicas (without
        the part that they have in common, where the update is sharded). Reads the whole state: for log lines, not for
        every step.
        """
        return statistics(self)

    def states(self, residual: str) -> list[State]:
        """What a checkpoint gets, after `finish_previous_step`: see `StateByParameter`. A collective call."""
        return StateByParameter(self).states(residual)

    def describe_states(self) -> dict[str, dict[str, Any]]:
        """What kinds there may be in `states`."""
        return StateByParameter.described()

    def counters(self) -> dict[str, Any]:
        """For a checkpoint: what is no tensor, as plain values."""
        return {"scape": StateByParameter(self).record(), "applied_steps": self.applied_steps.item()}

    @staticmethod
    def load_each(each: Sequence["Scape"], reader: Any, same_layout: bool, step: int) -> str:
        """Takes a checkpoint's state into the optimizers of this process's replicas: see `load_scape`."""
        return load_scape(each, reader, same_layout, step)

    def checkpoint_sizes(self, residual: str) -> dict[str, int]:
        """Bytes of all that `states` of all ranks leave in a checkpoint, by kind."""
        return StateByParameter(self).sizes(residual)

    def shared(self) -> list[ReplicatedTensors]:
        """What all replicas hold alike, after `finish_previous_step`."""
        return replicated_by_scape(self)

    def payload_parts(self) -> int:
        """Parts in which the payload goes at the target density."""
        return len(self.passes.parts)

    def planned_bytes(self) -> float:
        """Bytes of payload and masks that this rank sends in a step at the target density."""
        own = self.passes.layout.wire_bytes(self.options.density, self.options.selection)
        return self.exchange.planned_bytes() + self.collectives.gathered_bytes(own)

    def state_dict(self) -> dict[str, Any]:
        """Everything an exact resume needs, this replica's residual included. A collective call.

        Waits for masks in flight. Replicas differ: every rank has to save its own.
        """
        self.finish_previous_step()
        return super().state_dict() | {"state": {}, "scape": StateByParameter(self).whole()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back `state_dict()` of the same replica, layout and options; else raises ValueError."""
        if "scape" not in state_dict:
            raise ValueError(
                "the state has no 'scape' entry; save what Scape.state_dict() returns, each rank its own (helpers that "
                "gather optimizer state by parameter drop the residuals and masks)"
            )
        state = StateByParameter(self)
        state.check_same(state_dict["scape"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.finish_previous_step()
        self._show_state()
        state.put_whole(state_dict["scape"])
