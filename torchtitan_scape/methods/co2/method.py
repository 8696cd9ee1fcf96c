"""CO2: local steps, with an average of the replicas that overlaps with the whole next round.

Sun et al., "CO2: Efficient Distributed Training with Full Communication-Computation Overlap", ICLR 2024,
arXiv:2401.16265, Algorithm 1. Names of the paper: x_{t,k} are a replica's parameters after k local steps of round t,
tau is `inner_steps`, alpha `outer_lr`, beta `outer_momentum`, phi `momentum_clip`. The anchor is x_{t,0}.

What the sources leave open, and the choice here:

- Staleness gap. The published code (github.com/weigao266/fairscale-CO2) divides by a constant. Here the gap compares
  the distance that the anchor has moved since the stale round began, |x_{t,0} - x_{t-1,0}|, with the stale mean
  displacement, |x_{t-1,0} - x_{t-1,tau}|, over the whole model. The form 1 + distance / reference is that of Barkai et
  al., "Gap-Aware Mitigation of Gradient Staleness", arXiv:1909.10802. It was not compared with equation 3 of the paper.
- Clipping. The published code limits every entry and then discards the result. Here it limits every entry of the stored
  momentum.
- First round. There is no stale result at its end: the momentum stays zero, and replicas return to x_{0,0}.
"""

from typing import ClassVar

import torch
from torch import Tensor

from torchtitan_scape.methods.base import norm_over_model
from torchtitan_scape.methods.local_updates import LocalUpdates


def staleness_gap(last_step: Tensor, displacement: Tensor) -> Tensor:
    """Return 1 + last_step / displacement, FP32 (), at least 1.

    Args:
        last_step: Norm of the last outer step, FP32 ().
        displacement: Norm of the mean displacement, FP32 (); it may be 0.
    """
    return 1.0 + last_step / displacement.clamp(min=torch.finfo(torch.float32).tiny)


def norm_of(tensor: Tensor) -> Tensor:
    """Return the norm, FP64 ()."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


class Co2(LocalUpdates):
    """Exchanges all parameters at the end of a round, and uses the result at the end of the next one.

    At the end of round t:

    1. D = x_{t-1,0} - the mean of x_{t-1,tau}, from the exchange that round t overlapped with.
    2. Start averaging x_{t,0} - x_{t,tau}.
    3. D = D / gap, with gap = 1 + |alpha m| / |D|.
    4. m = clip(beta m + D); x_{t+1,0} = x_{t,0} - alpha m, on all replicas.

    |alpha m| before step 4 is |x_{t,0} - x_{t-1,0}|. A result in flight contains a round of steps that no replica has
    in its parameters any more, so a run that cannot continue it applies it to the weights.
    """

    has_outer_kernel: ClassVar[bool] = False

    def move_anchor(self, anchor: Tensor, momentum: Tensor | None, mean: Tensor) -> None:
        moved = mean if momentum is None else momentum.mul_(self.options.outer_momentum).add_(mean)
        if clip := self.options.momentum_clip:
            moved.clamp_(-clip, clip)
        anchor.sub_(moved, alpha=self.options.outer_lr)

    def scale_means(self, means: dict[str, Tensor]) -> None:
        if not self.options.gap_penalty:
            return
        # The order of the shards is that of the run, whatever the order in a checkpoint.
        names = [shard.name for shard in self.context.shards]
        stale = [means[name] for name in names]
        # One by one: with `host`, each momentum is copied to the device.
        last = [norm_of(self._momenta[name].to(mean.device)) for name, mean in zip(names, stale, strict=True)]
        gap = staleness_gap(self._norm(last) * self.options.outer_lr, self._norm([norm_of(mean) for mean in stale]))
        torch._foreach_div_(stale, gap)

    def _norm(self, norms: list[Tensor]) -> Tensor:
        """Return the norm over the whole model, FP32 (), from those of the shards, FP64 (). Collective."""
        return norm_over_model(self.context.shards, norms, self.collectives, self.context.grad_norm.device)
