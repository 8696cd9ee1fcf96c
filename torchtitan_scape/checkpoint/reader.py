"""The optimizer's and the method's state in a checkpoint: written as it is, read by the same layout or by another one.

Names follow the parameters, shapes are the global ones, so that any shard degree can read them. A replica's own state
has one row more in front, for each replica: written as a plain tensor it would be taken for copies of one, and all but
one dropped. What a checkpoint has, and what each kind of it is, stands in its record: see `methods.interface.State`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from torchtitan_scape.checkpoint.failures import failure_text
from torchtitan_scape.checkpoint.record_format import stored_kind
from torchtitan_scape.checkpoint.safe_load import CheckedReader, SafePlanner
from torchtitan_scape.checkpoint.slices import FlatSlices
from torchtitan_scape.checkpoint.state import (
    dense_state,
    needs_second_moment,
    saved_weights,
    shard_key,
    states,
)
from torchtitan_scape.core.parameters import Shard as LocalShard
from torchtitan_scape.core.parameters import is_slice, local
from torchtitan_scape.methods.interface import State
from torchtitan_scape.optimizers.registry import FIRST, OPTIMIZERS, SECOND
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

# Of weights beside their masters, in names.
_WEIGHTS = "weights"
# Bytes that are read at a time, of this rank.
_AT_A_TIME = 1 << 29


class GlobalLayout:
    """The position of this rank's local tensors in the global ones.

    Args:
        mesh: its dimension "dp_replicate" first, then those over which parameters are sharded; None in a process
            without a process group.
        simulated: replicas of this process, 1 for a real one.
        replicas: (how many, which of them this rank is of), if parameters are slices and the mesh does not tell.
    """

    def __init__(self, mesh: DeviceMesh | None, simulated: int, replicas: tuple[int, int] | None = None) -> None:
        self._mesh, self.simulated = mesh, simulated
        if replicas is None:
            axis: DeviceMesh | None = None if mesh is None else mesh["dp_replicate"]
            replicas = (1, 0) if axis is None else (axis.size(), axis.get_local_rank())
        self.replicas, self.replica = replicas
        self.ways = 1 if mesh is None else mesh.size() // self.replicas  # over which a replica is sharded

    def whole(self, parameter: Tensor, values: Tensor) -> Any:
        """`values`, of the parameter's local shape, as a tensor sharded like it, or what DCP takes for one."""
        if is_slice(parameter):
            return FlatSlices(parameter.whole, values.dtype, [(parameter.start, values)])
        if not isinstance(parameter, DTensor):
            return values
        return _dtensor(values, parameter.device_mesh, parameter.placements, parameter.shape)

    def rows(self, parameter: Tensor, values: Tensor, count: int) -> Any:
        """`values` (rows of this rank, *local shape) as (count, *global shape)."""
        if is_slice(parameter):
            first, size = self.replica * self.share_at_most(count), parameter.whole.numel()
            slices = [((first + i) * size + parameter.start, row) for i, row in enumerate(values)]
            return FlatSlices((count, *parameter.whole), values.dtype, slices)
        names: tuple[str, ...] = ()
        placements: list[Any] = []
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            placements = [_after_rows(p) for p in parameter.placements]
        if self.simulated > 1:  # a row of every replica, on each shard
            if not names:
                return values
            return _dtensor(values, parameter.device_mesh, placements, (count, *parameter.shape))  # type: ignore
        if self._mesh is None:
            return values
        mesh = self._mesh[("dp_replicate", *names)]
        return _dtensor(values, mesh, [Shard(0), *placements], (count, *parameter.shape))

    def of_optimizer(self, found: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """An optimizer's state by TorchTitan's names, of slices as `whole` has them; the same memory."""
        loaded = dict(found)
        for key, values in found.items():
            name, _, _ = key.removeprefix("state.").rpartition(".")
            parameter = parameters.get(name)
            if is_slice(parameter) and isinstance(values, Tensor) and values.ndim:
                loaded[key] = self.whole(parameter, _own_storage(values))
        return loaded

    def share(self, count: int) -> int:
        """Rows of `count` that this rank reads: its own where there are as many replicas, else dealt out."""
        most = self.share_at_most(count)
        return count if self.simulated > 1 else max(0, min(most, count - self.replica * most))

    def share_at_most(self, count: int) -> int:
        """Of all ranks."""
        return count if self.simulated > 1 else -(-count // self.replicas)


def _after_rows(placement: Any) -> Any:
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


class OptimizerCheckpoint(Stateful):
    """The optimizer's state and the method's for `dcp.save`; `checkpoint.migration.migrate` loads them."""

    def __init__(self, optimizers: ReplicaOptimizer, frame: GlobalLayout, residual: str) -> None:
        self._optimizers, self._frame, self._residual = optimizers, frame, residual

    def state_dict(self) -> dict[str, Any]:
        self._optimizers.finish_previous_step()
        parameters = {shard.name: shard.parameter for shard in self._optimizers.shards()}
        found = self._frame.of_optimizer(dense_state(self._optimizers), parameters)
        for name, (parameter, bits) in saved_weights(self._optimizers).items():
            found[f"{_WEIGHTS}.{name}"] = self._frame.whole(parameter, _own_storage(bits))
        total = self._frame.replicas * self._frame.simulated
        for state in states(self._optimizers, self._residual):
            for name, values in state.tensors.items():
                if state.packed:
                    values = state.entries(name, local(parameters[name]).shape)
                values, key = _own_storage(values), f"{state.kind}.{name}"
                if not state.by_parameter:
                    found[shard_key(self._optimizers, key)] = values
                elif state.per_replica:
                    found[key] = self._frame.rows(parameters[name], values, total)
                else:
                    found[key] = self._frame.whole(parameters[name], values)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("it is loaded by checkpoint.migration.migrate")


def _own_storage(values: Tensor) -> Tensor:
    """The same memory as a storage of its own, which begins where `values` does.

    Asynchronous saves stage whole storages, which may be flat buffers, and take a DTensor of a view with an
    offset for one that has memory of its own (PyTorch 2.13).
    """
    return torch.from_dlpack(values.detach())


class ModelCheckpoint(Stateful):
    """The model for a checkpoint or an export: what replicas share, where that is not their parameters.

    own: the model as TorchTitan saves it; what is loaded goes into it.
    """

    def __init__(self, own: Any, optimizers: ReplicaOptimizer, frame: GlobalLayout) -> None:
        self.own, self._optimizers, self._frame = own, optimizers, frame

    def state_dict(self) -> dict[str, Any]:
        shared = self._optimizers.saved_model()
        parameters = {shard.name: shard.parameter for shard in self._optimizers.shards()}
        found: dict[str, Any] = dict(self.own.state_dict())
        return found | {name: self._frame.whole(parameters[name], _own_storage(shared[name])) for name in shared}

    def room(self) -> dict[str, Any]:
        """What a checkpoint's model is read into: the model's tensors, or the masters that its weights are made of."""
        found = dict(self.own.state_dict())
        for shard in self._optimizers.shards():
            if is_slice(shard.parameter):
                found[shard.name] = self._frame.whole(shard.parameter, shard.parameter.detach())
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.own.load_state_dict({k: v for k, v in state_dict.items() if not isinstance(v, FlatSlices)})
        self._optimizers.model_loaded()


class StateReader:
    """Reads a checkpoint's optimizer state parameter by parameter, some at a time. All calls are collective.

    Args:
        saved: the record of the run that saved, see `metadata.py`.
        prefix: of the model's tensors in the checkpoint.

    Attributes:
        replicas: of the run that saved.
    """

    def __init__(
        self,
        path: str,
        saved: dict[str, Any],
        optimizers: ReplicaOptimizer,
        frame: GlobalLayout,
        prefix: str = "",
    ) -> None:
        self.path, self.saved, self.frame, self._prefix = path, saved, frame, prefix
        self._optimizers, self._shards = optimizers, optimizers.shards()
        self._kinds = CheckedReader(path).read_metadata().state_dict_metadata
        self.replicas: int = saved["replicas"]
        self.simulated = frame.simulated
        self.same_count = self.replicas == frame.replicas * frame.simulated

    def __iter__(self) -> Iterator[tuple[int, LocalShard, dict[str, Tensor]]]:
        """Every parameter with its number, and what was saved of it by kind, on this rank's shard and the CPU: flat
        (n,), of own states (rows, n) of the replicas whose rows this rank reads. "exp_avg" is a dense optimizer's first
        moment, "exp_avg_sq" its second where this run asks for it.
        """
        number = 0
        for shards in self._batches():
            for kinds, shard in zip(self._read(shards), shards, strict=True):
                yield number, shard, kinds
                number += 1

    def mean(self, own: Tensor) -> Tensor:
        """(n,): the mean over replicas that saved of rows (r, n), of which every rank has some. A collective call."""
        total = own.sum(0)
        if self.frame.simulated == 1:
            self._optimizers.collectives.sum_over_replicas(total)
        return total.div_(self.replicas)

    def fill(self, keys: dict[str, Tensor]) -> None:
        """Reads into the tensors, named as in the optimizer's part of the checkpoint."""
        loaded = self.frame.of_optimizer(keys, {shard.name: shard.parameter for shard in self._shards})
        load_into(self.path, {"optimizer": loaded})
        keys.update({key: value for key, value in loaded.items() if not isinstance(value, FlatSlices)})

    def fill_weights(self) -> None:
        """Reads weights that do not follow from their masters, as far as there are such here and they were saved."""
        saved = saved_weights(self._optimizers)
        keys = {f"{_WEIGHTS}.{name}": self.frame.whole(parameter, bits) for name, (parameter, bits) in saved.items()}
        if keys and all(self.has(key) for key in keys):
            load_into(self.path, {"optimizer": keys})
            self._optimizers.sharding.version.changed()

    def model(self, shard: LocalShard) -> Tensor:
        """The parameter itself, FP32 (n,)."""
        room = torch.empty(local(shard.parameter).shape)
        load_into(self.path, {self._prefix + shard.name: self.frame.whole(shard.parameter, room)})
        return room.view(-1)

    def fill_of_this_shard(self, states: Sequence[State]) -> bool:
        """Reads what is of this shard alone, as far as it was saved; whether all of it was."""
        of_shard = [state for state in states if not state.by_parameter]
        if not of_shard:
            return True
        keys = {f"{stored_kind(s.kind, self.saved)}.{name}": t for s in of_shard for name, t in s.tensors.items()}
        named = {shard_key(self._optimizers, key): values for key, values in keys.items()}
        there = {key: values for key, values in named.items() if self.has(key)}
        self.fill(there)
        return len(there) == len(named)

    def mean_of_this_run(self, own: Tensor) -> Tensor:
        """(n,): the mean over this run's replicas, of rows (r, n) of those of this process. A collective call."""
        mean = own.mean(0)
        self._optimizers.collectives.sum_over_replicas(mean)
        return mean.div_(self._optimizers.collectives.replicas)

    def from_a_rank_that_has_rows(self, values: Tensor) -> None:
        """Gives `values` of the first replica to all, where some ranks read no rows. A collective call."""
        if not self.same_count and self.frame.simulated == 1:
            self._optimizers.collectives.broadcast_from_first([values])

    @property
    def has_dense_state(self) -> bool:
        """Whether a dense optimizer's state was saved."""
        in_format_1 = self.has(f"state.{self._shards[0].name}.step")
        return bool(self.saved.get("dense_state", in_format_1))

    def applied_steps(self) -> float:
        """Return the steps that the saved optimizer's bias correction has counted; 0 if it counts none."""
        if "applied_steps" in self.saved:
            return float(self.saved["applied_steps"])
        key = f"state.{self._shards[0].name}.step"
        if not self.has(key):
            return 0.0
        stored = cast(TensorStorageMetadata, self._kinds[f"optimizer.{key}"])
        steps = torch.zeros(stored.size, dtype=stored.properties.dtype)
        self.fill({key: steps})
        return float(steps)

    def has(self, key: str) -> bool:
        """Whether the optimizer's part of the checkpoint has something of this name."""
        return f"optimizer.{key}" in self._kinds

    def _read(self, shards: Sequence[LocalShard]) -> list[dict[str, Tensor]]:
        moments = (FIRST, SECOND) if needs_second_moment(self._optimizers, self.saved["optimizer"]) else (FIRST,)
        rooms: list[dict[str, Tensor]] = []
        keys: dict[str, Tensor] = {}
        for shard in shards:
            room: dict[str, Tensor] = {}
            for kind, what in self.saved["states"].items():
                key = f"{stored_kind(kind, self.saved)}.{shard.name}"
                if not what["by_parameter"] or not self.has(key):
                    continue
                rows = (self.frame.share(self.replicas),) if what["per_replica"] else ()
                stored = cast(TensorStorageMetadata, self._kinds[f"optimizer.{key}"])
                room[kind] = torch.empty((*rows, *shard.local_shape), dtype=stored.properties.dtype)
                put = self.frame.rows(shard.parameter, room[kind], self.replicas) if rows else None
                keys[key] = self.frame.whole(shard.parameter, room[kind]) if put is None else put
            for kind in moments:
                if self.has(moment := f"state.{shard.name}.{kind}"):
                    room[kind] = torch.empty(shard.local_shape)
                    keys[moment] = self.frame.whole(shard.parameter, room[kind])
            entry = OPTIMIZERS.get(self.saved["optimizer"])
            if not room and entry is not None and entry.moments(shard):
                raise ValueError(f"{self.path} has no state of the parameter {shard.name!r}: it is of another model")
            rooms.append(room)
        self.fill(keys)
        own = {kind for kind, what in self.saved["states"].items() if what["per_replica"]}
        return [
            {kind: t.view(len(t), shard.size) if kind in own else t.view(-1) for kind, t in room.items()}
            for shard, room in zip(shards, rooms, strict=True)
        ]

    def _batches(self) -> Iterator[list[LocalShard]]:
        """The parameters, so many at a time that what is read of them is about `_AT_A_TIME` bytes; as on all ranks."""
        rows = self.frame.share_at_most(self.replicas)
        batch: list[LocalShard] = []
        taken = 0
        for shard in self._shards:
            batch.append(shard)
            taken += shard.entries // self.frame.ways * 4 * (rows + 3)
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
