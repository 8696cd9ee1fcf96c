"""Radius: gradients on a mask that all replicas keep for many steps.

Zheng, Zhang, "Radius: Range-based Gradient Sparsity for Large Foundation Model Pre-training" (MLSys 2025), Algorithms 1
and 2. The mask follows from what all replicas hold alike, so that no places travel.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kernels.scape.blocks import entries_per_block
from kernels.scape.reference import select_blocks, select_largest, set_positions, unpack_bits
from topology.chunks import AddingSource
from torchtitan_scape.core.parameters import Shard, flat_gradient, local, split
from torchtitan_scape.core.tensors import masked_copy_, packed_bits
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.radius.options import BLOCK, RadiusOptions, mask_counts


class Radius(GradientMethod):
    """One step t:

    1. before `start`: the synchronised gradient G is the mean of all gradients;
    2. from then on, where `interval` divides t, a refresh: G is the mean of residual + gradient, the residual 0;
    3. else: G is the mean of what is on the mask, in one all-reduce, and 0 off it; what is off it enters the residual;
    4. container: G is clipped, and the optimizer, AdamW or AdamS as it is, updates all entries with it: off the mask
       moments decay, and move the entry by what is left of them (by far more with AdamS: see docs/architecture.md);
    5. at a refresh, after the update: the mask is where the update without its rate, decay included, was largest.

    Parameters of one dimension and `dense_names` go whole in every step. Until the first refresh all entries are on the
    mask. A refresh that is skipped leaves mask and residuals for the next one.
    """

    def __init__(self, context: MethodContext, options: RadiusOptions) -> None:
        super().__init__(context, options)
        for group in context.optimizer.param_groups:
            _check_betas(*group["betas"])
        if any("exp_avg" in s and "exp_avg_sq" not in s for s in context.optimizer.state.values()):
            _check_beta1(context.optimizer)
        sparse, _ = split(context.shards, options.dense_names)
        self._sparse = [i for i, shard in enumerate(context.shards) if shard in sparse and shard.size]
        self._whole = [i for i in range(len(context.shards)) if i not in self._sparse]
        self._shards = [context.shards[i] for i in self._sparse]
        self._pending = ErrorFeedback.of(sparse)  # of empty shards, too: a checkpoint has them of all ranks
        self._residuals = [self._pending.tensors[shard.name].view(-1) for shard in self._shards]
        self._masks = {s.name: packed_bits(torch.ones(s.size, dtype=torch.bool, device=s.device)) for s in sparse}
        self._bits = [self._masks[shard.name] for shard in self._shards]
        sizes = [shard.size for shard in self._shards]
        self._selected = mask_counts(sizes, options.density, options.selection)
        self._known: list[int] | None = None
        self._start = options.start if options.start >= 0 else context.total_steps // 5
        self._refreshes = False
        self._fresh: list[Tensor] | None = None

    def synchronize(self, gradients: list[Tensor], step: StepInfo) -> list[Tensor]:
        self.scale_to_mean(gradients)
        whole = (
            self.take_full_exchange_request() or step.number < self._start or step.number % self.options.interval == 0
        )
        self._fresh = None
        self._refreshes = whole and step.number >= self._start
        if whole:
            self._exchange_all(gradients)
            self._pending.clear(step.applied)
        else:
            self._exchange_masked(gradients, step.applied)
        return gradients

    def after_optimizer_step(self, step: StepInfo) -> None:
        if not self._refreshes:
            return
        masks = []
        for shard, k in zip(self._shards, self._selected, strict=True):
            update = self._update(shard)
            if update is None:
                return  # no step has been applied yet, nor is this one
            masks.append(packed_bits(self._select(self._with_decay(shard, update), k)))
        if self.options.release_scale > 1.0:
            self._lengthen(step.applied)
        for bits, mask in zip(self._bits, masks, strict=True):
            masked_copy_(bits, mask, step.applied)
        if self._known != self._selected:
            self._known = None  # whether the step is applied only the device knows

    def gradient_norms(self, gradients: list[Tensor]) -> list[Tensor]:
        return super().gradient_norms(gradients) if self._fresh is None else self._fresh

    def states(self) -> list[State]:
        return [self._pending.state(), State("mask", self._masks, per_replica=False, on_migration="copy", packed=True)]

    def density(self) -> float:
        sent = sum(share * entries for entries, share in self.options.cost().exchanges(self.local_model()))
        return sent / max(1, sum(shard.size for shard in self.context.shards))

    # -------------------------------------------------------------------------------------- exchanges

    def _exchange_all(self, gradients: list[Tensor]) -> None:
        """Gradients become the mean of what is pending and themselves."""
        sparse = [gradients[i] for i in self._sparse]
        if self._refreshes and self.options.clip_refresh == "fresh":
            self.collectives.all_reduce_chunked(gradients)
            self._fresh = super().gradient_norms(gradients)
            if self.collectives.replicas > 1:  # residuals stay as they are: the step may have to be skipped
                self.collectives.all_reduce_chunked(AddingSource(self._residuals, sparse))
                return
        if sparse:
            torch._foreach_add_(sparse, self._residuals)
        if self._fresh is None:
            self.collectives.all_reduce_chunked(gradients)

    def _exchange_masked(self, gradients: list[Tensor], applied: Tensor) -> None:
        """Gradients become their mean on the mask and 0 off it, residuals get what was there."""
        counts = self._counts()
        sparse = [gradients[i] for i in self._sparse]
        for x, residual, bits, k in zip(sparse, self._residuals, self._bits, counts, strict=True):
            if k == x.numel():
                continue
            places = set_positions(unpack_bits(bits, x.numel()), k)
            values = x[places]
            x.index_fill_(0, places, 0.0)
            masked_copy_(residual, x + residual, applied)
            x[:k] = values  # the gradient itself is not needed any more: its room takes the payload
        payload = [x[:k] for x, k in zip(sparse, counts, strict=True)]
        self.collectives.all_reduce_chunked([*payload, *(gradients[i] for i in self._whole)])
        for x, bits, k in zip(sparse, self._bits, counts, strict=True):
            if k < x.numel():
                values = x[:k].clone()
                x.zero_().masked_scatter_(unpack_bits(bits, x.numel()), values)

    def _counts(self) -> list[int]:
        """Entries on the mask of each tensor. Waits for the device where their number may have changed: after the first
        refresh, and with a mask of another density or layout.
        """
        if self._known is None:
            counts = [unpack_bits(b, s.size).sum() for b, s in zip(self._bits, self._shards, strict=True)]
            self._known = torch.stack(counts).tolist() if counts else []
        return self._known

    # --------------------------------------------------------------------------------------- the mask

    def _update(self, shard: Shard) -> Tensor | None:
        """FP32 (n,): the optimizer's last update without its rate and decay, of its state; None if it has none yet.

        Algorithm 2's mhat / (sqrt(vhat) + eps). AdamS keeps no v: it is the one of the gradient and the moment before.
        """
        group, state = self._group(shard), self.context.optimizer.state[shard.parameter]
        if "exp_avg" not in state:
            return None
        (beta1, beta2), moment = group["betas"], local(state["exp_avg"]).reshape(-1)
        if "exp_avg_sq" in state:
            second = local(state["exp_avg_sq"]).reshape(-1)
        else:
            gradient = flat_gradient(shard).float()
            before = (moment - (1.0 - beta1) * gradient).div_(beta1)
            second = before.square_().mul_(beta2).add_(gradient.square(), alpha=1.0 - beta2)
        steps = local(state["step"]).double()
        normaliser = (second / (1.0 - beta2**steps)).sqrt_().add_(group["eps"])
        return (moment / (1.0 - beta1**steps)).div_(normaliser)

    def _with_decay(self, shard: Shard, update: Tensor) -> Tensor:
        """update + weight_decay * theta, of theta before the update."""
        group = self._group(shard)
        lr, decay = group["lr"], group["weight_decay"]
        before = local(shard.parameter).detach().reshape(-1).add(update, alpha=lr).div_(1.0 - lr * decay)
        return before.mul_(decay).add_(update)

    def _select(self, values: Tensor, k: int) -> Tensor:
        """bool (n,): where the k largest of FP32 (n,) are, or those of every block."""
        n = values.numel()
        if k == n:
            return torch.ones_like(values, dtype=torch.bool)
        if self.options.selection == "block":
            offsets = select_blocks(values, entries_per_block(self.options.density, BLOCK), BLOCK)
            places = (offsets + torch.arange(len(offsets), device=values.device)[:, None] * BLOCK).view(-1)
            return torch.zeros(n, dtype=torch.bool, device=values.device).index_fill_(0, places, True)
        return select_largest(values, k)

    def _lengthen(self, applied: Tensor) -> None:
        """theta -= (release_scale - 1) * lr * update off the mask."""
        # Replicas of one process share parameters: all have read them before one of them writes.
        self.collectives.sum_over_replicas(torch.zeros(1, device=applied.device))
        for shard, bits in zip(self._shards, self._bits, strict=True) if self.collectives.is_writer else ():
            update = self._update(shard)
            assert update is not None
            off = ~unpack_bits(bits, shard.size) & applied
            longer = self._group(shard)["lr"] * (self.options.release_scale - 1.0)
            own = local(shard.parameter).detach()
            own.sub_(torch.where(off, update, 0.0).view(own.shape), alpha=longer)

    def _group(self, shard: Shard) -> dict[str, Any]:
        return self.context.optimizer.param_groups[shard.group]


def _check_betas(beta1: float, beta2: float) -> None:
    if beta1 * beta1 >= beta2:
        raise ValueError(
            f"[optimizer] beta1 = {beta1} and beta2 = {beta2} with [sync] method = 'radius': off the mask updates grow "
            f"from step to step where beta1 is sqrt(beta2) or more; set beta1 below {math.sqrt(beta2):.4g}, or beta2 "
            f"above {beta1 * beta1:.4g}"
        )


def _check_beta1(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if group["betas"][0] == 0.0:
            raise ValueError(
                "[optimizer] beta1 = 0 with [sync] method = 'radius' and AdamS: the mask follows from the moment "
                "before the update, of which nothing is left; set beta1 above 0, or [optimizer] name = 'AdamW'"
            )
