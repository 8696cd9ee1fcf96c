"""Tables of runs on ranks, from stored lines whose numbers can be worked out by hand."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from scripts.study import sweep_figures, timed_rank
from scripts.study.__main__ import main
from scripts.study.grid import Grid, digest
from scripts.study.report import write_report
from scripts.study.special_tables import shard_bytes, shard_exchange, shard_steps
from scripts.study.store import SETUP, Store

GRID = """
title = "Strong scaling"
recipe = "train_configs/embedded.toml"
launcher = "emulated"
[report]
tables = ["step_times", "prediction", "interface_bytes", "shard_losses", "beside_the_paper"]
figures = ["figure_1", "figure_10", "figure_11", "figure_12"]
[methods]
dense = { label = "AdamS, dense", sync.method = "dense" }
scape = { label = "SCAPE 0.1", sync.method = "scape" }
tagc = { label = "TAGC", targets = { loss = 0.036 }, sync.method = "dense", sharding.gradients_code = "tagc" }
[[sets]]
name = "all"
methods = ["dense", "scape"]
sizes = [2, 4]
sequences = [16]
[[sets]]
name = "losses"
methods = ["dense", "scape", "tagc"]
steps = 40
"""
SECONDS = {("dense", 2): 1.0, ("dense", 4): 0.8, ("scape", 2): 0.5, ("scape", 4): 0.3125}
PREDICTED = {("dense", 2): 1.1, ("dense", 4): 0.84, ("scape", 2): 0.4, ("scape", 4): 0.325}


def run(method: str, size: int, **changes: Any) -> dict[str, Any]:
    """Return a line of the store."""
    seconds, predicted, sent = SECONDS[method, size], PREDICTED[method, size], {"dense": 4e6, "scape": 5e5}[method]
    result = {
        "launcher": "emulated",
        "recipe": "embedded",
        "label": {"dense": "AdamS, dense", "scape": "SCAPE 0.1"}[method],
        "size": size,
        "nodes": size // 2,
        "ranks_per_node": 2,
        "compute": "wait",
        "steps": [0.9 * seconds, seconds, 1.1 * seconds],
        "step_seconds": seconds,
        "quartiles": [0.95 * seconds, 1.05 * seconds],
        "phases": {"compute": 0.2, "exposed": seconds - 0.25, "optimizer": 0.04, "other": 0.01},
        "tokens_per_step": 4000,
        "peak_memory_bytes": 5e8 if method == "dense" else 6e8,
        "memory_kind": "resident set",
        "sent": {"network": sent, "node": 2 * sent},
        "nic": {"network": 2.1 * sent, "node": 4 * sent},
        "counted": {"network": 2 * sent, "node": 4 * sent},
        "predicted": {"step_seconds": predicted, "compute": 0.2, "exposed": predicted - 0.24, "optimizer": 0.04},
        "validation_loss": 3.25,
    }
    return line("all", method, {"launch.ranks": size, "training.global_batch_size": 16}, result | changes)


def line(name: str, method: str, options: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    options = {"sync.method": "scape" if method == "scape" else "dense", **options}
    key = digest([name, method, options])
    return {"key": key, "set": name, "method": method, "options": options, "result": result, "command": ""}


ALL = [run(method, size) for method, size in SECONDS]


def study(folder: Path, lines: list[dict[str, Any]], notes: bool = True) -> Grid:
    (folder / "grid.toml").write_text(GRID)
    store = Store(folder)
    for one in reversed(lines):  # in no order of the report
        store.append(one)
    if notes:
        store.note(SETUP, "all", {}, {"machine": "two cores", "notes": ["No GPU here."]}, "run it")
    return Grid(folder / "grid.toml")


def report(folder: Path, lines: list[dict[str, Any]], notes: bool = True) -> str:
    return write_report(study(folder, lines, notes), folder).read_text()


def table(text: str, heading: str) -> list[dict[str, str]]:
    """Return the first table below a heading."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_waiting_for_other_ranks_is_communication() -> None:
    """With overlap nearly all of the exchange is a wait: a stored run had 4,999 ms of 5,059 among "other"."""
    ranks = []
    for waited, exchange in ((0.3, 0.1), (0.1, 0.3)):
        phases = {"forward_backward": 0.5, "wait": waited, "exchange": exchange, "update": 0.05, "shard weights": 0.02}
        ranks.append({"times": [1.0, 1.0], "phases": phases, "peak": 1.0, "sent": {}, "silent": None, "beside": False})
    new = timed_rank._joined(ranks, statistics.median)
    expected = {"compute": 0.5, "exposed": 0.42, "optimizer": 0.05, "other": 0.03}
    assert new["phases"] == pytest.approx(expected)
    # On a GPU the collectives of the shard axis run beside the passes, and passes without them were measured.
    beside = timed_rank._joined([rank | {"silent": 0.4, "beside": True} for rank in ranks], statistics.median)
    assert beside["phases"] == pytest.approx({"compute": 0.4, "exposed": 0.5, "optimizer": 0.05, "other": 0.05})


def test_step_times(tmp_path: Path) -> None:
    text = report(tmp_path, ALL)
    rows = table(text, "Step times")
    assert [(row["method"], row["ranks (nodes x each)"]) for row in rows] == [
        ("AdamS, dense", "2 (1 x 2)"),
        ("AdamS, dense", "4 (2 x 2)"),
        ("SCAPE 0.1", "2 (1 x 2)"),
        ("SCAPE 0.1", "4 (2 x 2)"),
    ]
    # By hand: 1.0 * 2 / (0.8 * 4) = 62.5 %; 0.5 * 2 / (0.3125 * 4) = 80 %; 0.8 / 0.3125 = 2.56.
    assert [row["efficiency, %"] for row in rows] == ["100.0", "62.5", "100.0", "80.0"]
    assert [row["speed-up over AdamS, dense"] for row in rows] == ["1.00", "1.00", "2.00", "2.56"]
    assert [row["tokens/s"] for row in rows] == ["4,000", "5,000", "8,000", "12,800"]
    last = rows[-1]
    assert last["step, ms"] == "312.5" and last["quartiles, ms"] == "296.9 to 328.1"
    parts = [last[f"{name}, ms"] for name in ("compute", "exposed communication", "optimizer", "other")]
    assert parts == ["200.0", "62.5", "40.0", "10.0"] and last["peak memory per rank, MB"] == "600"
    assert last["sent per step and rank, MB: network"] == "0.500"
    assert last["sent per step and rank, MB: node"] == "1.000"
    assert "`run it`" in text and "two cores" in text and "- No GPU here." in text
    assert "calibrated wait" in text and "4,000 tokens per step" in text and "## Failed" not in text


def test_predictions_bytes_and_losses(tmp_path: Path) -> None:
    text = report(tmp_path, ALL)
    rows = table(text, "Predicted and measured steps")
    assert [row["residual, %"] for row in rows] == ["+10.0", "+5.0", "-20.0", "+4.0"]
    assert "(predicted - measured) / measured: -20.0 % (SCAPE 0.1, 2 ranks)" in text
    assert rows[3]["exposed communication, predicted / measured"] == "85.0 / 62.5"
    rows = table(text, "Bytes of the ranks and of the interfaces")
    assert [row["interface / counted"] for row in rows] == ["1.000", "1.050"] * 4
    assert rows[1]["counted by the ranks, MB"] == "8.000" and rows[1]["interface, MB"] == "8.400"


@pytest.mark.parametrize("number", [1, 10, 11, 12])
def test_the_figures_show_something(number: int, tmp_path: Path) -> None:
    from matplotlib.image import imread

    assert f"](figure_{number}.png)" in report(tmp_path, ALL)
    pixels = imread(tmp_path / f"figure_{number}.png")[..., :3]
    assert pixels.shape[0] > 150 and pixels.shape[1] > 600
    assert 0.02 < (pixels.min(axis=2) < 0.9).mean() < 0.6, "neither blank nor black"


PAPER_GRID = """
title = "Strong scaling"
recipe = "train_configs/embedded.toml"
launcher = "slurm"
[report]
tables = ["step_times", "beside_the_paper"]
figures = ["figure_10", "figure_11", "figure_12"]
[methods]
adams = { label = "AdamS", sync.method = "dense" }
[[sets]]
name = "MACHINE-paper"
methods = ["adams"]
sizes = [4, 64]
launch = { machine = "MACHINE" }
[[sets]]
name = "MACHINE"
methods = ["adams"]
sizes = [4, 64]
launch = { machine = "MACHINE" }
"""


@pytest.mark.parametrize("machine", ["vista", "frontier"])
def test_values_of_the_paper_are_beside_ours_on_its_machine(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(sweep_figures, "save", lambda drawing, path, legend: drawn.update({path.name: drawing}))
    (tmp_path / "grid.toml").write_text(PAPER_GRID.replace("MACHINE", machine))
    grid, store = Grid(tmp_path / "grid.toml"), Store(tmp_path)
    for spec, seconds in zip(grid.specs(grid.sets[0], "adams"), (20.0, 4.0), strict=True):
        one = run("dense", 2)["result"] | {"size": spec.size, "step_seconds": seconds, "recipe": "llama_1_8b"}
        store.keep(spec, one | {"label": "AdamS", "launcher": "slurm"}, "", {})
    text = write_report(grid, tmp_path).read_text()
    labels = {name: figure.axes[0].get_legend_handles_labels()[1] for name, figure in drawn.items()}
    theirs = {name: "the paper's value" in shown for name, shown in labels.items()}
    assert theirs == {f"figure_{n}.png": machine == "vista" and n != 12 for n in (10, 11, 12)}
    assert [len(drawing.axes) for drawing in drawn.values()] == [4, 2, 2], "the second set has the same runs"
    if machine == "frontier":
        assert "Beside the paper" not in text
        return
    row = table(text, "Beside the paper's values")[0]
    assert row["step, ms (64 ranks)"] == "4,000.0" and row["step, ms: the paper's"] == "4,804.4"
    assert row["efficiency, % (64 ranks)"] == "31.2" and row["efficiency, %: the paper's"] == "17.6"
    assert row["memory, MB: the paper's"] == "-"


def test_a_legend_of_fifteen_methods_is_not_cut_off(tmp_path: Path) -> None:
    from scripts import plots

    drawn, axes = plots.figure(1, 2, (10.8, 5))
    for i in range(15):
        axes[0][0].plot([1, 2], [i, i], label=f"SCAPE 0.{i:02d}, SHARDED UPDATE, WITH OFFLOAD")
    plots.save(drawn, tmp_path / "drawn.png", axes[0])
    (legend,) = drawn.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= drawn.bbox.width and box.y0 >= 0
    assert len(legend.get_texts()) == 15


def test_failures_are_listed_and_break_nothing(tmp_path: Path) -> None:
    failed = run("scape", 2) | {"result": {"label": "SCAPE 0.1", "error": "rank 1 of 4: out of memory\nTraceback"}}
    text = report(tmp_path, [ALL[0], ALL[1], ALL[3], failed])
    assert table(text, "Failed")[0]["error"] == "rank 1 of 4: out of memory"
    # Without its smallest size the method's baseline is another than the others', and the table says so.
    assert table(text, "Step times")[-1]["efficiency, %"] == "100.0 (from 4)"
    lacking = run("dense", 2, tokens_per_step=None)
    with pytest.raises(ValueError, match=f"{lacking['key']} lacks tokens_per_step"):
        report(tmp_path, [lacking])


def test_only_failures_still_make_a_report(tmp_path: Path) -> None:
    failed = run("scape", 2) | {"result": {"label": "SCAPE 0.1", "error": "rank 1 of 4: out of memory"}}
    text = report(tmp_path, [failed])
    assert table(text, "Failed")[0]["error"] == "rank 1 of 4: out of memory" and "![" not in text


def test_what_is_missing_is_left_out(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("peak_memory_bytes", "nic", "counted", "predicted", "validation_loss", "quartiles"))
    text = report(tmp_path, [run("scape", 2, **nothing)], notes=False)
    assert [line for line in text.splitlines() if line.startswith("# ") or line.startswith("## ")] == [
        "# Strong scaling",
        "## Step times",
    ]
    (row,) = table(text, "Step times")
    assert row["speed-up over dense"] == row["peak memory per rank, MB"] == row["quartiles, ms"] == "-"


def test_a_batch_that_changes_is_called_out(tmp_path: Path) -> None:
    assert "**The batch is not fixed.**" in report(tmp_path, [ALL[0], run("dense", 4, tokens_per_step=8000)])


def test_a_run_with_other_settings_replaces_the_old_one_in_the_table(tmp_path: Path) -> None:
    again = run("dense", 2, step_seconds=2.0)
    again["key"], again["options"] = "00000000", again["options"] | {"launch.steps": 99}
    rows = table(report(tmp_path, [again, *ALL]), "Step times")  # stored last
    assert [row["step, ms"] for row in rows[:2]] == ["2000.0", "800.0"] and len(rows) == 4


def test_nothing_to_report_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(tmp_path, [], notes=False)
    assert main(["report", str(tmp_path / "grid.toml"), f"--output={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "has no finished run" in error and len(error.splitlines()) == 1


# --------------------------------------------------------------------------------------------- shard axis


def timed(method: str, label: str, seconds: float, gradients: float = 0.0, **targets: Any) -> dict[str, Any]:
    phases = {"shard weights": 0.5, "shard gradients": gradients, "shard index": 0.25 * gradients, "check": 0.01}
    levels = {"network": {"weights": 8e6, "gradients": 2e6}, "node": {"weights": 1e6, "gradients": 0.0}}
    planned = {"network weights": 8e6, "network gradients": 2e6, "node weights": 1e6}
    one = {"method": method, "label": label, "micro_batches": 2, "step_seconds": seconds, "by_phase": phases}
    return {
        **one,
        "targets": targets,
        "planned": planned,
        "by_kind": levels,
        "nic": {"network": 10.2e6, "node": 1.05e6},
    }


def test_shard_axis_steps_are_compared_with_dense_and_zeropp_as_published(tmp_path: Path) -> None:
    cells = [
        timed("dense", "FSDP2", 8.0),
        timed("zeropp-published", "ZeRO++ as published", 4.0),
        timed("levels", "three levels", 2.0),
        timed("levels-scape", "three levels, SCAPE", 2.5),
    ]
    rows = list(shard_steps(cells))
    assert [row["step, ms"] for row in rows] == ["8000.0", "4000.0", "2000.0", "2500.0"]
    assert rows[2]["speed-up over FSDP2"] == "4.00" and rows[2]["speed-up over ZeRO++ as published"] == "2.00"
    assert rows[2]["weights, ms"] == "500.0" and rows[2]["optimizer, ms"] == "10.0"
    network, node = shard_bytes(cells[:1])
    assert network["interface / closed form"] == "1.020" and network["closed form"] == "10.000"
    assert node["interface / counted"] == "1.050" and node["counted by kind"] == "weights 1.000"


def test_the_exchange_of_tagc_is_compared_with_dense() -> None:
    cells = [timed("dense", "FSDP2", 9.0, 4.0), timed("tagc", "10 %", 4.0, 1.0, exchange=5.0)]
    cells.append(timed("tagc-0.9875", "1 %", 3.0, 0.5, exchange=5.0))
    first, second = shard_exchange(cells)
    assert (first["ratio"], first["holds"]) == ("4.00", "no") and (second["ratio"], second["holds"]) == ("8.00", "yes")


def test_gaps_of_the_shard_axis_are_paired_by_seed(tmp_path: Path) -> None:
    losses = {("dense", 0): 4.0, ("dense", 1): 5.0, ("scape", 0): 4.032, ("scape", 1): 5.0, ("tagc", 1): 5.1}
    lines = [line("losses", m, {"debug.seed": s}, {"label": m, "validation_loss": x}) for (m, s), x in losses.items()]
    lines.append(line("losses", "scape", {"debug.seed": 2}, {"label": "SCAPE 0.1", "error": "no space"}))
    text = report(tmp_path, lines)
    dense, scape, tagc = table(text, "Losses by seed")
    assert dense["gap, %"] == "-" and dense["seeds"] == "2" and dense["steps"] == "40"
    assert scape["by seed"] == "+0.80, +0.00" and scape["gap, %"].startswith("+0.40") and scape["holds"] == "yes"
    assert tagc["gap, %"] == "+2.00" and tagc["target"] == "3.6" and tagc["holds"] == "yes"
    assert "no space" in text and "Step times" not in text


def test_a_store_is_json_lines(tmp_path: Path) -> None:
    study(tmp_path, ALL)
    lines = [json.loads(text) for text in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [one["result"]["step_seconds"] for one in lines[:4]] == [SECONDS[key] for key in reversed(SECONDS)]
