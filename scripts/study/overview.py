"""The README's picture: final loss against bytes per step, for the methods of its decision table.

python -m scripts.study.overview    # writes docs/assets/loss_for_bytes.png from results/comparison
"""

from pathlib import Path

from scripts.common import RESULTS
from scripts.plots import COLOURS, figure, save
from scripts.study.entries import Budget, budgets_of
from scripts.study.grid import GRIDS, Grid
from scripts.study.store import Store

TARGET = Path(__file__).resolve().parents[2] / "docs" / "assets" / "loss_for_bytes.png"
# Method of the study -> its name in the picture.
SHOWN = {
    "Muon, dense": "dense, Muon",
    "AdamW, dense": "dense, AdamW",
    "quantized 4 bits, Muon": "quantized, Muon",
    "quantized 4 bits": "quantized, AdamW",
    "SPARTA 3, one bit, Muon": "SPARTA, Muon",
    "SCAPE at 1.2 %": "SCAPE, AdamS",
    "streaming DiLoCo 30": "streaming DiLoCo, AdamW",
}


def draw(budget: Budget, path: Path) -> None:
    """Draw the gap to dense Muon in % over the bytes of a step in % of dense."""
    drawn, axes = figure(1, 1, (6.0, 4.2))
    axis = axes[0][0]
    muon = budget.dense("Muon")
    assert muon is not None
    for i, entry in enumerate(entry for entry in budget.entries if entry.label in SHOWN):
        gaps, share = entry.gaps(muon), 100 * entry.shares[0]
        mean = sum(gaps) / len(gaps)
        axis.errorbar(
            share,
            mean,
            yerr=[[mean - min(gaps)], [max(gaps) - mean]],
            marker="o",
            markersize=9,
            color=COLOURS[i % len(COLOURS)],
            capsize=3,
        )
        left = share > 8
        axis.annotate(
            SHOWN[entry.label],
            (share, mean),
            xytext=(-9 if left else 9, 6 if mean >= 0.0 else -16),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=11,
        )
    axis.set_xscale("log")
    axis.set_xticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    axis.set_xlim(0.3, 140)
    axis.set_xlabel("bytes per step, % of dense FP32", fontsize=11)
    axis.set_ylabel("final loss above dense Muon, %", fontsize=11)
    axis.set_title("0.2 M parameters, 4 replicas, 980 steps", fontsize=11)
    axis.axhline(0.0, color="black", linewidth=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(drawn, path)


def main() -> None:
    grid = Grid(GRIDS / "comparison.toml")
    budgets, _ = budgets_of(grid, Store(RESULTS / "comparison", [RESULTS / name for name in grid.shared]))
    draw(next(one for one in budgets if one.steps == 980 and one.replicas == 4), TARGET)


if __name__ == "__main__":
    main()
