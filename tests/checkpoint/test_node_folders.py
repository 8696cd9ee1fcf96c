"""Folders of single nodes with copies: what each node holds, and starts with other, fewer, new and damaged nodes."""

import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.checkpoint.test_manager import SAVING, flip
from tests.logs import logged
from tests.marks import slow
from tests.pool import Pool
from tests.training import train
from torchtitan_scape.checkpoint import node_folders
from torchtitan_scape.checkpoint.metadata import CheckedReader, SafePlanner
from torchtitan_scape.checkpoint.node_folders import NodeFolders, check_private
from torchtitan_scape.checkpoint.storage import CheckedWriter, find_damage, steps_in
from torchtitan_scape.core.files import PACKAGE

pytestmark = pytest.mark.filterwarnings("ignore")
PATH = Path("run/step-2")  # relative: each host has its own working directory
ENTRIES = 3000  # of each rank's tensor: several pieces


def on_nodes(folder: str, hosts: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run on nodes with the names `hosts`, in order, each with a folder of its own and the same number of ranks.

    Every rank has a GPU of its own as device 0, as with Slurm's --gpus-per-task=1.
    """
    rank, per_node = dist.get_rank(), dist.get_world_size() // len(hosts)
    host = hosts[rank // per_node]
    os.makedirs(f"{folder}/{host}", exist_ok=True)
    os.chdir(f"{folder}/{host}")
    with (
        patch.object(socket, "gethostname", lambda: host),
        patch.object(node_folders, "_PIECE", 5000),
        patch.dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(per_node)),
    ):
        return work(*args, **kwargs)


def state_of(rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensor that only this rank has, and one that all have, of which DCP saves one."""
    return {
        f"of-{rank}": torch.randn(ENTRIES, generator=torch.Generator().manual_seed(seed + rank)),
        "of-all": torch.full((5,), float(seed)),
    }


def save(copies: int, step: int = 2, seed: int = 0, run: str = "run") -> None:
    path = PATH.with_name(f"step-{step}")
    nodes = NodeFolders(copies)
    nodes.run = run
    nodes.begin(path)
    writer = CheckedWriter(path, shared=False)
    dcp.save(state_of(dist.get_rank(), seed), storage_writer=writer, checkpoint_id=path)
    nodes.publish(path)


def restore(saved_ranks: int, seed: int = 0, copies: int = 1) -> str | None:
    """Return why step 2 cannot be restored; None after every tensor was read from this node's folder and compared."""
    nodes = NodeFolders(copies)
    nodes.exchange_manifests(PATH.parent)
    if reason := nodes.restore(PATH):
        return reason
    for rank in range(saved_ranks):
        expected = state_of(rank, seed)
        found = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load(found, storage_reader=CheckedReader(PATH), planner=SafePlanner(), no_dist=True)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert find_damage(PATH) is None
    return None


def files_of(folder: Path, host: str) -> set[str]:
    return {path.name for path in (folder / host / PATH).iterdir()}


@pytest.mark.parametrize(("hosts", "copies"), [("abcd", 1), slow("abcd", 2), slow("ab", 1), ("ab", 9), slow("a", 1)])
def test_a_node_holds_its_own_files_and_those_of_the_nodes_before_it(
    hosts: str, copies: int, pool4: Pool, tmp_path: Path
) -> None:
    pool4(on_nodes, str(tmp_path), hosts, save, copies)
    per_node, manifests = 4 // len(hosts), set()
    for node, host in enumerate(hosts):
        origins = {(node - k) % len(hosts) for k in range(copies + 1)}
        expected = {f"__{per_node * origin + i}_0.distcp" for origin in origins for i in range(per_node)}
        assert files_of(tmp_path, host) == {*expected, ".metadata", "manifest.json"}
        manifests.add((tmp_path / host / PATH / "manifest.json").read_text())
    assert len(manifests) == 1


@pytest.mark.parametrize("hosts", [slow("abcd"), "cadb", slow("abxd"), "acx", slow("db"), slow("acxy")])
def test_a_start_with_other_nodes_reads_the_same_bits(
    hosts: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The same nodes, another order, a replaced node (x), fewer nodes, and two replaced ones that are not adjacent."""
    request.getfixturevalue("pool4")(on_nodes, str(tmp_path), "abcd", save, 1)
    pool = request.getfixturevalue(f"pool{len(hosts)}")
    assert pool(on_nodes, str(tmp_path), hosts, restore, 4) == [None] * len(hosts)


def test_several_ranks_per_node(pool4: Pool, tmp_path: Path) -> None:
    pool4(on_nodes, str(tmp_path), "ab", save, 1)
    assert pool4(on_nodes, str(tmp_path), "xb", restore, 4) == [None] * 4


def test_two_adjacent_lost_nodes_are_named_with_their_files(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    pool4(on_nodes, str(tmp_path), "abcd", save, 1)
    assert set(pool2(on_nodes, str(tmp_path), "ad", restore, 4)) == {"no node has __1_0.distcp (was on b, c)"}


def test_a_damaged_file_is_replaced_by_the_copy(pool3: Pool, tmp_path: Path) -> None:
    pool3(on_nodes, str(tmp_path), "abc", save, 1)
    for path in (tmp_path / "a" / PATH, tmp_path / "c" / PATH):
        flip(path)
    (tmp_path / "b" / PATH / ".metadata").write_text("")
    assert pool3(on_nodes, str(tmp_path), "abc", restore, 3) == [None] * 3


def test_a_file_whose_copies_are_all_damaged_is_missing(pool2: Pool, tmp_path: Path) -> None:
    pool2(on_nodes, str(tmp_path), "ab", save, 1)
    for host in "ab":
        os.truncate(tmp_path / host / PATH / "__1_0.distcp", 10)
    for reason in pool2(on_nodes, str(tmp_path), "ab", restore, 2):
        assert "__1_0.distcp is truncated: has 10 of" in reason and "on a; " in reason
        assert reason.endswith("no node has __1_0.distcp (was on b, a)")


def test_a_manifest_that_is_damaged_on_all_nodes_is_the_damage_of_the_step(pool2: Pool, tmp_path: Path) -> None:
    """The start ended; an older checkpoint is loaded now."""
    pool2(on_nodes, str(tmp_path), "ab", save, 1)
    for host in "ab":
        (tmp_path / host / PATH / "manifest.json").write_text("{")
    assert pool2(on_nodes, str(tmp_path), "ab", restore, 2) == [f"{PATH}/manifest.json is damaged"] * 2


def test_a_node_that_was_away_gets_the_later_checkpoint_of_a_step(pool2: Pool, pool3: Pool, tmp_path: Path) -> None:
    pool3(on_nodes, str(tmp_path), "abc", save, 1)
    pool2(on_nodes, str(tmp_path), "ab", save, 1, 2, 7)
    assert pool3(on_nodes, str(tmp_path), "cab", restore, 2, 7) == [None] * 3


def test_a_complete_checkpoint_is_preferred_to_a_later_one_with_missing_files(
    pool2: Pool, pool3: Pool, tmp_path: Path
) -> None:
    pool2(on_nodes, str(tmp_path), "de", save, 1)
    pool3(on_nodes, str(tmp_path), "abc", save, 1, 2, 7)
    assert pool3(on_nodes, str(tmp_path), "dae", restore, 2, 0) == [None] * 3


def test_a_node_with_the_folder_of_another_run_is_refused(pool2: Pool, pool3: Pool, tmp_path: Path) -> None:
    """All nodes continued from its later step."""
    pool2(on_nodes, str(tmp_path), "ab", save, 1, run="")
    pool2(on_nodes, str(tmp_path), "de", save, 1, 4, run="")
    for good, text in pool3.outcomes(on_nodes, str(tmp_path), "abd", restore, 2):
        assert not good and "several runs: step-2 on a, step-2 on b and step-4 on d; delete" in text
    assert {path.name for path in (tmp_path / "a" / PATH.parent).iterdir()} == {"step-2"}


def all_steps(copies: int) -> list[int]:
    nodes = NodeFolders(copies)
    nodes.exchange_manifests(PATH.parent)
    return steps_in(PATH.parent)


def test_all_nodes_see_the_same_steps(pool2: Pool, pool3: Pool, tmp_path: Path) -> None:
    pool2(on_nodes, str(tmp_path), "ab", save, 1, 2)
    pool3(on_nodes, str(tmp_path), "abc", save, 1, 4)
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "a" / PATH.parent / "step-4" / "manifest.json").write_text("{")
    assert pool3(on_nodes, str(tmp_path), "bca", all_steps, 1) == [[2, 4]] * 3


def full(part: str, work: Callable[..., Any], *args: Any) -> Any:
    """Run with a full disk on host b, for files with this end of the name."""

    def open_full(path: Any, mode: str = "r", *more: Any) -> Any:
        if "w" in mode and str(path).endswith(part) and socket.gethostname() == "b":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return open(path, mode, *more)

    with (
        patch.object(node_folders, "open", open_full, create=True),
        patch("torchtitan_scape.core.files.open", open_full, create=True),
    ):
        return work(*args)


@pytest.mark.parametrize("part", ["distcp.part", "metadata.part", "unpublished.part"])
def test_a_full_disk_of_one_node_fails_the_save_on_all_ranks(part: str, pool3: Pool, tmp_path: Path) -> None:
    for good, text in pool3.outcomes(on_nodes, str(tmp_path), "abc", full, part, save, 1):
        assert not good and "OSError" in text and "No space left on device on b" in text
    assert not list(tmp_path.rglob("manifest.json")) and not list(tmp_path.rglob("*.part"))


def test_a_full_disk_of_one_node_fails_the_start_on_all_ranks(pool3: Pool, tmp_path: Path) -> None:
    pool3(on_nodes, str(tmp_path), "abc", save, 1)
    for good, text in pool3.outcomes(on_nodes, str(tmp_path), "abc", full, "distcp.part", restore, 3):
        assert not good and "OSError" in text and "No space left on device on b" in text


def test_another_rank_of_the_node_may_create_the_folder_first(tmp_path: Path) -> None:
    """Every rank of DCP creates it, also between the removal of an old one and its creation by the first rank."""
    nodes: Any = NodeFolders.__new__(NodeFolders)
    nodes.leads = True
    with patch.object(node_folders, "remove", Path.mkdir):
        nodes.begin(tmp_path / "step-2")
    assert (tmp_path / "step-2").is_dir()


def test_a_folder_that_nodes_share_is_refused(pool2: Pool, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    for good, text in pool2.outcomes(on_nodes, str(tmp_path), "ab", check_private, shared, 1):
        assert not good and "[checkpoint] copies = 1, but a, b share the folder" in text
    assert not shared.exists()
    pool2(on_nodes, str(tmp_path), "a", check_private, tmp_path / "a", 1)
    for good, text in pool2.outcomes(on_nodes, str(tmp_path), "ab", check_private, "/dev/null/run", 1):
        assert not good and "ValueError: nothing can be written to /dev/null/run on a (Not a directory), b" in text


# ------------------------------------------------------------------------------------------------ with the trainer


def run(steps: int, *arguments: str) -> tuple[torch.Tensor, str]:
    """Train until `steps`; return the parameters, and the log."""
    if not os.path.exists("torchtitan_scape"):  # The recipe has a relative path.
        os.symlink(PACKAGE, "torchtitan_scape")
    with logged() as lines:
        result = train("run", [*SAVING, "--checkpoint.copies=1", *arguments], stop_after=steps)
    return result["parameters"], "\n".join(lines)


def steps_of(folder: Path, host: str) -> list[int]:
    return steps_in(folder / host / "run/checkpoint")


@pytest.mark.parametrize("mode", [slow("disabled"), "async"])
def test_training_continues_bit_by_bit_with_a_replaced_node(mode: str, pool2: Pool, tmp_path: Path) -> None:
    """Of an uninterrupted run and one whose second node lost its folder, the weights are equal in every bit."""
    arguments = [f"--checkpoint.async_mode={mode}", "--checkpoint.keep_latest_k=2"]
    whole = pool2(on_nodes, str(tmp_path / "whole"), "ab", run, 8, *arguments)
    assert steps_of(tmp_path / "whole", "a") == steps_of(tmp_path / "whole", "b") == [6, 8]
    lost = tmp_path / "lost"
    pool2(on_nodes, str(lost), "ab", run, 5, *arguments)
    shutil.rmtree(lost / "b")
    resumed = pool2(on_nodes, str(lost), "xa", run, 8, *arguments)
    for (parameters, text), (expected, _) in zip(resumed, whole, strict=True):
        assert "Resumed from run/checkpoint/step-4" in text and torch.equal(parameters, expected)
    assert steps_of(lost, "x") == steps_of(lost, "a") == [6, 8]


def test_nodes_of_several_ranks_train(pool2: Pool, tmp_path: Path) -> None:
    """The start waited until the timeout: only the first rank of a node belongs to the group of the nodes."""
    pool2(on_nodes, str(tmp_path), "a", run, 2, timeout=100)
    assert steps_of(tmp_path, "a") == [2]


def test_an_older_step_is_used_if_the_newest_is_incomplete(pool2: Pool, tmp_path: Path) -> None:
    pool2(on_nodes, str(tmp_path), "ab", run, 4)
    for host in "ab":
        (tmp_path / host / "run/checkpoint/step-4/__1_0.distcp").unlink()
    for _, text in pool2(on_nodes, str(tmp_path), "ab", run, 6):
        assert "step-4 is damaged: no node has __1_0.distcp (was on b, a); loading an older checkpoint" in text
        assert "Resumed from run/checkpoint/step-2" in text
    for host in "ab":
        (tmp_path / host / "run/checkpoint/step-6/__1_0.distcp").unlink()
    for arguments, message in (
        (["--checkpoint.load_step=6"], "step-6 is damaged: no node has __1_0.distcp"),
        (["--checkpoint.no-fallback"], "step-6 is damaged: no node has __1_0.distcp"),
        (["--checkpoint.load_step=5"], "there is no finished"),
    ):
        for good, text in pool2.outcomes(on_nodes, str(tmp_path), "ab", run, 8, *arguments):
            assert not good and message in text


def test_a_copy_that_cannot_be_written_fails_the_save_and_not_the_run(pool2: Pool, tmp_path: Path) -> None:
    part = "step-4/__0_0.distcp.part"  # the copy on host b
    arguments = (full, part, run, 6, "--checkpoint.async_mode=async")
    for _, text in pool2(on_nodes, str(tmp_path), "ab", *arguments):
        assert "step-4: No space left on device on b; " in text
        assert "the last good checkpoint is step-2; a later step will be saved instead" in text
    assert steps_of(tmp_path, "a") == steps_of(tmp_path, "b") == [2, 6]


def test_the_folder_of_all_nodes_is_an_ordinary_checkpoint_once_merged(pool2: Pool, tmp_path: Path) -> None:
    """Files of all nodes, copied into one folder, are loaded by a run whose nodes share it."""
    pool2(on_nodes, str(tmp_path), "ab", run, 4)
    merged = tmp_path / "merged" / "checkpoint"
    for host in "ab":
        shutil.copytree(tmp_path / host / "run/checkpoint", merged, dirs_exist_ok=True)
    texts = pool2(continue_shared, str(merged.parent))
    assert all("step-4 in" in text and "state as it was saved" in text for text in texts)


def continue_shared(folder: str) -> str:
    with logged() as lines:
        train(folder, SAVING, stop_after=5)
    return "\n".join(lines)
