"""scripts/studies/quality_mechanism.py: its functions on masks against cases worked by hand, and a small whole run."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.scape.blocks import BlockLayout
from scripts.studies.quality_cells import GRID
from scripts.studies.quality_mechanism import main
from scripts.studies.quality_movement import ROWS, between, rule
from scripts.studies.quality_probe import View, Waits, block_top, by_wait, correlation, overlap
from tests import server


def mask(bits: str) -> torch.Tensor:
    return torch.tensor([bit == "1" for bit in bits])


def test_waits_are_the_steps_outside() -> None:
    waits = Waits(4)
    steps = [
        ("1111", "0000", "0000", []),  # the first step is dense, and no entry has waited
        ("1100", "0000", "0011", []),
        ("1010", "0010", "0100", [1]),
        ("1010", "0000", "0000", []),
        ("0110", "0100", "1000", [2]),
        ("1001", "1001", "0110", [1, 4]),
    ]
    for step, (used, fresh, left, outside) in enumerate(steps, start=1):
        found = waits.enter(mask(used), step)
        assert found[0].tolist() == mask(fresh).tolist(), step
        assert found[1].tolist() == mask(left).tolist(), step
        assert found[2].tolist() == outside, step


def test_the_largest_of_every_block_are_the_best() -> None:
    values = torch.tensor([1.0, -9, 2, 0, 3, -2, 0, 0, 5, 6, -7])  # the second block is short
    assert block_top(values, 2, 8).tolist() == mask("01001000011").tolist()
    assert block_top(torch.zeros(8), 2, 8).tolist() == mask("11000000").tolist(), "ties go to the lower index"
    assert block_top(values, 8, 8).all()


def test_the_best_mask_is_of_the_regions_of_the_selection() -> None:
    """Three blocks of 8, the last one short, of which the first replica owns two: 2 of each, or 4 of 16 and 1 of 4."""
    moment = torch.tensor([9.0, 8, 7, 6, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 4, 5, 0, 0])
    passes = SimpleNamespace(density=0.25, layout=BlockLayout((20,), 8, 2), selection="block")
    view: Any = SimpleNamespace(sizes=[20], passes=passes)
    assert View.best(view, moment).tolist() == mask("11000000" + "01100000" + "1100").tolist()
    passes.selection = "tensor"
    assert View.best(view, moment).tolist() == mask("11110000" + "00000000" + "0100").tolist()


def test_overlap_is_a_share_of_the_mask() -> None:
    assert overlap(mask("1110"), mask("0111")) == pytest.approx(2 / 3)
    assert overlap(mask("1000"), mask("1111")) == 1
    assert overlap(mask("0000"), mask("1111")) == 0


def test_correlation() -> None:
    x = torch.tensor([1.0, 2, 4, 8]).log()
    assert correlation(x, 3 * x + 1) == pytest.approx(1)
    assert correlation(x, -x) == pytest.approx(-1)
    assert correlation(torch.tensor([0.0, 0, 1, 1]), torch.tensor([0.0, 1, 0, 1])) == pytest.approx(0)
    assert correlation(x, torch.ones(4) + 1e-6 * x) is None, "rounding"
    assert correlation(x[:1], x[:1]) is None


def test_visits_by_wait() -> None:
    """Bins begin at 1, 2, 3, 4, 5, 6, 8, 10, ...; a wait of 0 is none."""
    found = by_wait(torch.tensor([0.0, 1, 1, 6, 7, 9]), torch.tensor([9.0, 1, 3, 2, 4, 5]))
    assert found == [[1, 1, 2, 2], [6, 7, 2, 3], [8, 9, 1, 5]]


def test_displacements_between_windows_follow_a_power_law() -> None:
    moved = {1: 1.0, 4: 2.0, 100: 10.0}
    assert between(moved, 2) == pytest.approx(2**0.5)
    assert between(moved, 25) == pytest.approx(5)
    assert between(moved, 400) == pytest.approx(10), "as far as is known"


def test_runs_and_their_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two short trainings, each in its process, and what is made of them."""
    monkeypatch.setattr(sys, "executable", server.python())
    text = GRID.read_text()
    small = text.replace("validations = 8 ", "validations = 1 ").replace("_tokens = 81920 ", "_tokens = 512 ")
    assert small.count("= 1  ") and small.count("= 512 ")
    (tmp_path / "grid.toml").write_text(small)
    out = ["--output", str(tmp_path)]
    given = [*out, "--steps=15", "--batch=512", "--grid", str(tmp_path / "grid.toml"), "--work", str(tmp_path / "work")]
    assert main(["run", "--methods=nothing", *given]) == 2 and "no method 'nothing'" in capsys.readouterr().err
    assert main(["report", *out]) == 2 and "lacks dense AdamS" in capsys.readouterr().err
    assert main(["run", "--methods=dense-adams,scape-0.1", *given]) == 0, [
        path.read_text()[-2000:] for path in (tmp_path / "work").glob("*.txt")
    ]
    assert capsys.readouterr().out.count(": done\n") == 2
    assert main(["run", "--methods=dense-adams,scape-0.1", *given]) == 0
    assert capsys.readouterr().out == "", "both are stored"

    cells = {cell["method"]: cell for path in (tmp_path / "cells").iterdir() if (cell := json.loads(path.read_text()))}
    dense, scape = cells["dense-adams"]["figures"], cells["scape-0.1"]["figures"]
    assert [rule(cells[name]) for name in ("dense-adams", "scape-0.1")] == [0, 3]
    assert list(dense["net"]) == ["1", "2", "5"] and dense["net"]["1"] > scape["net"]["1"] > 0
    means = scape["means"]
    assert means["new_slots"] > 0.5, "what has entered leaves again"
    assert means["correlation"] > 0.2 and means["factor"] > 2
    assert 0 < means["overlap_used"] <= 1 and 0 < means["never"] < 1 and means["residual"] > 0
    assert len(scape["curves"]["residual"]) == len(scape["curves"]["overlap_used"]) == 14

    assert main(["report", *out]) == 0
    table = (tmp_path / "table.md").read_text()
    assert f"| final validation loss | {cells['dense-adams']['validation_loss']:.4f} | " in table
    assert all(f"| {name} | " in table for name, _, _ in ROWS) and "nan" not in table
    for name in ("movement.png", "time.png"):
        assert f"]({name})" in table and (tmp_path / name).stat().st_size > 10_000
    path = next((tmp_path / "cells").iterdir())
    path.with_name("other.json").write_text(path.read_text())
    assert main(["report", *out]) == 2 and "two runs of a method" in capsys.readouterr().err
