"""Plots of the quality study. quality_report.py calls `draw`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.plots import COLOURS, MARKERS, figure, look, save, subplots
from scripts.studies.quality_costs import MACHINES, TITLE
from scripts.studies.quality_settings import Cell, Entry, Setting, at

START = 0.1  # the share of the steps before which losses are not shown: they would hide all differences
COLUMNS = 3  # panels of gap.png beside each other
Style = dict[str, Any]
Place = Callable[[Entry, Cell, float], float]


def styles(settings: Sequence[Setting]) -> dict[str, Style]:
    """One look for a method in all plots: dense ones dashed."""
    labels: dict[str, Entry] = {}
    for one in settings:
        for entry in one.entries:
            labels.setdefault(entry.label, entry)
    ordered = sorted(labels.values(), key=lambda entry: entry.order[:2])
    return {entry.label: look(i, entry.is_dense) for i, entry in enumerate(ordered)}


def lines(axis: Any, entries: Sequence[Entry], looks: dict[str, Style], place: Place) -> None:
    """Validation losses: the mean over the seeds, and the seeds as thin lines. `place` gives x from the step."""
    for entry in entries:
        style = looks[entry.label]
        for run in entry.runs.values() if len(entry.runs) > 1 else ():
            points = [(place(entry, run, s), loss) for s, loss in run["validation"] if s >= START * entry.steps]
            axis.plot(*zip(*points, strict=True), color=style["color"], linewidth=0.5, alpha=0.5)
        points = [(place(entry, entry.first, s), loss) for s, loss in entry.curve() if s >= START * entry.steps]
        axis.plot(*zip(*points, strict=True), label=entry.label, markersize=4, linewidth=1.4, **style)
    axis.set_ylabel("validation loss (nats per token)")
    axis.grid(alpha=0.3)


def loss_against_steps(one: Setting, looks: dict[str, Style], path: Path) -> None:
    """Validation, and the training losses as stored."""
    drawn, axes = subplots(["Training", "Validation"], 1, 5.0)
    drawn.suptitle(one.title)
    for entry in one.entries:
        points = [(s, loss) for s, loss in entry.first["training"] if s >= START * one.steps]
        if points:
            axes[0][0].plot(*zip(*points, strict=True), linewidth=1, **looks[entry.label] | {"marker": None})
    axes[0][0].set_ylabel(f"training loss, seed {next(iter(one.entries[0].runs))} (nats per token)")
    axes[0][0].grid(alpha=0.3)
    lines(axes[0][1], one.entries, looks, lambda entry, run, step: step)
    for axis in axes[0]:
        axis.set_xlabel("step")
    save(drawn, path, axes[0])


def megabytes(_: Entry, run: Cell, step: float) -> float:
    """What a replica has sent up to a step at which the run was validated."""
    return dict(map(tuple, run["bytes"]))[step] / 1e6


def loss_against_bytes(one: Setting, looks: dict[str, Style], path: Path) -> None:
    drawn, axes = subplots([one.title], 1, 5.0)
    axis = axes[0][0]
    lines(axis, one.entries, looks, megabytes)
    axis.set_xscale("log")
    axis.set_xlabel("sent by a replica so far (MB, density warm-up included)")
    save(drawn, path, axes[0])


def loss_against_seconds(one: Setting, looks: dict[str, Style], path: Path) -> None:
    drawn, axes = subplots([title for title, _ in MACHINES.values()], 1, 5.0)
    drawn.suptitle(f"{one.title}\n{TITLE}", fontsize=11)
    timed = [entry for entry in one.entries if entry.seconds]
    for axis, machine in zip(axes[0], MACHINES, strict=True):
        lines(axis, timed, looks, lambda entry, run, step, m=machine: at(entry.seconds[m], step))  # type: ignore[misc]
        axis.set_xlabel("predicted seconds")
    save(drawn, path, axes[0])


def family(entry: Entry) -> tuple[str, str]:
    """(what methods share that differ in density alone, its name). The warm-up's steps follow the run's length."""
    apart = (".density", ".density_warmup_steps")
    kept = {k: v for k, v in entry.options.items() if k.startswith("sync.") and not k.endswith(apart)}
    density = f"{entry.density:g}"
    name = entry.label.replace(density, "", 1).replace("  ", " ").replace(" ,", ",").strip()
    if density not in entry.label:  # SCAPE int4, 48 of 1024
        name = name.partition(",")[0]
    return f"{name} {sorted(kept.items())}", name


def gap_against_density(settings: Sequence[Setting], path: Path) -> None:
    columns = min(COLUMNS, len(settings))
    rows = -(-len(settings) // columns)
    drawn, grid = figure(rows, columns, (max(6.4, 5.0 * columns), 0.9 + 3.6 * rows))
    axes = list(grid.flat)
    names: dict[str, str] = {}
    for axis, one in zip(axes, settings, strict=False):
        spread = one.spread_of_dense()
        axis.axhspan(-spread, spread, color="#000000", alpha=0.1, label="AdamS, dense: ± one deviation of its seeds")
        axis.axhline(0, color="#000000", linestyle="--", linewidth=1)
        points: dict[str, list[tuple[float, list[float]]]] = {}
        for entry in one.entries:
            if not entry.is_dense and entry.density is not None and (gaps := one.gaps(entry)):
                key, name = family(entry)
                names.setdefault(key, name)
                points.setdefault(key, []).append((entry.density, gaps))
        for key, found in points.items():
            i = list(names).index(key)
            colour = COLOURS[1 + i % (len(COLOURS) - 1)]
            means = sorted((density, sum(gaps) / len(gaps)) for density, gaps in found)
            axis.plot(
                *zip(*means, strict=True),
                label=names[key],
                markersize=6,
                color=colour,
                marker=MARKERS[i % len(MARKERS)],
            )
            for density, gaps in found:
                axis.plot([density] * len(gaps), gaps, ".", color=colour, markersize=3)
        axis.set_xscale("log")
        axis.set_title(one.title.replace(": ", ":\n", 1), fontsize=10)
        axis.set_xlabel("density")
        axis.set_ylabel("final gap to dense AdamS (%)")
        axis.grid(alpha=0.3)
    for axis in axes[len(settings) :]:
        axis.set_axis_off()
    save(drawn, path, axes[: len(settings)])


def draw(folder: Path, settings: Sequence[Setting]) -> dict[str, str]:
    """Captions of the plots by file name. Plots of an earlier report go."""
    for old in folder.glob("*.png"):
        old.unlink()
    looks, captions = styles(settings), {}
    compared = [one for one in settings if any(not e.is_dense and e.density and one.gaps(e) for e in one.entries)]
    if compared:
        gap_against_density(compared, folder / "gap.png")
        captions["gap.png"] = "Final gap to dense AdamS against density"
    for one in settings:
        for kind, plot, what in (
            ("steps", loss_against_steps, "steps"),
            ("bytes", loss_against_bytes, "bytes sent"),
            ("seconds", loss_against_seconds, f"predicted seconds ({TITLE})"),
        ):
            if kind == "bytes" and one.replicas == 1:
                continue  # nothing is sent
            name = f"{kind}-{one.slug}.png"
            plot(one, looks, folder / name)
            captions[name] = f"Loss against {what}"
    return captions
