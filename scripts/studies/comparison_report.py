"""The comparison's page: tables of every budget. comparison.py calls it."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from scripts.common import command_of, markdown, spread, write
from scripts.studies.comparison_costs import MACHINES, describe, planned, run_seconds, step_seconds
from scripts.studies.comparison_methods import Budget, Compared
from scripts.studies.quality_cells import described
from scripts.studies.quality_settings import percent

LIMITS = (0.003, 0.006, 0.012, 0.025, 0.05, 0.13, 0.26, 0.5)  # shares of the dense bytes
READING = """\
A Llama of 0.2 M parameters on the bytes of {text}, simulated replicas, 20 tokens a parameter. Every
method is tuned by the same budget of runs with one seed, which the study's grid declares: two or three learning rates
a factor of two apart, and a few further runs at most, beyond an edge or in the outer rate of local updates. Other seeds
run at the best, but for what stays far behind, where the grid says so. Losses are final validation losses, nats a
token. Gaps are paired by seed, mean ± sample standard deviation; (edge) marks a best rate that is the lowest or highest
that ran. Bytes: what a replica sends over dense FP32 gradients, masks and scales included; "a step" is planned, over
the period of methods that have one, "whole run" is counted, dense starts and warm-ups included."""
TEXTS = {"standard_library_short": "Python's standard library", "speeches_short": "the messages of US presidents"}
LIMITS_OF_IT = """\
What none of this shows: a larger model (local updates are published as closing their gap with size, from 2.0 % at 35 M
to 0.3 % at 2.4 B parameters), other data, another schedule or b2. A seed changes the start and not the order of the
data; a single one may be a percent off. Other numbers of replicas are validated on other text: compare their gaps."""


def main_table(one: Budget) -> str:
    rows = []
    for found in one.methods:
        rows.append(
            {
                "method": found.label,
                "optimizer": found.optimizer,
                "bytes of dense, %: a step": percent(found.shares[0]),
                "whole run": percent(found.shares[1]),
                "tuned to": found.rate,
                "seeds": ", ".join(map(str, found.losses)),
                "final losses": ", ".join(f"{loss:.4f}" for loss in found.losses.values()),
                "gap to AdamW, dense, %": spread(found.gaps(one.dense("AdamW")), "+.2f"),
                "to AdamS, dense, %": spread(found.gaps(one.dense("AdamS")), "+.2f"),
                "to its optimizer, dense, %": spread(found.gaps(one.dense(found.optimizer)), "+.2f"),
            }
        )
    return markdown(rows)


def limits_table(one: Budget) -> str:
    """For every limit of bytes the method of the least gap, and SCAPE's best beside it."""

    def gap(found: Compared) -> float:
        return statistics.mean(found.gaps(one.dense("AdamW")))

    rows: list[dict[str, str]] = []
    for limit in LIMITS:
        fits = [found for found in one.others if found.shares[0] <= limit and found.gaps(one.dense("AdamW"))]
        if not fits:
            continue
        best = min(fits, key=gap)
        scape = min((found for found in fits if found.kind == "scape"), key=gap, default=None)
        rows.append(
            {
                "at most, % of dense": percent(limit),
                "least gap": best.label,
                "bytes, %": percent(best.shares[0]),
                "seeds": str(len(best.runs)),
                "gap to AdamW, dense, %": spread(best.gaps(one.dense("AdamW")), "+.2f"),
                "SCAPE": scape.label if scape else "-",
                "its loss above that, %": spread(scape.gaps(best), "+.2f") if scape and scape is not best else "-",
            }
        )
        if len(rows) > 1 and list(rows[-1].values())[1:] == list(rows[-2].values())[1:]:
            rows.pop()  # more bytes, and nothing better
    return markdown(rows)


def tuning_table(one: Budget) -> str:
    rows = []
    for found in one.methods:
        runs = []
        for cell in found.tuning.cells:
            loss = found.tuning.loss(cell)
            failed = "failed" if cell.key in found.tuning.failed else "not run"
            text = f"{cell.learning_rate:g}{described(cell.also)}: {failed if loss is None else f'{loss:.4f}'}"
            runs.append(f"**{text}**" if cell == found.tuning.best else text)
        rows.append({"method": found.label, "learning rate: final loss with the first seed": "; ".join(runs)})
    return markdown(rows)


def seconds_table(one: Budget) -> str:
    rows = []
    for found in one.methods:
        method = planned(found.first["options"])
        row = {"method": found.label}
        for machine in MACHINES:
            row[f"{machine}: step, s"] = f"{step_seconds(machine, method, one.replicas):.3g}"
            row[f"{machine}: run / dense AdamW's"] = f"{relative(one, found, machine):.2f}"
        rows.append(row | {"gap to AdamW, dense, %": spread(found.gaps(one.dense("AdamW")), "+.2f")})
    return markdown(rows)


def relative(one: Budget, found: Compared, machine: str) -> float:
    """Predicted seconds of its run over those of dense AdamW's."""
    dense = one.dense("AdamW")
    assert dense is not None
    return run_seconds(found.first, machine) / run_seconds(dense.first, machine)


def page(found: Sequence[Budget], path: Path) -> None:
    data = found[0].methods[0].options["training.dataset"]
    reading = READING.format(text=TEXTS.get(data, data))
    parts = ["# Every method at one budget", f"Made by `{command_of('scripts.studies.comparison')}`. {reading}"]
    parts += ["![Loss against bytes](loss_against_bytes.png)", LIMITS_OF_IT]
    for one in found:
        parts += [f"## {one.title}"]
        if one.missing:
            parts.append(f"{one.missing} declared runs have not run yet.")
        parts += [main_table(one), "The least gap for at most so many bytes of a step:", limits_table(one)]
        parts += ["Tuning:", tuning_table(one)]
    parts += ["## Seconds", describe(), "![Loss against predicted seconds](loss_against_seconds.png)"]
    for one in found:
        parts += [f"{one.title}:", seconds_table(one)]
    write(path, "\n\n".join(parts) + "\n")
