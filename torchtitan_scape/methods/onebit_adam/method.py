"""1-bit Adam: momentum in one bit, preconditioned by a variance that does not change any more.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (ICML 2021),
arXiv:2102.02888, Algorithm 1. Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam"
(ICLR 2023), arXiv:2202.06009, for the schedule of variance updates.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, local
from torchtitan_scape.core.tensors import indices_by_key
from torchtitan_scape.kernels.backends import elementwise_update
from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.methods.base import clip_factor, norm_over_model
from torchtitan_scape.methods.chunked import SentValues
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.onebit_adam.options import UPDATES_OF_A_NEW_VARIANCE, OnebitAdamOptions
from torchtitan_scape.methods.quantized.method import Quantized
from torchtitan_scape.topology.comm_stream import Handle


class OnebitAdam(Quantized):
    """One step t (m: the momentum that all replicas share, v: the variance, g_i: the gradient of replica i).

    Steps that update the variance are dense AdamW: the mean of g_i, clipped by its norm. Every other step:

    1. Each replica clips g_i by its own norm, because the norm of the mean is not known yet.
    2. m_i = beta1 m + (1 - beta1) g_i, and m becomes the mean of m_i in the code of the exchange, with the errors of
       the replica and of the owner added before each of the two encodings.
    3. theta -= lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^u)) + eps) + weight_decay theta), where u counts the
       updates of v.

    The momentum has t updates and the variance u. AdamW corrects both by u; where t is larger, in 0/1 Adam, its step is
    rescaled to the correction by t.

    The exchange is that of `Quantized` in units of the gradient: it sends m_i / (1 - beta1), and `synchronize` returns
    the gradient g with beta1 m + (1 - beta1) g equal to the new momentum. Moments are the state of AdamW. Its counter
    "step" counts the updates of v, so that another run continues with the right bias correction.

    An entry with v = 0 had no gradient during the warm-up. It keeps its value apart from weight decay, because its
    quotient would be unbounded.
    """

    reads_moments = True

    def __init__(self, context: MethodContext, options: OnebitAdamOptions) -> None:
        super().__init__(context, options.exchange())
        self.options = options
        self._adam = elementwise_update(self.backend, "frozen")
        self._last_update = options.last_update(context.total_steps)
        self._updates_variance = True  # in this step
        self._keeps_errors = False  # in this step: pending errors wait for a step that sends the momentum

    # ------------------------------------------------------------------------------------------ the step

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        if self._is_dense(info.number):
            updates = self.options.updates_until(info.number, self._last_update)
            rescaled = self.collectives.is_writer and updates < info.number
            with _corrected_by(self.context.optimizer, updates, info.number) if rescaled else nullcontext():
                super().step(gradients, info)
            return
        context, phase = self.context, self.context.timer.phase
        with phase("clip"):
            norms = self.norms(gradients)
            norm = norm_over_model(context.shards, norms, self.collectives, context.grad_norm.device)
            norm = norm * context.gradient_scale
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
        context = self.context
        norms, device = self.norms(momenta), context.grad_norm.device
        sound = norm_over_model(context.shards, norms, self.collectives, device).isfinite()
        context.grad_norm.copy_(torch.where(sound, context.grad_norm, torch.inf))
        return info._replace(applied=info.applied & sound)

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        """Return the synchronized gradients, as every method does.

        Simulated replicas that share the moments must not update them meanwhile.
        """
        return self._as_gradients(self.synchronize_momenta(gradients, info))

    def start(self, gradients: list[Tensor], info: StepInfo) -> Callable[[], list[Tensor]]:
        self._begin_step(gradients, info)
        finish = super().start(gradients, info)
        return lambda: self._as_gradients(finish())

    def synchronize_momenta(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        """Return the new momentum divided by 1 - beta1. In a step that updates the variance: as `synchronize`.

        The old momentum is read before the exchange only: afterwards another simulated replica may have updated it.
        """
        self._begin_step(gradients, info)
        return super().synchronize(gradients, info)

    def _begin_step(self, gradients: list[Tensor], info: StepInfo) -> None:
        """Add the old momentum, unless the variance is updated. The exchange multiplies both by `gradient_scale`."""
        self._updates_variance = self._is_dense(info.number)
        if not self._updates_variance:
            self._add_momenta(gradients, 1.0 / self.context.gradient_scale)

    def _as_gradients(self, momenta: list[Tensor]) -> list[Tensor]:
        if not self._updates_variance:
            self._add_momenta(momenta, -1.0)
        return momenta

    def begin(self) -> None:
        full = self.take_full_exchange_request()
        self._keeps_errors = self._updates_variance and self.options.variance_updates > 0 and not full
        self._begin_exchange(self._updates_variance or full or self.collectives.replicas == 1)

    def start_chunk(self, number: int, gradients: Sequence[Tensor | None], applied: Tensor | None) -> Any:
        start = super(Quantized, self).start_chunk if self._keeps_errors else super().start_chunk
        return start(number, gradients, applied)

    def finish_chunk(self, sent: Any, applied: Tensor) -> None:
        finish = super(Quantized, self).finish_chunk if isinstance(sent, SentValues) else super().finish_chunk
        finish(sent, applied)

    def send(self, values: Tensor) -> Handle:
        self.scale_to_mean([values])
        return self.collectives.all_reduce(values)

    def check_second_moments(self, loaded: bool, step: int) -> None:
        remaining = range(step + 1, self._last_update + 1)
        updates = sum(self.options.updates_variance(number, self._last_update) for number in remaining)
        if not loaded and updates < UPDATES_OF_A_NEW_VARIANCE:
            raise ValueError(
                f"[sync.onebit_adam] warmup_steps = {self.options.warmup_steps} ends at step {self._last_update}, and "
                f"the checkpoint of step {step} has no variance: after {updates} updates it would be frozen; set "
                f"warmup_steps to {step + UPDATES_OF_A_NEW_VARIANCE} or more, and variance_updates to 0"
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
        rates = [
            _with_step_length(Rates.of(group), 1.0 / (1.0 - group["betas"][0] ** info.number))
            for group in self.context.optimizer.param_groups
        ]
        self._adam.step(
            [local(shard.parameter) for shard in shards],
            momenta,
            [[local(state[kind]) for state in states] for kind in ("exp_avg", "exp_avg_sq")],
            [rates[shard.group] for shard in shards],
            torch.stack([local(state["step"]) for state in states]).double(),
            info.applied,
        )

    def _is_dense(self, number: int) -> bool:
        """Return whether a step updates the variance: by the schedule, or because AdamW has made no step yet."""
        if self.options.updates_variance(number, self._last_update):
            return True
        return not any("exp_avg" in self._state(shard) for shard in self.context.shards)

    def _state(self, shard: Shard) -> dict[str, Any]:
        state: dict[str, Any] = self.context.optimizer.state.get(
            shard.parameter, {}
        )  # `[]` would insert an empty state
        return state


def _with_step_length(rates: Rates, factor: float) -> Rates:
    """Return the rates with steps that are `factor` times as long, and the same weight decay."""
    return replace(rates, lr=rates.lr * factor, weight_decay=rates.weight_decay / factor)


@contextmanager
def _corrected_by(optimizer: torch.optim.Optimizer, counted: int, updates: int) -> Iterator[None]:
    """Let AdamW, which counts `counted` steps, correct its first moment by as many `updates`."""
    before = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        beta1 = group["betas"][0]
        factor = (1.0 - beta1**counted) / (1.0 - beta1**updates)
        group["lr"], group["weight_decay"] = group["lr"] * factor, group["weight_decay"] / factor
    try:
        yield
    finally:
        for group, (lr, weight_decay) in zip(optimizer.param_groups, before, strict=True):
            group["lr"], group["weight_decay"] = lr, weight_decay
