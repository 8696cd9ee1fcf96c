"""Elastic jobs (NNODES=2:3) that lose nodes for good, on a real Slurm cluster."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.faults.fault_runs import differences
from scripts.slurm_cluster import SlurmCluster
from tests.scripts.slurm.real_jobs import ENDED, Job, checkpoint

pytestmark = pytest.mark.slow
NODES = 3
# The global batch of 3 and 2 nodes. A lost node is detected after 25 s.
ARGUMENTS = ["--training.global_batch_size=6", "--checkpoint.interval=5", "--comm.train_timeout_seconds=30"]
ELASTIC = {"NNODES": "2:3", "PET_RDZV_CONF": "join_timeout=120"}


@pytest.fixture(autouse=True)
def all_nodes(slurm: SlurmCluster) -> Iterator[None]:
    """Start the nodes again that a test has lost."""
    yield
    slurm.run("scancel", "--user=root")
    for node in range(1, NODES + 1):
        if not slurm.cluster.processes(node):
            slurm.restore_node(node)
    slurm.wait_for_nodes()


def elastic(slurm: SlurmCluster, folder: Path, *arguments: str, **environment: str) -> Job:
    given = {**ELASTIC, **environment}
    return Job(slurm, "vista", folder, *ARGUMENTS, *arguments, options=["--nodes=3", "--no-kill"], **given)


def shown(job: Job) -> str:
    return job.slurm.output("scontrol", "show", "job", job.number)


def steps(text: str) -> list[list[int]]:
    """Return the logged steps of each start."""
    parts = text.split("Training starts")[1:]
    return [[int(step) for step in re.findall(r" step: +(\d+)  loss", part)] for part in parts]


def shrunk(job: Job) -> None:
    """Lose node 3 after step 7, and wait until the others continue and Slurm has removed the node."""
    job.wait_for_step(7)
    job.slurm.lose_node(3)
    job.wait(lambda: len(steps(job.text())) == 2 and steps(job.text())[1], "steps of the other nodes")
    job.wait(lambda: "NumNodes=2" in shown(job), "the removal of the node")


def test_a_job_continues_without_a_lost_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    """As a job of two nodes from the same checkpoint, in every bit."""
    job = elastic(slurm, tmp_path / "e", "--training.steps=30")
    shrunk(job)
    assert "NodeList=node[1-2]" in shown(job) and job.state() == "RUNNING"
    job.wait_for_end()
    text = job.text()
    assert job.state() == "COMPLETED" and "ExitCode=0:0" in shown(job), text[-3000:]
    assert "Node failure on node3" in text and "replicas 3 -> 2" in text and "Summary of" in text
    first, second = steps(text)
    begin = second[0] - 1
    assert begin in (5, 10, 15) and begin <= first[-1], (first, second)
    assert first == list(range(1, first[-1] + 1)) and second == list(range(begin + 1, 31))
    shutil.copytree(checkpoint(tmp_path / "e", begin), checkpoint(tmp_path / "h", begin))
    by_hand = Job(slurm, "vista", tmp_path / "h", *ARGUMENTS, "--training.steps=30", options=["--nodelist=node[1-2]"])
    by_hand.wait_for_end()
    assert by_hand.state() == "COMPLETED", by_hand.text()[-3000:]
    assert not differences(checkpoint(tmp_path / "e", 30), checkpoint(tmp_path / "h", 30), tmp_path)


def test_a_shrunk_job_receives_the_signal_and_is_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    """As 300 s before the time limit."""
    job = elastic(slurm, tmp_path / "s", "--training.steps=30")
    shrunk(job)
    slurm.run("scancel", "--signal=USR1", "--batch", job.number)
    job.wait(lambda: "requeueing job" in job.text(), "the requeue")
    assert "stopped on request after step" in job.text() and "(exit code 75" in job.text()
    slurm.restore_node(3)
    job.start_now()
    job.wait_for_end()
    text = job.text()
    assert job.state() == "COMPLETED" and "replicas 2 -> 3" in text, text[-3000:]
    _, second, third = steps(text)
    assert third == list(range(second[-1] + 1, 31))


def test_a_job_with_too_few_nodes_ends(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = elastic(slurm, tmp_path / "f", "--training.steps=100000")
    shrunk(job)
    slurm.lose_node(2)
    job.wait_for_end()
    text = job.text()
    assert job.state() == "FAILED" and "ExitCode=3:0" in shown(job), text[-3000:]
    assert "1 (node1) of 2, 3 nodes have joined" in text and "requeueing" not in text


def test_a_job_that_loses_its_first_node_continues_and_is_canceled_at_its_end(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm keeps the job without a batch script and would not end it."""
    job = elastic(slurm, tmp_path / "b", "--training.steps=20")
    job.wait_for_step(7)
    slurm.lose_node(1)
    job.wait(lambda: job.state() in ENDED, "the end")
    log = (tmp_path / "b" / "logs" / "rank-1.log").read_text()
    assert job.state() == "CANCELLED" and "node node1 is lost, and with it the batch script" in log, log[-3000:]
    assert checkpoint(tmp_path / "b", 20).exists() and steps(log)[-1][-1] == 20
