"""Pictures and table of the observations, from the files of `scripts.studies.observe run` alone."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.common import markdown, number, read, write
from scripts.plots import COLOURS, figure, save
from torchtitan_scape.observe import record
from torchtitan_scape.observe.figures import HIGHEST, LINEAR, LOWEST, PER_OCTAVE

OPTIMIZERS = {"adamw": ("AdamW", COLOURS[1]), "adams": ("AdamS", COLOURS[2])}
SHOWN = 3  # tensors in pictures of distributions and residuals: the paper's
BINS = 120  # of a picture of a signed histogram
BETA1 = 0.9  # of all recipes
NOISE = "gradients that were independent noise"
Stored = dict[str, Any]


def load(folder: Path) -> dict[str, dict[str, Stored]]:
    """By recipe, and by optimizer with -topk after it where it was switched: rows, histograms, curves."""
    found: dict[str, dict[str, Stored]] = {}
    for path in sorted(folder.glob("*.npz")):
        recipe, _, name = path.stem.partition("-")
        rows, histograms = record.read(path)
        about = read(path.with_suffix(".json"))
        if about is None:
            raise ValueError(f"{path.with_suffix('.json')} is missing; run python -m scripts.studies.observe run")
        found.setdefault(recipe, {})[name] = {"rows": rows, "histograms": histograms, **about}
    if not found:
        raise ValueError(f"{folder} has no runs; first run python -m scripts.studies.observe run")
    return found


def draw(folder: Path) -> None:
    """Writes the pictures of every recipe, and table.md."""
    recipes = load(folder)
    for recipe, runs in recipes.items():
        for kind, picture in KINDS.items():
            picture(runs, recipe, folder / f"{kind}-{recipe}.png")
    write(folder / "table.md", table(recipes))
    print(f"wrote {folder / 'table.md'} and {len(KINDS) * len(recipes)} pictures")


def dense(runs: dict[str, Stored]) -> dict[str, Stored]:
    return {name: runs[name] for name in OPTIMIZERS if name in runs}


def labels(runs: dict[str, Stored]) -> list[str]:
    """The tensors, in the order of the recipe's names."""
    return list(dict.fromkeys(row.tensor for run in dense(runs).values() for row in run["rows"]))


# ----------------------------------------------------------------------------- distributions: Figures 4 and 5


def distributions(runs: dict[str, Stored], recipe: str, path: Path) -> None:
    """A row a tensor; at each step a signed histogram and one of log2 |g|, both optimizers on the same axes."""
    found = {
        (name, step, tensor): figures
        for name, run in dense(runs).items()
        for step, tensor, figures in run["histograms"]
    }
    tensors, steps = labels(runs)[:SHOWN], sorted({step for _, step, _ in found})
    drawn, axes = figure(len(tensors), 2 * len(steps), (4.3 * 2 * len(steps), 3.1 * len(tensors)))
    drawn.suptitle(f"{recipe}: gradients of dense training, entries that are 0 left out (Figures 4 and 5)")
    for row, tensor in zip(axes, tensors, strict=True):
        for i, step in enumerate(steps):
            both = {name: found[name, step, tensor] for name in OPTIMIZERS if (name, step, tensor) in found}
            signed(row[2 * i], both)
            logarithmic(row[2 * i + 1], both)
            row[2 * i].set_title(f"{tensor}, step {step}", fontsize=9)
            row[2 * i + 1].set_title(f"{tensor}, step {step}", fontsize=9)
        row[0].set_ylabel("density")
    save(drawn, path, [axes[0][0]])


def signed(axis: Any, both: dict[str, Stored]) -> None:
    """Over the range that holds 99.5 % of the wider of the two."""
    exponent = max(figures["exponent"] for figures in both.values())
    counts = {name: coarse(figures, exponent) for name, figures in both.items()}
    edges = 2.0**exponent * np.linspace(-1, 1, LINEAR + 1)
    reach = max(_reach(values, edges) for values in counts.values())
    inside = max(1, round(LINEAR * reach / 2 ** (exponent + 1)))  # of one side
    joined = max(1, 2 * inside // BINS)
    for name, values in counts.items():
        # From the middle outwards, so that 0 is an edge.
        half = -(-inside // joined) * joined
        middle = values[LINEAR // 2 - half : LINEAR // 2 + half] if half <= LINEAR // 2 else values
        kept = middle[: middle.size // joined * joined].reshape(-1, joined).sum(1)
        width = joined * (edges[1] - edges[0])
        own = width * (np.arange(kept.size + 1) - kept.size / 2)
        label, colour = OPTIMIZERS[name]
        axis.stairs(kept / max(1, values.sum()) / width, own, color=colour, label=label, linewidth=1.2)
    axis.set_xlim(-reach, reach)
    axis.ticklabel_format(axis="both", style="sci", scilimits=(-2, 3))
    axis.set_xlabel("g")
    axis.grid(alpha=0.3)


def coarse(figures: Stored, exponent: int) -> Any:
    """The signed histogram in the bins of another exponent that is no smaller, without the zeros, of which the bin to
    the right of 0 has all."""
    counts = figures["linear"].copy()
    counts[LINEAR // 2] -= figures["zeros"]
    times = 2 ** (exponent - figures["exponent"])
    found = np.zeros(LINEAR, dtype=np.int64)
    half = LINEAR // 2
    np.add.at(found, half + (np.arange(LINEAR) - half) // times, counts)
    return found


def _reach(counts: Any, edges: Any) -> float:
    """Half of the symmetric range with 99.5 % of all."""
    middles = np.abs((edges[:-1] + edges[1:]) / 2)
    order = np.argsort(middles)
    held = np.cumsum(counts[order])
    return float(middles[order][np.searchsorted(held, 0.995 * held[-1])])


def logarithmic(axis: Any, both: dict[str, Stored]) -> None:
    edges = LOWEST + np.arange((HIGHEST - LOWEST) * PER_OCTAVE + 1) / PER_OCTAVE
    low, high = math.inf, -math.inf
    for name, figures in both.items():
        counts = figures["log2"]
        below = np.cumsum(counts) / counts.sum()
        low, high = min(low, edges[np.searchsorted(below, 2e-3)]), max(high, edges[np.flatnonzero(counts)[-1] + 1])
        label, colour = OPTIMIZERS[name]
        axis.stairs(counts / counts.sum() * PER_OCTAVE, edges, color=colour, label=label, linewidth=1.2)
    axis.set_xlim(low, high)
    axis.set_xlabel("log2 |g|")
    axis.set_ylabel("share an octave")
    axis.grid(alpha=0.3)


# ------------------------------------------------------------------------------------------ overlap: Figure 6


def windows(rows: Sequence[record.Row]) -> list[tuple[int, int]]:
    """(first, last step) of every stretch of steps without a gap but at the run's middle, where a window begins."""
    steps, found = sorted({row.step for row in rows}), list[tuple[int, int]]()
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def of_noise(step: int, density: float, beta1: float = BETA1) -> float:
    """The overlap where every step's gradient were normal noise, independent of all others: m and its predecessor have
    what they average in common, and so the correlation b1, more exactly b1 sqrt((1 - b1^(2t-2)) / (1 - b1^2t))."""
    correlation = beta1 * math.sqrt((1 - beta1 ** (2 * step - 2)) / (1 - beta1 ** (2 * step)))
    normal = statistics.NormalDist()
    edge, spread = normal.inv_cdf(1 - density / 2), math.sqrt(1 - correlation**2)
    x = np.linspace(edge, 9.0, 2001)
    outside = [
        normal.cdf((-edge - correlation * v) / spread) + normal.cdf((correlation * v - edge) / spread) for v in x
    ]
    weights = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return float(2 * np.trapezoid(weights * np.array(outside), x) / density)


def overlaps(runs: dict[str, Stored], recipe: str, path: Path) -> None:
    """A row an optimizer, a column a window, a line a tensor."""
    named, tensors = dense(runs), labels(runs)
    stretches = windows(next(iter(named.values()))["rows"])
    drawn, axes = figure(len(named), len(stretches), (6.2 * len(stretches), 3.3 * len(named)), sharey=True)
    drawn.suptitle(f"{recipe}: overlap of the largest |m| of a step with those of the step before (Figure 6)")
    for row, (name, run) in zip(axes, named.items(), strict=True):
        density = run["rows"][0].density
        for axis, (first, last) in zip(row, stretches, strict=True):
            for i, tensor in enumerate(tensors):
                of = [r for r in run["rows"] if r.tensor == tensor and first <= r.step <= last]
                axis.plot([r.step for r in of], [r.overlap for r in of], color=COLOURS[i], label=tensor, linewidth=1.2)
            chance = f"chance, {100 * density:g} %"
            axis.axhline(density, color="gray", linestyle="--", linewidth=1, label=chance)
            noise = [(step, of_noise(step, density)) for step in range(max(2, first), last + 1)]
            axis.plot(*zip(*noise, strict=True), color="gray", linestyle=":", linewidth=1.5, label=NOISE)
            axis.set_title(f"{OPTIMIZERS[name][0]}, from step {first}", fontsize=10)
            axis.set_ylim(0, 1)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"overlap of the top {100 * density:g} %")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    save(drawn, path, [axes[0][0]])


# ---------------------------------------------------------------------------------------- residuals: Figure 3


def residuals(runs: dict[str, Stored], recipe: str, path: Path) -> None:
    """Loss gap and norms over the model after the switch; then those of tensors, of top-k and of the shadow."""
    tensors = labels(runs)[:SHOWN]
    drawn, axes = figure(3, SHOWN, (5.0 * SHOWN, 9.6))
    drawn.suptitle(f"{recipe}: after the switch to the largest of every tensor, with error feedback (Figure 3)")
    top = axes[0]
    for name, (label, colour) in OPTIMIZERS.items():
        if f"{name}-topk" not in runs or name not in runs:
            continue
        plain, switched = runs[name]["curves"], runs[f"{name}-topk"]["curves"]
        gap = gaps(plain, switched)
        top[0].plot(*zip(*gap, strict=True), color=colour, alpha=0.3, linewidth=0.8)
        top[0].plot(*zip(*smooth(gap), strict=True), color=colour)
        top[1].plot(*zip(*switched["residual"], strict=True), color=colour)
        top[2].plot(*zip(*switched["norm"], strict=True), color=colour, linestyle="--", linewidth=1)
        start = switched["norm"][0][0]
        before = [(step, value) for step, value in plain["norm"] if step >= start]
        top[2].plot(
            *zip(*before, strict=True),
            color=colour,
            linestyle=":",
            linewidth=1,
            label=f"{label}: the dense run's gradient",
        )
        for axis, tensor in zip(axes[1], tensors, strict=False):
            lines(axis, runs[f"{name}-topk"], tensor, start, label, colour)
        for axis, tensor in zip(axes[2], tensors, strict=False):
            lines(axis, runs[name], tensor, start, label, colour)
    top[0].axhline(0, color="gray", linewidth=0.8)
    top[0].set_title("training loss, top-k minus dense (10 steps' mean)", fontsize=10)
    top[1].set_title("norm of the residual, whole model, root mean square over replicas", fontsize=10)
    top[2].set_title("norm of the gradient that arrived, whole model", fontsize=10)
    for axis, tensor in zip(axes[1], tensors, strict=False):
        axis.set_title(f"top-k: {tensor}", fontsize=10)
    for axis, tensor in zip(axes[2], tensors, strict=False):
        axis.set_title(f"shadow in the dense run: {tensor}", fontsize=10)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_visible(bool(axis.lines))
        if axis is not top[0]:
            axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for row in axes[1:]:
        row[0].set_ylabel("L2 norm, before clipping")
    save(drawn, path, [top[2], axes[1][0]])


def lines(axis: Any, run: Stored, tensor: str, start: int, label: str, colour: str) -> None:
    rows = [row for row in run["rows"] if row.tensor == tensor and row.step >= start]
    steps = [row.step for row in rows]
    axis.plot(steps, [row.residual for row in rows], color=colour, label=f"{label}: residual", linewidth=1.3)
    axis.plot(
        steps, [row.sent for row in rows], color=colour, label=f"{label}: what is sent", linewidth=1, linestyle="--"
    )


def gaps(plain: Stored, switched: Stored) -> list[tuple[int, float]]:
    """(step, training loss minus that of the dense run at this step, of the same data)."""
    before = dict(map(tuple, plain["training"]))
    return [(step, loss - before[step]) for step, loss in switched["training"] if step in before]


def smooth(points: Sequence[tuple[int, float]], width: int = 10) -> list[tuple[int, float]]:
    """Means over so many steps up to each."""
    values = [value for _, value in points]
    return [(points[i][0], statistics.fmean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(points))]


KINDS = {"gradients": distributions, "overlap": overlaps, "residuals": residuals}

# --------------------------------------------------------------------------------------------------- table


def table(recipes: dict[str, dict[str, Stored]]) -> str:
    parts = ["# The paper's observations in short runs\n"]
    parts.append("`python -m scripts.studies.observe run`, then `plot`, which writes this from stored files alone.\n")
    for recipe, runs in recipes.items():
        name, some = next(iter(dense(runs).items()))
        first = f"Options of the dense run with {OPTIMIZERS[name][0]}"
        parts += [f"## {recipe}\n", f"{first}: `{' '.join(some['options'])}`\n"]
        parts += ["Gradients of dense training:\n", markdown(of_gradients(runs)), "", compared(runs), ""]
        parts += ["Overlap, mean (least) over a window:\n", markdown(of_overlap(runs)), ""]
        parts += ["After the switch, means over the last quarter of its steps:\n", markdown(of_residuals(runs)), ""]
        parts += ["Losses:\n", markdown(of_losses(runs)), ""]
    return "\n".join(parts)


def of_gradients(runs: dict[str, Stored]) -> list[dict[str, str]]:
    rows = []
    for name, run in dense(runs).items():
        for step, tensor, f in run["histograms"]:
            row = {"tensor": tensor, "step": str(step), "optimizer": OPTIMIZERS[name][0]}
            row |= {"standard deviation": f"{f['deviation']:.3g}", "kurtosis": f"{f['kurtosis']:.1f}"}
            row |= {"within a tenth of it": f"{100 * f['within_tenth']:.1f} %"}
            rows.append(row | {"zeros": f"{100 * f['zeros'] / f['entries']:.1f} %"})
    order = labels(runs)
    return sorted(rows, key=lambda row: (order.index(row["tensor"]), int(row["step"])))


def compared(runs: dict[str, Stored]) -> str:
    """In how many pairs of the same tensor and step the second optimizer's gradients are the narrower ones."""
    each = [{(s, tensor): f for s, tensor, f in run["histograms"]} for run in dense(runs).values()]
    if len(each) < 2:
        return ""
    pairs = [(each[0][key], each[1][key]) for key in each[0]]
    names = [label for label, _ in OPTIMIZERS.values()]
    counts = {
        "the smaller standard deviation": sum(b["deviation"] < a["deviation"] for a, b in pairs),
        "the larger kurtosis": sum(b["kurtosis"] > a["kurtosis"] for a, b in pairs),
        "more within a tenth": sum(b["within_tenth"] > a["within_tenth"] for a, b in pairs),
    }
    told = ", ".join(f"{text} in {count}" for text, count in counts.items())
    return f"Of {len(pairs)} pairs {names[1]} has {told}.\n"


def of_overlap(runs: dict[str, Stored]) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = [{"tensor": NOISE}]
    for name, run in dense(runs).items():
        for first, last in windows(run["rows"]):
            noise = [of_noise(step, run["rows"][0].density) for step in range(max(2, first), last + 1)]
            rows[0][f"{OPTIMIZERS[name][0]}, {first} to {last}"] = f"{statistics.fmean(noise):.3f} ({min(noise):.3f})"
    for tensor in labels(runs):
        row = {"tensor": tensor}
        for name, run in dense(runs).items():
            for first, last in windows(run["rows"]):
                found = [
                    r.overlap
                    for r in run["rows"]
                    if r.tensor == tensor and first <= r.step <= last and math.isfinite(r.overlap)
                ]
                row[f"{OPTIMIZERS[name][0]}, {first} to {last}"] = (
                    f"{statistics.fmean(found):.3f} ({min(found):.3f})" if found else "-"
                )
        rows.append(row)
    return rows


def of_residuals(runs: dict[str, Stored]) -> list[dict[str, str]]:
    rows = []
    for tensor in labels(runs):
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
            rows.append(row)
    return rows


def of_losses(runs: dict[str, Stored]) -> list[dict[str, str]]:
    rows = []
    for name, (label, _) in OPTIMIZERS.items():
        if name not in runs or f"{name}-topk" not in runs:
            continue
        plain, switched = runs[name]["curves"], runs[f"{name}-topk"]["curves"]
        gap = smooth(gaps(plain, switched))
        at, most = max(gap[min(9, len(gap) - 1) :], key=lambda point: point[1])
        rows.append(
            {
                "optimizer": label,
                "validation, dense": f"{plain['validation'][-1][1]:.4f}",
                "validation, top-k": f"{switched['validation'][-1][1]:.4f}",
                "largest gap of training losses (10 steps' mean)": f"{most:+.4f} at step {at}",
                "last": f"{gap[-1][1]:+.4f}",
                "residual, whole model, at the end": f"{switched['residual'][-1][1]:.3g}",
                "what arrived": f"{switched['norm'][-1][1]:.3g}",
            }
        )
    return rows
