"""PowerSGD: gradients of matrices as products of two thin ones (Vogels, Karimireddy, Jaggi, NeurIPS 2019)."""

import torch
from torch import Tensor

from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.powersgd.options import PowersgdOptions, factor_rank


class Powersgd(GradientMethod):
    """One step (the paper's Algorithms 1 and 2), for a local shard seen as a matrix M = gradient + residual (a, b):

    1. P = mean over replicas of M Q, in one all-reduce for all matrices and what goes whole; columns orthonormalised;
    2. Q = mean over replicas of M^T P, in a second one;
    3. the synchronised gradient is P Q^T, the residual M - P Q^T.

    Q is that of the step before, at first normal numbers from one seed, columns orthonormalised. A column of Q that
    comes out as zero (no gradient there) stays what it was, so that it can find something later.
    """

    def __init__(self, context: MethodContext, options: PowersgdOptions) -> None:
        super().__init__(context, options)
        ranks = [factor_rank(tuple(shard.local_shape), options.rank) for shard in context.shards]
        self._factored = [i for i, rank in enumerate(ranks) if rank]
        self._whole = [i for i in range(len(context.shards)) if i not in self._factored]
        shards = [context.shards[i] for i in self._factored]
        # Of every matrix: whether a shard of it is factored depends on its size, and a checkpoint has all of them.
        self._pending = ErrorFeedback.of([shard for shard in context.shards if shard.parameter.ndim > 1])
        self._residuals = [self._pending.tensors[shard.name] for shard in shards]
        self._q = {s.name: torch.empty(s.columns, rank) for s, rank in zip(shards, filter(None, ranks), strict=True)}
        for i, (shard, q) in enumerate(zip(shards, self._q.values(), strict=True)):
            self._q[shard.name] = _first_q(q, i).to(shard.device)
        self._start = options.start if options.start >= 0 else context.total_steps // 10

    def synchronize(self, gradients: list[Tensor], step: StepInfo) -> list[Tensor]:
        self.scale_to_mean(gradients)
        for gradient, shard in zip(gradients, self.context.shards, strict=True):
            if (residual := self._pending.tensors.get(shard.name)) is not None:
                gradient.add_(residual.view(-1))
        if self.take_full_exchange_request() or step.number <= self._start:
            self.collectives.all_reduce_chunked(gradients)
            self._pending.clear(step.applied)
            return gradients
        matrices = [gradients[i].view(len(r), -1) for i, r in zip(self._factored, self._residuals, strict=True)]
        kept = list(self._q.values())
        qs = kept if self.options.warm_start else [_first_q(q, i, step.number) for i, q in enumerate(kept)]

        ps = [m @ q for m, q in zip(matrices, qs, strict=True)]
        *ps, whole = self._mean([*ps, torch.cat([gradients[i] for i in self._whole] or [gradients[0][:0]])])
        for i, values in zip(self._whole, whole.split([gradients[i].numel() for i in self._whole]), strict=True):
            gradients[i].copy_(values)
            if (residual := self._pending.tensors.get(self.context.shards[i].name)) is not None:
                masked_copy_(residual, 0.0, step.applied)
        ps = [orthonormalised(torch.where(step.applied, p, 0.0)) for p in ps]

        qs = self._mean([m.T @ p for m, p in zip(matrices, ps, strict=True)])
        for matrix, p, q, residual, old in zip(matrices, ps, qs, self._residuals, kept, strict=True):
            product = p @ q.T
            masked_copy_(residual, matrix - product, step.applied)
            matrix.copy_(product)
            masked_copy_(old, torch.where(q.norm(dim=0) > 0, q, old), step.applied)
        return gradients

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """The means over replicas, in one all-reduce."""
        flat = torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.empty(0)
        length = flat.numel()
        flat = torch.nn.functional.pad(flat, (0, self.collectives.padded_size(length) - length))
        self.collectives.all_reduce(flat).wait()
        parts = flat[:length].split([t.numel() for t in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def states(self) -> list[State]:
        q = State("q", self._q, per_replica=False, on_migration="rebuild", by_parameter=False)
        return [self._pending.state(), q]

    def density(self) -> float:
        return sum(m.count for m in self.collective_calls()) / max(1, sum(shard.size for shard in self.context.shards))


def _first_q(like: Tensor, number: int, step: int = 0) -> Tensor:
    """Orthonormal columns of the shape of `like`, the same on every replica."""
    generator = torch.Generator(like.device).manual_seed(number + (step << 20))
    return orthonormalised(torch.randn(like.shape, generator=generator, device=like.device))


def orthonormalised(matrix: Tensor) -> Tensor:
    """The columns of FP32 (n, r), orthonormal: Gram-Schmidt up to two, else QR. Of two a zero one stays zero."""
    if matrix.shape[1] > 2:
        return torch.linalg.qr(matrix).Q
    columns: list[Tensor] = []
    for column in matrix.unbind(1):
        for before in columns:
            column = column - (before @ column) * before
        norm = column.norm()
        columns.append(torch.where(norm > 0, column / norm, 0.0))
    return torch.stack(columns, dim=1)
