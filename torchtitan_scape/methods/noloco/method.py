"""NoLoCo: several local steps, then an outer step with the mean over a random pair of replicas.

Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models" (2025), arXiv:2506.10911.
This is the outer step of its Section 3.2. The routing of pipeline stages in Section 3.1 is not part of it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import stored
from torchtitan_scape.methods.base import LocalMethod
from torchtitan_scape.methods.interface import MethodContext, State, StepInfo
from torchtitan_scape.methods.noloco.options import NolocoOptions
from torchtitan_scape.topology.chunks import ConcatSource


class Noloco(LocalMethod):
    """Outer step of replica i with its partner (phi_i: slow weights, theta_i: parameters, delta_i: momentum).

    Every `inner_steps` steps, after the inner optimizer's update, with means over the pair:

    1. Delta_i = theta_i - phi_i                                                            (Eq. 1)
    2. delta_i = alpha delta_i + beta mean(Delta) - gamma (phi_i - mean(phi))               (Eq. 2)
    3. phi_i = phi_i + delta_i; theta_i = phi_i                                             (Eq. 3)

    alpha is `outer_momentum`, beta `outer_lr` and gamma `averaging_rate`. Eq. 2 is printed with a minus sign before
    beta; the paper's Eq. 32 has a plus sign. docs/reference/methods/noloco.md has the other deviations from the paper.

    The paper sends Delta_i and phi_i. Step 2 needs only the mean of one tensor, u_i = phi_i + (beta / gamma) Delta_i:
    delta_i = alpha delta_i + gamma (mean(u) - phi_i). This equals step 2 up to FP32 rounding.

    A full exchange is an outer step with the means over all replicas, which makes them equal. In a skipped step there
    is no exchange. The displacement then waits for the next round.
    """

    def __init__(self, context: MethodContext, options: NolocoOptions) -> None:
        super().__init__(context, options)
        self._slow = {s.name: stored(s.parameter).detach().to(torch.float32, copy=True) for s in context.shards}
        self._momenta: dict[str, Tensor] = {}
        if options.outer_momentum:
            self._momenta = {name: torch.zeros_like(values) for name, values in self._slow.items()}

    def exchange(self, info: StepInfo) -> None:
        full = self.take_full_exchange_request()
        round_number, left = divmod(info.number, self.options.inner_steps)
        if (left and not full) or not info.applied.item():
            return
        if full:
            self._exchange_with_all()
        else:
            step = _OuterStep(self.options, self._flat(self._slow), self._parameters(), self._flat(self._momenta))
            self.collectives.pair_mean_chunked(step, round_number)

    def states(self) -> list[State]:
        states = [State("slow_weights", self._slow, per_replica=True, on_migration="model")]
        if self._momenta:
            states.append(State("slow_momentum", self._momenta, per_replica=True, on_migration="copy"))
        return states

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        for momentum in self._momenta.values():
            momentum.zero_()

    def density(self) -> float:
        return 1.0 / self.options.inner_steps

    def _flat(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        return [tensors[shard.name].view(-1) for shard in self.context.shards] if tensors else []

    def _parameters(self) -> list[Tensor]:
        return [stored(shard.parameter).detach().view(-1) for shard in self.context.shards]

    def _exchange_with_all(self) -> None:
        """Run the outer step with the means over all replicas. They have equal weights and momenta afterwards."""
        alpha, beta = self.options.outer_momentum, self.options.outer_lr
        slow, fast, momenta = self._flat(self._slow), self._parameters(), self._flat(self._momenta)
        momenta = momenta or [torch.zeros_like(values) for values in slow]
        for phi, theta, delta in zip(slow, fast, momenta, strict=True):
            delta.mul_(alpha).add_(theta.float() - phi, alpha=beta)
        self.collectives.all_reduce_chunked([*slow, *momenta])
        for phi, theta, delta in zip(slow, fast, momenta, strict=True):
            theta.copy_(phi.add_(delta))


class _OuterStep:
    """`topology.chunks.Source` that sends u_i and applies the outer step with the mean that it receives.

    Args:
        slow, fast, momenta: Flat tensors of the slow weights, FP32, the parameters, and the momenta, FP32; no momenta
            if the momentum is 0.
    """

    def __init__(
        self, options: NolocoOptions, slow: Sequence[Tensor], fast: Sequence[Tensor], momenta: Sequence[Tensor]
    ) -> None:
        self._alpha, self._gamma = options.outer_momentum, options.averaging_rate
        self._weight = options.outer_lr / options.averaging_rate
        self._slow, self._fast, self._momenta = slow, fast, momenta
        self._concatenated = ConcatSource(slow)
        self.entries, self.device = self._concatenated.entries, self._concatenated.device

    def fill(self, chunk: Tensor, first: int) -> None:
        for i, part, values in self._views(chunk, first):
            torch.lerp(self._slow[i][part], self._fast[i][part].float(), self._weight, out=values)

    def store(self, chunk: Tensor, first: int) -> None:
        for i, part, mean in self._views(chunk, first):
            phi, theta = self._slow[i][part], self._fast[i][part]
            step = mean.sub_(phi).mul_(self._gamma)
            if self._momenta:
                step = self._momenta[i][part].mul_(self._alpha).add_(step)
            theta.copy_(phi.add_(step))

    def _views(self, chunk: Tensor, first: int) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield (number of a tensor, slice of it, the same entries of the chunk)."""
        at = 0
        for i, part in self._concatenated.slices(first, chunk.numel()):
            length = min(part.stop, self._slow[i].numel()) - part.start
            yield i, part, chunk[at : at + length]
            at += length
