"""The .sbatch files and the sweep on a real Slurm cluster of this host; see scripts/slurm_cluster.py."""

import json
import os
import sys
from pathlib import Path

import pytest

from scripts.common import ROOT
from scripts.faults.fault_runs import differences
from scripts.slurm_cluster import SlurmCluster
from scripts.study.store import SETUP, Store
from tests.scripts.slurm.jobs import real_mpi
from tests.scripts.slurm.real_jobs import EMBEDDED, Job, checkpoint

pytestmark = pytest.mark.slow
SHARDED = "--parallelism.data_parallel_shard_degree=2"


def test_a_requeued_job_equals_an_undisturbed_one(slurm: SlurmCluster, tmp_path: Path) -> None:
    """USR1 as 300 s before the time limit: a checkpoint, scontrol requeue, and the next start continues."""
    steps = "--training.steps=24"
    disturbed = Job(slurm, "vista", tmp_path / "disturbed", steps)
    disturbed.wait_for_step(4)
    slurm.run("scancel", "--signal=USR1", "--batch", disturbed.number)
    disturbed.start_now()
    disturbed.wait_for_end()
    text = disturbed.text()
    assert disturbed.state() == "COMPLETED", text[-3000:]
    assert f"requeueing job {disturbed.number} (exit code 75" in text and "stopped on request after step" in text
    assert "2 ranks on 2 node(s) of 1" in text and "Summary of" in text
    undisturbed = Job(slurm, "vista", tmp_path / "undisturbed", steps)
    undisturbed.wait_for_end()
    found = differences(checkpoint(tmp_path / "disturbed", 24), checkpoint(tmp_path / "undisturbed", 24), tmp_path)
    assert not found, found


def test_a_job_of_another_cluster_trains(slurm: SlurmCluster, tmp_path: Path) -> None:
    """With resources that sbatch is given, and one GPU for each task; the GPUs are files."""
    options = ["--cpus-per-task=1", "--gpus-per-node=2", "--gpus-per-task=1"]
    job = Job(slurm, "cluster", tmp_path / "c", "--training.steps=3", SHARDED, options=options, RANKS_PER_NODE="2")
    job.wait_for_end()
    text = job.text()
    assert job.state() == "COMPLETED", text[-3000:]
    assert "4 ranks on 2 node(s) of 2" in text and "Summary of 3 steps" in text


def test_a_job_of_frontier_with_gpus_is_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two ranks per node, one GPU each; the GPUs are files."""
    job = Job(
        slurm,
        "frontier",
        tmp_path / "f",
        "--training.steps=16",
        SHARDED,
        RANKS_PER_NODE="2",
    )
    job.wait_for_step(3)
    slurm.run("scancel", "--signal=USR1", job.number)
    job.start_now()
    job.wait_for_end()
    text = job.text()
    assert job.state() == "COMPLETED", text[-3000:]
    assert "4 ranks on 2 node(s) of 2" in text and text.count("requeueing job") == 1


@pytest.mark.parametrize("launcher", ["mpirun", "hydra"])
def test_launchers_of_mpi_pass_the_signal(
    launcher: str, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their daemons run as tasks of srun. The batch script receives USR1, and the job is requeued with a checkpoint.

    Hydra passed the first node's SLURMD_NODENAME to all ranks, and returned 0 after the signal.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    environment = real_mpi(programs, launcher)
    environment.pop("HYDRA_BOOTSTRAP")  # here srun starts its daemons, one per node
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    job = Job(slurm, "vista", tmp_path / "m", "--training.steps=12", **environment)
    job.wait_for_step(3)
    slurm.run("scancel", "--signal=USR1", "--batch", job.number)
    job.start_now()
    job.wait_for_end()
    text = job.text()
    assert job.state() == "COMPLETED", text[-3000:]
    assert text.count("requeueing job") == 1 and "Resumed from" in text
    assert "2 ranks on 2 node(s) of 1" in text and "Summary of 12 steps" in text


def test_a_canceled_job_is_not_requeued_and_a_fixed_one_says_how_to_continue(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    canceled = Job(slurm, "vista", tmp_path / "c", "--training.steps=500")
    canceled.wait_for_step(3)
    slurm.run("scancel", canceled.number)
    canceled.wait_for_end()
    assert canceled.state() == "CANCELLED" and "requeueing" not in canceled.text()
    fixed = Job(slurm, "vista", tmp_path / "n", "--training.steps=500", REQUEUE="0")
    fixed.wait_for_step(3)
    slurm.run("scancel", "--signal=USR1", fixed.number)
    fixed.wait_for_end()
    line = next(line for line in fixed.text().splitlines() if "to continue, with" in line)
    assert f"CONFIG_FILE={EMBEDDED} PYTHON=" in line and "vista.sbatch" in line
    assert " MODULES='' NCCL_NET=none REQUEUE=0 sbatch --nodes=2" in line
    assert "--training.steps=500" in line


def test_large_jobs_receive_the_packages(slurm: SlurmCluster, tmp_path: Path) -> None:
    packages, node = tmp_path / "packages", tmp_path / "node"
    packages.mkdir()
    (packages / "marker.py").write_text("")
    (tmp_path / "report.py").write_text("import marker, os; print('copied', marker.__file__, os.environ['RANK'])\n")
    environment = {"BROADCAST_NODES": "2", "BROADCAST_FROM": str(packages), "NODE_DIR": str(node), "LOG_RANK": "0,1"}
    job = Job(slurm, "vista", tmp_path / "b", TRAIN_SCRIPT=str(tmp_path / "report.py"), **environment)
    job.wait_for_end()
    assert f"copied {node}/packages/marker.py 1" in job.text(), job.text()


def test_the_sweep_measures_two_sizes_and_ends_a_late_method(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(f"""
recipe = "{EMBEDDED}"
methods_of = "{ROOT}/scripts/study/grids/strong_scaling.toml"
[[sets]]
name = "all"
launcher = "slurm"
sizes = [1, 2]
sequences = [4]
methods = ["adams", "scape-0.01"]
options = {{ training.seq_len = 64 }}
launch = {{ machine = "vista", steps = 3, warm_up = 2 }}
[[sets]]
name = "late"
launcher = "slurm"
sizes = [2]
sequences = [4]
methods = ["adams-sharded", "scape-0.1"]
options = {{ training.seq_len = 64 }}
launch = {{ machine = "vista", steps = 100000, warm_up = 2, timeout = 25 }}
""")
    command = [sys.executable, "-m", "scripts.study", "run", str(tmp_path / "grid.toml"), "--poll=1"]
    command += [f"--output={tmp_path / 'out'}", f"--work={tmp_path / 'work'}"]
    environment = {"MODULES": "", "PYTHON": sys.executable, "NCCL_NET": "none", "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"GRACE": "3", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = slurm.run(*command, env=environment, timeout=560)
    assert "4 runs done, 2 failed" in result.stdout, result.stdout + result.stderr
    lines = [line for line in Store(tmp_path / "out").own.values() if line["method"] != SETUP]
    found = {(line["set"], line["method"], line["options"]["launch.ranks"]): line["result"] for line in lines}
    for size in (1, 2):
        for method in ("adams", "scape-0.01"):
            cell = found["all", method, size]
            assert len(cell["steps"]) == 3 and cell["nodes"] == size, json.dumps(cell)
    for method in ("adams-sharded", "scape-0.1"):  # the second one started although the first was ended
        assert "exit code 124" in found["late", method, 2]["error"] or "137" in found["late", method, 2]["error"]
    assert (tmp_path / "work" / "late").exists() and not slurm.output("squeue", "-h").strip()
