"""The paper's observations: what the grid asks of the trainer, and the figures and tables of stored runs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.study import observations
from scripts.study.grid import GRIDS, Grid
from scripts.study.launchers import ARRAYS
from scripts.study.report import write_report
from scripts.study.store import Store
from torchtitan_scape.config.checks import check_config
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.observe.figures import chosen, distribution, largest, overlap
from torchtitan_scape.observe.record import Record, Row
from torchtitan_scape.trainer.specs import whole_model

TENSORS = ["layers.0.feed_forward.w1+w3", "layers.3.attention.wo"]


def test_the_runs_of_the_grid() -> None:
    grid = Grid(GRIDS / "observations.toml")
    specs = [spec for one in grid.sets for method in one.methods for spec in grid.specs(one, method)]
    assert len(specs) == 10
    configs = {(spec.of.name, spec.method): parse(spec.arguments) for spec in (specs[0], specs[3], specs[5], specs[8])}
    for config in configs.values():
        check_config(config, "cpu")
        assert config.observe.windows == [[1, 50], [101, 100]] and config.observe.histograms == [10, 100]
        assert config.training.local_batch_size * config.topology.simulate_replicas == 16
    assert configs["embedded", "adams-topk"].sync.topk.selection == "tensor"
    assert configs["embedded-0.008", "adamw"].optimizer.lr == 0.008
    config = configs["embedded", "adamw"]
    model = whole_model(config)[2]
    names = [name for name, _ in model.named_parameters()]
    shards = collect_shards([{"params": list(model.parameters()), "param_names": names}])
    labels = [one.label for one in chosen(config.observe.names, shards, "llama3")]
    assert labels[: observations.SHOWN] == [one.label for one in chosen([], shards, "llama3")]


@pytest.mark.parametrize("step", [2, 30])
def test_overlap_of_noise(step: int) -> None:
    moments = [torch.zeros(200_000), torch.zeros(200_000)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(step):
        moments = [moments[1], 0.9 * moments[1] + 0.1 * torch.randn(200_000, generator=generator)]
    seen = overlap(*(largest(moment, 0.1) for moment in moments))
    assert observations.overlap_of_noise(step, 0.1) == pytest.approx(seen, abs=0.01)


def stored(folder: Path) -> Grid:
    """Store the runs of one set that are switched after step 4."""
    text = (GRIDS / "observations.toml").read_text()
    lines = [
        one for one in text.splitlines() if 'name = "speeches"' not in one and 'name = "embedded-0.008"' not in one
    ]
    (folder / "grid.toml").write_text("\n".join(lines))
    grid, store, arrays = Grid(folder / "grid.toml"), Store(folder), dict[str, Any]()
    for name in grid.methods:
        (spec,) = grid.specs(grid.sets[0], name)
        steps = range(5, 9) if name.endswith("topk") else (1, 2, 5, 6, 7, 8)
        wide = 3.0 if name.startswith("adamw") else 1.0
        made = Record(folder, {})
        for step in steps:
            for tensor in TENSORS:
                made.add(Row(step, tensor, 0.1, math.nan if step == 1 else 0.5 + step / 100, 2.0, 1.0, wide * step))
        for tensor in TENSORS if not name.endswith("topk") else ():
            values = torch.randn(2_000, generator=torch.Generator().manual_seed(1)) * wide * 1e-3
            made.add_histogram(2, tensor, distribution(values))
        made.write()
        with np.load(made.path) as file:
            arrays |= {f"embedded/{name}/{key}": file[key] for key in file.files}
        losses = [[step, 5.0 - step / 10 + (wide if name.endswith("topk") else 0)] for step in range(5, 9)]
        curves = dict.fromkeys(("training", "validation", "norm", "residual"), losses)
        store.keep(spec, {"label": spec.label, "curves": curves}, "", {})
    np.savez_compressed(folder / ARRAYS, **arrays)
    return grid


def test_figures_and_tables_of_stored_runs(tmp_path: Path) -> None:
    grid = stored(tmp_path)
    text = write_report(grid, tmp_path).read_text()
    for kind in observations.FIGURES:
        assert f"({kind}-embedded.png)" in text and (tmp_path / f"{kind}-embedded.png").stat().st_size > 5000
    assert "| layers.3.attention.wo | 2 | AdamS | 0.00" in text and "| 0.520 (0.520) | 0.565 (0.550) |" in text
    # The last quarter of the steps after the switch: step 8.
    assert "| layers.3.attention.wo | AdamW | 1 | 24 | 24.00 | 1 | 24 | 24.00 |" in text
    assert "+3.0000 at step 8" in text and "+1.0000 at step 8" in text
    (tmp_path / ARRAYS).unlink()
    with pytest.raises(ValueError, match="is missing; run the study again"):
        write_report(grid, tmp_path)
