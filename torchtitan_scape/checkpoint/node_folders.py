"""Checkpoints in folders that are private to nodes, with copies on the following nodes ([checkpoint] copies).

    nodes = NodeFolders(copies=1)
    nodes.begin(path)
    dcp.save(state, storage_writer=CheckedWriter(path, shared=False), checkpoint_id=path)
    nodes.publish(path)

    nodes.exchange_manifests(folder)    # at the start of a run; all nodes then have the same finished steps
    nodes.restore(path)                 # None, and every node has all files; or the reason why not

All methods are collective over all ranks. Every rank writes its file into the folder of its node. The first rank of a
node, its *leader*, sends the node's files to the next `copies` nodes, in a ring, and `.metadata` of rank 0 goes to all
nodes. The manifest, the same on all nodes, is written last. Therefore a step with a manifest on some node is complete
as long as no `copies` + 1 consecutive nodes are lost. A node is identified by nothing but its files: nodes can be
numbered anew, replaced or removed between two starts. The manifest has a random name of the run, so that a node with
the folder of another run is refused.

Files are sent over gloo in pieces, so that memory is bounded, and checked by their CRC-32 when they arrive. An I/O
error on one node does not stop the transfers, in which other nodes would wait; it is raised on all ranks afterwards.
"""

import errno
import json
import logging
import os
import secrets
import shutil
import socket
import time
import zlib
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.checkpoint.storage import (
    MANIFEST,
    METADATA,
    UNPUBLISHED,
    FileSum,
    damage_of,
    read_manifest,
    remove,
    share_of,
    steps_in,
    write_probe,
)
from torchtitan_scape.core.files import parse_json, sync_folder, write_whole
from torchtitan_scape.core.text import first_text, size_text
from torchtitan_scape.topology.groups import gather_lists
from torchtitan_scape.topology.layout import ranks_per_node_from_environment

logger = logging.getLogger(__name__)

_PIECE = 16 << 20  # bytes that are sent at a time
_TIMEOUT = timedelta(days=1)  # ranks wait until all files have arrived; a lost rank is detected otherwise


@dataclass(frozen=True)
class _Piece:
    """Bytes `begin` to `end` of a file."""

    file: FileSum
    begin: int
    end: int

    def empty(self) -> Tensor:
        return torch.zeros(self.end - self.begin, dtype=torch.uint8, device="cpu")


def _pieces(files: Sequence[FileSum]) -> Iterator[_Piece]:
    for file in files:
        for begin in range(0, file.size, _PIECE):
            yield _Piece(file, begin, min(begin + _PIECE, file.size))


@dataclass(frozen=True)
class _Version:
    """A finished step in the folder of a node: the text of its manifest, and the files that are there."""

    step: int
    manifest: str
    present: tuple[str, ...]


def _is_first(environment: Mapping[str, str]) -> bool:
    """Return whether this rank is the first one of its node.

    Not whether LOCAL_RANK is 0, if the launcher gives the number of ranks: LOCAL_RANK is the index of the device, which
    is 0 in all tasks of a Slurm job that see one GPU each (rank.sh).
    """
    per_node = ranks_per_node_from_environment(environment, dist.get_world_size())
    return dist.get_rank() % per_node == 0 if per_node else environment.get("LOCAL_RANK", "0") == "0"


class NodeFolders:
    """The folders of all nodes. Construction is collective over all ranks.

    Args:
        copies: Number of following nodes that receive the files of a node; all others if there are fewer.

    Attributes:
        leads: Whether this rank is the first one of its node.
        run: Name of the run in manifests, on the first rank of each node; "" until one was read or written.
    """

    run = ""

    def __init__(self, copies: int, environment: Mapping[str, str] = os.environ) -> None:
        rank, first = dist.get_rank(), _is_first(environment)
        self._ranks = dist.new_group(timeout=_TIMEOUT, backend="gloo")
        leaders = gather_lists(self._ranks, [(rank, socket.gethostname())] if first else [])
        self._leaders, self._hosts = [leader for leader, _ in leaders], [host for _, host in leaders]
        self._leader_group = dist.new_group(self._leaders, _TIMEOUT, "gloo")
        self._node = bisect(self._leaders, rank) - 1
        ends = [*self._leaders[1:], dist.get_world_size()]
        self._local_rank, self._local_ranks = (n - self._leaders[self._node] for n in (rank, ends[self._node]))
        self.leads, self._copies = first, min(copies, len(leaders) - 1)
        self._errors: list[OSError] = []
        self._crc32 = 0  # of the pieces of a file that have arrived

    # ------------------------------------------------------------------------------------------ saving

    def begin(self, path: str | os.PathLike[str]) -> None:
        """Create an empty folder on this node, before any rank writes. Raises OSError. Not collective."""
        if self.leads:
            remove(path)
            Path(path).mkdir(parents=True, exist_ok=True)  # other ranks of the node create it too, see CheckedWriter

    def publish(self, path: str | os.PathLike[str]) -> None:
        """Send the files of all ranks to the nodes that keep copies, and write the manifest on all nodes.

        Raises:
            OSError: The same on every rank, if a node could not read or write. Some nodes may have the manifest.
        """
        path, start = Path(path), time.monotonic()
        if self.leads:
            own: list[list[str]] = [[] for _ in self._hosts]
            mine = sorted(file.name for file in path.glob("*.distcp"))
            dist.all_gather_object(own, mine, group=self._leader_group)
            if self._distribute_manifest(path, own):
                files = {one.name: one for one in read_manifest(path, UNPUBLISHED)}
                self._send_along_ring(path, [[files[name] for name in names] for names in own])
                self._send_to_all(path, files[METADATA], source=0, lacks=self._node > 0)
        self._raise_together()
        if self.leads:
            with self._noted():
                os.replace(path / UNPUBLISHED, path / MANIFEST)
                sync_folder(path)
        self._raise_together()
        logger.info(f"Copied {path} to {self._copies} of {len(self._hosts) - 1} other nodes in {_since(start)}")

    def _distribute_manifest(self, path: Path, own: list[list[str]]) -> bool:
        """Write rank 0's manifest, with the hosts of each file, on all nodes under its preliminary name."""
        text: list[str | None] = [None]
        if self._node == 0:
            with self._noted():
                hosts = {
                    name: [self._hosts[(node + k) % len(own)] for k in range(self._copies + 1)]
                    for node, names in enumerate(own)
                    for name in names
                }
                manifest = parse_json((path / UNPUBLISHED).read_bytes())
                self.run = self.run or secrets.token_hex(8)
                text[0] = json.dumps(manifest | {"saved": time.time(), "hosts": hosts, "run": self.run}, indent=1)
        dist.broadcast_object_list(text, self._leaders[0], group=self._leader_group)
        with self._noted():
            write_whole(path / UNPUBLISHED, text[0] or "")
        return all(gather_lists(self._leader_group, [not self._errors]))

    def _send_along_ring(self, path: Path, own: list[list[FileSum]]) -> None:
        """Send this node's files to the next nodes, and receive those of the ones before it."""
        nodes = len(own)
        for distance in range(1, self._copies + 1):
            target, source = (self._node + distance) % nodes, (self._node - distance) % nodes
            for out, into in zip_longest(_pieces(own[self._node]), _pieces(own[source])):
                works, received = [], None if into is None else into.empty()
                if out is not None:
                    works.append(dist.isend(self._read(path, out), self._leaders[target], self._leader_group))
                if received is not None:
                    works.append(dist.irecv(received, self._leaders[source], self._leader_group))
                for work in works:
                    work.wait()
                if into is not None and received is not None:
                    self._write(path, into, received)

    # ----------------------------------------------------------------------------------------- loading

    def exchange_manifests(self, folder: str | os.PathLike[str]) -> None:
        """Write the manifest of every finished step on all nodes.

        A node that was away may have another checkpoint of a step, which the others have saved again since. Complete
        ones are preferred, then the newest. The files of others are removed.

        Raises:
            OSError: On every rank, if a node cannot be written.
            ValueError: On every rank, if the nodes have checkpoints of several runs.
        """
        own: dict[int, _Version] = {}
        versions: list[tuple[str, _Version]] = []
        if self.leads:
            own = {one.step: one for one in _versions_in(Path(folder))}
            mine = [(self._hosts[self._node], one) for one in own.values()]
            versions = gather_lists(self._leader_group, mine)
        runs = _runs_of(versions)
        self.run = next(iter(runs), "")
        several = [" and ".join(first_text(texts, 4) for texts in runs.values())] if len(runs) > 1 else []
        if several := gather_lists(self._ranks, several):
            raise ValueError(f"{folder} has checkpoints of several runs: {several[0]}; delete those of the others")
        if self.leads:
            for step, manifest in _preferred([one for _, one in versions]).items():
                path = Path(folder, f"step-{step}")
                if step in own and own[step].manifest == manifest:
                    continue
                with self._noted():
                    if step in own:
                        remove(path)
                    path.mkdir(parents=True, exist_ok=True)
                    write_whole(path / MANIFEST, manifest)
        self._raise_together()

    def restore(self, path: str | os.PathLike[str]) -> str | None:
        """Verify the files of all nodes, and send every node the intact files that it lacks.

        Returns:
            None if all nodes have all files now; else the files that no node has, or the damage of the manifest, as a
            clause.

        Raises:
            OSError: On every rank, if a node cannot be written.
        """
        path, start = Path(path), time.monotonic()
        files, damaged = list[FileSum](), list[str]()
        try:
            files = read_manifest(path)
        except ValueError as error:  # no node has an intact one, see `exchange_manifests`
            damaged.append(str(error))
        if damaged := gather_lists(self._ranks, damaged):
            return damaged[0]
        intact, damages = self._verify(path, files)
        if missing := [one.name for one in files if one.name not in intact]:
            return "; ".join([*damages, _missing_text(path, missing)])
        for damage in damages:
            logger.warning(f"{damage}; replaced by the copy of another node")
        lacking = [one for one in files if len(intact[one.name]) < len(self._hosts)]
        if self.leads:
            for i, one in enumerate(lacking):
                holders = intact[one.name]
                self._send_to_all(path, one, holders[i % len(holders)], self._node not in holders)
        self._raise_together()
        nbytes = sum(one.size * (len(self._hosts) - len(intact[one.name])) for one in lacking)
        logger.info(f"{path}: nodes received {nbytes:,} bytes from other nodes in {_since(start)}")
        return None

    def _verify(self, path: Path, files: Sequence[FileSum]) -> tuple[dict[str, list[int]], list[str]]:
        """Return the nodes that have each file intact, and the damages of others. Each rank reads some files."""
        here = [one for one in files if (path / one.name).exists()]
        found: list[tuple[int, str, str | None]] = []
        for one in share_of(here, self._local_rank, self._local_ranks):
            found.append((self._node, one.name, damage_of(path, one, reads=True)))
        intact: dict[str, list[int]] = {}
        damages: list[str] = []
        for node, name, damage in sorted(gather_lists(self._ranks, found), key=lambda one: one[:2]):
            if damage is None:
                intact.setdefault(name, []).append(node)
            else:
                damages.append(f"{damage} on {self._hosts[node]}")
        return intact, damages

    # --------------------------------------------------------------------------------------- transfers

    def _send_to_all(self, path: Path, file: FileSum, source: int, lacks: bool) -> None:
        """Send a file of the node `source` to all nodes; this one writes it if it `lacks` it."""
        for piece in _pieces([file]):
            data = self._read(path, piece) if self._node == source else piece.empty()
            dist.broadcast(data, self._leaders[source], group=self._leader_group)
            if lacks:
                self._write(path, piece, data)

    def _read(self, path: Path, piece: _Piece) -> Tensor:
        data = piece.empty()
        with self._noted(), open(path / piece.file.name, "rb") as file:
            file.seek(piece.begin)
            if file.readinto(data.numpy()) != len(data):
                raise OSError(errno.EIO, f"{piece.file.name} became shorter")
        return data

    def _write(self, path: Path, piece: _Piece, data: Tensor) -> None:
        """Append a piece to its file, which gets its name when it is complete and has the right checksum."""
        if self._errors:
            return
        part, content = path / f"{piece.file.name}.part", data.numpy()
        with self._noted(part), open(part, "ab" if piece.begin else "wb") as file:
            self._crc32 = zlib.crc32(content, self._crc32 if piece.begin else 0)
            file.write(content)
            if piece.end < piece.file.size:
                return
            file.flush()
            os.fsync(file.fileno())
            if self._crc32 != piece.file.crc32:
                raise OSError(errno.EIO, f"{piece.file.name} does not have its checksum")
            os.replace(part, path / piece.file.name)

    @contextmanager
    def _noted(self, part: Path | None = None) -> Iterator[None]:
        """Keep an OSError for `_raise_together`, and remove the unfinished file."""
        try:
            yield
        except OSError as error:
            text = f"{error.strerror or error} on {self._hosts[self._node]}"
            self._errors.append(OSError(error.errno or errno.EIO, text))
            if part is not None:
                part.unlink(missing_ok=True)

    def _raise_together(self) -> None:
        """Raise the first error of the first node that has one, on every rank."""
        errors = gather_lists(self._ranks, [(error.errno, error.strerror) for error in self._errors[:1]])
        self._errors.clear()
        if errors:
            raise OSError(*errors[0])


def _versions_in(folder: Path) -> list[_Version]:
    versions = []
    for step in steps_in(folder):
        path = folder / f"step-{step}"
        with suppress(ValueError, OSError):  # unfinished, or with a damaged manifest
            files = read_manifest(path)
            present = tuple(one.name for one in files if damage_of(path, one, reads=False) is None)
            versions.append(_Version(step, (path / MANIFEST).read_text(), present))
    return versions


def _runs_of(versions: Sequence[tuple[str, _Version]]) -> dict[str, list[str]]:
    """Return the steps and hosts by run of versions, each with its host. Manifests of earlier versions name no run."""
    found: dict[str, list[str]] = {}
    for host, one in versions:
        if run := parse_json(one.manifest).get("run"):
            found.setdefault(run, []).append(f"step-{one.step} on {host}")
    return found


def _preferred(versions: Sequence[_Version]) -> dict[int, str]:
    """Return the manifest to use by step: complete ones first, then the newest."""
    present: dict[str, set[str]] = {}
    for one in versions:
        present.setdefault(one.manifest, set()).update(one.present)

    def rank(one: _Version) -> tuple[bool, float, str]:
        content = parse_json(one.manifest)
        return content["files"].keys() <= present[one.manifest], content.get("saved", 0.0), one.manifest

    steps: dict[int, _Version] = {}
    for one in versions:
        steps[one.step] = max(steps.get(one.step, one), one, key=rank)
    return {step: one.manifest for step, one in sorted(steps.items())}


def _missing_text(path: Path, missing: list[str]) -> str:
    hosts = parse_json((path / MANIFEST).read_bytes()).get("hosts", {})
    named = [f"{name} (was on {', '.join(hosts[name])})" if name in hosts else name for name in missing]
    return f"no node has {first_text(named, 4)}"


def _since(start: float) -> str:
    return f"{time.monotonic() - start:.2f} s"


def check_private(folder: str | os.PathLike[str], copies: int, environment: Mapping[str, str] = os.environ) -> None:
    """Check at startup that no two nodes share the folder, and log the free space. Collective over all ranks.

    Raises:
        ValueError: On every rank, with the hosts that share the folder, or that cannot write to it.
    """
    path, host, first = Path(folder).absolute(), socket.gethostname(), _is_first(environment)
    probes: list[tuple[str, str, int]] = []
    refused: list[tuple[str, OSError]] = []
    if first:
        try:
            probes.append((write_probe(path), host, shutil.disk_usage(path).free))
        except OSError as error:
            refused.append((host, error))
    own = [name for name, _, _ in probes]
    each = gather_lists(dist.group.WORLD, probes)
    others = [host for name, host, _ in each if first and name not in own and (path / name).exists()]
    refused, sharing = gather_lists(dist.group.WORLD, refused), gather_lists(dist.group.WORLD, others)
    for name in own:
        (path / name).unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()  # only if it is empty
    if refused:
        hosts = first_text([f"{host} ({error.strerror})" for host, error in refused], 8)
        text = f"nothing can be written to {path} on {hosts}; set --checkpoint.folder"
        raise ValueError(text) from refused[0][1]
    if sharing:
        raise ValueError(
            f"[checkpoint] copies = {copies}, but {first_text(sorted(set(sharing)), 8)} share the folder {path}; set "
            "copies = 0, or --checkpoint.folder to a folder of each node, such as /dev/shm/run-1"
        )
    least, where = min((free, host) for _, host, free in each)
    logger.info(
        f"Checkpoints: {len(each)} nodes, each with its own files and those of {min(copies, len(each) - 1)} others in "
        f"{path}; {size_text(least)} are free on {where}, the least of all"
    )
