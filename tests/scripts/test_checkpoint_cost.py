"""scripts/benchmarks/checkpoint_cost.py: ratios of results that can be computed by hand."""

from pathlib import Path
from typing import Any

from scripts.benchmarks.checkpoint_cost import plain_write, tables


def cell(nbytes: float, now: float, later: float) -> dict[str, Any]:
    return {
        "disabled": {"bytes": nbytes, "goes_on": now, "whole": now, "plain": 0.1},
        "async": {"bytes": nbytes, "goes_on": later, "whole": 2 * now, "plain": 0.1},
    }


def test_ratios_are_relative_to_dense_adamw_with_equal_replicas() -> None:
    writers = {"checked": 0.21, "without checksums": 0.20, "PyTorch's": 0.25}
    dense = {**cell(4e6, 0.2, 0.05), "writers": writers}
    head, _, first, second, _, _, _, by_writer = tables({"2": {"adamw": dense, "adams": cell(3e6, 0.1, 0.04)}}).split(
        "\n"
    )
    assert first == "| 2 | dense AdamW | 4.000 | 1.00 | 200.0 | 1.00 | 50.0 | 1.00 | 400.0 | 100.0 | 2.00 |"
    assert second == "| 2 | dense AdamS | 3.000 | 0.75 | 100.0 | 0.50 | 40.0 | 0.80 | 200.0 | 100.0 | 1.00 |"
    assert head.count("|") == first.count("|")
    assert by_writer == "| 2 | 210.0 | 200.0 | 250.0 | 1.050 | 0.840 |"


def test_the_plain_write_leaves_no_files(tmp_path: Path) -> None:
    assert plain_write(tmp_path, 5 << 20) > 0 and not list(tmp_path.iterdir())
