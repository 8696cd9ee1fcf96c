"""The optimizer's state in a checkpoint: written as it is, read by the same layout or by another one.

Names follow the parameters, shapes are the global ones, so that any shard degree can read them. A residual has one row
more in front, for each replica: written as a plain tensor it would be taken for copies of one, and all but one dropped.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from torchtitan_scape.checkpoint.failures import failure_text
from torchtitan_scape.checkpoint.safe_load import CheckedReader, SafePlanner
from torchtitan_scape.sync.scape.optimizer import Scape
from torchtitan_scape.sync.scape.state import StateByParameter
from torchtitan_scape.sync.shards import Shard as LocalShard
from torchtitan_scape.sync.shards import local

# Bytes that are read at a time, of this rank.
_AT_A_TIME = 1 << 29


class Frame:
    """How local tensors of this rank lie in the global ones.

    mesh: with the axis of replicas first, then those over which parameters are sharded.
    played: replicas that one process plays, 1 for a real one.
    """

    def __init__(self, mesh: DeviceMesh, played: int) -> None:
        self._mesh, self.played = mesh, played
        self.replicas, self.replica = mesh["dp_replicate"].size(), mesh["dp_replicate"].get_local_rank()
        self.ways = mesh.size() // self.replicas  # over which a replica is sharded

    def whole(self, parameter: Tensor, values: Tensor) -> Tensor:
        """`values`, of the parameter's local shape, as a tensor sharded like it."""
        if not isinstance(parameter, DTensor):
            return values
        return _dtensor(values, parameter.device_mesh, parameter.placements, parameter.shape)

    def rows(self, parameter: Tensor, values: Tensor, count: int) -> Tensor:
        """`values` (rows of this rank, *local shape) as (count, *global shape)."""
        names: tuple[str, ...] = ()
        placements: list[Any] = []
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            placements = [_behind_rows(p) for p in parameter.placements]
        if self.played > 1:  # a row of every replica, on each shard
            if not names:
                return values
            return _dtensor(values, parameter.device_mesh, placements, (count, *parameter.shape))  # type: ignore
        mesh = self._mesh[("dp_replicate", *names)]
        return _dtensor(values, mesh, [Shard(0), *placements], (count, *parameter.shape))

    def share(self, count: int) -> int:
        """Rows of `count` that this rank reads: its own where there are as many replicas, else dealt out."""
        most = self.share_at_most(count)
        return count if self.played > 1 else max(0, min(most, count - self.replica * most))

    def share_at_most(self, count: int) -> int:
        """Of all ranks."""
        return count if self.played > 1 else -(-count // self.replicas)


def _behind_rows(placement: Any) -> Any:
    if not hasattr(placement, "dim"):
        return placement
    if hasattr(placement, "split_factor"):
        return type(placement)(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1)


def _dtensor(values: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> DTensor:
    """A DTensor around these values, on whatever device they are: `from_local` would move them to the mesh's."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    meta = TensorMeta(torch.Size(shape), tuple(strides), values.dtype)
    return DTensor(values.detach(), DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def saved_state(scape: Scape, frame: Frame, residual: str) -> dict[str, Tensor]:
    """What a checkpoint gets of SCAPE, behind `settle`; see `optimizer.portable` for the kinds. A collective call."""
    portable = StateByParameter(scape)
    parameters = {shard.name: shard.parameter for shard in scape.ordered}
    total = frame.replicas * frame.played
    found = {}
    for (kind, name), values in portable.tensors(residual).items():
        parameter, values = parameters[name], _apart(values)
        is_rows = kind == "residual"
        found[f"{kind}.{name}"] = frame.rows(parameter, values, total) if is_rows else frame.whole(parameter, values)
    return found | extras_of(portable)


def _apart(values: Tensor) -> Tensor:
    """The same memory as a storage of its own, which begins where `values` does.

    Asynchronous saves stage whole storages, which are the flat buffers here, and take a DTensor of a view with an
    offset for one that has memory of its own (PyTorch 2.13).
    """
    return torch.from_dlpack(values.detach())


def extras_of(portable: StateByParameter) -> dict[str, Tensor]:
    """What differs from shard to shard goes under the shard's number."""
    rank = portable.scape.collectives.model_rank
    return {f"{kind}.{rank}": values for kind, values in portable.extras().items()}


@dataclass
class Saved:
    """A parameter's state as it was saved, on this rank's shard, on the CPU; FP32 (n,) where nothing else is said.

    moment, residual: of SCAPE as in `optimizer.portable`, residual (rows, n) of the replicas whose rows this rank
    reads; of a dense method the first moment, and None.
    used, held: bool (n,), A and P. master; weight: BF16.
    """

    moment: Tensor | None
    residual: Tensor | None = None
    used: Tensor | None = None
    held: Tensor | None = None
    master: Tensor | None = None
    weight: Tensor | None = None


class StateReader:
    """Reads a checkpoint's optimizer state parameter by parameter, some at a time. All calls are collective.

    saved: the record of the run that saved, see `record.py`.
    """

    def __init__(self, path: str, saved: dict[str, Any], shards: Sequence[LocalShard], frame: Frame) -> None:
        self.path, self.saved, self.frame, self.shards = path, saved, frame, shards
        self._kinds = CheckedReader(path).read_metadata().state_dict_metadata
        self.replicas: int = saved["replicas"]

    def __iter__(self) -> Iterator[tuple[int, LocalShard, Saved]]:
        """Every parameter with its number among the shards."""
        read = self._read_scape if self.saved["method"] == "scape" else self._read_dense
        number = 0
        for shards in self._batches():
            for saved, shard in zip(read(shards), shards, strict=True):
                yield number, shard, saved
                number += 1

    def fill(self, keys: dict[str, Tensor]) -> None:
        """Reads into the tensors, named as in the optimizer's part of the checkpoint."""
        if not keys:
            return
        load_into(self.path, {"optimizer": keys})

    def model(self, shard: LocalShard) -> Tensor:
        """The parameter itself, FP32 (n,)."""
        room = torch.empty(local(shard.parameter).shape)
        load_into(self.path, {shard.name: self.frame.whole(shard.parameter, room)})
        return room.view(-1)

    def applied_steps(self) -> float:
        if self.saved["method"] == "scape":
            return float(self.saved["scape"]["applied_steps"])
        key = f"state.{self.shards[0].name}.step"
        stored = cast(TensorStorageMetadata, self._kinds[f"optimizer.{key}"])
        steps = torch.zeros(stored.size, dtype=stored.properties.dtype)
        self.fill({key: steps})
        return float(steps)

    def _read_scape(self, shards: Sequence[LocalShard]) -> list[Saved]:
        dtypes = {"moment": torch.float32, "mask": torch.uint8, "master": torch.float32, "weight": torch.bfloat16}
        rooms: list[dict[str, Tensor]] = []
        keys: dict[str, Tensor] = {}
        for shard in shards:
            room: dict[str, Tensor] = {}
            for kind, dtype in dtypes.items():
                if self.has(f"{kind}.{shard.name}"):
                    room[kind] = torch.empty(local(shard.parameter).shape, dtype=dtype)
                    keys[f"{kind}.{shard.name}"] = self.frame.whole(shard.parameter, room[kind])
            if self.has(f"residual.{shard.name}"):
                room["residual"] = torch.empty((self.frame.share(self.replicas), *local(shard.parameter).shape))
                keys[f"residual.{shard.name}"] = self.frame.rows(shard.parameter, room["residual"], self.replicas)
            if not room.keys() & {"moment", "residual"}:
                raise ValueError(f"{self.path} has no state of the parameter {shard.name!r}: it is of another model")
            rooms.append(room)
        self.fill(keys)
        dense = self.saved["scape"]["densities"][1] == 1.0
        found = []
        for shard, room in zip(shards, rooms, strict=True):
            flat = {kind: values.view(-1) for kind, values in room.items()}
            rows, mask = room.get("residual"), flat.get("mask")
            found.append(
                Saved(
                    flat.get("moment"),
                    None if rows is None else rows.view(len(rows), shard.size),
                    None if mask is None else mask % 2 > 0,
                    None if mask is None or dense else mask > 1,
                    flat.get("master"),
                    flat.get("weight"),
                )
            )
        return found

    def _read_dense(self, shards: Sequence[LocalShard]) -> list[Saved]:
        rooms = [torch.empty(local(shard.parameter).shape) for shard in shards]
        keys = {}
        for shard, room in zip(shards, rooms, strict=True):
            key = f"state.{shard.name}.exp_avg"
            if not self.has(key):
                raise ValueError(f"{self.path} has no state of the parameter {shard.name!r}: it is of another model")
            keys[key] = self.frame.whole(shard.parameter, room)
        self.fill(keys)
        return [Saved(room.view(-1)) for room in rooms]

    def has(self, key: str) -> bool:
        """Whether the optimizer's part of the checkpoint has something of this name."""
        return f"optimizer.{key}" in self._kinds

    def _batches(self) -> Iterator[list[LocalShard]]:
        """The parameters, so many at a time that what is read of them is about `_AT_A_TIME` bytes; as on all ranks."""
        rows = self.frame.share_at_most(self.replicas)
        batch: list[LocalShard] = []
        taken = 0
        for shard in self.shards:
            batch.append(shard)
            taken += shard.parameter.numel() // self.frame.ways * 4 * (rows + 3)
            if taken >= _AT_A_TIME:
                yield batch
                batch, taken = [], 0
        if batch:
            yield batch


def load_into(path: str, state: dict[str, Any]) -> None:
    """Reads what `state` asks for, in place. A collective call.

    Raises ValueError where the checkpoint has not what is asked for, or cannot be read.
    """
    try:
        dcp.load(state, storage_reader=CheckedReader(path), planner=SafePlanner())
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if "Missing key" in str(cause) or "ize mismatch" in str(cause):
                raise ValueError(f"{path} is of another model or method: {' '.join(str(cause).split())}") from None
        if all(isinstance(cause, (ValueError, OSError)) for cause in causes):
            raise ValueError(failure_text(error, path)) from None
        raise
