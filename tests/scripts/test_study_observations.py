"""The study of the paper's observations: what it asks of the trainer, and what it makes of stored files."""

import argparse
import math
from pathlib import Path

import pytest
import torch

from scripts.common import write
from scripts.studies import observe, observe_plots
from torchtitan_scape.config.checks import check_config
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.observe.figures import distribution, largest, overlap
from torchtitan_scape.observe.record import Record, Row
from torchtitan_scape.observe.tensors import chosen
from torchtitan_scape.trainer.specs import whole_model

TENSORS = ["layers.0.feed_forward.w1+w3", "layers.3.attention.wo"]


def test_runs_are_what_is_said_of_them() -> None:
    given = argparse.Namespace(steps=200, replicas=4, density=0.1, rest=[])
    assert len(observe.CELLS) == 8
    configs = {cell.name: parse(observe.options(cell, given)) for cell in observe.CELLS[::3]}
    for config in configs.values():
        check_config(config, "cpu")
        assert config.observe.windows == [[1, 50], [101, 100]] and config.observe.histograms == [10, 100]
        assert config.training.local_batch_size * config.topology.simulate_replicas == 16
    assert configs["embedded-adams-topk"].sync.topk.selection == "tensor"
    model = whole_model(configs["embedded-adamw"])[2]
    names = [name for name, _ in model.named_parameters()]
    shards = collect_shards([{"params": list(model.parameters()), "param_names": names}])
    labels = [one.label for one in chosen(observe.NAMES, shards, "llama3")]
    assert labels[: observe_plots.SHOWN] == [one.label for one in chosen([], shards, "llama3")]


def test_signed_histograms_meet_on_the_wider_axis() -> None:
    values = torch.randn(5_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    values[:100] = 0
    narrow, wide = distribution(values), distribution(torch.cat([values, torch.tensor([1.0])]))
    assert wide.exponent > narrow.exponent + 3
    joined = observe_plots.coarse(vars(narrow) | {"linear": narrow.linear.numpy()}, wide.exponent)
    expected = wide.linear.numpy().copy()
    expected[int((1.0 / 2**wide.exponent + 1) * expected.size / 2)] -= 1
    expected[expected.size // 2] -= 100
    assert (joined == expected).all()


@pytest.mark.parametrize("step", [2, 30])
def test_overlap_of_noise(step: int) -> None:
    moments = [torch.zeros(200_000), torch.zeros(200_000)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(step):
        moments = [moments[1], 0.9 * moments[1] + 0.1 * torch.randn(200_000, generator=generator)]
    seen = overlap(*(largest(moment, 0.1) for moment in moments))
    assert observe_plots.of_noise(step, 0.1) == pytest.approx(seen, abs=0.01)


def stored(folder: Path) -> None:
    """Files of one recipe, of runs that were switched after step 4."""
    for name in ("adamw", "adams", "adamw-topk", "adams-topk"):
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
        made.path.rename(folder / f"small-{name}.npz")
        losses = [[step, 5.0 - step / 10 + (wide if name.endswith("topk") else 0)] for step in range(5, 9)]
        curves = dict.fromkeys(("training", "validation", "norm", "residual"), losses)
        write(folder / f"small-{name}.json", {"options": [], "curves": curves})


def test_pictures_and_table_from_stored_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(observe_plots, "save", lambda figure, path, legend=(): drawn.append(path.name))
    with pytest.raises(ValueError, match=r"has no runs; first run python -m scripts.studies.observe run"):
        observe_plots.load(tmp_path)
    stored(tmp_path)
    observe_plots.draw(tmp_path)
    assert drawn == [f"{kind}-small.png" for kind in observe_plots.KINDS]
    text = (tmp_path / "table.md").read_text()
    assert "| layers.3.attention.wo | 2 | AdamS | 0.00" in text and "| 0.520 (0.520) | 0.565 (0.550) |" in text
    # The last quarter of the steps after the switch: step 8.
    assert "| layers.3.attention.wo | AdamW | 1 | 24 | 24.00 | 1 | 24 | 24.00 |" in text
    assert "+3.0000 at step 8" in text and "+1.0000 at step 8" in text
