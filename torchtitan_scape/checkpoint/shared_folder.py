"""Check at startup that all nodes see the same folder. Without it, a run would fail at its first save."""

import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from torchtitan_scape.checkpoint.folder import call_on_rank_0
from torchtitan_scape.checkpoint.storage import SHARED_SECONDS
from torchtitan_scape.core.text import first_text
from torchtitan_scape.topology.groups import gather_lists

MAX_NAMED = 8  # hosts in the error


def hosts_without(folder: str | os.PathLike[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the hosts that do not see `folder` of rank 0's host, or cannot write to it. Collective over all ranks.

    Rank 0 writes an empty file with a random name, and the ranks with LOCAL_RANK 0 look for it. The file is removed
    afterwards, and the folder as well if it did not exist before.

    Raises:
        OSError: On every rank, if rank 0 cannot write to the folder.
    """
    path = Path(folder).absolute()
    probe = path / call_on_rank_0(lambda: _write(path))
    host = None
    if environment.get("LOCAL_RANK", "0") == "0" and not (_is_visible(probe) and os.access(path, os.W_OK | os.X_OK)):
        host = socket.gethostname()
    hosts = gather_lists(dist.group.WORLD, [] if host is None else [host])
    if dist.get_rank() == 0:
        with suppress(OSError):
            probe.unlink()
            path.rmdir()  # only if it is empty
    return sorted(set(hosts))


def check_shared(folder: str | os.PathLike[str], environment: Mapping[str, str] = os.environ) -> None:
    """Check the folder of checkpoints on all nodes. Collective over all ranks.

    Raises:
        ValueError: On every rank, with the hosts that do not see the folder.
        OSError: On every rank, if rank 0 cannot write to the folder.
    """
    if hosts := hosts_without(folder, environment):
        raise ValueError(describe(folder, hosts))


def describe(folder: str | os.PathLike[str], hosts: list[str]) -> str:
    """Return one line with the hosts that do not see the folder, and the fix."""
    return (
        f"{Path(folder).absolute()} is not a folder that all nodes share and may write to: a file of rank 0 is missing "
        f"on {first_text(hosts, MAX_NAMED)}; checkpoints need one. Set --job.dump_folder to a folder of a shared file "
        "system, such as NFS or Lustre, or train without --checkpoint.enable"
    )


def _write(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f".probe-{secrets.token_hex(8)}"
    (folder / name).touch(exist_ok=False)
    return name


def _is_visible(probe: Path) -> bool:
    """Wait until the file is visible. A new name is in no cache, but its folders may be cached as missing."""
    end = time.monotonic() + SHARED_SECONDS
    while not probe.exists():
        if time.monotonic() >= end:
            return False
        for folder in reversed(probe.parents):  # opening a folder makes NFS update its cached entries
            with suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY))
        time.sleep(0.2)
    return True
