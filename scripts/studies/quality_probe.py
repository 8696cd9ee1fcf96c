"""A probe that follows a short run on a CPU: waits outside the mask, movement in visits, residuals, the best mask.

quality_mechanism.py says what the figures mean.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.scape import reference
from kernels.scape.blocks import entries_per_block
from torchtitan_scape.core.parameters import local

SETTLED = 0.2  # the share of the steps that figures leave out
WINDOWS = (1, 2, 5, 10, 20, 50, 100, 200, 400)  # steps over which displacements are taken
SHORT = 10  # steps; an entry with a wait up to here has returned shortly after it left
Row = dict[str, Any]


class Waits:
    """How long entries wait outside the mask, from the masks in use: `enter` at every step, in order."""

    def __init__(self, n: int) -> None:
        self.last = torch.zeros(n, dtype=torch.int32)  # last step inside; 0 before the first one

    def enter(self, mask: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """What enters and what leaves at `step`, bool (n,), and the steps spent outside by what enters, FP32."""
        before = self.last == step - 1
        fresh, left = mask & ~before, before & ~mask
        waits = (step - 1 - self.last[fresh]).float()
        self.last[mask] = step
        return fresh, left, waits


def block_top(values: Tensor, k: int, block_size: int) -> Tensor:
    """bool (n,): the k largest |values| of every block."""
    mask = reference.offsets_to_mask(reference.select_blocks(values, k, block_size), block_size)
    return reference.unpack_bits(mask, values.numel())


def overlap(mask: Tensor, best: Tensor) -> float:
    """Share of `mask` that lies in `best`."""
    return ((mask & best).sum() / mask.sum().clamp(min=1)).item()


def correlation(x: Tensor, y: Tensor) -> float | None:
    """None where there is nothing but rounding to correlate."""
    if len(x) < 2 or min(x.std(), y.std()) < 1e-3:
        return None
    return torch.corrcoef(torch.stack([x, y]).double())[0, 1].item()


def by_wait(waits: Tensor, moved: Tensor) -> list[list[float]]:
    """[lowest, highest wait, visits, their mean displacement], in about three bins an octave."""
    found = []
    for low, high in itertools.pairwise(sorted({round(2 ** (i / 3)) for i in range(3 * 20)})):
        inside = (waits >= low) & (waits < high)
        if inside.any():
            found.append([low, high - 1, int(inside.sum()), moved[inside].mean().item()])
    return found


class View:
    """What the probe sees of SCAPE, all that it knows of the inside: masks, replicas' states, averaged payloads.

    Args:
        replicas: the method of each; sizes: of the sparsified tensors, their first ones.
    """

    def __init__(self, replicas: Sequence[Any], sizes: Sequence[int]) -> None:
        self.replicas, self.sizes = replicas, list(sizes)
        self.passes, self.masks = replicas[0].passes, replicas[0].masks
        self.payload: dict[int, Tensor] = {}
        self.listening = False
        # `squares` is handed the averaged payload, and overwrites it.
        self._squares, self.passes.squares = self.passes.squares, self._listen

    def _listen(self, part: Any) -> Tensor:
        if self.listening and self.sparse:
            average, places = self.passes.payload, self.passes.payload_layout.positions
            for i in range(part.first, min(part.end, len(self.sizes))):
                self.payload[i] = average[places[i] : places[i] + self.passes.counts[i]].clone()
        return self._squares(part)

    @property
    def sparse(self) -> bool:
        """Whether the density has come to its target."""
        return self.passes.compact

    def used(self) -> Tensor:
        """bool (n,): the mask of the step."""
        bits = [self.passes.layout.bits(self.masks.in_use, i) for i in range(len(self.sizes))]
        pairs = zip(bits, self.sizes, strict=True)
        return torch.cat([torch.ones(n).bool() if b is None else reference.unpack_bits(b, n) for b, n in pairs])

    def states(self) -> Tensor:
        """FP32 (replicas, n): off the mask the residuals."""
        kept = [one.passes.kept("state")[: len(self.sizes)] for one in self.replicas]
        return torch.stack([torch.cat([state.view(-1) for state in states]) for states in kept])

    def average(self) -> Tensor:
        """FP32: the payload of the last step that was listened to, averaged, entry by entry of the mask."""
        return torch.cat([self.payload[i] for i in range(len(self.sizes))])

    def best(self, moment: Tensor) -> Tensor:
        """bool (n,): the mask of the largest |moment| in the regions in which the method selects."""
        passes, layout = self.passes, self.passes.layout
        found = []
        for i, values in enumerate(moment.split(self.sizes)):
            if passes.selection == "block":
                k = entries_per_block(passes.density, layout.block_size)
                found.append(block_top(values, k, layout.block_size))
                continue
            for start, end in sorted(layout.owned(i, replica) for replica in range(layout.replicas)):
                if n := end - start:  # one block, of whole bytes
                    found.append(block_top(values[start:end], entries_per_block(passes.density, n), -(-n // 8) * 8))
        return torch.cat(found)

    @property
    def selects_new(self) -> bool:
        """Whether what has just entered may be selected again."""
        return self.passes.keeps >= 1.0


class Probe:
    """Follows a run on its sparsified tensors, by hooks before and after the optimizer's step."""

    def __init__(self, optimizers: Any, steps: int) -> None:
        optimizer = optimizers.inner
        replicas = [method for method in optimizers.methods if method.holds_optimizer_state]
        self.group, self.settled, self.every = optimizer.param_groups[0], round(SETTLED * steps), max(1, steps // 100)
        self.tensors = [local(p).detach().view(-1) for p in self.group["params"] if p.ndim >= 2]
        sizes = [tensor.numel() for tensor in self.tensors]
        self.n, self.step = sum(sizes), 0
        self.view = View(replicas, sizes) if replicas else None
        self.moved = {window: torch.zeros(self.n) for window in WINDOWS}
        self.net: dict[str, list[float]] = {}
        self.waits, self.waited = Waits(self.n), torch.zeros(self.n)  # the wait before the present or the last visit
        self.visited, self.entry = torch.zeros(2, self.n)  # displacement in it, and in its first step
        self.entered, self.ended = [torch.empty(3, 0)], [torch.empty(2, 0)]
        self.rows: list[Row] = []
        self.selected: tuple[Row, Tensor] | None = None  # the last row, and what was best to select in its step
        optimizers.register_step_pre_hook(self.before)
        optimizers.register_step_post_hook(self.after)

    def before(self, *_: Any) -> None:
        self.step += 1
        self.theta = torch.cat(self.tensors)
        if self.view is not None:
            self.view.listening = self.step % self.every == 0

    def after(self, *_: Any) -> None:
        lr = self.group["lr"]
        u = (self.theta - lr * self.group["weight_decay"] * self.theta - torch.cat(self.tensors)) / lr
        for window, moved in self.moved.items():
            moved += u
            if self.step % window == 0:
                if self.step - window >= self.settled:
                    self.net.setdefault(str(window), []).append(moved.abs().mean().item())
                moved.zero_()
        if self.view is not None:
            self.visit(self.view, u)

    def visit(self, view: View, u: Tensor) -> None:
        used = view.used()
        fresh, left, waits = self.waits.enter(used, self.step)
        if self.selected is not None:
            row, best = self.selected
            row["overlap_selected"] = overlap(used, best)
            self.selected = None
        if view.listening and view.sparse:
            if self.step > self.settled:
                self.pairs(u, fresh, left, waits)
            self.note(view, u, used, fresh)
        self.entry[fresh], self.waited[fresh], self.visited[fresh] = u[fresh], waits, 0.0
        self.visited += torch.where(used, u, 0.0)

    def pairs(self, u: Tensor, fresh: Tensor, left: Tensor, waits: Tensor) -> None:
        """What the visits that begin and those that end have waited, with their factors and displacements."""
        beta1, beta2 = self.group["betas"]
        factors, signs = u[fresh].abs() / ((1 - beta1) / math.sqrt(1 - beta2)), (u * self.entry)[fresh].sign()
        real = factors > 0.5  # an entry that never had a gradient does not move
        self.entered.append(torch.stack([waits, factors, signs])[:, real])
        self.ended.append(torch.stack([self.waited, self.visited.abs()])[:, left])

    def note(self, view: View, u: Tensor, used: Tensor, fresh: Tensor) -> None:
        """A row of figures of this step."""
        residual = torch.where(used, 0.0, view.states())
        # The replicas' mean of mt: of what they keep off the mask, and the averaged payload on it.
        moment = residual.mean(0)
        moment[used] = view.average()
        best = view.best(moment)
        row = {
            "step": self.step,
            "new_slots": overlap(used, fresh),
            "new_norm": (u[fresh].square().sum() / u.square().sum()).item(),
            "residual": residual.square().sum(1).mean().sqrt().item(),
            "overlap_used": overlap(used, best),
        }
        self.rows.append(row)
        self.selected = row, best if view.selects_new else view.best(torch.where(fresh, 0.0, moment))

    def figures(self) -> Row:
        """What is stored."""
        found: Row = {"entries": self.n, "net": {key: sum(each) / len(each) for key, each in self.net.items()}}
        if self.view is None:
            return found
        waits, factors, signs = torch.cat(self.entered, dim=1)
        again = signs[(waits <= SHORT) & (signs != 0)]
        sorted_waits = waits.sort().values.tolist()
        means = {
            "wait": waits.mean().item(),
            "quantiles": [int(sorted_waits[int(share * len(waits))]) for share in (0.1, 0.5, 0.9)],
            "factor": factors.mean().item(),
            "correlation": correlation(waits.log(), factors.log()),
            "never": (self.waits.last <= self.settled).float().mean().item(),
            "short": (waits <= SHORT).float().mean().item(),
            "same_sign": (again > 0).float().mean().item(),
        }
        settled = [row for row in self.rows if row["step"] > self.settled and "overlap_selected" in row]
        means |= {key: sum(row[key] for row in settled) / len(settled) for key in settled[0]}
        curves = {name: [[row["step"], row[name]] for row in self.rows] for name in ("residual", "overlap_used")}
        return found | {"means": means, "visits": by_wait(*torch.cat(self.ended, dim=1)), "curves": curves}
