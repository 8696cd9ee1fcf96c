"""Files of unknown origin, such as pointers of Git LFS in the place of data or weights; and full disks."""

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from torchtitan_scape import train
from torchtitan_scape.checkpoint.storage import MANIFEST, FileSum, _write_manifest, find_damage
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.files import OPEN_FILES, pointer_text, write_whole
from torchtitan_scape.data.manifest import Manifest, open_pair
from torchtitan_scape.huggingface.folder import read_folder
from torchtitan_scape.runtime import launch
from torchtitan_scape.titan.tokenizer import build_tokenizer

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 12345\n"


def _tokenizer(folder: Path) -> None:
    config = JobConfig()
    config.model.hf_assets_path = str(folder)
    build_tokenizer(config)


def _manifest(folder: Path) -> None:
    shard = {"name": "a", "split": "train", "documents": 1, "tokens": 1, "bytes": 1, "bin_sha256": "", "idx_sha256": ""}
    head = {"format": 1, "source": {}, "border": "eos", "dtype": "uint16", "shard_tokens": 1, "held_out": None}
    head |= {"tokenizer": {"digest": "", "entries": 1, "bos": 0, "eos": 0}, "shards": [shard], "splits": {}}
    (folder / "manifest.json").write_text(json.dumps(head))
    Manifest.read(folder)


def _weights(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    read_folder(folder)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "tokenizer": ("tokenizer.json", _tokenizer),
    "prepared data": ("a.bin", _manifest),
    "manifest": ("manifest.json", Manifest.read),
    "pair": ("a.idx", lambda folder: open_pair(folder / "a")),
    "weights": ("model.safetensors", _weights),
}


@pytest.mark.parametrize("name, read", READERS.values(), ids=READERS.keys())
def test_a_pointer_of_git_lfs_is_refused_by_its_name(name: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ValueError, match=f"{tmp_path / name} is a Git LFS pointer, not the file itself; run git lfs"):
        read(tmp_path)


def test_a_pointer_in_a_checkpoint_is_its_damage(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_text(POINTER)
    _write_manifest(tmp_path / MANIFEST, [FileSum("__0_0.distcp", 12345, 0)])
    assert "__0_0.distcp is a Git LFS pointer" in (find_damage(tmp_path) or "")


@pytest.mark.parametrize(
    "content, text",
    [
        (POINTER.replace("git-lfs", "hawser"), "a Git LFS pointer, not the file itself; run git lfs pull in"),
        (
            f"/annex/objects/SHA256E-s5--{'ab' * 32}.txt\n",
            "a git-annex pointer, not the file itself; run git annex get in",
        ),
    ],
)
def test_other_pointers_are_refused(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    assert text in pointer_text(tmp_path / "a.txt")


def test_a_longer_text_on_pointers_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(POINTER + "A document about Git LFS. " * 40)
    assert pointer_text(tmp_path / "a.txt") == pointer_text(tmp_path / "none") == ""


def test_a_file_that_cannot_be_written_is_named_and_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_whole(tmp_path / "a.json", "before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a\.json'"):
        write_whole(tmp_path / "a.json", "after")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "before")]


@pytest.mark.parametrize("program", [train, launch])
def test_ranks_and_launchers_raise_the_limit_of_open_files(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store of 512 ranks has more connections than the usual limit of 1,024."""
    found: list[tuple[int, int]] = []
    work = SimpleNamespace(main=lambda: found.append(resource.getrlimit(resource.RLIMIT_NOFILE)))
    monkeypatch.setattr(program, "import_module", lambda name: work)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # train sets it
    (soft, hard), mask = resource.getrlimit(resource.RLIMIT_NOFILE), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        program.main()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert found == [(min(hard, OPEN_FILES), hard)]
