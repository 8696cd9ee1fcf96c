"""A study's report.md, from its stored lines: the tables that its grid names, and the figures."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.common import markdown, spread, write
from scripts.study import costs, curves, observations, special_tables, sweep_figures, sweep_tables
from scripts.study.entries import Budget, budgets_of, relative
from scripts.study.figures import FIGURES
from scripts.study.grid import Grid
from scripts.study.store import SETUP, Store
from scripts.study.sweep_tables import Row

READING = """\
Losses are final validation losses in nats per token, on the same validation batches for all methods of a budget.
A method is tuned with one seed by the runs that the grid declares, some methods at one rate; other seeds run at its
best setting. A seed changes the start, not the order of the data. Gaps are paired by seed, mean ± standard deviation;
(edge) marks a best rate that is the lowest or the highest that ran. Bytes are what a replica sends relative to dense
FP32 gradients, masks and scales included: of a step after the start, planned, and of the whole run, counted, with dense
starts and warm-ups. Every replica validates on its own part of the text: between different numbers of replicas compare
the gaps, not the losses."""


def percent(share: float) -> str:
    """Return a share in percent with three digits."""
    return f"{100 * share:.3g}"


def losses_of(one: Budget, report: dict[str, Any]) -> Iterator[Row]:
    for entry in one.entries:
        row = {"method": entry.label, "optimizer": entry.optimizer, "tuned to": entry.tuned}
        for title, share in zip(("bytes, % of dense: step", "whole run"), entry.shares, strict=True):
            row[title] = percent(share) if one.replicas > 1 else "-"
        if report.get("payload"):
            density, by_tensor = entry.option("density"), entry.option("selection") == "tensor"
            row["density"] = "-" if density is None else f"{density:.4g}"
            row["block"] = "-" if entry.is_dense else "tensor" if by_tensor else entry.option("block_size") or "-"
            row["SCAPE's code"] = entry.payload_code or "float32"
        row["seeds"] = ", ".join(map(str, entry.losses))
        row["final validation losses"] = ", ".join(f"{loss:.4f}" for loss in entry.losses.values())
        row["mean"] = spread(list(entry.losses.values()), ".4f")
        for name in report["gaps"]:
            to = one.dense(entry.optimizer if name == "own" else name)
            title = f"gap to dense {'training with its optimizer' if name == 'own' else name}, %"
            row[title] = "0" if entry is to else spread(entry.gaps(to), "+.2f")
        yield row


def trials_of(one: Budget) -> Iterator[Row]:
    for entry in one.entries:
        texts = []
        for trial in entry.trials:
            text = f"{trial.text}: {'failed' if trial.loss is None else f'{trial.loss:.4f}'}"
            texts.append(f"**{text}**" if trial == entry.best else text)
        yield {"method": entry.label, "learning rate: final loss with the first seed": "; ".join(texts)}


def seconds_of(one: Budget) -> Iterator[Row]:
    for entry in one.entries:
        row = {"method": entry.label}
        for machine in costs.MACHINES:
            step = costs.step_seconds(machine, costs.overlapped(entry.options), one.replicas)
            row[f"{machine}: step, s"] = f"{step:.3g}"
            row[f"{machine}: run / dense AdamW's"] = f"{relative(one, entry, machine):.2f}"
        yield row | {"gap to dense AdamW, %": spread(entry.gaps(one.dense("AdamW")), "+.2f")}


def provenance(store: Store) -> str:
    """Return the number of runs, and what they were made with."""
    runs = [line for line in store.own.values() if "validation_loss" in line["result"]]
    versions = {", ".join(f"{k} {v}" for k, v in sorted(line["versions"].items())) for line in runs}
    corpora, sizes = ({line["result"].get(key) for line in runs} - {None} for key in ("corpus", "parameters"))
    models = ", ".join(f"{count:,}" for count in sorted(sizes))
    text = f"{len(runs)} runs of a model of {models} parameters; {'; '.join(sorted(versions))}"
    mixed = [name for name, values in (("versions", versions), ("corpora", corpora)) if len(values) > 1]
    text += f"; corpus digest {', '.join(sorted(map(str, corpora)))}."
    return text + (f" **The runs have different {' and '.join(mixed)}.**" if mixed else "")


def budget_parts(grid: Grid, store: Store) -> list[str]:
    found, missing = budgets_of(grid, store)
    if not found:
        return []
    parts = [f"{provenance(store)}\n{READING}"]
    parts += [f"{missing} declared run(s) have not run yet."] if missing else []
    for one in found:
        parts += [f"## {one.title}", markdown(list(losses_of(one, grid.report)))]
        parts += ["Tuning:", markdown(list(trials_of(one)))]
    if grid.report.get("seconds"):
        parts += ["## Predicted seconds", costs.describe()]
        for one in (one for one in found if one.dense("AdamW")):
            parts += [f"{one.title}:", markdown(list(seconds_of(one)))]
    return parts


TABLES: dict[str, Callable[[Grid, Store], list[str]]] = {
    "budgets": budget_parts,
    "observations": observations.parts,
    "curves": curves.parts,
    **sweep_tables.TABLES,
    **sweep_figures.TABLES,
    **special_tables.TABLES,
}


def failures(store: Store) -> list[str]:
    rows = []
    for line in store.own.values():
        if "error" in line["result"]:
            error = line["result"]["error"]
            varied = {key: line["options"].get(key) for key in ("optimizer.lr", "debug.seed")}
            run = ", ".join(f"{key} {value}" for key, value in varied.items() if value is not None)
            first = (error.strip().splitlines() or ["no message"])[0]
            label = line["result"].get("label", line["method"])
            rows.append({"set": line["set"], "method": label, "run": run or "-", "error": first})
    return ["## Failed", markdown(rows)] if rows else []


def setups(store: Store) -> list[str]:
    """Return the machines, commands and notes of the sets that have them."""
    parts = []
    for line in store.own.values():
        if line["method"] == SETUP:
            machine = line["result"].get("machine")
            old = "" if line["source"] == "scripts.study" else " (a command of commit bc06ed0)"
            text = f"Set {line['set']}: `{line['command']}`{old}" + (f" on {machine}." if machine else ".")
            parts.append("\n".join([text, *(f"- {note}" for note in line["result"].get("notes", []))]))
    return ["## Set-up", *parts] if parts else []


def write_report(grid: Grid, folder: Path) -> Path:
    """Write report.md and the figures of a study into `folder`. Raises ValueError without finished runs."""
    store = Store(folder, [folder.parent / name for name in grid.shared])
    name = grid.path.stem
    parts = [f"# {grid.declared.get('title', name)}", f"Made by `python -m scripts.study report {name}`."]
    parts += [grid.declared["about"].strip()] if "about" in grid.declared else []
    tables = [part for table in grid.report["tables"] for part in TABLES[table](grid, store)]
    failed = failures(store)
    if not (tables or failed):
        raise ValueError(f"{store.path} has no finished run; first run python -m scripts.study run {name}")
    for figure in grid.report.get("figures", []):
        parts += [f"![{caption}]({file})" for file, caption in FIGURES[figure](grid, store, folder).items()]
    parts += [*tables, *failed, *setups(store)]
    path = folder / "report.md"
    write(path, "\n\n".join(parts) + "\n")
    return path
