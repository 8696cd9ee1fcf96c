"""1-bit Adam: momentum in one bit, preconditioned by a variance that does not change any more.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (ICML 2021),
arXiv:2102.02888, Algorithm 1.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, StoredTensors, local
from torchtitan_scape.core.tensors import indices_by_key
from torchtitan_scape.kernels.backends import elementwise_update
from torchtitan_scape.kernels.common.tensors import Rates
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import MethodContext, StepInfo, clip_factor
from torchtitan_scape.methods.onebit_adam.options import UPDATES_OF_A_NEW_VARIANCE, OnebitAdamOptions
from torchtitan_scape.methods.quantized.method import Quantized


class OnebitAdam(Quantized):
    """One step (m: the momentum that all replicas share, v: the variance, g_i: the gradient of replica i).

    The steps of the warm-up are dense AdamW: the mean of g_i, clipped by its norm. Every later step:

    1. Each replica clips g_i by its own norm, because the norm of the mean is not known yet.
    2. m_i = beta1 m + (1 - beta1) g_i, and m becomes the mean of m_i in the code of the exchange, with the errors of
       the replica and of the owner added before each of the two encodings.
    3. theta -= lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^u)) + eps) + weight_decay theta), where t counts the
       updates of m, and u those of v, also those of AdamW before this run.

    The exchange is that of `Quantized` in units of the gradient: it sends m_i / (1 - beta1), and `synchronize` returns
    the gradient g with beta1 m + (1 - beta1) g equal to the new momentum. Moments are the state of AdamW. Its counter
    "step" counts the updates of v, so that another run continues with the right bias correction.

    An entry with v = 0 had no gradient during the warm-up. It keeps its value apart from weight decay, because its
    quotient would be unbounded.
    """

    reads_moments = True
    steps_optimizer = False  # not after the warm-up

    def __init__(self, context: MethodContext, options: OnebitAdamOptions) -> None:
        super().__init__(context, options.exchange())
        self.options = options
        self._adam, self._stored = elementwise_update(self.backend, "frozen"), StoredTensors(context.shards)
        self._last_update = options.last_update(context.total_steps)
        self._updates_variance = True  # in this step

    # ------------------------------------------------------------------------------------------ the step

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        if self._is_dense(info.number):
            super().step(gradients, info)
            return
        context, phase = self.context, self.context.timer.phase
        with phase("clip"):
            norm = self.norm_over_model(self.norms(gradients)) * context.gradient_scale
            if context.max_norm is not None:
                context.clip_factor.copy_(clip_factor(norm, context.max_norm))
                self.multiply_gradients(gradients, context.clip_factor)
            context.grad_norm.copy_(torch.where(info.applied, norm, torch.nan))
        with phase("exchange"):
            momenta = self.synchronize_momenta(gradients, info)
        if self.collectives.is_writer:
            if self.observer is not None:
                with phase("observe"):
                    self.observer.synchronized(partial(self._gradient_of, momenta), info.applied)
            with phase("update"):
                self._update(momenta, self._if_finite(momenta, info))

    def _if_finite(self, momenta: list[Tensor], info: StepInfo) -> StepInfo:
        """Return `info` without `applied`, and set the norm to infinity, if a synchronized momentum is not finite."""
        norm, sound = self.context.grad_norm, self.norm_over_model(self.norms(momenta)).isfinite()
        norm.copy_(torch.where(sound, norm, torch.inf))
        return info._replace(applied=info.applied & sound)

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        """Return the synchronized gradients, as every method does.

        Simulated replicas that share the moments must not update them meanwhile.
        """
        momenta = self.synchronize_momenta(gradients, info)
        if not self._updates_variance:
            self._add_momenta(momenta, -1.0)
        return momenta

    start = GradientMethod.start  # not in parts: `synchronize` adds and subtracts the old momentum

    def synchronize_momenta(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        """Return the new momentum divided by 1 - beta1. In a step of the warm-up: as `synchronize`.

        The old momentum is read before the exchange only: afterwards another simulated replica may have updated it.
        """
        self._updates_variance = self._is_dense(info.number)
        if not self._updates_variance:
            self._add_momenta(gradients, 1.0 / self.context.gradient_scale)  # the exchange multiplies both by the scale
        return super().synchronize(gradients, info)

    def begin(self) -> None:
        full = self.take_full_exchange_request()
        self._begin_exchange(self._updates_variance or full or self.collectives.replicas == 1)

    def check_second_moments(self, loaded: bool, step: int) -> None:
        updates = max(0, self._last_update - step)
        if not loaded and updates < UPDATES_OF_A_NEW_VARIANCE:
            raise ValueError(
                f"[sync.onebit_adam] warmup_steps = {self.options.warmup_steps} ends at step {self._last_update}, and "
                f"the checkpoint of step {step} has no variance: after {updates} updates it would be frozen; set "
                f"warmup_steps to {step + UPDATES_OF_A_NEW_VARIANCE} or more"
            )

    def _add_momenta(self, gradients: list[Tensor], factor: float) -> None:
        """Add factor * beta1 / (1 - beta1) * m to the gradients, in place, in one pass over both."""
        shards, groups = self.context.shards, self.context.optimizer.param_groups
        for beta1, numbers in indices_by_key(float(groups[shard.group]["betas"][0]) for shard in shards).items():
            moments = [local(self._state(shards[i])["exp_avg"]) for i in numbers]
            if any(moment.shape != gradients[i].shape for moment, i in zip(moments, numbers, strict=True)):
                moments = [moment.reshape(gradients[i].shape) for moment, i in zip(moments, numbers, strict=True)]
            torch._foreach_add_([gradients[i] for i in numbers], moments, alpha=factor * beta1 / (1.0 - beta1))

    def _gradient_of(self, momenta: list[Tensor], name: str) -> Tensor:
        """Return g of the class's docstring for one parameter, before the update."""
        i = next(i for i, shard in enumerate(self.context.shards) if shard.name == name)
        shard = self.context.shards[i]
        beta1 = float(self.context.optimizer.param_groups[shard.group]["betas"][0])
        moment = local(self._state(shard)["exp_avg"]).reshape(-1)
        return torch.sub(momenta[i].view(-1), moment, alpha=beta1 / (1.0 - beta1))

    def _update(self, momenta: list[Tensor], info: StepInfo) -> None:
        """Move the weights along the momenta, divided by the root of the frozen second moments."""
        shards, states = self.context.shards, [self._state(shard) for shard in self.context.shards]
        rates = [Rates.of(group) for group in self.context.optimizer.param_groups]
        variance_updates = torch.stack([local(state["step"]) for state in states]).double()
        updates = torch.stack([variance_updates + (info.number - self._last_update), variance_updates], 1)
        self._adam.step(
            self._stored(),
            momenta,
            [[local(state[kind]) for state in states] for kind in ("exp_avg", "exp_avg_sq")],
            [rates[shard.group] for shard in shards],
            updates,
            info.applied,
        )

    def _is_dense(self, number: int) -> bool:
        """Return whether a step updates the variance: in the warm-up, or because AdamW has made no step yet."""
        return number <= self._last_update or not any("exp_avg" in self._state(shard) for shard in self.context.shards)

    def _state(self, shard: Shard) -> dict[str, Any]:
        state: dict[str, Any] = self.context.optimizer.state.get(
            shard.parameter, {}
        )  # `[]` would insert an empty state
        return state
