"""How SCAPE's update moves entries, beside dense AdamS: waits, distances and residuals, from a probe in short runs.

    python scripts/quality_mechanism.py run            # every method below; --again trains those that are stored too
    python scripts/quality_mechanism.py report         # table.md and plots, from the stored cells alone

Runs are those of the quality study (methods and recipe of scripts/quality_grid.toml, simulated replicas in one process,
on the CPU), each in a process of its own. A stored one is not run again unless asked for: use --again behind a change
of the code. Runs of other lengths belong into an --output of their own.

All figures are of the sparsified entries, from a fifth of the steps on: the density has then been at its target for a
tenth. A wait is the number of steps that an entry has spent outside the mask when it enters; a visit is its steps
inside from then on. Movement is in learning rates, without weight decay. The factor on the first step of a visit is
against (1 - beta1) / sqrt(1 - beta2), which an entry without a moment moves by. The best mask is the one that the
replicas' mean of their new moments, residuals included, would select.
"""

import argparse
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from kernels import reference  # noqa: E402
from kernels.blocks import entries_per_block  # noqa: E402
from scripts.quality_cells import Cell, Grid, Set, as_argument  # noqa: E402
from scripts.quality_runs import ALONE, Store, versions  # noqa: E402
from scripts.scaling_report import COLOURS, MARKERS, markdown, save, subplots  # noqa: E402

RATES = {"dense-adams": 4e-3} | {
    f"scape-{density:g}{rule}": rate
    for density, rate in ((0.1, 4e-3), (0.01, 2e-3))
    for rule in ("-paper", "-tensor-waits", "")
}
RULES = ("AdamS, dense", "the paper's rule", "one wait a tensor, moment kept", "the default rule")
REPLICAS, SEED = 4, 0
SETTLED = 0.2  # the share of the steps that figures leave out
WINDOWS = (1, 2, 5, 10, 20, 50, 100, 200, 400)  # steps over which displacements are taken
FEW = 30  # visits, of which the mean displacement is not drawn
SHORT = 10  # steps; an entry with a wait up to here has returned shortly after it left
# The probe looks at what runs on a CPU.
NO_GPU = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
Row = dict[str, Any]
Points = list[tuple[float, float]]


# -------------------------------------------------------------------------------------- functions on masks


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


# ------------------------------------------------------------------------------------------------ the probe


class Probe:
    """Follows a run on its sparsified tensors, by hooks before and after the optimizer's step and at the exchange."""

    def __init__(self, optimizers: Any, steps: int) -> None:
        from torchtitan_scape.optimizer.shards import local

        optimizer = optimizers.optimizers[0]
        self.scape: Any = getattr(optimizers, "scape", None)
        self.group, self.settled, self.every = optimizer.param_groups[0], round(SETTLED * steps), max(1, steps // 100)
        self.tensors = [local(p).detach().view(-1) for p in self.group["params"] if p.ndim >= 2]
        self.sizes = [tensor.numel() for tensor in self.tensors]
        self.n, self.step = sum(self.sizes), 0
        self.moved = {window: torch.zeros(self.n) for window in WINDOWS}
        self.net: dict[str, list[float]] = {}
        self.waits, self.waited = Waits(self.n), torch.zeros(self.n)  # the wait before the present or the last visit
        self.visited, self.entry = torch.zeros(2, self.n)  # displacement in it, and in its first step
        self.entered, self.ended = [torch.empty(3, 0)], [torch.empty(2, 0)]
        self.rows: list[Row] = []
        self.selected: tuple[Row, Tensor] | None = None  # the last row, and what was best to select in its step
        self.payload: dict[int, Tensor] = {}
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)
        if self.scape is not None:
            # `squares` is handed the averaged payload, and overwrites it.
            self.squares, self.scape.passes.squares = self.scape.passes.squares, self.look

    def before(self, *_: Any) -> None:
        self.step += 1
        self.theta = torch.cat(self.tensors)

    def look(self, part: Any) -> Tensor:
        passes = self.scape.passes
        if self.step % self.every == 0 and passes.compact:
            average, places = passes.payload[0], passes.positions()
            for i in range(part.first, min(part.end, passes.sparsified)):
                self.payload[i] = average[places[i] : places[i] + passes.counts[i]].clone()
        return self.squares(part)

    def after(self, *_: Any) -> None:
        lr = self.group["lr"]
        u = (self.theta - lr * self.group["weight_decay"] * self.theta - torch.cat(self.tensors)) / lr
        for window, moved in self.moved.items():
            moved += u
            if self.step % window == 0:
                if self.step - window >= self.settled:
                    self.net.setdefault(str(window), []).append(moved.abs().mean().item())
                moved.zero_()
        if self.scape is not None:
            self.visit(u)

    def visit(self, u: Tensor) -> None:
        masks, passes = self.scape.masks, self.scape.passes
        bits = [passes.layout.bits(masks.in_use, i) for i in range(len(self.sizes))]
        pairs = zip(bits, self.sizes, strict=True)
        used = torch.cat([torch.ones(n).bool() if b is None else reference.unpack_bits(b, n) for b, n in pairs])
        fresh, left, waits = self.waits.enter(used, self.step)
        if self.selected is not None:
            row, best = self.selected
            row["overlap_selected"] = overlap(used, best)
            self.selected = None
        if self.step % self.every == 0 and passes.compact:
            if self.step > self.settled:
                self.pairs(u, fresh, left, waits)
            self.note(u, used, fresh)
        self.entry[fresh], self.waited[fresh], self.visited[fresh] = u[fresh], waits, 0.0
        self.visited += torch.where(used, u, 0.0)

    def pairs(self, u: Tensor, fresh: Tensor, left: Tensor, waits: Tensor) -> None:
        """What the visits that begin and those that end have waited, with their factors and displacements."""
        beta1, beta2 = self.group["betas"]
        factors, signs = u[fresh].abs() / ((1 - beta1) / math.sqrt(1 - beta2)), (u * self.entry)[fresh].sign()
        real = factors > 0.5  # an entry that never had a gradient does not move
        self.entered.append(torch.stack([waits, factors, signs])[:, real])
        self.ended.append(torch.stack([self.waited, self.visited.abs()])[:, left])

    def note(self, u: Tensor, used: Tensor, fresh: Tensor) -> None:
        """A row of figures of this step."""
        passes = self.scape.passes
        states = torch.cat(passes.states[: len(self.sizes)], dim=1)  # a row a replica
        residual = torch.where(used, 0.0, states)
        # The replicas' mean of mt: of what they keep off the mask, and the averaged payload on it.
        moment = residual.mean(0)
        moment[used] = torch.cat([self.payload[i] for i in range(len(self.sizes))])
        best = self.best(moment)
        row = {
            "step": self.step,
            "new_slots": overlap(used, fresh),
            "new_norm": (u[fresh].square().sum() / u.square().sum()).item(),
            "residual": residual.square().sum(1).mean().sqrt().item(),
            "overlap_used": overlap(used, best),
        }
        self.rows.append(row)
        # What has just entered is not to be selected.
        self.selected = row, self.best(torch.where(fresh, 0.0, moment)) if passes.keeps < 1.0 else best

    def best(self, moment: Tensor) -> Tensor:
        """The mask of the largest |moment| in the regions in which the method selects."""
        passes, layout = self.scape.passes, self.scape.passes.layout
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

    def figures(self) -> Row:
        """What is stored."""
        found: Row = {"entries": self.n, "net": {key: sum(each) / len(each) for key, each in self.net.items()}}
        if self.scape is None:
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


# ------------------------------------------------------------------------------------------------- running


def cell_of(args: argparse.Namespace, method: str) -> Cell:
    """Raises ValueError for a method that there is not."""
    grid = Grid(args.grid)
    if method not in RATES or method not in grid.methods:
        raise ValueError(f"there is no method {method!r} here; known are {', '.join(RATES)}")
    one = Set("mechanism", args.steps, args.batch, REPLICAS, (method,), (RATES[method],), (SEED,))
    return grid.cell(one, method, RATES[method], SEED)


def train(args: argparse.Namespace) -> int:
    """Trains one method in this process and stores what the probe saw."""
    from torchtitan_scape.train import ScapeTrainer, parse

    cell = cell_of(args, args.methods)
    given = [f"--job.config_file={Grid(args.grid).recipe}", *(as_argument(k, v) for k, v in cell.overrides.items())]
    trainer = ScapeTrainer(parse([*given, f"--job.dump_folder={args.work / cell.name}"]))
    probe = Probe(trainer.optimizers, cell.steps)
    trainer.train()
    short = json.loads(json.dumps(probe.figures()), parse_float=lambda text: float(f"{float(text):.4g}"))
    content = {"validation_loss": trainer.validator.last_loss, "versions": versions(), "figures": short}
    Store(args.output).keep(cell, content)
    os._exit(0)  # as the trainer's own: threads that are still there may abort a process that ends


def run(args: argparse.Namespace) -> int:
    """Each method in a process of its own: process groups and seeds do not mix."""
    args.grid, args.output, args.work = (path.resolve() for path in (args.grid, args.output, args.work))
    cells = [cell_of(args, method) for method in args.methods.split(",")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # behind which `subprocess.run` ends the child
    args.work.mkdir(parents=True, exist_ok=True)
    failed = 0
    for cell in cells:
        if Store(args.output).read(cell) is not None and not args.again:
            continue
        path = args.work / f"{cell.name}.txt"
        command = [sys.executable, str(Path(__file__).resolve()), "one", f"--methods={cell.method}"]
        command += [f"--{key}={getattr(args, key)}" for key in ("grid", "steps", "batch", "output", "work")]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **ALONE, **NO_GPU}
        with open(path, "wb") as log:
            code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
        failed += bool(code)
        print(f"{cell.title}: " + (f"failed with exit code {code}, log: {path}" if code else "done"), flush=True)
    return 1 if failed else 0


# -------------------------------------------------------------------------------------------------- report


def rule(cell: Row) -> int:
    """Which of RULES: the order, and the look in plots."""
    options = cell["options"]
    if options["sync.method"] == "dense":
        return 0
    if not options.get("sync.scape.wait_scaling", True):
        return 1
    return 2 if options.get("sync.scape.wait_by") == "tensor" else 3


def density(cell: Row) -> float:
    return float(cell["options"]["sync.scape.density"]) if rule(cell) else 1.0


def net(cell: Row) -> dict[int, float]:
    """Mean net displacement of an entry by window in steps."""
    return {int(window): value for window, value in cell["figures"]["net"].items()}


def between(moved: dict[int, float], window: float) -> float:
    """Displacement over so many steps, along power laws between the windows that are known."""
    return float(np.exp(np.interp(math.log(window), np.log(list(moved)), np.log(list(moved.values())))))


def curves(cell: Row, dense: Row) -> dict[str, Points]:
    """What the plots show of a cell."""
    moved = net(cell)
    found: dict[str, Points] = {
        "visits": list(moved.items()),
        "distances": [(window, far / net(dense)[window]) for window, far in moved.items()],
    }
    if rule(cell):
        bins = cell["figures"]["visits"]
        counts = list(itertools.accumulate(count for _, _, count, _ in bins))
        found["shares"] = [(high, count / counts[-1]) for (_, high, _, _), count in zip(bins, counts, strict=True)]
        found["visits"] = [(math.sqrt(low * high), far) for low, high, count, far in bins if count >= FEW]
        found |= cell["figures"]["curves"]
    return found


# By file: caption, and of every row of panels the curves, the axes' labels, and the vertical scale.
PLOTS = {
    "movement.png": (
        "Waits, how far a visit moves an entry, and how far entries get, beside dense AdamS over as many steps",
        [
            ("shares", "wait (steps)", "share of the visits\nwith this wait or a shorter one", "linear"),
            ("visits", "wait before the visit; window of dense AdamS (steps)", "net displacement (lr)", "log"),
            ("distances", "window (steps)", "net displacement of all entries (lr)\n/ dense AdamS's", "log"),
        ],
    ),
    "time.png": (
        "Residuals, and the mask in use against the best one",
        [
            ("residual", "step", "residual norm", "linear"),
            ("overlap_used", "step", "share of the mask\nthat is in the best one", "linear"),
        ],
    ),
}


def draw(folder: Path, cells: Sequence[Row], dense: Row) -> None:
    """A column a density, a colour a rule, dense AdamS dashed."""
    densities = sorted({density(cell) for cell in cells if rule(cell)}, reverse=True)
    for file, (_, rows) in PLOTS.items():
        figure, axes = subplots([f"density {d:g}" for d in densities], len(rows), 0.6 + 3 * len(rows), [1] * len(rows))
        for line, (name, x, y, scale) in zip(axes, rows, strict=True):
            for axis, value in zip(line, densities, strict=True):
                for cell in [dense, *(cell for cell in cells if rule(cell) and density(cell) == value)]:
                    i, points = rule(cell), curves(cell, dense).get(name)
                    if points:
                        marker = "" if x == "step" else MARKERS[i]
                        look = {"color": COLOURS[i], "marker": marker, "linestyle": "-" if i else "--"}
                        axis.plot(*zip(*points, strict=True), label=RULES[i], markersize=4, linewidth=1.4, **look)
                axis.set(xlabel=x, xscale="linear" if x == "step" else "log", yscale=scale)
                axis.grid(alpha=0.3)
                for one in (axis.xaxis, axis.yaxis):
                    one.set_major_formatter(lambda value, _: f"{value:g}")
                if scale == "linear":
                    axis.set_ylim(bottom=0)
            line[0].set_ylabel(y)
        save(figure, folder / file, axes.flat)


ROWS = (
    ("learning rate", "learning_rate", "g"),
    ("final validation loss", "validation_loss", ".4f"),
    ("wait at entry, 10 / 50 / 90 % quantile (steps)", "quantiles", ""),
    ("wait at entry, mean (steps)", "wait", ".1f"),
    ("factor on the step, mean", "factor", ".1f"),
    ("correlation of log factor and log wait", "correlation", ".2f"),
    ("displacement in a visit / dense AdamS's over the wait (lr)", "visit", ".2f"),
    ("entries that never enter", "never", ".1%"),
    (f"waits of up to {SHORT} steps, share of those that enter", "short", ".1%"),
    ("of these, in the direction of their entry before", "same_sign", ".1%"),
    ("new slots, share of the mask", "new_slots", ".1%"),
    ("new slots, share of the squared update", "new_norm", ".1%"),
    ("path / dense AdamS's (lr)", "net_1", ".2f"),
    ("net displacement over 10 steps / dense AdamS's (lr)", "net_10", ".2f"),
    ("net displacement over 200 steps / dense AdamS's (lr)", "net_200", ".2f"),
    ("the same with the learning rates", "far", ".2f"),
    ("net displacement over 50 steps / path", "straight", ".2f"),
    ("residual norm", "residual", ".2f"),
    ("share of the mask that is in the best one, when selected", "overlap_selected", ".1%"),
    ("share of the mask that is in the best one, in use", "overlap_used", ".1%"),
)


def derived(cell: Row, dense: Row) -> Row:
    """What the table shows of a cell."""
    figures, moved, shown = cell["figures"], net(cell), curves(cell, dense)
    found = {key: cell[key] for key in ("learning_rate", "validation_loss")} | figures.get("means", {})
    found |= {f"net_{window}": ratio for window, ratio in shown["distances"]}
    if 200 in moved:
        found["far"] = found["net_200"] * cell["learning_rate"] / dense["learning_rate"]
        found["straight"] = moved[50] / (50 * moved[1])
    if rule(cell):
        known = [(math.sqrt(low * high), n, far) for low, high, n, far in figures["visits"] if high <= max(net(dense))]
        alike = sum(n * between(net(dense), wait) for wait, n, _ in known)
        found["visit"] = sum(n * far for _, n, far in known) / alike
        found["quantiles"] = " / ".join(map(str, found["quantiles"]))
    return found


def report(args: argparse.Namespace) -> int:
    """Raises ValueError where cells of dense AdamS or of SCAPE lack, or a method has two."""
    cells = [json.loads(path.read_text()) for path in sorted((args.output / "cells").glob("*.json"))]
    cells.sort(key=lambda cell: (-density(cell), rule(cell)))
    if not cells or rule(cells[0]) or not rule(cells[-1]):
        raise ValueError(f"{args.output / 'cells'} lacks dense AdamS or SCAPE; run scripts/quality_mechanism.py run")
    if len({cell["label"] for cell in cells}) < len(cells):
        raise ValueError(f"{args.output / 'cells'} has two runs of a method; remove the one that is obsolete")
    dense = cells[0]
    draw(args.output, cells, dense)
    values = {cell["label"]: derived(cell, dense) for cell in cells}
    rows = []
    for name, key, form in ROWS:
        pairs = [(label, found.get(key)) for label, found in values.items()]
        rows.append({"": name} | {label: "-" if v is None else format(v, form) for label, v in pairs})
    run = f"{dense['steps']} steps of {dense['batch']:,} tokens, {dense['replicas']} simulated replicas"
    parts = [
        "# How updates move entries",
        f"Made by `python scripts/quality_mechanism.py report`: {run}, seed {dense['seed']}, the recipe of the quality "
        f"study; {dense['figures']['entries']:,} sparsified entries.",
        " ".join((__doc__ or "").split("\n\n")[-1].split()),
        markdown(rows),
        *(f"![{caption}]({name})\n\n{caption}." for name, (caption, _) in PLOTS.items()),
    ]
    (args.output / "table.md").write_text("\n\n".join(parts) + "\n")
    print(f"wrote {args.output / 'table.md'}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    output = ROOT / "results" / "quality_mechanism"
    for name in ("run", "one"):  # `one` is what `run` starts
        one = commands.add_parser(name)
        one.add_argument("--methods", default=",".join(RATES), help="names, with commas between; all by default")
        one.add_argument("--steps", type=int, default=980)
        one.add_argument("--batch", type=int, default=4096, help="tokens a step")
        one.add_argument("--again", action="store_true", help="train what is stored, too")
        one.add_argument("--grid", type=Path, default=ROOT / "scripts" / "quality_grid.toml")
        one.add_argument("--output", type=Path, default=output)
        one.add_argument("--work", type=Path, default=ROOT / "outputs" / "quality_mechanism", help="logs of the runs")
    commands.add_parser("report").add_argument("--output", type=Path, default=output)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        return {"run": run, "one": train, "report": report}[args.command](args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
