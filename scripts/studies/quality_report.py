"""Tables of the quality study, from its stored cells alone. quality_study.py calls it."""

import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from scripts.common import markdown, number, spread, write
from scripts.studies.quality_costs import MACHINES, describe, method_of, step_seconds
from scripts.studies.quality_frontier import FIGURE, PAGE, write_frontier
from scripts.studies.quality_plots import draw
from scripts.studies.quality_settings import Cell, Setting, at, percent, reached, read_cells, settings_of

MARGIN = 0.01  # above dense AdamS's final loss


def main_table(one: Setting) -> str:
    rows = []
    for entry in one.entries:
        gaps = one.gaps(entry)
        rows.append(
            {
                "method": entry.label,
                "best learning rate": entry.rate,
                "final validation loss": spread(list(entry.losses.values()), ".4f"),
                "gap to dense AdamS, %": "0" if entry.is_baseline else spread(gaps, "+.2f"),
                "sent per step against dense, %: steady": percent(entry.shares[0]) if one.replicas != 1 else "-",
                "whole run": percent(entry.shares[1]) if one.replicas != 1 else "-",
                "seeds": str(len(entry.runs)),
            }
        )
    return markdown(rows)


def tuning_table(one: Setting) -> str:
    rates = sorted({rate for entry in one.entries for rate in entry.tuning})
    rows = []
    for entry in one.entries:
        row = {"method": entry.label}
        for rate in rates:
            loss = entry.tuning.get(rate)
            text = ("failed" if rate in entry.tuning else "-") if loss is None else f"{loss:.4f}"
            row[f"{rate:g}"] = f"**{text}**" if rate == entry.best else text
        rows.append(row)
    warning = ""
    if edge := [entry.label for entry in one.entries if entry.at_edge]:
        warning = f"\n\n**The best learning rate is at the edge of the grid** for {'; '.join(edge)}: widen it."
    return markdown(rows) + warning


def time_table(one: Setting) -> str:
    """Predicted seconds to dense AdamS's final loss + 1 %."""
    if one.baseline is None:
        return ""
    target = (1 + MARGIN) * statistics.mean(one.baseline.losses.values())
    rows = []
    for entry in one.entries:
        step = reached(entry.curve(), target)
        row = {"method": entry.label, f"steps to {target:.4f}": "not reached" if step is None else f"{step:,.0f}"}
        for machine, (title, _) in MACHINES.items():
            method = method_of(entry.options, entry.steps)
            last = None if method is None else step_seconds(machine, method)
            seconds = None if method is None or step is None else at(entry.seconds[machine], step)
            row[f"{title}: last step, ms"] = number(last, ",.0f", 1e3)
            row[f"{title}: s to {target:.4f}"] = number(seconds, ",.0f")
        rows.append(row)
    return markdown(rows)


def replicas_table(settings: Sequence[Setting]) -> str:
    """Pairs of settings that differ in replicas alone, by method."""
    rows = []
    for few, many in product(settings, settings):
        if (few.steps, few.batch) != (many.steps, many.batch) or few.replicas >= many.replicas:
            continue
        twins = {entry.label: entry for entry in many.entries}
        for entry in (entry for entry in few.entries if entry.label in twins):
            twin = twins[entry.label]
            rows.append(
                {
                    "budget": f"{few.steps:,} steps x {few.batch:,} tokens",
                    "method": entry.label,
                    "replicas": f"{few.replicas}, {many.replicas}",
                    "final validation loss, fewer": spread(list(entry.losses.values()), ".4f"),
                    "more": spread(list(twin.losses.values()), ".4f"),
                    "gap to dense AdamS, %, fewer": spread(few.gaps(entry), "+.2f"),
                    "gap, more": spread(many.gaps(twin), "+.2f"),
                }
            )
    return markdown(rows)


def provenance(cells: Sequence[Cell]) -> str:
    """What the cells were made with, and a warning where it is not one thing."""
    versions = {", ".join(f"{k} {v}" for k, v in sorted(cell["versions"].items())) for cell in cells}
    corpora = {str(cell["corpus"]) for cell in cells}
    parameters = {cell["parameters"] for cell in cells}
    text = (
        f"{len(cells)} runs of a model of {', '.join(f'{count:,}' for count in sorted(parameters))} parameters; "
        f"{'; '.join(sorted(versions))}; corpus digest {', '.join(sorted(corpora))}."
    )
    mixed = [name for name, found in (("versions", versions), ("corpora", corpora)) if len(found) > 1]
    return text + (f" **The runs do not share their {' and '.join(mixed)}.**" if mixed else "")


def failures(failed: Sequence[Cell]) -> str:
    rows = []
    for cell in failed:
        named = "label" in cell
        run = f"lr {cell['learning_rate']:g}, seed {cell['seed']}, {cell['steps']} x {cell['batch']}" if named else "-"
        rows.append({"method": cell["label"] if named else "-", "run": run, "error": cell["error"]})
    return markdown(rows)


def write_report(folder: Path) -> Path:
    """Writes table.md, frontier.md and the plots into `folder`, which holds cells/.

    Raises ValueError where no cell is finished.
    """
    finished, failed = read_cells(folder / "cells")
    settings = settings_of(finished, failed)
    if not settings:
        raise ValueError(f"{folder / 'cells'} has no finished cell; first run quality_study run")
    figures = draw(folder, settings)
    parts = [
        "# Quality at several budgets",
        f"Made by `python -m scripts.studies.quality_study report`. {provenance(finished)} "
        "Losses are in nats a token, on the same "
        "validation batches for all. Learning rates were tuned with one seed, among those of the tables below, and "
        "the other seeds run at the best; a seed changes the start, not the order of the data. Mean ± sample standard "
        "deviation over the seeds; gaps are paired by seed.",
        describe(),
    ]
    if write_frontier(folder, settings):
        parts.append(f"![Loss against bytes]({FIGURE})\n\n[{PAGE}]({PAGE}) has the figures of it.")
    if "gap.png" in figures:
        parts.append("![Final gap to dense AdamS against density](gap.png)")
    for one in settings:
        parts += [f"## {one.title}", main_table(one), "Learning rates, one seed, final validation loss:"]
        parts.append(tuning_table(one))
        if times := time_table(one):
            parts += [f"Predicted seconds to dense AdamS's final loss + {100 * MARGIN:g} %:", times]
        parts += [f"![{caption}]({name})" for name, caption in figures.items() if f"-{one.slug}." in name]
    if replicas := replicas_table(settings):
        note = (
            "Every replica validates on its own part of the text, so that other numbers of replicas are validated on "
            "other text: compare the gaps, not the losses."
        )
        parts += ["## Replicas", note, replicas]
    if failed:
        parts += ["## Failed", failures(failed)]
    path = folder / "table.md"
    write(path, "\n\n".join(parts) + "\n")
    return path
