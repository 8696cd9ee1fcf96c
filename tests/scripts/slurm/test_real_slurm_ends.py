"""Ends of jobs on a real Slurm cluster: time limits, lost ranks and nodes, requeues by hand; jobs of another user."""

import contextlib
import os
import pwd
import signal
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts.common import ROOT
from scripts.slurm_cluster import SlurmCluster
from tests.scripts.slurm.real_jobs import EMBEDDED, ENDED, SMALL, Job, checkpoint

pytestmark = pytest.mark.slow
ENDLESS = "--training.steps=100000"
SAVE = "--checkpoint.interval=5"


def starts(job: Job) -> list[int]:
    """Return the first step of each start."""
    return [int(text.split()[0]) for text in job.text().split("Training starts at step ")[1:]]


def trainers(pids: list[int]) -> list[int]:
    """Return the processes of the trainer among those with the ids `pids`."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            if b"-m\0torchtitan_scape.train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_slurm_sends_the_signal_before_the_limit_and_the_job_continues(slurm: SlurmCluster, tmp_path: Path) -> None:
    """As --signal=B:USR1@300 of the files, with a limit of three minutes. Slurm sends it up to a minute earlier."""
    job = Job(slurm, "vista", tmp_path / "s", ENDLESS, options=["--time=3", "--signal=B:USR1@100"])
    job.wait(lambda: "requeueing job" in job.text(), "the signal", 200)
    assert "stopped on request after step" in job.text() and "exit code 75" in job.text()
    job.start_now()
    job.wait(lambda: len(starts(job)) == 2, "the next start")
    first, second = starts(job)
    assert first == 1 and second > 1 and "Resumed from" in job.text(), job.text()[-3000:]
    slurm.run("scancel", job.number)
    job.wait_for_end()
    assert job.state() == "CANCELLED"


def test_the_limit_itself_ends_a_job_with_a_checkpoint(slurm: SlurmCluster, tmp_path: Path) -> None:
    """No USR1. At the limit Slurm sends SIGTERM, and SIGKILL after KillWait. The job is not requeued."""
    job = Job(slurm, "vista", tmp_path / "t", ENDLESS, options=["--time=1", "--signal=B:USR1@0"])
    job.wait_for_end()
    text = job.text()
    assert job.state() == "TIMEOUT" and "DUE TO TIME LIMIT" in text, text[-3000:]
    assert "s after SIGTERM; its checkpoint in" in text and "requeueing" not in text and "USR1" not in text
    assert len(list((tmp_path / "t" / "run" / "checkpoint").iterdir())) == 1


@pytest.mark.parametrize("requeue", ["0", "1"])
def test_a_killed_rank_ends_or_requeues_the_job(requeue: str, slurm: SlurmCluster, tmp_path: Path) -> None:
    """kill -9 of rank 1. The next start continues after the last checkpoint."""
    job = Job(slurm, "vista", tmp_path / "k", "--training.steps=24", SAVE, REQUEUE_ON_FAILURE=requeue)
    job.wait_for_step(7)
    (rank,) = trainers(slurm.cluster.processes(2))
    os.kill(rank, signal.SIGKILL)
    if requeue == "1":
        job.start_now()
    job.wait_for_end()
    text = job.text()
    assert "error: the ranks ended with exit code" in text and "task 1: Killed" in text, text[-3000:]
    if requeue == "1":
        assert job.state() == "COMPLETED" and text.count("requeueing job") == 1, text[-3000:]
        assert starts(job) == [1, 6] and checkpoint(tmp_path / "k", 24).exists()
    else:
        assert job.state() == "FAILED" and "requeueing" not in text and starts(job) == [1]


def test_invalid_input_of_one_rank_is_not_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The other ranks wait for it until srun kills them, and srun returns their code."""
    script = tmp_path / "other_recipe.py"
    script.write_text(
        "import os, sys\nsys.argv += ['--no.such_key=1'] if os.environ['RANK'] == '1' else []\n"
        "from torchtitan_scape.train import main\nmain()\n"
    )
    job = Job(slurm, "vista", tmp_path / "i", ENDLESS, TRAIN_SCRIPT=str(script), REQUEUE_ON_FAILURE="1")
    job.wait_for_end()
    shown = slurm.output("scontrol", "show", "job", job.number)
    assert "requeueing" not in job.text() and "ExitCode=2:0" in shown, job.text()[-3000:] + shown
    assert "the ranks ended with exit code 2: " in job.text()


def test_a_chain_continues_and_ends_with_the_training(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The first job stops at its time limit, the second completes the training, and the third has nothing to do."""
    environment = {"CONFIG_FILE": EMBEDDED, "MODULES": "", "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"NCCL_NET": "none", "OMP_NUM_THREADS": "1"}
    options = ["--nodes=2", "--time=20", f"--output={tmp_path}/%j.out", "scripts/slurm/vista.sbatch"]
    given = [*SMALL, "--training.steps=10", f"--job.dump_folder={tmp_path / 'run'}"]
    answer = slurm.run("scripts/slurm/chain.sh", "3", *options, *given, env=environment, timeout=60)
    assert answer.returncode == 0, answer.stderr
    numbers = answer.stdout.split(";")[0].split()[1:]
    jobs = [Job.submitted(slurm, number, tmp_path / f"{number}.out") for number in numbers]
    assert len(jobs) == 3 and [job.state() for job in jobs[1:]] == ["PENDING", "PENDING"]
    jobs[0].wait_for_step(3)
    slurm.run("scancel", "--signal=USR1", "--batch", numbers[0])
    for job in jobs:
        job.wait(lambda job=job: job.state() in ENDED, "the end", 480)
    assert [job.state() for job in jobs] == ["FAILED", "COMPLETED", "CANCELLED"], [job.text()[-2000:] for job in jobs]
    assert starts(jobs[0]) == [1] and starts(jobs[1])[0] > 3 and "Summary of" in jobs[1].text()
    assert checkpoint(tmp_path, 10).exists() and not jobs[2].text()


def test_a_requeue_by_hand_continues(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm ends the job with SIGTERM and KillWait, as at the time limit, and starts it again with the same number."""
    job = Job(slurm, "vista", tmp_path / "h", "--training.steps=24", SAVE)
    job.wait_for_step(7)
    slurm.run("scontrol", "requeue", job.number)
    job.start_now()
    job.wait_for_end()
    assert job.state() == "COMPLETED", job.text()[-3000:]
    first, second = starts(job)
    assert first == 1 and second >= 6 and "requeueing job" not in job.text()
    assert (tmp_path / "h" / "logs" / "start-0" / "rank-1.log").exists()


def python_of(slurm: SlurmCluster, user: str) -> dict[str, str]:
    """Return the variables of a Python that a user can execute: this one, or the system's with this one's packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for variables in (
        {"PYTHON": sys.executable},
        {"PYTHON": f"/usr/bin/{version}", "PYTHONPATH": sysconfig.get_path("purelib")},
    ):
        command = ["test", "-r", "run_train.sh", "-a", "-x", variables["PYTHON"]]
        probe = [variables["PYTHON"], "-c", "import torch, torchtitan"]
        if all(slurm.run(*given, user=user, env=variables, timeout=60).returncode == 0 for given in (command, probe)):
            return variables
    pytest.skip(f"{user} can execute neither {sys.executable} nor {version} of the system, or not read {ROOT}")


def test_a_job_of_another_user_is_requeued_and_continues(slurm: SlurmCluster) -> None:
    """The files of the run belong to the user. "nobody" may read no folder of root."""
    user, folder = pwd.getpwnam("nobody"), slurm.folder / "user"
    folder.mkdir()
    os.chown(folder, user.pw_uid, user.pw_gid)
    environment = python_of(slurm, user.pw_name)
    job = Job(slurm, "vista", folder, "--training.steps=16", user=user.pw_name, **environment)
    job.wait_for_step(4)
    answer = slurm.run("scancel", "--signal=USR1", job.number, user=user.pw_name)
    assert answer.returncode == 0, answer.stderr
    job.start_now()
    job.wait_for_end()
    assert job.state() == "COMPLETED" and "Summary of" in job.text(), job.text()[-3000:]
    assert job.text().count("requeueing job") == 1 and len(starts(job)) == 2
    written = list((folder / "run").rglob("*"))
    assert checkpoint(folder, 16) in written and {path.stat().st_uid for path in written} == {user.pw_uid}


def test_a_lost_node_requeues_a_job_which_continues_when_it_is_back(slurm: SlurmCluster, tmp_path: Path) -> None:
    """srun waits until Slurm gives up the node (SlurmdTimeout), and Slurm requeues the job."""
    job = Job(slurm, "vista", tmp_path / "l", "--training.steps=24", SAVE)
    job.wait_for_step(7)
    slurm.cluster.set_link(2, up=False)
    job.wait(lambda: job.state() == "PENDING", "the requeue", 120)
    assert "node2 down" in slurm.output("sinfo", "-h", "-N", "-p", "gh", "-o", "%N %T")
    assert "Node failure on node2" in job.text() and "DUE TO NODE FAILURE" in job.text()
    slurm.cluster.set_link(2, up=True)
    # A late message of the node about the first start would free it after the next start has allocated it.
    job.wait(lambda: not trainers(slurm.cluster.processes(2)), "the end of the rank on the lost node")
    slurm.wait_for_nodes()
    job.start_now()
    job.wait_for_end()
    assert job.state() == "COMPLETED", job.text()[-3000:]
    assert starts(job) == [1, 6]


def test_a_lost_node_ends_a_job_that_must_not_be_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, "vista", tmp_path / "n", ENDLESS, options=["--no-requeue"])
    job.wait_for_step(3)
    slurm.cluster.set_link(2, up=False)
    try:
        job.wait_for_end()
        assert job.state() == "NODE_FAIL" and "DUE TO NODE FAILURE" in job.text(), job.text()[-3000:]
        assert "node1 idle" in slurm.output("sinfo", "-h", "-N", "-p", "gh", "-o", "%N %T")
    finally:
        slurm.cluster.set_link(2, up=True)
