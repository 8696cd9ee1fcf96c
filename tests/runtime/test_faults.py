"""Faults: ranks that die, halt or fail, links that go down, and signals. All ranks end soon with a reason."""

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from scripts.faults.fault_runs import TINY, Launch, differences, free_endpoint, seconds_until_gone
from tests import server
from tests.pool import Pool
from tests.runtime.test_launch import SMALL
from tests.scripts.test_emulated_cluster import Cluster, works  # noqa: F401
from tests.server import Process
from tests.training import EMBEDDED, train
from torchtitan_scape.runtime import launcher

STEPS = 16
# The recipe with the size of the tests.
ARGUMENTS = [*EMBEDDED, *TINY, "--sync.scape.code=int4", f"--training.steps={STEPS}"]


@pytest.fixture
def forks() -> dict[str, str]:
    """Environment of launchers whose ranks the test server forks; with --slow ranks are real processes."""
    return {"PYTHON_EXEC": server.python()}


# ---------------------------------------------------------------------------------------------------- liveness


class Group:
    """Ranks of tests/runtime/peer.py, at a free endpoint unless the environment has one."""

    def __init__(self, *behaviors: str, **more: str) -> None:
        address, port = free_endpoint().split(":")
        common = {**os.environ, "MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(len(behaviors)), **more}
        self.ranks, self._outputs = [], []
        for rank, behavior in enumerate(behaviors):
            read_end, write_end = os.pipe()
            environment = {**common, "RANK": str(rank)}
            self.ranks.append(Process("tests.runtime.peer", [behavior], environment, files=[0, write_end, write_end]))
            self._outputs.append(open(read_end))  # noqa: SIM115
            os.close(write_end)

    def wait_until_there(self) -> None:
        for output_file in self._outputs:
            assert output_file.readline() == "ready\n"

    def ends(self, expected: dict[int, tuple[int, str]]) -> None:
        """Check the exit code and the output of ranks, and kill the remaining ones."""
        for rank, (code, text) in expected.items():
            found = self.ranks[rank].wait(timeout=60)
            with self._outputs[rank] as output_file:
                output = output_file.read()
            assert found == code and text in output, (found, output)
        for rank in self.ranks:
            rank.kill()


def test_ranks_that_wait_for_a_lost_rank_end_and_name_it() -> None:
    """The ranks wait as in an NCCL collective that does not return. Rank 0 hosts the store. All cases run at once,
    because starting takes time.

    A rank that fails by itself, for example because a recipe is unreadable on one node, passes its reason and exit code
    to all. A rank that hangs outside of the collective is named although it has heartbeats. Ranks that halt for less
    than the timeout, or that ended normally, have no effect.
    """
    failing, killed, halted = Group("wait", "wait", "fail"), Group("wait", "wait"), Group("wait", "wait")
    hosting, working = Group("wait", "wait"), Group("work", "work", "leave")
    hanging = Group("reduce", "hang", "reduce")
    groups = (failing, killed, halted, hosting, working, hanging)
    for group in groups:
        group.wait_until_there()
    time.sleep(2.0)  # For one heartbeat of each rank.
    begin = time.monotonic()
    os.kill(killed.ranks[1].pid, signal.SIGKILL)
    os.kill(halted.ranks[1].pid, signal.SIGSTOP)
    os.kill(hosting.ranks[0].pid, signal.SIGKILL)
    for rank in working.ranks[:2]:
        os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(rank.pid, signal.SIGCONT)
    failing.ends({0: (2, "rank 2 stopped: no such file"), 1: (2, "rank 2 stopped: no such file"), 2: (2, "")})
    killed.ends({0: (3, f", process {killed.ranks[1].pid}) is lost: no heartbeat")})
    halted.ends({0: (3, f", process {halted.ranks[1].pid}) is lost: no heartbeat")})
    hosting.ends({1: (3, "rank 0, its launcher or its host has ended")})
    stalled = f", process {hanging.ranks[1].pid}) in runtime/peer.py:33 (<module>) does not take part, 2 wait"
    hanging.ends({0: (3, stalled), 2: (3, stalled)})
    working.ends({0: (0, ""), 1: (0, ""), 2: (0, "")})
    assert time.monotonic() - begin < 30.0


def test_a_requeued_job_does_not_join_its_last_start() -> None:
    """The store of that, with its failure, is still at the address for some seconds."""
    address, port = free_endpoint().split(":")
    last = dist.TCPStore(address, int(port), is_master=True, wait_for_workers=False)
    last.set("scape/liveness/7-0-0/0/started", "1")
    last.set("scape/liveness/7-0-0/0/failed", json.dumps({"rank": 0, "code": 2, "text": "of the last start"}))
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    group = Group("work", "work", MASTER_ADDR=address, MASTER_PORT=port, SLURM_RESTART_COUNT="1", **job)
    time.sleep(8.0)
    del last
    group.ends({0: (0, f"MASTER_PORT={port} is in use"), 1: (0, "ready")})


# ---------------------------------------------------------------------------------------------------- restarts


def test_restarts_are_counted_until_one_makes_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class StartedAgain(Exception):
        pass

    def reexecute() -> None:
        raise StartedAgain

    monkeypatch.setattr(launcher, "_reexecute", reexecute)
    monkeypatch.setattr(launcher.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("SCAPE_RESTARTS", "0 -1")
    progress = tmp_path / "progress"

    def fails(resumed: int | None) -> bool:
        """Simulate a start that resumes at a step (or not at all) and fails. Return whether it is restarted."""
        if resumed is not None:
            with open(progress, "a") as file:
                file.write(f"resumed {resumed}\n")
        try:
            launcher._restart(2, progress)
        except StartedAgain:
            return True
        return False

    assert fails(0) and fails(0) and fails(10) and fails(10) and fails(20), "each start makes progress"
    assert fails(20) and not fails(20), "a crash loop"
    assert "not restarted: 2 restarts (MAX_RESTARTS) made no progress beyond step 20" in capsys.readouterr().err
    progress.unlink()
    monkeypatch.setenv("SCAPE_RESTARTS", "0 -1")
    assert fails(None) and fails(None) and not fails(None), "not one step"


def test_a_launcher_ends_although_the_host_of_its_store_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a loss of power: requests to the store wait until TCP gives up, in torchrun's agent too."""
    asked, codes = threading.Event(), []

    def no_response() -> bool:
        asked.set()
        time.sleep(600)
        return False

    ranks = launcher.LocalRanks.__new__(launcher.LocalRanks)
    ranks.across_nodes, ranks.store, ranks.pids, ranks._finish = True, ("", 0), [], codes.append
    monkeypatch.setattr(launcher.LocalRanks, "codes", lambda self: {launcher.LOST if asked.is_set() else None})
    monkeypatch.setattr(launcher, "failure_known", lambda address, port: no_response)
    monkeypatch.setattr(launcher, "AGENT_SECONDS", 0.1)
    watch = threading.Thread(target=ranks.watch, daemon=True)
    watch.start()
    watch.join(30)
    assert codes == [launcher.LOST]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[(0, True)], [(1, False), (0, True)]], ids=["one", "two"])
def test_a_run_on_two_nodes_survives_lost_ranks_and_a_stop_on_request(
    kills: list[tuple[int, bool]], pool2: Pool, forks: dict[str, str], tmp_path: Path
) -> None:
    """Ranks of either node are killed, one while a checkpoint is written; then one of the two launchers receives
    SIGUSR1.

    The run restarts automatically on both nodes and stops with a checkpoint on both. Its final checkpoint, optimizer
    state included, is bitwise equal to that of an undisturbed run.
    """
    whole, folder = tmp_path / "whole", tmp_path / "run"
    pool2(train, str(whole), ARGUMENTS)
    dice = random.Random(0)
    python = forks if len(kills) == 1 else {}
    environment = {"MAX_RESTARTS": "2", **python}
    with Launch(ARGUMENTS, folder, nodes=2, ranks_per_node=1, environment=environment) as run:
        for start, (victim, during_a_save) in enumerate(kills, start=1):
            run.wait_for_training(start)
            if during_a_save:
                run.wait_for_a_save()
            else:
                time.sleep(dice.uniform(0.0, 1.5))
            ranks = run.ranks()
            os.kill(ranks[victim], signal.SIGKILL)
            assert seconds_until_gone(list(ranks.values()), 30.0) < 15.0
            survivor = rf"[rank {1 - victim}] error: rank {victim} ("
            run.wait_until(lambda: survivor in run.output(), 10, "the survivor's line")  # noqa: B023
        run.wait_for_training(len(kills) + 1)
        run.launchers[0].send_signal(signal.SIGUSR1)
        assert run.wait(60) == [75, 75], run.output()
        assert "Stopped on request at step" in run.output() and "Traceback" not in run.output()
    with Launch(ARGUMENTS, folder, nodes=2, ranks_per_node=1, environment=python) as run:
        assert run.wait(120) == [0, 0], run.output()
        assert "Training starts at step 1\n" not in run.output()
    assert differences(whole / f"checkpoint/step-{STEPS}", folder / f"checkpoint/step-{STEPS}", tmp_path) == []


@pytest.mark.slow
def test_a_broken_recipe_on_one_node_ends_both_without_a_restart(forks: dict[str, str], tmp_path: Path) -> None:
    """No launcher restarts the run."""
    (tmp_path / "broken.toml").write_text("[training\n")
    recipes = ["train_configs/embedded.toml", str(tmp_path / "broken.toml")]

    def start(node, command, environment, log):  # type: ignore[no-untyped-def]
        own = {**os.environ, **environment, "CONFIG_FILE": recipes[node]}
        return subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    environment = {"MAX_RESTARTS": "3", "NNODES": "2", "RDZV_ENDPOINT": free_endpoint(), **forks}
    with Launch(ARGUMENTS, tmp_path, nodes=2, ranks_per_node=1, environment=environment, start=start) as run:
        assert run.wait(60) == [2, 2], run.output()
    lines = [line for line in run.output().splitlines() if "] error: " in line]
    assert len(lines) == 2 and all("broken.toml is not valid TOML" in line for line in lines), run.output()
    assert "restarting" not in run.output()


def test_a_stop_without_checkpoints_reports_that_nothing_was_saved(forks: dict[str, str], tmp_path: Path) -> None:
    arguments, failures = [*SMALL, *TINY, "--checkpoint.no-enable", "--training.steps=1000"], tmp_path / "failures"
    given = {"MAX_RESTARTS": "1", "SCAPE_FAILURE_FILE": str(failures), **forks}
    with Launch(arguments, tmp_path, environment=given) as run:
        run.wait_for_training(1)
        os.kill(run.ranks()[1], signal.SIGTERM)  # One rank only; the others learn of it in the all-reduced flag.
        assert run.wait(30) == [4], run.output()
        assert "and nothing was saved: saving needs --checkpoint.enable" in run.output()
        assert "MAX_RESTARTS without checkpoint.enable" in run.output() and "Traceback" not in run.output()
    assert sorted(failures.read_text().splitlines()) == ["4 rank 0", "4 rank 1"], "for a job of Slurm"


@pytest.mark.slow
def test_a_short_link_outage_is_tolerated_and_a_long_one_is_named(
    works: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    timeout = 15.0
    arguments = [*ARGUMENTS, "--training.steps=10000", f"--comm.train_timeout_seconds={timeout:.0f}"]
    with Cluster(2) as cluster:
        with Launch(arguments, tmp_path, nodes=2, ranks_per_node=1, start=cluster.start) as run:
            run.wait_until(lambda: len(run.steps()) > 4, 180, "two steps")
            cluster.set_link(1, up=False)
            time.sleep(3.0)
            cluster.set_link(1, up=True)
            before = len(run.steps())
            run.wait_until(lambda: len(run.steps()) > before + 4, 60, "steps after the outage")
            ranks = run.ranks()
            cluster.set_link(1, up=False)
            assert seconds_until_gone(list(ranks.values()), 60.0) < timeout + 8.0
            cluster.set_link(1, up=True)
            assert run.wait(60) == [3, 3], run.output()
        assert re.search(r"rank 0\] error: rank 1 \(.*\) is lost: no heartbeat for 1\d s", run.output()), run.output()
        assert re.search(r"rank 1\] error: rank 0's host, .* does not respond for 1\d s", run.output()), run.output()
