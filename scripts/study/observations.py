"""The tables and figures of the paper's observations, from stored lines and observations.npz."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.common import markdown, number
from scripts.plots import COLORS, figure, save
from scripts.study.grid import Grid
from scripts.study.launchers import ARRAYS, arrays_of
from scripts.study.store import Store
from scripts.study.sweep_tables import Row
from torchtitan_scape.observe import record
from torchtitan_scape.observe.figures import HIGHEST, LINEAR, LOWEST, PER_OCTAVE

OPTIMIZERS = {"adamw": ("AdamW", COLORS[1]), "adams": ("AdamS", COLORS[2])}
SHOWN = 3  # tensors in figures of distributions and residuals: the paper's
BINS = 120  # of a signed histogram in a figure
BETA1 = 0.9  # of all recipes
NOISE = "independent noise as gradients"
Observed = dict[str, Any]  # rows, histograms and curves of a run
Runs = dict[str, Observed]  # by method: adamw, adamw-topk, ...


def read_runs(store: Store, set_name: str) -> Runs:
    """Return what the runs of a set observed, by method. Raises ValueError if their arrays are missing."""
    lines = {line["method"]: line for line in store.of(set_name) if "curves" in line["result"]}
    folder, found = store.path.parent, Runs()
    if lines and not (folder / ARRAYS).exists():
        raise ValueError(f"{folder / ARRAYS} is missing; run the study again")
    for method, line in lines.items():
        rows, histograms = record.read(arrays_of(folder, f"{set_name}/{method}/"))  # type: ignore[arg-type]
        found[method] = {"rows": rows, "histograms": histograms, "curves": line["result"]["curves"]}
    return found


def dense(runs: Runs) -> Runs:
    return {name: runs[name] for name in OPTIMIZERS if name in runs}


def tensors_of(runs: Runs) -> list[str]:
    """Return the names of the observed tensors, in the order of the recipe."""
    return list(dict.fromkeys(row.tensor for run in dense(runs).values() for row in run["rows"]))


def draw(grid: Grid, store: Store, folder: Path) -> dict[str, str]:
    """Write the figures of every set with both optimizers; return captions by file name."""
    captions = {}
    for one in grid.sets:
        runs = read_runs(store, one.name)
        if len(dense(runs)) < len(OPTIMIZERS):
            continue
        for kind, (make, caption) in FIGURES.items():
            make(runs, one.name, folder / f"{kind}-{one.name}.png")
            captions[f"{kind}-{one.name}.png"] = f"{caption}, {one.name}"
    return captions


def distributions(runs: Runs, name: str, path: Path) -> None:
    """Draw a row for each tensor; at each step a signed histogram and one of log2 |g|, with both optimizers."""
    found = {(n, step, tensor): h for n, run in dense(runs).items() for step, tensor, h in run["histograms"]}
    tensors, steps = tensors_of(runs)[:SHOWN], sorted({step for _, step, _ in found})
    title = f"{name}: gradients of dense training, without zero entries (Figures 4 and 5)"
    drawn, axes = figure(len(tensors), 2 * len(steps), (4.3 * 2 * len(steps), 3.1 * len(tensors)), title)
    for row, tensor in zip(axes, tensors, strict=True):
        for i, step in enumerate(steps):
            both = {n: found[n, step, tensor] for n in OPTIMIZERS if (n, step, tensor) in found}
            _signed(row[2 * i], both)
            _logarithmic(row[2 * i + 1], both)
            for axis in row[2 * i : 2 * i + 2]:
                axis.set_title(f"{tensor}, step {step}", fontsize=9)
        row[0].set_ylabel("density")
    save(drawn, path, [axes[0][0]])


def _signed(axis: Any, both: Runs) -> None:
    """Draw signed histograms over the range that contains 99.5 % of the wider one's entries that are not zero."""
    reach = 0.0
    for name, figures in both.items():
        counts, edges = figures["linear"].copy(), 2.0 ** figures["exponent"] * np.linspace(-1, 1, LINEAR + 1)
        counts[LINEAR // 2] -= figures["zeros"]  # the bin to the right of 0 contains all zero entries
        sides = (counts[LINEAR // 2 :] + counts[LINEAR // 2 - 1 :: -1]).cumsum()
        inside = 1 + int(np.searchsorted(sides, 0.995 * sides[-1]))  # bins of one side
        joined = max(1, 2 * inside // BINS)
        half = min(-(-inside // joined), LINEAR // 2 // joined) * joined  # 0 is an edge
        middle = slice(LINEAR // 2 - half, LINEAR // 2 + half)
        drawn, edges = counts[middle].reshape(-1, joined).sum(1), edges[middle.start : middle.stop + 1 : joined]
        label, color = OPTIMIZERS[name]
        axis.stairs(drawn / counts.sum() / np.diff(edges), edges, color=color, label=label, linewidth=1.2)
        reach = max(reach, edges[-1])
    axis.set(xlim=(-reach, reach), xlabel="g")
    axis.ticklabel_format(axis="both", style="sci", scilimits=(-2, 3))


def _logarithmic(axis: Any, both: Runs) -> None:
    edges = LOWEST + np.arange((HIGHEST - LOWEST) * PER_OCTAVE + 1) / PER_OCTAVE
    low, high = math.inf, -math.inf
    for name, figures in both.items():
        counts = figures["log2"]
        below = np.cumsum(counts) / counts.sum()
        low, high = min(low, edges[np.searchsorted(below, 2e-3)]), max(high, edges[np.flatnonzero(counts)[-1] + 1])
        label, color = OPTIMIZERS[name]
        axis.stairs(counts / counts.sum() * PER_OCTAVE, edges, color=color, label=label, linewidth=1.2)
    axis.set(xlim=(low, high), xlabel="log2 |g|", ylabel="share per octave")


def windows(rows: Sequence[record.Row]) -> list[tuple[int, int]]:
    """Return (first, last step) of each range of consecutive steps."""
    found = list[tuple[int, int]]()
    for step in sorted({row.step for row in rows}):
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def overlap_of_noise(step: int, density: float, beta1: float = BETA1) -> float:
    """Return the overlap if all steps' gradients were independent normal noise.

    m and its predecessor then correlate by b1 sqrt((1 - b1^(2t-2)) / (1 - b1^2t)).
    """
    correlation = beta1 * math.sqrt((1 - beta1 ** (2 * step - 2)) / (1 - beta1 ** (2 * step)))
    normal = statistics.NormalDist()
    edge, deviation = normal.inv_cdf(1 - density / 2), math.sqrt(1 - correlation**2)
    x = np.linspace(edge, 9.0, 2001)
    below = [sum(normal.cdf((sign * correlation * v - edge) / deviation) for sign in (-1, 1)) for v in x]
    weights = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return float(2 * np.trapezoid(weights * np.array(below), x) / density)


def overlaps(runs: Runs, name: str, path: Path) -> None:
    """Draw a row for each optimizer, a column for each window, a line for each tensor."""
    stretches = windows(next(iter(dense(runs).values()))["rows"])
    drawn, axes = figure(len(OPTIMIZERS), len(stretches), (6.2 * len(stretches), 3.3 * len(OPTIMIZERS)), sharey=True)
    drawn.suptitle(f"{name}: overlap of the largest |m| of a step with those of the step before (Figure 6)")
    for row, (optimizer, run) in zip(axes, dense(runs).items(), strict=True):
        density = run["rows"][0].density
        for axis, (first, last) in zip(row, stretches, strict=True):
            for i, tensor in enumerate(tensors_of(runs)):
                of = [r for r in run["rows"] if r.tensor == tensor and first <= r.step <= last]
                axis.plot([r.step for r in of], [r.overlap for r in of], color=COLORS[i], label=tensor, linewidth=1.2)
            axis.axhline(density, color="gray", linestyle="--", linewidth=1, label=f"chance, {100 * density:g} %")
            noise = [(step, overlap_of_noise(step, density)) for step in range(max(2, first), last + 1)]
            axis.plot(*zip(*noise, strict=True), color="gray", linestyle=":", linewidth=1.5, label=NOISE)
            axis.set_title(f"{OPTIMIZERS[optimizer][0]}, from step {first}", fontsize=10)
            axis.set(ylim=(0, 1), xlabel="step")
        row[0].set_ylabel(f"overlap of the top {100 * density:g} %")
    save(drawn, path, [axes[0][0]])


def residuals(runs: Runs, name: str, path: Path) -> None:
    """Draw loss gap and norms over the model after the switch; below, those of tensors with top-k and of the shadow."""
    tensors = tensors_of(runs)[:SHOWN]
    drawn, axes = figure(3, SHOWN, (5.0 * SHOWN, 9.6))
    drawn.suptitle(f"{name}: after the switch to top-k of every tensor, with error feedback (Figure 3)")
    top = axes[0]
    for method, (label, color) in OPTIMIZERS.items():
        plain, switched = runs[method]["curves"], runs[f"{method}-topk"]["curves"]
        gap, start = gaps(plain, switched), switched["norm"][0][0]
        top[0].plot(*zip(*gap, strict=True), color=color, alpha=0.3, linewidth=0.8)
        top[0].plot(*zip(*smooth(gap), strict=True), color=color)
        top[1].plot(*zip(*switched["residual"], strict=True), color=color)
        top[2].plot(*zip(*switched["norm"], strict=True), color=color, linestyle="--", linewidth=1)
        before = [(step, value) for step, value in plain["norm"] if step >= start]
        style = {"linestyle": ":", "linewidth": 1, "label": f"{label}: gradient of the dense run"}
        top[2].plot(*zip(*before, strict=True), color=color, **style)
        for line, kind in ((axes[1], f"{method}-topk"), (axes[2], method)):
            for axis, tensor in zip(line, tensors, strict=False):
                rows = [row for row in runs[kind]["rows"] if row.tensor == tensor and row.step >= start]
                steps = [row.step for row in rows]
                axis.plot(steps, [r.residual for r in rows], color=color, label=f"{label}: residual", linewidth=1.3)
                sent = {"label": f"{label}: sent", "linewidth": 1, "linestyle": "--"}
                axis.plot(steps, [r.sent for r in rows], color=color, **sent)
    top[0].axhline(0, color="gray", linewidth=0.8)
    titles = ["training loss, top-k minus dense (mean of 10 steps)", "residual norm, model, RMS over replicas"]
    titles += ["norm of the received gradient, model", *(f"top-k: {tensor}" for tensor in tensors)]
    titles += [f"shadow in the dense run: {tensor}" for tensor in tensors]
    for axis, title in zip(axes.flat, titles, strict=False):
        axis.set_title(title, fontsize=10)
        axis.set(xlabel="step", visible=bool(axis.lines))
        if axis is not top[0]:
            axis.set_ylim(bottom=0)
    for row in axes[1:]:
        row[0].set_ylabel("L2 norm, before clipping")
    save(drawn, path, [top[2], axes[1][0]])


def gaps(plain: Observed, switched: Observed) -> list[tuple[int, float]]:
    """Return (step, training loss minus the dense run's at this step, on the same data)."""
    before = dict(map(tuple, plain["training"]))
    return [(step, loss - before[step]) for step, loss in switched["training"] if step in before]


def smooth(points: Sequence[tuple[int, float]], width: int = 10) -> list[tuple[int, float]]:
    """Return means over the last `width` steps."""
    values = [value for _, value in points]
    return [(points[i][0], statistics.fmean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(points))]


FIGURES = {
    "gradients": (distributions, "Distribution of gradients"),
    "overlap": (overlaps, "Overlap of the largest moments of consecutive steps"),
    "residuals": (residuals, "Residuals after the switch to top-k"),
}


def parts(grid: Grid, store: Store) -> list[str]:
    found = []
    for one in grid.sets:
        if not (runs := read_runs(store, one.name)):
            continue
        found += [f"## {one.name}", "Gradients of dense training:", markdown(gradient_rows(runs)), narrower(runs)]
        found += ["Overlap, mean (minimum) over a window:", markdown(overlap_rows(runs))]
        found += ["After the switch, means over the last quarter of its steps:", markdown(list(residual_rows(runs)))]
        found += ["Losses:", markdown(list(loss_rows(runs)))]
    return [part for part in found if part]


def gradient_rows(runs: Runs) -> list[Row]:
    rows = []
    for name, run in dense(runs).items():
        for step, tensor, f in run["histograms"]:
            row = {"tensor": tensor, "step": str(step), "optimizer": OPTIMIZERS[name][0]}
            row |= {"standard deviation": f"{f['deviation']:.3g}", "kurtosis": f"{f['kurtosis']:.1f}"}
            row |= {"within a tenth of it": f"{100 * f['within_tenth']:.1f} %"}
            rows.append(row | {"zeros": f"{100 * f['zeros'] / f['entries']:.1f} %"})
    order = tensors_of(runs)
    return sorted(rows, key=lambda row: (order.index(row["tensor"]), int(row["step"])))


def narrower(runs: Runs) -> str:
    """Return in how many pairs of the same tensor and step AdamS's gradients are narrower than AdamW's."""
    each = [{(s, tensor): f for s, tensor, f in run["histograms"]} for run in dense(runs).values()]
    if len(each) < 2:
        return ""
    pairs = [(each[0][key], each[1][key]) for key in each[0]]
    counts = {
        "the smaller standard deviation": sum(b["deviation"] < a["deviation"] for a, b in pairs),
        "the larger kurtosis": sum(b["kurtosis"] > a["kurtosis"] for a, b in pairs),
        "more within a tenth": sum(b["within_tenth"] > a["within_tenth"] for a, b in pairs),
    }
    return f"Of {len(pairs)} pairs AdamS has {', '.join(f'{text} in {count}' for text, count in counts.items())}."


def overlap_rows(runs: Runs) -> list[Row]:
    rows: list[Row] = [{"tensor": name} for name in (NOISE, *tensors_of(runs))]
    for name, run in dense(runs).items():
        density = run["rows"][0].density
        for first, last in windows(run["rows"]):
            for row in rows:
                of = (r for r in run["rows"] if r.tensor == row["tensor"] and first <= r.step <= last)
                values = [r.overlap for r in of if math.isfinite(r.overlap)]
                if row["tensor"] == NOISE:
                    values = [overlap_of_noise(step, density) for step in range(max(2, first), last + 1)]
                text = f"{statistics.fmean(values):.3f} ({min(values):.3f})" if values else "-"
                row[f"{OPTIMIZERS[name][0]}, {first} to {last}"] = text
    return rows


def residual_rows(runs: Runs) -> Iterator[Row]:
    for tensor in tensors_of(runs):
        for name, (label, _) in OPTIMIZERS.items():
            row = {"tensor": tensor, "optimizer": label}
            for kind, what in ((f"{name}-topk", "top-k"), (name, "shadow")):
                if f"{name}-topk" not in runs or kind not in runs:
                    continue
                start, end = (runs[f"{name}-topk"]["curves"]["norm"][i][0] for i in (0, -1))
                late = end + 1 - max(1, (end + 1 - start) // 4)
                of = [r for r in runs[kind]["rows"] if r.tensor == tensor and r.step >= late]
                sent, left = (statistics.fmean(getattr(r, key) for r in of) for key in ("sent", "residual"))
                row |= {f"{what}: sent": number(sent, ".3g"), f"{what}: residual": number(left, ".3g")}
                row |= {f"{what}: residual / sent": number(left / sent, ".2f")}
            if len(row) > 2:
                yield row


def loss_rows(runs: Runs) -> Iterator[Row]:
    for name, (label, _) in OPTIMIZERS.items():
        if name not in runs or f"{name}-topk" not in runs:
            continue
        plain, switched = runs[name]["curves"], runs[f"{name}-topk"]["curves"]
        gap = smooth(gaps(plain, switched))
        at, most = max(gap[min(9, len(gap) - 1) :], key=lambda point: point[1])
        row = {"optimizer": label, "validation, dense": f"{plain['validation'][-1][1]:.4f}"}
        row |= {"validation, top-k": f"{switched['validation'][-1][1]:.4f}"}
        row |= {"largest gap of training losses (mean of 10 steps)": f"{most:+.4f} at step {at}"}
        row |= {"last": f"{gap[-1][1]:+.4f}", "residual, model, at the end": f"{switched['residual'][-1][1]:.3g}"}
        yield row | {"received gradient": f"{switched['norm'][-1][1]:.3g}"}
