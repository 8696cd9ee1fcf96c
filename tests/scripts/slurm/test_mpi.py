"""Ranks that real launchers of MPI start on this host, as the only node of a job; scontrol is a stand-in."""

import json
from pathlib import Path

import pytest

from scripts.faults.fault_runs import COMMON
from tests.scripts.slurm.jobs import EMBEDDED, REPORT, real_mpi, stand_ins, submit

pytestmark = pytest.mark.slow
ONE_NODE = {"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost", "RANKS_PER_NODE": "2"}
ONE_NODE |= {
    "SLURM_NODELIST": "localhost",
    "SLURM_TASKS_PER_NODE": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "MASTER_ADDR": "localhost",
}
LAUNCHERS = pytest.mark.parametrize("launcher", ["mpirun", "hydra"])


@LAUNCHERS
def test_two_ranks_train(launcher: str, tmp_path: Path) -> None:
    environment = {**real_mpi(stand_ins(tmp_path), launcher), **ONE_NODE, "CONFIG_FILE": EMBEDDED, "LOG_RANK": "0,1"}
    small = [*COMMON, "--training.steps=3", "--training.local_batch_size=1", "--training.seq_len=64"]
    result, _ = submit("vista", tmp_path, environment, *small, f"--job.dump_folder={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr[-3000:]
    text = result.stdout + result.stderr
    assert "2 ranks on 1 node(s) of 2" in text and "Summary of 3 steps" in text, text[-3000:]


@LAUNCHERS
def test_ranks_read_the_variables_of_the_launcher(launcher: str, tmp_path: Path) -> None:
    """Four ranks on a host that may have fewer cores."""
    more = {"RANKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4", "SLURM_NTASKS_PER_NODE": "4"}
    more |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    environment = {**real_mpi(stand_ins(tmp_path), launcher), **ONE_NODE, **more, "TRAIN_SCRIPT": REPORT}
    result, _ = submit("vista", tmp_path, environment, "--a.key=two words")
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in range(4):
        facts = json.loads((tmp_path / "logs" / f"facts-{rank}.json").read_text())
        assert (facts["RANK"], facts["WORLD_SIZE"], facts["LOCAL_RANK"]) == (str(rank), "4", str(rank))
        assert facts["ranks_per_node"] == 4 and facts["arguments"] == ["--a.key=two words"]


@LAUNCHERS
def test_the_exit_code_is_that_of_the_failed_rank(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    print('[rank 1] error: as asked for')\n"
        "    sys.exit(3)\ntime.sleep(3)\n"
    )
    environment = {**real_mpi(stand_ins(tmp_path), launcher), **ONE_NODE, "TRAIN_SCRIPT": str(script)}
    result, _ = submit("vista", tmp_path, environment)
    assert result.returncode == 3, (result.returncode, result.stderr[-3000:])
    assert "ended with exit code 3: [rank 1] error: as asked for" in result.stderr
