"""PowerSGD: low-rank approximation of gradients.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(NeurIPS 2019), arXiv:1905.13727.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.core.tensors import flat, indices_by_key, masked_copy_
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.powersgd.options import PowersgdOptions, factor_rank


class Powersgd(GradientMethod):
    """One step (the paper's Algorithms 1 and 2), for a local shard viewed as a matrix M = gradient + residual, (a, b):

    1. P = mean over replicas of M Q, with orthonormalized columns. One all-reduce contains all matrices and the
       uncompressed parameters.
    2. Q = mean over replicas of M^T P, in a second all-reduce.
    3. The synchronized gradient is P Q^T, the residual is M - P Q^T.

    Q starts from the previous step's value; the first one consists of normal random numbers from a fixed seed, with
    orthonormalized columns. If a column of Q becomes zero (no gradient in that direction), its previous value is kept,
    because a zero column would stay zero.

    Both sums are linear in M. The result therefore depends on the sum of the gradients and residuals only, and not on
    their distribution over the replicas.
    """

    def __init__(self, context: MethodContext, options: PowersgdOptions) -> None:
        super().__init__(context, options)
        ranks = [factor_rank(tuple(shard.local_shape), options.rank) for shard in context.shards]
        self._factored = [i for i, rank in enumerate(ranks) if rank]
        self._uncompressed = [i for i in range(len(context.shards)) if i not in self._factored]
        shards = [context.shards[i] for i in self._factored]
        # A residual for every matrix: other ranks may factor their shards of it, and a checkpoint needs all ranks'.
        self._pending = ErrorFeedback.of([shard for shard in context.shards if shard.parameter.ndim > 1])
        self._residuals = [self._pending.tensors[shard.name] for shard in shards]
        self._q = {
            s.name: torch.empty(s.columns, rank, dtype=torch.float32, device="cpu")
            for s, rank in zip(shards, filter(None, ranks), strict=True)
        }
        for i, (shard, q) in enumerate(zip(shards, self._q.values(), strict=True)):
            self._q[shard.name] = _initial_q(q, i).to(shard.device)
        self._start = options.start if options.start >= 0 else context.part_of_run(10, "start")

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        gradients = flat(gradients)
        pending = [self._pending.tensors.get(shard.name) for shard in self.context.shards]
        pairs = [(g, r.view(-1)) for g, r in zip(gradients, pending, strict=True) if r is not None]
        self.scale_and_add([g for g, _ in pairs], [r for _, r in pairs])
        self.scale_to_mean([g for g, r in zip(gradients, pending, strict=True) if r is None])
        if self.take_full_exchange_request() or info.number <= self._start:
            self.collectives.all_reduce_chunked(gradients)
            self._pending.clear(info.applied)
            return gradients
        matrices = [gradients[i].view(len(r), -1) for i, r in zip(self._factored, self._residuals, strict=True)]
        stored_qs = list(self._q.values())

        ps = [m @ q for m, q in zip(matrices, stored_qs, strict=True)]
        others = [gradients[i] for i in self._uncompressed]
        *ps, means = self._mean([*ps, torch.cat(others or [gradients[0][:0]])])
        for i, values in zip(self._uncompressed, means.split([other.numel() for other in others]), strict=True):
            gradients[i].copy_(values)
            if (residual := self._pending.tensors.get(self.context.shards[i].name)) is not None:
                masked_copy_(residual, 0.0, info.applied)
        ps = orthonormalize_all(ps, info.applied)

        qs = self._mean([m.T @ p for m, p in zip(matrices, ps, strict=True)])
        for matrix, p, q, residual in zip(matrices, ps, qs, self._residuals, strict=True):
            _approximate_(matrix, p, q, residual, info.applied)
        for group in indices_by_key(q.shape for q in stored_qs).values():
            q, previous = (torch.stack([each[i] for i in group]) for each in (qs, stored_qs))
            kept = torch.where((q.norm(dim=1, keepdim=True) > 0) & info.applied, q, previous)
            torch._foreach_copy_([stored_qs[i] for i in group], list(kept))
        return gradients

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the means over replicas. One all-reduce, or none without tensors."""
        if not tensors:
            return []
        values = torch.cat([t.reshape(-1) for t in tensors])
        length = values.numel()
        values = torch.nn.functional.pad(values, (0, self.collectives.padded_size(length) - length))
        self.collectives.all_reduce(values).wait()
        parts = values[:length].split([t.numel() for t in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        for i, q in enumerate(self._q.values()):
            q.copy_(_initial_q(q.cpu(), i))  # the generator of the CPU, as in `__init__`

    def states(self) -> list[State]:
        q = State("q", self._q, per_replica=False, on_migration="rebuild", by_parameter=False)
        return [self._pending.state(), q]

    def density(self) -> float:
        return sum(m.count for m in self.collective_calls()) / max(1, sum(shard.size for shard in self.context.shards))


def _approximate_(matrix: Tensor, p: Tensor, q: Tensor, residual: Tensor, applied: Tensor) -> None:
    """Replace a matrix by p q^T, and the residual by the matrix without it if `applied`, bool ()."""
    if applied.is_cpu:
        product = p @ q.T
        masked_copy_(residual, matrix - product, applied)
        matrix.copy_(product)
    else:  # the libraries for GPUs subtract the product as they compute it
        masked_copy_(residual, torch.addmm(matrix, p, q.T, alpha=-1.0), applied)
        torch.mm(p, q.T, out=matrix)


def _initial_q(like: Tensor, number: int) -> Tensor:
    """Return random orthonormal columns of the shape of `like`, equal on all replicas."""
    generator = torch.Generator(like.device).manual_seed(number)
    return orthonormalize(torch.randn(like.shape, generator=generator, dtype=torch.float32, device=like.device))


def orthonormalize(matrix: Tensor) -> Tensor:
    """Return orthonormal columns that span those of FP32 (..., n, r): Gram-Schmidt in FP64, every column twice.

    In FP32 one pass is not exact for columns that are nearly parallel, as those of a gradient of low rank. A QR of the
    libraries for GPUs factors tall matrices one by one. A zero column stays zero.
    """
    columns = matrix.double().reshape(-1, *matrix.shape[-2:])
    basis = torch.empty_like(columns)
    for j in range(columns.shape[2]):
        column, before = columns[..., j : j + 1], basis[..., :j]
        for _ in range(2 if j else 0):
            column = torch.baddbmm(column, before, before.mT @ column, alpha=-1.0)
        norm = column.norm(dim=1, keepdim=True)
        torch.mul(column, torch.where(norm > 0, 1.0 / norm, 0.0), out=basis[..., j : j + 1])
    return basis.to(matrix.dtype).view(matrix.shape)


def orthonormalize_all(matrices: Sequence[Tensor], applied: Tensor) -> list[Tensor]:
    """Return the results of `orthonormalize`, of zeros if not `applied`. Those of one shape are factored together."""
    bases: dict[int, Tensor] = {}
    for group in indices_by_key(matrix.shape for matrix in matrices).values():
        stacked = torch.stack([matrices[i] for i in group])
        bases |= zip(group, orthonormalize(torch.where(applied, stacked, 0.0)), strict=True)
    return [bases[i] for i in range(len(matrices))]
