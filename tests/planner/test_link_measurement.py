"""The measurement of links: its fit on synthetic times, and a measurement in real gloo processes."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.pool import Pool
from torchtitan_scape.doctor import main
from torchtitan_scape.planner.measurement import _tiers, fit_link, measure
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import SCHEMA, Links, get_machine


def points(latency: float, bandwidth: float, size: int = 4) -> list[dict]:
    """Return the measurements of an ideal link."""
    found = []
    for nbytes in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        rounds, sent = 2 * (size - 1), 2 * (size - 1) / size * nbytes
        found.append({"rounds": rounds, "sent": sent, "seconds": rounds * latency + sent / bandwidth})
    return found


@pytest.mark.parametrize(("latency", "bandwidth"), [(5e-6, 12.5e9), (2e-4, 1.25e7), (0.0, 1e9)])
def test_the_fit_recovers_a_link(latency: float, bandwidth: float) -> None:
    link = fit_link(points(latency, bandwidth))
    assert link["latency"] == pytest.approx(latency, rel=1e-6, abs=1e-12)
    assert link["bandwidth"] == pytest.approx(bandwidth, rel=1e-6)
    assert link["residual"] < 1e-6


def test_an_outlier_gives_a_large_residual() -> None:
    measured = points(1e-5, 1e9)
    measured[1]["seconds"] *= 3
    assert fit_link(measured)["residual"] > 0.3


def test_constant_times_still_give_a_bandwidth() -> None:
    measured = [p | {"seconds": 1e-3 / (i + 1)} for i, p in enumerate(points(0, 1))]
    assert 0 < fit_link(measured)["bandwidth"] < float("inf")


def test_every_level_of_both_axes_is_measured_once() -> None:
    """Frontier, 2 nodes, 2 shards: replicas communicate within and between nodes, shards within a package."""
    layout = plan_layout(16, ranks_per_node=8, machine=get_machine("frontier"), replicate=8, shard=2)
    tiers = {tier.level: tier for tier in _tiers(layout)}
    assert {level: tier.size for level, tier in tiers.items()} == {"node": 4, "network": 2, "gcd_pair": 2}
    for tier in tiers.values():
        assert sorted(rank for ranks in tier.groups for rank in ranks) == list(range(16))
    assert tiers["gcd_pair"].groups[0] == (0, 1) and (0, 8) in tiers["network"].groups


def one_level(sizes: tuple[int, ...]) -> dict:
    layout = plan_layout(2, ranks_per_node=1, machine=get_machine("local"), replicate=2, shard=1)
    return measure(layout, torch.device("cpu"), sizes, timedelta(seconds=60))


def test_two_ranks_report_equal_measurements(pool2: Pool) -> None:
    first, second = pool2(one_level, (1 << 10, 1 << 20))
    assert first == second
    assert first["schema"] == SCHEMA and first["backend"] == "gloo" and first["world_size"] == 2
    link = first["levels"]["network"]
    # A wide range, which a number in a wrong unit would exceed.
    assert 0 <= link["latency"] < 0.1 and 1e6 < link["bandwidth"] < 1e12
    assert 1e8 < first["memory_bandwidth"] < 1e13
    small, large = first["measurements"]
    assert (small["rounds"], small["sent"], large["sent"]) == (2, 1 << 10, 1 << 20)
    assert 3 <= len(small["repeats"]) <= 7 and small["seconds"] in small["repeats"]


def run_main(arguments: list[str]) -> int:
    return main(arguments)


def test_the_file_of_the_doctor_is_read_by_the_cost_model(pool2: Pool, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "links.json"
    call = ["--dump-folder", str(tmp_path / "run"), "--output", str(path)]
    call += ["--ranks-per-node", "2", "--machine", "local", "--largest", "0.25"]
    assert pool2(run_main, call) == [0, 0]
    stored = json.loads(path.read_text())
    links = Links.from_json(path)
    assert links["node"].bandwidth == stored["levels"]["node"]["bandwidth"]
    assert links.memory_bandwidth == stored["memory_bandwidth"]
    assert stored["ranks_per_node"] == 2 and max(m["bytes"] for m in stored["measurements"]) == 1 << 18
    assert list(path.parent.iterdir()) == [path]  # no incomplete file is left
    with pytest.raises(ValueError, match=r"no level 'network', only node; run the doctor"):
        links["network"]


@pytest.mark.parametrize(
    "arguments", [["--machine", "cray"], ["--shard", "3"], ["--ranks-per-node", "4"], ["--largest", "0.001"]]
)
def test_invalid_arguments_exit_with_code_1_on_every_rank(arguments: list[str], pool2: Pool, tmp_path: Path) -> None:
    call = ["--dump-folder", str(tmp_path / "run"), "--output", str(tmp_path / "links.json"), "--ranks-per-node", "2"]
    assert pool2(run_main, [*call, *arguments]) == [1, 1]
    assert not (tmp_path / "links.json").exists()
