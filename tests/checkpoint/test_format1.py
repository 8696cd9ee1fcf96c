"""Checkpoints in format 1, which commit bc06ed0 wrote, load, and training continues as it did there."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.checkpoint import format1
from tests.marks import slow
from tests.pool import Pool

ARCHIVE = Path(__file__).with_name("format1.tar.xz")


# Of the default run: the states of every method.
SOME = {
    1: ("muon", "scape", "topk", "powersgd-mean", "radius", "quantized", "demo", "streaming", "sparta-6", "tagc"),
    2: ("scape-gather", "scape-2x1", "shard-tagc-mean"),
}
# Runs of the archive with options that were removed.
REMOVED = {"scape-gather-bf16", "scape-gather-bf16-mean", "scape-gather-int4", "scape-gather-int4-mean"}


@pytest.mark.parametrize("ranks, some", [(1, True), (2, True), slow(1, False), slow(2, False)])
def test_every_method_continues_as_before(
    ranks: int, some: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Norms of synchronized gradients contain the residuals; the losses of the first steps hardly depend on them."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "format1"
    expected = json.loads((folder / "expected.json").read_text())
    cases = {1: format1.ONE_RANK, 2: format1.TWO_RANKS}[ranks]
    cases = {name: cases[name] for name in SOME[ranks]} if some else cases
    pool: Pool = request.getfixturevalue(f"pool{ranks}")
    found = pool(format1.train_all, str(folder), cases, timeout=600)[0]
    # On another CPU than the archive's, sums are rounded differently.
    different = [
        f"{name}: {key} {figures[key]}, recorded {expected[name][key]}"
        for name, figures in found.items()
        for key, rel in (("losses", 1e-5), ("norms", 1e-4))
        if figures[key] != pytest.approx(expected[name][key], rel=rel)
    ]
    assert not different, "\n".join(different)
    assert expected.keys() - REMOVED == format1.ONE_RANK.keys() | format1.TWO_RANKS.keys()
