"""Algorithm 1 of the SCAPE paper, written down: two buffers, bool masks, N replicas in one process.

Slow and plain on purpose. It shares no code with the product, which is held against it.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Literal:
    """N replicas of the same parameters; sparsified tensors first, then dense ones (1-D)."""

    sparse: list[Tensor]
    dense: list[Tensor]
    replicas: int
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    density: float = 0.1
    density_warmup_steps: int = 0
    block_size: int = 16
    selection: str = "block"
    staleness_scaling: bool = True
    max_staleness: float = 1000.0
    keep_moment: float = 0.5
    max_norm: float | None = 1.0
    clip_mode: str = "moment"
    wire: str = "float32"
    update: str = "replicated"  # in FP32 "sharded" is the same algorithm
    values: str = "float32"
    t: int = 0
    applied: int = 0
    norm: float = 0.0
    m: list[Tensor] = field(default_factory=list)
    e: list[list[Tensor]] = field(default_factory=list)
    A: list[Tensor] = field(default_factory=list)
    P: list[Tensor] = field(default_factory=list)
    mt: list[list[Tensor]] = field(default_factory=list)
    common: list[Tensor] = field(default_factory=list)  # the part of e that is the same on all replicas
    shown: list[Tensor] = field(default_factory=list)  # theta as all replicas have it; rounded where values travel so
    visits: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of rows and columns, FP64

    def __post_init__(self) -> None:
        theta = self.theta
        self.m = [torch.zeros(p.numel()) for p in theta]
        self.common = [torch.zeros(p.numel()) for p in theta]
        self.e = [[torch.zeros(p.numel()) for p in theta] for _ in range(self.replicas)]
        self.A = [torch.ones(p.numel(), dtype=torch.bool) for p in theta]
        self.P = [a.clone() for a in self.A]
        self.shown = [p.clone().view(-1) for p in theta]
        for p in self.sparse:
            self.visits.append(
                (torch.zeros(p.shape[0]).double(), torch.zeros(p.numel() // max(1, p.shape[0])).double())
            )

    @property
    def theta(self) -> list[Tensor]:
        return self.sparse + self.dense

    def density_at(self, t: int) -> float:
        d, warmup = self.density, self.density_warmup_steps
        return max(d, d ** min(1.0, t / warmup)) if warmup else d

    def step(self, gradients: list[list[Tensor]]) -> None:
        """gradients[replica][tensor], in mean units."""
        b1, b2 = self.betas
        self.t += 1
        if not all(g.isfinite().all() for replica in gradients for g in replica):
            return
        self.applied += 1
        n = self.replicas
        self.mt = [
            [b1 * m + (1 - b1) * g.view(-1) + e for m, g, e in zip(self.m, gradients[r], self.e[r], strict=True)]
            for r in range(n)
        ]
        new_mask = self.refresh(self.density_at(self.t + 1), skip_new=self.at_target)
        b, q, gh = [], [], []
        # Where it is sharded, what is the same for all is left out of what travels, and added by its owner.
        common = [b1 * m + c for m, c in zip(self.m, self.common, strict=True)]
        if self.update == "replicated":
            common = [torch.zeros_like(c) for c in common]
        means, lost = self.average([[(self.mt[r][i] - common[i])[a] for i, a in enumerate(self.A)] for r in range(n)])
        for i, a in enumerate(self.A):
            b.append(means[i] + common[i][a])
            self.common[i] = torch.where(a, 0.0, common[i])
            q.append(self.m[i][a])
            gh.append((b[i] - b1 * q[i]) / (1 - b1))
            for r in range(n):
                self.e[r][i] = torch.where(a, 0.0, self.mt[r][i])
                self.e[r][i][a] = lost[r][i]
        self.norm = math.sqrt(sum(float(g.double().square().sum()) for g in gh))
        c = 1.0 if self.max_norm is None else min(1.0, self.max_norm / (self.norm + 1e-6))
        for i, a in enumerate(self.A):
            v = b2 * q[i] ** 2 + (1 - b2) * (c * gh[i]) ** 2
            moment = b[i] if self.clip_mode == "literal" else b1 * q[i] + (1 - b1) * (c * gh[i])
            self.m[i] = torch.zeros_like(self.m[i])
            self.m[i][a] = moment
            u = torch.zeros_like(self.m[i])
            u[a] = (moment / (1 - b1**self.applied)) / (torch.sqrt(v / (1 - b2**self.applied)) + self.eps)
            fresh = a & ~self.P[i]
            if self.staleness_scaling:
                u *= self.staleness(i, a, fresh)
                self.m[i][fresh] *= self.keep_moment
            p, shown = self.theta[i].view(-1), self.shown[i]
            p.copy_(p - self.lr * (u + self.weight_decay * p))
            shown -= self.lr * self.weight_decay * shown
            shown[a] = p[a].bfloat16().float() if self.rounds(self.values) else p[a]
        self.P, self.A = self.A, new_mask

    def staleness(self, i: int, a: Tensor, fresh: Tensor) -> Tensor:
        """The factor on the step of every entry of a tensor: how stale those are that enter, else 1."""
        factor = torch.ones(a.numel())
        if i < len(self.sparse):
            rows, columns = self.visits[i]
            entered = fresh.view(rows.numel(), -1).double()
            if not all(a.all() for a in self.A) and not all(p.all() for p in self.P):
                rows *= 0.8
                rows += 0.2 * entered.sum(1)
                columns *= 0.8
                columns += 0.2 * entered.sum(0)
        if fresh.any():
            mean = min(max((a.numel() - int(a.sum())) / int(fresh.sum()), 1.0), self.max_staleness)
            often = (rows[:, None] / rows.mean()) * (columns / columns.mean())
            finer = (mean / often.clamp(min=1e-3)).clamp(1.0, self.max_staleness).float()
            factor[fresh] = finer.flatten()[fresh]
        return factor

    def average(self, payloads: list[list[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The mean over replicas of what each sends, tensor by tensor, and what each has to keep for the rounding.

        In BF16 a replica rounds what it sends, and what it is the owner of once more when it sends the mean back;
        the owners' parts are equal stretches of the whole payload. Denser masks than the last go in FP32.
        """
        n, counts = self.replicas, [p.numel() for p in payloads[0]]
        whole = [torch.cat(p) for p in payloads]
        if not self.rounds(self.wire):
            total = whole[0].clone()
            for other in whole[1:]:
                total += other
            lost = [torch.zeros_like(total) for _ in range(n)]
            return list((total / n).split(counts)), [list(one.split(counts)) for one in lost]
        sent = [one.to(torch.bfloat16).float() for one in whole]
        mean = sent[0].clone()
        for other in sent[1:]:
            mean += other
        mean /= n
        # Where the update is sharded the mean stays with the owners of its parts.
        arrived = mean if self.update == "sharded" else mean.to(torch.bfloat16).float()
        lost = [one - rounded for one, rounded in zip(whole, sent, strict=True)]
        part = math.ceil(sum(counts) / n)
        for r in range(n):
            own = slice(r * part, (r + 1) * part)
            lost[r][own] += (mean - arrived)[own] * n
        return list(arrived.split(counts)), [list(one.split(counts)) for one in lost]

    def rounds(self, dtype: str) -> bool:
        """Whether what has this dtype is rounded in this step."""
        return dtype == "bfloat16" and self.replicas > 1 and self.at_target

    @property
    def at_target(self) -> bool:
        """Whether the mask in use has as many entries as at the target density."""
        used = [int(a.sum()) for a in self.A]
        return self.density < 1.0 and used == [int(a.sum()) for a in self.refresh(self.density)]

    def refresh(self, density: float, skip_new: bool = False) -> list[Tensor]:
        """M(t): every replica selects in its own run of blocks, from its own mt.

        skip_new: newly entered entries count as zeros, as their mt is about to be spent.
        """
        masks = [torch.ones_like(a) for a in self.A]
        if density >= 1.0:
            return masks
        blocks = []  # (tensor, first entry, end), end to end over the sparsified tensors
        for i, p in enumerate(self.sparse):
            masks[i][:] = False
            blocks += [(i, s, min(s + self.block_size, p.numel())) for s in range(0, p.numel(), self.block_size)]
        run = math.ceil(len(blocks) / self.replicas)
        for r in range(self.replicas):
            own = blocks[r * run : (r + 1) * run]
            if self.selection == "tensor":
                spans = {}
                for i, s, end in own:
                    spans[i] = (spans.get(i, (s, end))[0], end)
                own = [(i, s, end) for i, (s, end) in spans.items()]
            for i, s, end in own:
                size = self.block_size if self.selection == "block" else end - s
                k = min(max(1, round(density * size)), end - s)
                values = self.mt[r][i][s:end].abs()
                if skip_new and self.keep_moment < 1.0 and self.staleness_scaling:
                    values[(self.A[i] & ~self.P[i])[s:end]] = 0.0
                values = values.tolist()
                chosen = sorted(range(end - s), key=lambda j: (-values[j], j))[:k]
                masks[i][[s + j for j in chosen]] = True
        return masks
