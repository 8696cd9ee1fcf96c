"""The two base classes of methods: `GradientMethod` synchronizes gradients, `LocalMethod` synchronizes weights."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import check_contiguous, stored
from torchtitan_scape.core.tensors import PART
from torchtitan_scape.methods.interface import Method, MethodContext, State, StepInfo
from torchtitan_scape.methods.update import clip_factor, norm_over_model


class GradientMethod(Method):
    """A method that synchronizes gradients: synchronize -> norm -> clip -> optimizer.step -> after_optimizer_step.

    Replicas that one process simulates share one set of weights. Only one of them (`collectives.is_writer`) clips and
    updates.
    """

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        context, phase = self.context, self.context.timer.phase
        with phase("exchange"):
            gradients = self.synchronize(gradients, info)
        if self.collectives.is_writer:
            self._observe(gradients, info)
            with phase("clip"):
                norms = self.gradient_norms(gradients)
                context.grad_norm.copy_(
                    norm_over_model(context.shards, norms, self.collectives, context.grad_norm.device)
                )
                factor = None if context.max_norm is None else clip_factor(context.grad_norm, context.max_norm)
                if factor is not None:
                    context.clip_factor.copy_(factor)
            info = info._replace(applied=info.applied & context.grad_norm.isfinite())
            with phase("update"):
                self.optimizer_step(context.shards, gradients, info.applied, factor)
        with phase("exchange"):
            self.after_optimizer_step(info)

    @abstractmethod
    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        """Return the synchronized gradients, FP32, bitwise equal on all replicas. Collective.

        Args:
            gradients: This replica's gradients, FP32, contiguous and of any shape, one per shard; they may be
                overwritten. `core.tensors.flat` returns vectors.
            info: see `Method.step`.
        """

    def start(self, gradients: list[Tensor], info: StepInfo) -> Callable[[], list[Tensor]]:
        """Start an exchange; the returned function waits for it and returns the result of `synchronize`. Collective.

        Other collectives may run in between, and the gradients must not be changed. By default the exchange starts when
        the returned function is called.
        """
        return lambda: self.synchronize(gradients, info)

    def after_optimizer_step(self, info: StepInfo) -> None:
        """Run after the optimizer's update, for example to select the next mask. Collective."""

    def gradient_norms(self, gradients: list[Tensor]) -> Tensor:
        """Return the norms that clipping uses, FP64 (shards,); by default those of the synchronized gradients."""
        return self.norms(gradients)

    def scale_to_mean(self, gradients: list[Tensor]) -> None:
        """Multiply by `context.gradient_scale`, in place."""
        if gradients and self.context.gradient_scale != 1.0:
            torch._foreach_mul_(gradients, self.context.gradient_scale)

    def scale_and_add(self, gradients: list[Tensor], residuals: list[Tensor]) -> None:
        """Replace each gradient by `context.gradient_scale` times itself plus its residual, in one pass over both."""
        if self.context.gradient_scale == 1.0:
            if gradients:
                torch._foreach_add_(gradients, residuals)
            return
        for gradient, residual in zip(gradients, residuals, strict=True):
            torch.add(residual, gradient, alpha=self.context.gradient_scale, out=gradient)


class LocalMethod(Method):
    """A method with local updates between exchanges: norm -> clip -> optimizer.step -> exchange.

    Every replica clips its own gradient and updates its own weights with its own optimizer.
    """

    per_replica_weights = True
    limits_gradients = False  # each replica clips by its own norm before anything is kept or sent

    def __init__(self, context: MethodContext, options: Any) -> None:
        check_contiguous(context.shards, options.method_name())
        super().__init__(context, options)

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        context, phase = self.context, self.context.timer.phase
        with phase("clip"):
            scale = context.gradient_scale
            norms = self.norms(gradients) if info.norms is None else info.norms
            norm = norm_over_model(context.shards, norms, self.collectives, context.grad_norm.device) * scale
            if scale != 1.0 and (context.max_norm is None or self.observer is not None):
                torch._foreach_mul_(gradients, scale)
                scale = 1.0  # otherwise it is part of clipping, so that the gradients are read once
            self._observe(gradients, info)
            factor = None if context.max_norm is None else clip_factor(norm, context.max_norm)
            if factor is not None:
                context.clip_factor.copy_(factor)
                factor = factor * scale
            context.grad_norm.copy_(torch.where(info.applied, norm, torch.nan))
        with phase("update"):
            self.optimizer_step(context.shards, gradients, info.applied, factor)
        with phase("exchange"):
            self.exchange(info)

    @abstractmethod
    def exchange(self, info: StepInfo) -> None:
        """Exchange weights or displacements, if an exchange is due in this step. Collective."""

    @cached_property
    def _idle_states(self) -> list[State]:
        return self.states()

    def declared_states(self) -> list[State]:
        """Return the states while no exchange is running. Call it once before the first step."""
        return self._idle_states

    def model_state(self) -> State:
        """Return the state with the weights that are validated, exported and saved as the model.

        If it is per replica, the model is the mean over replicas.
        """
        return next(state for state in self.declared_states() if state.on_migration == "model")

    def anchors(self) -> dict[str, Tensor]:
        """Return the tensors of `model_state`, by name."""
        return self.model_state().tensors

    def replicated_tensors(self) -> list[ReplicatedTensors]:
        shared = [state for state in self.states() if not state.per_replica and state.by_parameter]
        return [
            ReplicatedTensors(
                s.name, [(state.kind, state.tensors[s.name]) for state in shared if s.name in state.tensors]
            )
            for s in self.context.shards
        ]

    def metrics(self, local: bool = False) -> dict[str, float]:
        """Return "density" and "residual_norm", the distance between this replica's weights and `anchors`."""
        anchors = self.anchors()
        pending = [state.tensors for state in self.declared_states() if state.on_migration == "displacement"]
        squares = torch.zeros((), dtype=torch.float64, device=self.context.grad_norm.device)
        for shard in (shard for shard in self.context.shards if shard.counted):
            others = [tensors[shard.name] for tensors in pending if shard.name in tensors]
            flat = [t.reshape(-1) for t in (stored(shard.parameter), anchors[shard.name], *others)]
            for weight, anchor, *rest in zip(*(t.split(PART) for t in flat), strict=True):  # a part at a time in FP64
                distance = anchor.to(weight.device) - weight.double()
                for other in rest:
                    distance += other.to(weight.device)
                squares += distance.square().sum()
        return {"density": self.density(), "residual_norm": self.root_mean_square(squares, local)}
