"""PowerSGD: gradients of matrices as products of two thin ones (Vogels, Karimireddy, Jaggi, NeurIPS 2019)."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.base import GradientMethod
from torchtitan_scape.methods.interface import CollectiveCall, ErrorFeedback, MethodContext, State, StepInfo
from torchtitan_scape.methods.options import LAYOUT, MethodOptions
from torchtitan_scape.planner.volumes import PlannedRun as PlannedMethod


@dataclass
class PowersgdOptions(MethodOptions):
    """[sync.powersgd]: read with method = "powersgd"."""

    section: ClassVar[str] = "sync.powersgd"

    rank: int = field(default=4, metadata=LAYOUT)
    """Columns of the thin matrices. A matrix for which two of them are no smaller than itself goes whole"""

    start: int = -1
    """So many steps at first are dense; -1 for a tenth of training.steps"""

    warm_start: bool = True
    """Begin each step with the factor of the step before it, else with random numbers"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.rank >= 1, "rank", "it must be 1 or more")
        self.require(self.start >= -1, "start", "it must be 0 or more, or -1 for a tenth of training.steps")

    def planned(self, optimizer: str) -> PlannedMethod:
        return PlannedMethod("powersgd", rank=self.rank, optimizer=optimizer.lower())


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
        self._factored = [i for i, shard in enumerate(context.shards) if _rank(shard, options.rank)]
        self._whole = [i for i in range(len(context.shards)) if i not in self._factored]
        shards = [context.shards[i] for i in self._factored]
        # Of every matrix: whether a shard of it is factored depends on its size, and a checkpoint has all of them.
        self._pending = ErrorFeedback.of([shard for shard in context.shards if shard.parameter.ndim > 1])
        self._residuals = [self._pending.tensors[shard.name] for shard in shards]
        self._q = {shard.name: torch.empty(shard.columns, _rank(shard, options.rank)) for shard in shards}
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

    def collective_calls(self) -> list[CollectiveCall]:
        shards, filled_up = self.context.shards, self.collectives.padded_size
        ps = sum(len(r) * q.shape[1] for r, q in zip(self._residuals, self._q.values(), strict=True))
        sizes = ps + sum(shards[i].size for i in self._whole), sum(q.numel() for q in self._q.values())
        return [CollectiveCall("all_reduce", filled_up(size)) for size in sizes]

    def density(self) -> float:
        return sum(m.size for m in self.collective_calls()) / max(1, sum(shard.size for shard in self.context.shards))


def _rank(shard: Shard, rank: int) -> int:
    """Columns of the shard's factors; 0 where it goes whole."""
    if shard.parameter.ndim < 2 or not shard.size:
        return 0
    rows, columns = shard.size // shard.columns, shard.columns
    least = min(rows, columns, rank)
    return least if 2 * least * (rows + columns) < rows * columns else 0


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
