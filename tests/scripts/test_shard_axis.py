"""scripts/studies/shard_axis.py: its table from cells that can be worked out by hand, and its smallest runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.common import ROOT, write
from scripts.emulated_cluster import Cluster, ClusterError
from scripts.studies import shard_axis
from scripts.studies.shard_axis_forms import LOSSES, SPEED, TAGC
from scripts.studies.shard_axis_report import byte_rows, exchange_rows, loss_rows, step_rows, verdicts, write_report
from torchtitan_scape.config.checks import check_config
from torchtitan_scape.config.parsing import parse


def timed(form: str, seconds: float, gradients: float = 0.0) -> dict[str, Any]:
    phases = {"shard weights": 0.5, "shard gradients": gradients, "shard index": 0.25 * gradients, "check": 0.01}
    levels = {"network": {"weights": 8e6, "gradients": 2e6}, "node": {"weights": 1e6, "gradients": 0.0}}
    planned = {"network weights": 8e6, "network gradients": 2e6, "node weights": 1e6}
    one = {"form": form, "micro_batches": 2, "step_seconds": seconds, "by_phase": phases, "planned": planned}
    return {**one, "by_kind": levels, "nic": {"network": 10.2e6, "node": 1.05e6}}


def test_steps_are_held_against_dense_and_zeropp_as_published() -> None:
    cells = [timed("dense", 8.0), timed("zeropp-published", 4.0), timed("levels", 2.0), timed("levels-scape", 2.5)]
    rows = step_rows(cells, SPEED)
    assert [row["step, ms"] for row in rows] == ["8000.0", "4000.0", "2000.0", "2500.0"]
    assert rows[2]["faster than FSDP2's own (ZeRO-3)"] == "4.00"
    assert rows[2]["faster than ZeRO++ as published"] == "2.00" and rows[2]["weights, ms"] == "500.0"
    assert rows[2]["optimizer, ms"] == "10.0"
    held = {(row["faster"], row["than"]): row["holds"] for row in verdicts(cells)}
    assert held[SPEED["levels"].title, SPEED["zeropp-published"].title] == "yes"
    assert held[SPEED["levels-scape"].title, SPEED["zeropp-published"].title] == "no"
    network, node = byte_rows(cells[:1], SPEED)
    assert network["interface / closed form"] == "1.020" and network["closed form"] == "10.000"
    assert node["interface / counted"] == "1.050" and node["counted by kind"] == "weights 1.000"


def test_tagcs_exchange_is_held_against_dense() -> None:
    first, second = exchange_rows(
        [timed("dense", 9.0, 4.0), timed("tagc-0.9", 4.0, 1.0), timed("tagc-0.9875", 3.0, 0.5)]
    )
    assert (first["ratio"], first["holds"]) == ("4.00", "no") and (second["ratio"], second["holds"]) == ("8.00", "yes")


def test_gaps_are_paired_by_seed(tmp_path: Path) -> None:
    losses = {("dense", 0): 4.0, ("dense", 1): 5.0, ("int8", 0): 4.032, ("int8", 1): 5.0, ("tagc-0.9", 1): 5.1}
    cells = [{"form": f, "steps": 40, "seed": s, "validation_loss": loss} for (f, s), loss in losses.items()]
    dense, int8, tagc = loss_rows(cells)
    assert dense["gap, %"] == "-" and dense["seeds"] == "2"
    assert int8["by seed"] == "+0.80, +0.00" and int8["gap, %"].startswith("+0.40") and int8["holds"] == "yes"
    assert tagc["gap, %"] == "+2.00" and tagc["target"] == "3.6" and tagc["holds"] == "yes"

    for number, cell in enumerate([*cells, {"form": "int8", "steps": 40, "seed": 2, "error": "no space"}]):
        write(tmp_path / "losses" / "cells" / f"{number}.json", cell)
    write(tmp_path / "losses" / "sweep.json", {"command": "a command"})
    text = write_report(tmp_path).read_text()
    assert "a command" in text and "failed: 5: no space" in text and "+0.80, +0.00" in text and "Step times" not in text


def test_the_trainer_takes_what_forms_are_made_of() -> None:
    """And goes with each other; all of them, as a run of a form takes minutes."""
    for form in (*SPEED.values(), *TAGC.values(), *LOSSES.values()):
        config = parse(["--job.config_file=train_configs/embedded.toml", *form.arguments()])
        check_config(config, "cpu")
        assert config.parallelism.data_parallel_shard_degree == form.shard


def test_unknown_forms_are_named(tmp_path: Path) -> None:
    for launcher in ("speed", "losses"):
        args = shard_axis.parse([launcher, "--forms=zero", f"--output={tmp_path}"])
        with pytest.raises(ValueError, match="no form 'zero'; known are dense"):
            shard_axis.run(args)


@pytest.mark.slow
def test_the_smallest_runs(tmp_path: Path) -> None:
    try:
        with Cluster(1):
            pass
    except ClusterError as error:
        pytest.skip(str(error))

    def run(name: str, *arguments: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "scripts.studies.shard_axis", name, f"--output={tmp_path / name}", *arguments]
        short = ["--", "--validation.steps=1", "--validation.local_batch_size=1"]
        result = subprocess.run([*command, *short], cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, result.stdout + result.stderr
        return [json.loads(path.read_text()) for path in (tmp_path / name / "cells").glob("*.json")]

    short = ("--slowdown=0", "--rate=200", "--micro-batches=2", "--steps=2", "--warm-up=2")
    (cell,) = run("speed", "--forms=zeropp-published", *short)
    assert cell["nic"]["network"] == pytest.approx(sum(cell["by_kind"]["network"].values()), rel=0.05)
    assert sum(v for k, v in cell["planned"].items() if k.startswith("network")) == pytest.approx(
        sum(cell["by_kind"]["network"].values()), rel=0.02
    ), "across nodes in both forward passes"
    assert cell["by_phase"]["shard weights"] > 0 and cell["phases"]["exposed"] > cell["by_phase"]["shard weights"]
    (cell,) = run("losses", "--forms=tagc-0.9", "--seeds=0", "--steps=2")
    assert cell["validation_loss"] > 0
    assert "TAGC, 10 % once a step" in (tmp_path / "table.md").read_text()
