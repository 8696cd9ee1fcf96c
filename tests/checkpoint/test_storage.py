"""Checkpoint folders are either complete or recognized as incomplete, after any damage or interrupted save."""

import errno
import json
import os
import shutil
import time
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.small_states import same, save, small, zeros
from tests.pool import Pool
from torchtitan_scape.checkpoint import storage
from torchtitan_scape.checkpoint.metadata import CheckedReader, SafePlanner
from torchtitan_scape.checkpoint.storage import (
    CheckedWriter,
    failure_text,
    find_damage,
    is_complete,
    is_finished,
    read_manifest,
    remove,
    steps_in,
)
from torchtitan_scape.core.files import passing_cause

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step-1"
    save(small(), path, threads=2)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "step-1"))


FILES = [".metadata", "__0_0.distcp", "__0_1.distcp"]


# ------------------------------------------------------------------------------------------- saving, all the ways


def rich(seed: int) -> dict[str, Any]:
    """Return a state with uneven shards, one of them empty on the last rank, and values other than tensors."""
    generator = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(*shape: int) -> DTensor:
        return distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)])

    return {
        "layers.weight": sharded(7, 3),
        "layers.bias": sharded(1, 5),
        "optimizer": {"state.layers.weight.exp_avg": sharded(7, 3).to(torch.bfloat16), "lr": 0.1 + seed},
        "plain": {"bits": torch.randint(0, 255, (9,), generator=generator, dtype=torch.uint8), "list": [seed, "x"]},
        "data": {f"rank_{dist.get_rank()}": bytes([seed, dist.get_rank()])},
    }


def save_and_load(path: str, how: str) -> tuple[bool, str | None, bool]:
    """Save twice into the same folder, with different states, and load."""
    for seed in (1, 2):
        state = rich(seed)
        writer = CheckedWriter(path, thread_count=2 if how == "threads" else 1)
        if how in ("sync", "threads"):
            dcp.save(state, storage_writer=writer, checkpoint_id=path)
            continue
        kind = AsyncCheckpointerType(how)
        future = dcp.async_save(state, storage_writer=writer, checkpoint_id=path, async_checkpointer_type=kind)
        for tensor in (state["layers.weight"].to_local(), state["plain"]["bits"]):
            tensor.zero_()  # training continues
        future.result()  # type: ignore[union-attr]
    if how == "process":
        _async_process_executor._CHECKPOINT_PROCESS = None  # a synchronous save at the end
    expected = rich(2)
    loaded = zeros(expected)
    loaded["plain"]["list"] = [0, ""]
    damage = find_damage(path, dist.get_rank(), dist.get_world_size())
    dcp.load(loaded, storage_reader=CheckedReader(path), planner=SafePlanner())
    return is_complete(path), damage, same(loaded, expected)


@pytest.mark.parametrize("how", ["sync", "threads", "thread", "process"])
def test_all_save_modes_write_complete_checkpoints(how: str, pool2: Pool, tmp_path: Path) -> None:
    assert pool2(save_and_load, str(tmp_path / "a" / "step-2"), how) == [(True, None, True)] * 2
    files = {path.name for path in (tmp_path / "a" / "step-2").iterdir()}
    data = {f"__{rank}_{thread}.distcp" for rank in (0, 1) for thread in range(2 if how == "threads" else 1)}
    assert files == {"manifest.json", ".metadata", *data}
    assert {one.name for one in read_manifest(tmp_path / "a" / "step-2")} == files - {"manifest.json"}


def seen_while_writing(path: str) -> tuple[bool, bool]:
    """Return whether manifest and .metadata of the previous save exist when this rank starts to write."""
    state = rich(0)
    dcp.save(state, storage_writer=CheckedWriter(path), checkpoint_id=path)
    seen: list[bool] = []
    write, prepare = CheckedWriter.write_data, CheckedWriter.prepare_local_plan

    def look(self: Any, *args: Any) -> Any:
        seen.extend((Path(path) / name).exists() for name in ("manifest.json", ".metadata"))
        return write(self, *args)

    def late(self: Any, *args: Any) -> Any:
        time.sleep(0.2 * (1 - dist.get_rank()))
        return prepare(self, *args)

    with patch.object(CheckedWriter, "write_data", look), patch.object(CheckedWriter, "prepare_local_plan", late):
        dcp.save(state, storage_writer=CheckedWriter(path), checkpoint_id=path)
    return seen[0], seen[1]


def test_an_old_checkpoint_is_invalidated_before_any_rank_writes(pool2: Pool, tmp_path: Path) -> None:
    assert pool2(seen_while_writing, str(tmp_path / "c")) == [(False, False)] * 2


def fail_while_planning(path: str) -> str:
    dcp.save(rich(0), storage_writer=CheckedWriter(path), checkpoint_id=path)
    planned = dcp.DefaultSavePlanner.create_local_plan

    def fail(self: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return planned(self)

    with patch.object(dcp.DefaultSavePlanner, "create_local_plan", fail):
        try:
            dcp.save(rich(1), storage_writer=CheckedWriter(path), checkpoint_id=path)
        except BaseException as error:
            return failure_text(error, path)
    return "no error"


def test_a_save_that_never_started_keeps_the_old_checkpoint(pool2: Pool, tmp_path: Path) -> None:
    for text in pool2(fail_while_planning, str(tmp_path / "c")):
        assert "Input/output error on rank 1;" in text
    assert is_complete(tmp_path / "c") and find_damage(tmp_path / "c") is None


def test_ranks_without_coordination_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_collectives"):
        dcp.save(small(), storage_writer=CheckedWriter(tmp_path), checkpoint_id=tmp_path, use_collectives=False)


# ------------------------------------------------------------------------------------------------------- damage


def test_a_saved_checkpoint_is_complete(saved: Path) -> None:
    assert is_complete(saved) and find_damage(saved) is None
    assert sorted(one.name for one in read_manifest(saved)) == FILES


def test_checksums_match_the_files(tmp_path: Path) -> None:
    """Large slices are summed in parallel to the write, small ones before it."""
    save({"large": torch.randn(1 << 20), "small": torch.randn(7), "text": "x"}, tmp_path)
    for one in read_manifest(tmp_path):
        data = (tmp_path / one.name).read_bytes()
        assert (one.size, one.crc32) == (len(data), zlib.crc32(data))
    assert find_damage(tmp_path) is None


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_changed_file_sizes_are_detected(name: str, copy: Path) -> None:
    path = copy / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert not is_complete(copy)
    says = "is damaged" if name == "manifest.json" else f"is truncated: has {len(data) - 1:,} of {len(data):,} bytes"
    assert find_damage(copy) == f"{path} {says}"
    path.write_bytes(data + b"0")
    assert not is_complete(copy) and str(path) in str(find_damage(copy))
    path.unlink()
    assert not is_complete(copy)
    says = f"{copy} has no manifest.json, so" if name == "manifest.json" else f"{path} is missing"
    assert str(find_damage(copy)).startswith(says)


@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_of_a_file_is_detected(name: str, place: float, bit: int, saved: Path) -> None:
    path = saved / name
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[int(place * len(data))] ^= 1 << bit
    try:
        path.write_bytes(flipped)
        assert find_damage(saved) == f"{path} is damaged: its bytes do not give its checksum"
    finally:
        path.write_bytes(data)


def test_every_flipped_bit_of_the_manifest_is_detected(copy: Path) -> None:
    path = copy / "manifest.json"
    data = path.read_bytes()
    for i in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[i // 8] ^= 1 << (i % 8)
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"is damaged|has format"):
            read_manifest(copy)


@pytest.mark.parametrize("content", ["[" * 100_000, ""])
def test_a_strange_manifest_is_damaged(content: str, copy: Path) -> None:
    path = copy / "manifest.json"
    if not content:  # valid, with a file of another folder
        (copy.parent / "outside").write_bytes(b"")
        files = {"../outside": {"bytes": 0, "crc32": "00000000"}}
        content = json.dumps({"format": storage.FORMAT, "files": files, "crc32": storage._sum_of(files)})
    path.write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        read_manifest(copy)


def test_files_of_a_larger_world_are_ignored(copy: Path) -> None:
    (copy / "__7_0.distcp").write_bytes(b"stale")
    assert is_complete(copy) and find_damage(copy) is None


def test_folders_without_a_checkpoint_are_not_complete(copy: Path) -> None:
    assert find_damage(copy / "nowhere") == f"there is no folder {copy / 'nowhere'}"
    (copy / "manifest.json").unlink()
    (copy / ".metadata").unlink()
    assert find_damage(copy) == f"{copy} has no manifest.json: it is half-written"
    manifest = {"format": 2, "files": {}, "crc32": "any"}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert find_damage(copy) == f"{copy / 'manifest.json'} has format 2, this version reads 1"
    assert not is_complete(copy)


@given(sizes=st.lists(st.integers(0, 1000), max_size=12), world=st.integers(1, 5))
def test_shares_are_disjoint_complete_and_even(sizes: list[int], world: int) -> None:
    files = [storage.FileSum(str(i), size, 0) for i, size in enumerate(sizes)]
    shares = [storage.share_of(files, rank, world) for rank in range(world)]
    assert sorted((one.name for share in shares for one in share), key=int) == [one.name for one in files]
    loads = [sum(one.size for one in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_damage_is_found_by_the_rank_that_reads_the_file(copy: Path) -> None:
    (copy / "__0_1.distcp").write_bytes(b"\0" * (copy / "__0_1.distcp").stat().st_size)
    found = [find_damage(copy, rank, 3) for rank in range(3)]
    assert sorted(one is None for one in found) == [False, True, True]


def test_remove_deletes_the_manifest_first(copy: Path) -> None:
    with patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        remove(copy)
    assert find_damage(copy) == f"{copy} has no manifest.json: it is half-written"
    remove(copy)
    remove(copy)
    assert not copy.exists()


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    """A run would begin at step 1. A link that leads to itself is an error that root has as well."""
    (tmp_path / "checkpoint").symlink_to(tmp_path / "checkpoint")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        steps_in(tmp_path / "checkpoint")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        is_finished(tmp_path / "checkpoint")
    assert steps_in(tmp_path / "none") == [] and not is_finished(tmp_path / "none")


def cause_of_rank_0() -> int | None:
    """Return the errno of the cause of an error of rank 0."""

    def read() -> None:
        try:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        except OSError as error:
            raise ValueError(f"it cannot be read: {error.strerror}") from None

    try:
        storage.call_on_rank_0(read)
    except ValueError as error:
        cause = passing_cause(error)
        return None if cause is None else cause.errno
    return None


def test_the_cause_of_an_error_of_rank_0_reaches_all_ranks(pool2: Pool) -> None:
    """It decides about the exit code."""
    assert pool2(cause_of_rank_0) == [errno.ESTALE] * 2


def unreadable_on_rank_1(path: str) -> tuple[str, int | None]:
    def read(file: Path, size: int) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with patch.object(storage, "_crc32_of", read if dist.get_rank() == 1 else storage._crc32_of):
        try:
            return storage.first_damage(path) or "", None
        except ValueError as error:
            cause = passing_cause(error)
            return str(error), cause and cause.errno


def test_a_lost_server_is_no_damage(pool2: Pool, saved: Path) -> None:
    """An older checkpoint was loaded; if there was none, the run ended with the advice to start in another folder."""
    stale = f"{saved} cannot be read: Stale file handle", errno.ESTALE
    assert pool2(unreadable_on_rank_1, str(saved)) == [stale] * 2
