"""Algorithm 1 of the SCAPE paper, written plainly: two buffers, bool masks, N replicas in one process.

Slow and simple on purpose. The product is compared with it. It shares no code with the product, except for the rounding
of block codes.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchtitan_scape.kernels.codec.reference import BlockCode


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
    max_norm: float | None = 1.0
    clip_mode: str = "moment"
    code: str = "float32"
    update: str = "replicated"  # in FP32, "sharded" is the same algorithm
    chunk_entries: int = 64  # of payloads without a buffer, as in `tests.replicas`
    t: int = 0
    applied: int = 0
    used_at: float = 1.0  # density at which the current mask was selected
    norm: float = 0.0
    m: list[Tensor] = field(default_factory=list)
    e: list[list[Tensor]] = field(default_factory=list)
    A: list[Tensor] = field(default_factory=list)
    P: list[Tensor] = field(default_factory=list)
    mt: list[list[Tensor]] = field(default_factory=list)
    common: list[Tensor] = field(default_factory=list)  # the part of e that is equal on all replicas
    visits: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # visit rates of rows and columns, FP64

    def __post_init__(self) -> None:
        theta = self.theta
        self.m = [torch.zeros(p.numel()) for p in theta]
        self.common = [torch.zeros(p.numel()) for p in theta]
        self.e = [[torch.zeros(p.numel()) for p in theta] for _ in range(self.replicas)]
        self.A = [torch.ones(p.numel(), dtype=torch.bool) for p in theta]
        self.P = [a.clone() for a in self.A]
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
        """Run a step with gradients[replica][tensor], in mean units."""
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
        # A sharded update does not send the shared part; its owner adds it.
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
                self.m[i][fresh] *= 0.5
            p = self.theta[i].view(-1)
            p.copy_(p - self.lr * (u + self.weight_decay * p))
        self.P, self.A, self.used_at = self.A, new_mask, self.density_at(self.t + 1)

    def staleness(self, i: int, a: Tensor, fresh: Tensor) -> Tensor:
        """Return the factor on the step of every entry of a tensor: the staleness of entering entries, otherwise 1."""
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
            mean = min(max((a.numel() - int(a.sum())) / int(fresh.sum()), 1.0), 1000.0)
            often = (rows[:, None] / rows.mean()) * (columns / columns.mean())
            finer = (mean / often.clamp(min=1e-3)).clamp(1.0, 1000.0).float()
            factor[fresh] = finer.flatten()[fresh]
        return factor

    def average(self, payloads: list[list[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Return the mean over replicas by tensor, and each replica's quantization errors.

        A replica quantizes the values that it sends; an owner also quantizes the mean that it sends back. With a
        sharded update owners keep the mean unquantized.
        """
        n, name = self.replicas, self.code_now
        counts = [p.numel() for p in payloads[0]]
        whole = [pad(torch.cat(p), (0, 1)) for p in payloads]  # a zero at the end, for padding
        mean, lost = in_order(whole) / n, [torch.zeros_like(one) for one in whole]
        for owner, row in enumerate(self.rows() if name != "float32" else []):
            sent = [rounded(one[row], name) for one in whole]
            exact = in_order(sent) / n
            mean[row] = exact if self.update == "sharded" else rounded(exact, name)
            for r in range(n):
                lost[r][row] = whole[r][row] - sent[r]
            lost[owner][row] += (exact - mean[row]) * n
        if not self.at_target:  # there is no buffer for the errors
            lost = [torch.zeros_like(one) for one in whole]
        return list(mean[:-1].split(counts)), [list(one[:-1].split(counts)) for one in lost]

    @property
    def code_now(self) -> str:
        """The encoding in this step. Masks of the density warm-up use INT8."""
        if self.replicas == 1 or self.density >= 1.0 or self.code == "float32":
            return "float32"
        if self.at_target:
            return self.code
        return "int8" if self.used_at < 1.0 else "float32"

    def rows(self) -> list[Tensor]:
        """Return the payload indices of each owner's encoded entries, in order; blocks are padded with the index after
        the last one."""
        n, unit = self.replicas, 128
        used = torch.cat(self.A)
        places, masked = torch.arange(int(used.sum())), sum(int(a.sum()) for a in self.A[: len(self.sparse)])

        def filled(some: Tensor, multiple: int = unit) -> Tensor:
            return pad(some, (0, -some.numel() % multiple), value=places.numel())

        sparse, dense = places[:masked], places[masked:] if self.at_target else places[:0]
        if self.update == "sharded":
            owner = self.owners()[used]
            return [torch.cat([filled(some[owner[some] == r]) for some in (sparse, dense)]) for r in range(n)]
        # With a buffer in one message, without one in chunks.
        chunks = [torch.cat((filled(sparse), dense))] if self.at_target else sparse.split(self.chunk_entries)
        return list(torch.cat([filled(chunk, n * unit).view(n, -1) for chunk in chunks], 1))

    def owners(self) -> Tensor:
        """Return the owner of every entry: of its block, or of its slice of tensors without a mask."""
        owners = [torch.empty(p.numel(), dtype=torch.int64) for p in self.theta]
        for r, run in enumerate(self.runs()):
            for i, start, end in run:
                owners[i][start:end] = r
        whole = sum(p.numel() for p in self.dense)
        share = max(1, math.ceil(whole / (4 * self.replicas)) * 4)
        return torch.cat([*owners[: len(self.sparse)], torch.arange(whole) // share])

    def runs(self) -> list[list[tuple[int, int, int]]]:
        """Return every replica's blocks, (tensor, first entry, end), consecutive over the sparsified tensors."""
        size, blocks = self.block_size, []
        for i, p in enumerate(self.sparse):
            blocks += [(i, s, min(s + size, p.numel())) for s in range(0, p.numel(), size)]
        run = math.ceil(len(blocks) / self.replicas)
        return [blocks[r * run : (r + 1) * run] for r in range(self.replicas)]

    @property
    def at_target(self) -> bool:
        """Whether the current mask has the number of entries of the target density."""
        used = [int(a.sum()) for a in self.A]
        return self.density < 1.0 and used == [int(a.sum()) for a in self.refresh(self.density)]

    def refresh(self, density: float, skip_new: bool = False) -> list[Tensor]:
        """Return M(t): every replica selects in its own share of the blocks, from its own mt.

        Args:
            skip_new: treat newly entered entries as zeros, because this step uses up their moment.
        """
        masks = [torch.ones_like(a) for a in self.A]
        if density >= 1.0:
            return masks
        for i in range(len(self.sparse)):
            masks[i][:] = False
        for r, own in enumerate(self.runs()):
            if self.selection == "tensor":
                spans = dict[int, tuple[int, int]]()
                for i, s, end in own:
                    spans[i] = (spans.get(i, (s, end))[0], end)
                own = [(i, s, end) for i, (s, end) in spans.items()]
            for i, s, end in own:
                size = self.block_size if self.selection == "block" else end - s
                k = min(max(1, round(density * size)), end - s)
                values = self.mt[r][i][s:end].abs()
                if skip_new and self.staleness_scaling:
                    values[(self.A[i] & ~self.P[i])[s:end]] = 0.0
                values = values.tolist()
                chosen = sorted(range(end - s), key=lambda j: (-values[j], j))[:k]
                masks[i][[s + j for j in chosen]] = True
        return masks


def in_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for other in tensors[1:]:
        total += other
    return total


def rounded(values: Tensor, name: str) -> Tensor:
    """Return the decoded FP32 values. Block codes are those of the product, which have separate tests."""
    arrived = torch.empty_like(values)
    if values.numel():
        code = BlockCode(name)
        code.decode(code.encode(values.view(1, -1)), arrived.view(1, -1))
    return arrived
