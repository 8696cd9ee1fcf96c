"""Runs with NNODES=MIN:MAX: usable numbers of nodes, a node that is lost for good, and one that joins."""

import os
import re
from pathlib import Path

import pytest

from scripts.faults.fault_runs import PrivateFolders
from scripts.faults.lost_nodes import ARGUMENTS, ElasticRun, repeated_by_hand
from tests.runtime.test_launch import launch
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.trainer import layout
from torchtitan_scape.trainer.layout import usable_counts


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def counts(least: int, most: int, ranks: int, *arguments: str) -> tuple[list[int], dict[int, str], int]:
    recipe = ["--job.config_file=train_configs/embedded.toml", "--checkpoint.enable"]
    config = parse([*recipe, *arguments])
    return *usable_counts(config, least, most, ranks), config.training.global_batch_size


def test_numbers_of_nodes_that_do_not_divide_the_batch_are_left_out() -> None:
    usable, refused, batch = counts(2, 4, 8, "--training.local_batch_size=3")
    assert (usable, batch) == ([2, 4], 96) and refused.keys() == {3}
    assert refused[3] == (
        "[training] global_batch_size = 96 is not a multiple of local_batch_size 3 x 24 data-parallel ranks = 72"
    )
    assert counts(1, 4, 1, "--training.local_batch_size=1", "--training.global_batch_size=12") == ([1, 2, 3, 4], {}, 12)


def test_a_batch_that_follows_the_nodes_can_use_all_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["--job.config_file=train_configs/embedded.toml", "--checkpoint.enable", "--training.local_batch_size=3"]
    assert layout.main(["2", "4", "8", *recipe, "--training.global_batch_size=-1"]) == 0
    text = capsys.readouterr()
    assert text.out.splitlines()[-1] == "[2, 3, 4] -1"
    assert text.err.endswith("every step trains one local batch per data-parallel rank, with 2, 3, 4 nodes\n")


def test_copies_cover_the_nodes_that_wait_after_a_lost_node() -> None:
    """Of four nodes two continue, and the copy of a file may be on the one that waits: see the lost neighbors in
    tests/checkpoint/test_node_folders.py.
    """
    batch = ["--training.local_batch_size=1", "--training.global_batch_size=4"]
    with pytest.raises(ValueError, match=r"of 4 nodes is lost, 2 continue and 1 wait, .* set copies = 2, or"):
        counts(2, 4, 1, *batch, "--checkpoint.copies=1")
    assert counts(2, 4, 1, *batch, "--checkpoint.copies=2")[0] == [2, 4]
    assert counts(1, 2, 1, *batch, "--checkpoint.copies=1")[0] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--checkpoint.no-enable"],
            "NNODES=2:3 restarts the run when nodes are lost or join; add --checkpoint",
        ),
        (
            ["--parallelism.data_parallel_replicate_degree=3"],
            "2 nodes of 1 ranks cannot be used: 2 ranks cannot be",
        ),
        (["--optimizer.lr=-1"], "lr"),
    ],
)
def test_a_recipe_for_one_number_of_nodes_only_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        counts(2, 3, 1, *arguments)


def test_the_launcher_refuses_such_a_recipe_before_it_waits_for_nodes(tmp_path: Path) -> None:
    environment = {"NNODES": "1:2", "NGPU": "1", "RDZV_ENDPOINT": "localhost:29555"}
    result, _ = launch(environment, f"--job.dump_folder={tmp_path}/out")
    assert result.returncode == 2 and "error: NNODES=1:2 restarts the run" in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("copies", [0, 1])
def test_a_run_continues_without_a_lost_node_and_takes_it_up_again(copies: int, victim: int, tmp_path: Path) -> None:
    """Real processes. The node of either launcher is lost, also that which serves the store, and with copies its folder
    too. The training alone, and that after the join, equal a start by hand from the same checkpoint in every bit.
    """
    if copies and os.geteuid() != 0:
        pytest.skip("mount namespaces need root")
    (tmp_path / "run").mkdir()
    folders = PrivateFolders(tmp_path / "run", tmp_path / "nodes") if copies else None
    run = ElasticRun(tmp_path / "run", [*ARGUMENTS, f"--checkpoint.copies={copies}"], folders=folders)
    with run.launch as nodes:

        def wait_for_checkpoint() -> None:
            first = run.intervals[-1][1]
            nodes.wait_until(lambda: max(nodes.steps(), default=0) > first + 12, 300, "a checkpoint")

        wait_for_checkpoint()
        run.kill(victim)
        run.wait_for_start([1 - victim])
        assert "replicas 2 -> 1" in nodes.output() and "the mean of the pending gradients" in nodes.output()
        wait_for_checkpoint()
        run.start_again(victim)
        run.wait_for_start([0, 1])
        assert "can join: from 1 to 2 nodes after a checkpoint" in nodes.output()
        assert "replicas 1 -> 2" in nodes.output() and "Traceback" not in nodes.output()
        last = run.intervals[-1][1]
        wait_for_checkpoint()
    run.intervals.append((2, last + 10 - last % 10))
    assert [count for count, _ in run.intervals] == [2, 1, 2, 2]
    if folders is not None:
        for _, step in run.intervals:
            folders.merge(step, 2, tmp_path / "run" / "checkpoint")
    for interval in (1, 2):
        assert run.intervals[interval + 1][1] > run.intervals[interval][1]
        assert repeated_by_hand(tmp_path / "run", ARGUMENTS, interval, run, tmp_path / str(interval)) == []
