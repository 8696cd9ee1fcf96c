"""The report of a strong-scaling sweep, from cells whose figures can be worked out by hand."""

import csv
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.studies.scaling_plots import FIGURES
from scripts.studies.scaling_report import write_report
from tests import server

LABELS = {"adams": "AdamS, dense", "scape-0.1": "SCAPE 0.1", "powersgd": "PowerSGD"}
SECONDS = {("adams", 2): 1.0, ("adams", 4): 0.8, ("scape-0.1", 2): 0.5, ("scape-0.1", 4): 0.3125}
PREDICTED = {("adams", 2): 1.1, ("adams", 4): 0.84, ("scape-0.1", 2): 0.4, ("scape-0.1", 4): 0.325}


def cell(method: str, size: int, **changes: Any) -> dict[str, Any]:
    seconds = SECONDS.get((method, size), 1.0)
    predicted = PREDICTED.get((method, size), 1.0)
    sent = {"adams": 4e6, "scape-0.1": 5e5}.get(method, 1e6)
    return {
        "launcher": "emulated",
        "recipe": "embedded",
        "method": method,
        "label": LABELS[method],
        "size": size,
        "nodes": size // 2,
        "ranks_per_node": 2,
        "compute": "wait",
        "steps": [0.9 * seconds, seconds, 1.1 * seconds],
        "step_seconds": seconds,
        "quartiles": [0.95 * seconds, 1.05 * seconds],
        "phases": {"compute": 0.2, "exposed": seconds - 0.25, "optimizer": 0.04, "other": 0.01},
        "tokens_per_step": 4000,
        "peak_memory_bytes": 5e8 if method == "adams" else 6e8,
        "memory_kind": "resident set",
        "sent": {"network": sent, "node": 2 * sent},
        "nic": {"network": 2.1 * sent, "node": 4 * sent},
        "counted": {"network": 2 * sent, "node": 4 * sent},
        "predicted": {"step_seconds": predicted, "compute": 0.2, "exposed": predicted - 0.24, "optimizer": 0.04},
        "validation_loss": 3.25,
        "steps_trained": 30,
        "command": "run this",
    } | changes


def failed(method: str, size: int) -> dict[str, Any]:
    error = "rank 1 of 4: out of memory\nTraceback"
    named = {"launcher": "emulated", "recipe": "embedded", "method": method, "label": LABELS[method]}
    return named | {"size": size, "error": error}


ALL = [cell(method, size) for method, size in SECONDS]


def store(folder: Path, cells: list[dict[str, Any]], **changes: Any) -> Path:
    (folder / "cells").mkdir(parents=True)
    for i, one in enumerate(cells):
        (folder / "cells" / f"{len(cells) - i:02d}.json").write_text(json.dumps(one))  # in no order of use
    sweep = {"launcher": "emulated", "command": "sweep it", "notes": ["No GPU here."], "machine": "two cores"}
    sweep |= {"sizes": [2, 4], "methods": ["adams", "scape-0.1"], "recipes": ["embedded"]} | changes
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return folder


def report(folder: Path) -> str:
    return write_report(folder).read_text()


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "scaling.csv", newline="") as file:
        return list(csv.DictReader(file))


def table(text: str, heading: str) -> list[dict[str, str]]:
    """The first table below a heading."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_table_of_a_recipe(tmp_path: Path) -> None:
    rows = table(report(store(tmp_path / "sweep", ALL)), "embedded")
    assert [(row["method"], row["ranks (nodes x each)"]) for row in rows] == [
        ("AdamS, dense", "2 (1 x 2)"),
        ("AdamS, dense", "4 (2 x 2)"),
        ("SCAPE 0.1", "2 (1 x 2)"),
        ("SCAPE 0.1", "4 (2 x 2)"),
    ]
    # By hand: 1.0 * 2 / (0.8 * 4) = 62.5 %; 0.5 * 2 / (0.3125 * 4) = 80 %; 0.8 / 0.3125 = 2.56.
    assert [row["efficiency, %"] for row in rows] == ["100.0", "62.5", "100.0", "80.0"]
    assert [row["speed-up against AdamS, dense"] for row in rows] == ["1.00", "1.00", "2.00", "2.56"]
    assert [row["tokens/s"] for row in rows] == ["4,000", "5,000", "8,000", "12,800"]
    last = rows[-1]
    assert last["step, ms (median)"] == "312.5"
    assert last["quartiles, ms"] == "296.9 to 328.1"
    assert [last[f"{name}, ms"] for name in ("compute", "exposed communication", "optimizer", "other")] == [
        "200.0",
        "62.5",
        "40.0",
        "10.0",
    ]
    assert last["peak memory per rank, MB"] == "600"
    assert last["sent per step and rank, MB: network"] == "0.500"
    assert last["sent per step and rank, MB: node"] == "1.000"


def test_predictions_bytes_and_losses(tmp_path: Path) -> None:
    text = report(store(tmp_path / "sweep", ALL))
    rows = table(text, "Predicted against measured")
    assert [row["residual, %"] for row in rows] == ["+10.0", "+5.0", "-20.0", "+4.0"]
    assert "Largest residual: -20.0 % (embedded, SCAPE 0.1, 2 ranks)" in text
    assert rows[3]["exposed communication, predicted / measured"] == "85.0 / 62.5"
    rows = table(text, "Bytes against the interfaces' counters")
    assert [row["interface / counted"] for row in rows] == ["1.000", "1.050"] * 4
    assert rows[1]["counted by the ranks, MB"] == "8.000" and rows[1]["interface, MB"] == "8.400"
    assert {row["validation loss"] for row in table(text, "Validation loss")} == {"3.2500"}
    assert "`sweep it`" in text and "two cores" in text and "- No GPU here." in text
    assert "calibrated wait" in text and "4,000 tokens a step" in text
    assert "Failed" not in text


def test_csv_and_json_hold_every_cell(tmp_path: Path) -> None:
    folder = store(tmp_path / "sweep", [*ALL, failed("powersgd", 4)])
    report(folder)
    rows = csv_rows(folder)
    assert len(rows) == 5
    for row in rows[:4]:
        method, size = row["method"], int(row["size"])
        seconds = SECONDS[method, size]
        assert float(row["step_seconds"]) == seconds
        assert float(row["efficiency"]) == pytest.approx(SECONDS[method, 2] * 2 / (seconds * size))
        assert float(row["speedup"]) == pytest.approx(SECONDS["adams", size] / seconds)
        assert float(row["tokens_per_second"]) == pytest.approx(4000 / seconds)
        assert float(row["residual"]) == pytest.approx(PREDICTED[method, size] / seconds - 1)
        assert float(row["exposed_seconds"]) == pytest.approx(seconds - 0.25)
        assert float(row["nic_network_bytes"]) == pytest.approx(1.05 * float(row["counted_network_bytes"]))
        assert (row["steps_measured"], row["error"]) == ("3", "")
    assert rows[4]["method"] == "powersgd" and rows[4]["error"].startswith("rank 1 of 4")
    stored = json.loads((folder / "scaling.json").read_text())
    assert stored["command"] == "sweep it" and len(stored["cells"]) == 5
    assert stored["cells"][0]["steps"] == ALL[0]["steps"]


def test_figures_show_something(tmp_path: Path) -> None:
    from matplotlib.image import imread

    folder = store(tmp_path / "sweep", ALL)
    text = report(folder)
    for name in FIGURES:
        assert f"]({name})" in text
        pixels = imread(folder / name)[..., :3]
        assert pixels.shape[0] > 200 and pixels.shape[1] > 600
        assert 0.02 < (pixels.min(axis=2) < 0.9).mean() < 0.6  # neither blank nor black


def test_failures_are_listed_and_break_nothing(tmp_path: Path) -> None:
    folder = store(tmp_path / "sweep", [ALL[0], ALL[1], ALL[3], failed("scape-0.1", 2)], sizes=[2, 4, 8])
    (folder / "cells" / "cut.json").write_text('{"launcher": "emu')
    (folder / "cells" / "part.json").write_text(json.dumps({"recipe": "embedded", "size": 8}))
    (folder / "cells" / "sizeless.json").write_text(json.dumps({**ALL[0], "size": None, "error": None}))
    text = report(folder)
    rows = {(row["method"], row["ranks"]): row["error"] for row in table(text, "Failed or not run")}
    assert rows["SCAPE 0.1", "2"] == "rank 1 of 4: out of memory"
    assert rows["cut", "-"].startswith("cut.json cannot be read")
    assert rows["part", "8"].startswith("part.json lacks") and "step_seconds" in rows["part", "8"]
    assert rows["AdamS, dense", "-"] == "sizeless.json lacks size"
    assert "Not run: embedded adams on 8, embedded scape-0.1 on 8." in text
    # Without its smallest size the method's baseline is another than the others', and the table says so.
    assert table(text, "embedded")[-1]["efficiency, %"] == "100.0 (from 4)"


def test_only_failures_still_make_a_report(tmp_path: Path) -> None:
    folder = store(tmp_path / "sweep", [failed("adams", 2)])
    for name in FIGURES:
        (folder / name).write_text("of an earlier report")
    text = report(folder)
    assert table(text, "Failed or not run")[0]["error"] == "rank 1 of 4: out of memory"
    assert "![" not in text and not any((folder / name).exists() for name in FIGURES)


def test_what_is_missing_is_left_out(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("peak_memory_bytes", "nic", "counted", "predicted", "validation_loss", "quartiles"))
    folder = store(tmp_path / "sweep", [cell("scape-0.1", 2, **nothing)], sizes=[2], methods=["scape-0.1"], notes=[])
    text = report(folder)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# Strong scaling", "## embedded"]
    (row,) = table(text, "embedded")
    assert row["speed-up against dense"] == row["peak memory per rank, MB"] == row["quartiles, ms"] == "-"
    assert [(folder / name).exists() for name in FIGURES] == [True, False, False]


def test_predicted_cells_stand_apart_from_measured_ones(tmp_path: Path) -> None:
    change = {"launcher": "predicted", "compute": "predicted", "steps": [], "step_seconds": 0.1}
    text = report(store(tmp_path / "sweep", [*ALL, cell("adams", 4, **change)]))
    assert [row["efficiency, %"] for row in table(text, "embedded (emulated, compute: wait)")][1] == "62.5"
    assert len(table(text, "embedded (predicted, compute: predicted)")) == 1
    assert len(table(text, "Predicted against measured")) == 4
    assert "nothing measured" in text


def test_a_batch_that_changes_is_called_out(tmp_path: Path) -> None:
    assert "**The batch is not fixed.**" in report(
        store(tmp_path / "sweep", [ALL[0], cell("adams", 4, tokens_per_step=8000)])
    )


@pytest.mark.parametrize("sweep, message", [(True, "has no cells"), (False, "sweep.json cannot be read")])
def test_nothing_to_report_is_one_line(sweep: bool, message: str, tmp_path: Path) -> None:
    folder = store(tmp_path / "sweep", [])
    if not sweep:
        (folder / "sweep.json").unlink()
    done = command_line(folder)
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def command_line(folder: Path) -> "subprocess.CompletedProcess[str]":
    return server.run("scripts.studies.strong_scaling", "report", f"--output={folder}")


def test_command_line(tmp_path: Path) -> None:
    folder = store(tmp_path / "sweep", ALL)
    assert command_line(folder).returncode == 0
    assert "- No GPU here." in (folder / "report.md").read_text()
