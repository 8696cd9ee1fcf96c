"""Radius: gradients on a mask that does not change for many steps.

Zheng, Zhang, "Radius: Range-based Gradient Sparsity for Large Foundation Model Pre-training" (MLSys 2025), Algorithms 1
and 2. Every replica computes the mask from replicated state, so that no indices are sent.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, contiguous_gradient, local
from torchtitan_scape.core.tensors import flat, masked_copy_, packed_bits
from torchtitan_scape.kernels.backends import masked_payload
from torchtitan_scape.kernels.scape.reference import select_largest, set_positions, unpack_bits
from torchtitan_scape.methods.base import ResidualMethod
from torchtitan_scape.methods.interface import MethodContext, State, StepInfo
from torchtitan_scape.methods.radius.options import RadiusOptions, mask_counts
from torchtitan_scape.topology.partition import chunk_of_payload


class Radius(ResidualMethod):
    """One step t:

    1. Before step `start`, the synchronized gradient G is the mean of all gradients.
    2. After that, a step t that is a multiple of `interval` is a refresh: G is the mean of residual + gradient, and the
       residual becomes 0.
    3. In other steps G is the mean of the gradients inside the mask, in one all-reduce, and 0 outside it. Gradients
       outside the mask are added to the residual.
    4. G is clipped, and the unmodified optimizer (AdamW or AdamS) updates all entries. Outside the mask the moments
       decay and still move the entries (far more with AdamS, see docs/reference/methods/radius.md).
    5. At a refresh, after the update, the mask selects the entries with the largest update. The update includes weight
       decay, without the learning rate.

    Parameters of one dimension are exchanged uncompressed in every step. Until the first refresh the
    mask contains all entries. A skipped refresh leaves mask and residuals unchanged until the next one.
    """

    reads_moments = True

    def __init__(self, context: MethodContext, options: RadiusOptions) -> None:
        super().__init__(context, options)
        for group in context.optimizer.param_groups:
            _check_betas(*group["betas"])
        if any("exp_avg" in s and "exp_avg_sq" not in s for s in context.optimizer.state.values()):
            _check_beta1(context.optimizer)
        if not isinstance(context.optimizer, torch.optim.Adam):
            self.optimizer_step.may_multiply = False  # the mask is computed from clipped gradients, see `_update`
        self._shards = [context.shards[i] for i in self.sparse]
        self._masks = {s.name: _all_ones(s) for s in context.shards if s.name in self.pending.tensors}
        self._bits = [self._masks[shard.name] for shard in self._shards]
        sizes = [shard.size for shard in self._shards]
        self._selected = mask_counts(sizes, options.density)
        self._mask_counts: list[int] | None = None  # None: to be read from the device
        self._kernels = masked_payload(self.backend)
        self._masked: Any = None  # the masks as the kernels read them, at `_versions` of the masks
        self._versions: list[int] = []
        self._start = options.start if options.start >= 0 else context.part_of_run(5, "start")
        self._is_refresh = False

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        full = (
            self.take_full_exchange_request() or info.number < self._start or info.number % self.options.interval == 0
        )
        self._is_refresh = full and info.number >= self._start
        if full:
            return self.exchange_all(gradients, info)
        self._exchange_masked(gradients, info.applied)
        return gradients

    def after_optimizer_step(self, info: StepInfo) -> None:
        if not self._is_refresh:
            return
        masks = []
        for shard, k in zip(self._shards, self._selected, strict=True):
            update = self._update(shard)
            if update is None:
                return  # all steps so far were skipped, including this one
            update = self._with_decay(shard, update)
            masks.append(_all_ones(shard) if k == shard.size else packed_bits(select_largest(update, k)))
        for bits, mask in zip(self._bits, masks, strict=True):
            masked_copy_(bits, mask, info.applied)
        if self._mask_counts != self._selected:
            self._mask_counts = None  # they depend on `info.applied`, which is on the device

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        for shard in self.context.shards:
            if shard.name in self._masks:
                self._masks[shard.name].copy_(_all_ones(shard))
        self._mask_counts = None

    def states(self) -> list[State]:
        return [*super().states(), State("mask", self._masks, per_replica=False, on_migration="copy", packed=True)]

    def density(self) -> float:
        entries, share = max(1, sum(shard.size for shard in self.context.shards)), 1.0 / self.options.interval
        return share + (1.0 - share) * self.options.payload(self.local_model()) / entries

    # -------------------------------------------------------------------------------------- exchanges

    def _exchange_masked(self, gradients: list[Tensor], applied: Tensor) -> None:
        """Replace the gradients by their mean inside the mask and 0 outside it; add those outside to the residuals."""
        counts = self._entries_in_mask()
        sparse = [gradients[i] for i in self.sparse]
        uncompressed = [gradients[i] for i in self.uncompressed]
        replicas = self.collectives.replicas
        # With one replica nothing is sent, and an unsent payload is never filled.
        if self._kernels is not None and counts and min(counts) > 0 and replicas > 1:
            versions = [bits._version for bits in self._bits]  # a repair writes into the masks, too
            if versions != self._versions:
                whole = [gradient.numel() for gradient in uncompressed]
                self._masked = self._kernels.MaskedTensors(self._bits, self.residuals, counts, whole)
                self._versions = versions
            scale = self.context.gradient_scale
            payload = self._kernels.MaskedPayload(self._masked, [*sparse, *uncompressed], applied, scale, replicas)
            # The payload divides the sums as it stores them.
            self.collectives.all_reduce_chunked(payload, mean=False, chunk_entries=chunk_of_payload(payload.entries))
            return
        self.scale_to_mean(gradients)
        sparse, uncompressed = flat(sparse), flat(uncompressed)
        for x, residual, bits, k in zip(sparse, self.residuals, self._bits, counts, strict=True):
            if k == x.numel():
                continue
            indices = set_positions(unpack_bits(bits, x.numel()), k)
            values = x[indices]
            x.index_fill_(0, indices, 0.0)
            masked_copy_(residual, x + residual, applied)
            x[:k] = values  # the payload reuses the gradient's memory
        copies = [x[:k] for x, k in zip(sparse, counts, strict=True)]
        self.collectives.all_reduce_chunked([*copies, *uncompressed])
        for x, bits, k in zip(sparse, self._bits, counts, strict=True):
            if k < x.numel():
                values = x[:k].clone()
                x.zero_().masked_scatter_(unpack_bits(bits, x.numel()), values)

    def _entries_in_mask(self) -> list[int]:
        """Return the number of mask entries of each tensor.

        Waits for the device if the numbers may have changed: after the first refresh, and after loading a mask with
        another density or layout.
        """
        if self._mask_counts is None:
            counts = [unpack_bits(b, s.size).sum() for b, s in zip(self._bits, self._shards, strict=True)]
            self._mask_counts = torch.stack(counts).tolist() if counts else []
        return self._mask_counts

    # --------------------------------------------------------------------------------------- the mask

    def _update(self, shard: Shard) -> Tensor | None:
        """Return the optimizer's last update without learning rate and weight decay, FP32 (n,).

        This is mhat / (sqrt(vhat) + eps) of Algorithm 2. AdamS stores no v: it computes v from the gradient and the
        previous first moment. None if no step was applied yet.
        """
        group, state = self._group(shard), self.context.optimizer.state[shard.parameter]
        if "exp_avg" not in state:
            return None
        # PyTorch's AdamW keeps moments in the dtype of the parameter.
        (beta1, beta2), moment = group["betas"], local(state["exp_avg"]).reshape(-1).float()
        if "exp_avg_sq" in state:
            second = local(state["exp_avg_sq"]).reshape(-1).float()
        else:
            gradient = contiguous_gradient(shard).float().view(-1)
            previous = (moment - (1.0 - beta1) * gradient).div_(beta1)
            second = previous.square_().mul_(beta2).add_(gradient.square(), alpha=1.0 - beta2)
        steps = local(state["step"]).double()
        denominator = (second / (1.0 - beta2**steps)).sqrt_().add_(group["eps"])
        return (moment / (1.0 - beta1**steps)).div_(denominator)

    def _with_decay(self, shard: Shard, update: Tensor) -> Tensor:
        """Return update + weight_decay * theta, FP32 (n,), with theta before the update."""
        group = self._group(shard)
        lr, decay = group["lr"], group["weight_decay"]
        theta = local(shard.parameter).detach().reshape(-1).float()
        before = theta.add(update, alpha=lr).div_(1.0 - lr * decay)
        return before.mul_(decay).add_(update)

    def _group(self, shard: Shard) -> dict[str, Any]:
        return self.context.optimizer.param_groups[shard.group]


def _all_ones(shard: Shard) -> Tensor:
    """Return a mask of all entries, packed."""
    return packed_bits(torch.ones(shard.size, dtype=torch.bool, device=shard.device))


def _check_betas(beta1: float, beta2: float) -> None:
    if beta1 * beta1 >= beta2:
        raise ValueError(
            f"[optimizer] beta1 = {beta1} and beta2 = {beta2} with [sync] method = 'radius': updates outside the mask "
            f"grow from step to step if beta1 is sqrt(beta2) or more; set beta1 below {math.sqrt(beta2):.4g}, or beta2 "
            f"above {beta1 * beta1:.4g}"
        )


def _check_beta1(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if group["betas"][0] == 0.0:
            raise ValueError(
                "[optimizer] beta1 = 0 with [sync] method = 'radius' and AdamS: the mask depends on the previous first "
                "moment, which beta1 = 0 discards; set beta1 above 0, or [optimizer] name = 'AdamW'"
            )
