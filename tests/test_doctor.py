"""The doctor: in real processes, and with a fault in one of them, which it names."""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.pool import Pool
from tests.server import ROOT
from torchtitan_scape import doctor
from torchtitan_scape.checkpoint import storage
from torchtitan_scape.planner import measurement
from torchtitan_scape.planner.measurement import MAX_ROUNDS, residual_advice, rounds_of

CHECKS = ["packages", "devices", "transport", "folder", "clocks", "node pairs", "products", "links"]


def run(folder: str, fault: str = "", check: str = "", *options: str) -> tuple[int, dict[str, doctor.Finding]]:
    """Run one check or all, on nodes of one rank. Return the exit code and the rows by check."""
    rank, rows = dist.get_rank(), []
    exchange, now, product = dist.batch_isend_irecv, time.time, measurement.torch.mm
    collect = doctor.Doctor.rows if not check else lambda self: [doctor._guarded(getattr(self, check))]

    def slow_exchange(operations: list[Any]) -> list[Any]:
        slow = {rank, operations[0].peer} == {1, 3} if fault == "pair" else 2 in (rank, operations[0].peer)
        time.sleep(0.4 if fault in ("pair", "node") and slow else 0.0)
        return exchange(operations)

    def slow_product(a: Any, b: Any) -> Any:
        time.sleep(0.3 if fault == "product" and rank == 3 else 0.0)
        return product(a, b)

    def keep(self: doctor.Doctor) -> list[doctor.Finding]:
        rows.extend(collect(self))
        return rows

    if fault == "folder":
        os.makedirs(f"{folder}/{rank}")
        os.chdir(f"{folder}/{rank}")
        folder = "run"
    versions = doctor.code_versions() | ({"code: torch": "2.11.0"} if fault == "version" and rank == 2 else {})
    with (
        patch.object(os, "uname", lambda: type("Name", (), {"nodename": f"node{rank}"})),
        patch.object(socket, "gethostname", lambda: f"node{rank}"),
        patch.object(time, "time", lambda: now() + (5.0 if fault == "clock" and rank == 1 else 0.0)),
        patch.object(dist, "batch_isend_irecv", slow_exchange),
        patch.object(measurement.torch, "mm", slow_product),
        patch.object(doctor, "code_versions", lambda: versions),
        patch.object(doctor.Doctor, "rows", keep),
        patch.object(storage, "SHARED_SECONDS", 0.5),
        patch.object(measurement, "NODE_REPEATS", 4),
        patch.dict(os.environ, LOCAL_RANK="0"),
    ):
        code = doctor.main(["--dump-folder", folder, "--ranks-per-node=1", "--machine=local", "--largest=1", *options])
    return code, {row.check: row for row in rows}


@pytest.mark.parametrize(
    "fault, check, result, advice",
    [
        ("pair", "node pairs", "6 pairs, GB/s in one direction: ", "node1 and node3 exchange"),
        ("node", "node pairs", "(node0 and node2)", "node2 is slow with 3 of 3 nodes: check its adapters"),
        ("clock", "clocks", "ms apart", "node1 is 5.0 s ahead of node0; synchronize it by NTP"),
        ("folder", "folder", "not shared", "is missing on node1, node2, node3; checkpoints need one"),
        ("version", "packages", "not completed", "rank 2 has code: torch = 2.11.0"),
    ],
)
def test_a_fault_is_named_on_every_rank(
    fault: str, check: str, result: str, advice: str, pool4: Pool, tmp_path: Path
) -> None:
    results = pool4(run, str(tmp_path), fault, {"node pairs": "pairs"}.get(check, check))
    assert all(code == 1 for code, _ in results)
    for _, rows in results:
        assert rows[check].failed and advice in " ".join(rows[check].advice)
        assert fault == "node" or result in rows[check].result


def test_a_slow_cpu_is_a_note(pool4: Pool, tmp_path: Path) -> None:
    """Other programs on a laptop are no reason to fail."""
    for _, rows in pool4(run, str(tmp_path), "product", "products"):
        row = rows["products"]
        assert not row.failed and row.advice[0].startswith("node3 rank 3 computes at") and "node3 rank 3)" in row.result


def test_every_check_has_a_row_and_the_links_are_stored(pool4: Pool, tmp_path: Path) -> None:
    for _, rows in pool4(run, str(tmp_path / "run"), "", "", f"--output={tmp_path}/links.json"):
        assert list(rows) == CHECKS and not any(rows[name].failed for name in CHECKS if name != "node pairs")
    assert json.loads((tmp_path / "links.json").read_text())["world_size"] == 4
    assert not (tmp_path / "run/.probe").exists()


def test_an_output_that_one_process_cannot_measure_is_a_failure(tmp_path: Path) -> None:
    """The planner would read the links of an earlier command."""
    one = object.__new__(doctor.Doctor)
    one.world, one.options = 1, argparse.Namespace(output=tmp_path / "links.json")
    found = one.links()
    assert found.failed and f"{tmp_path}/links.json was not written: start two ranks" in str(found)


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_NTASKS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "torchtitan_scape", "doctor", f"--dump-folder={tmp_path}"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert [line[:12].strip() for line in found.stdout.splitlines() if not line.startswith(" ")] == CHECKS


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
def test_every_pair_of_nodes_is_measured_once_and_no_node_twice_in_a_round(nodes: int) -> None:
    rounds = rounds_of(nodes)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(nodes) for b in range(a + 1, nodes)
    ]
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds_of(200)) == MAX_ROUNDS


@pytest.mark.parametrize(
    "slow, meaning", [(1 << 10, "the bandwidth can be used"), (1 << 24, "the bandwidth is uncertain")]
)
def test_a_large_residual_has_advice(slow: int, meaning: str) -> None:
    points = [
        {
            "level": "network",
            "bytes": n,
            "rounds": 2,
            "sent": n,
            "seconds": (2e-5 + n / 1e9) * (2.4 if n == slow else 1),
        }
        for n in (1 << 10, 1 << 20, 1 << 24)
    ]
    link = {"latency": 1e-5, "bandwidth": 1e9, "residual": 0.58}
    result = {"levels": {"network": link, "node": link | {"residual": 0.1}}, "measurements": points}
    found = residual_advice(result)
    assert list(found) == ["network"] and "took 2.40 x the fitted time: " + meaning in found["network"]


def test_srun_without_torchrun_sets_the_variables() -> None:
    environment = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "70"}
    environment |= {"SLURM_STEP_NODELIST": "n[1-2]"}
    answer = subprocess.CompletedProcess([], 0, "n1\nn2\n")
    with patch.object(subprocess, "run", return_value=answer):
        doctor.set_environment(environment)
    assert [environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["3", "4", "1"]
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("n1", "20070")
