"""Local tensors of a rank as parts of global ones, in the form that DCP saves and loads."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from torchtitan_scape.checkpoint.slices import FlatSlices, flat_boxes
from torchtitan_scape.core.parameters import is_slice, local


class GlobalLayout:
    """The position of this rank's local tensors in the global ones.

    Args:
        mesh: dimension "dp_replicate" first, then those over which parameters are sharded; None in a process without
            a process group.
        simulated: number of replicas in this process, 1 for a real one.
        replicas: (number of replicas, index of this rank's), for slices, where the mesh does not determine them.

    Attributes:
        replicas: number of real replicas.
        replica: index of this rank's replica.
        ways: number of ranks over which one replica is sharded.
    """

    def __init__(self, mesh: DeviceMesh | None, simulated: int, replicas: tuple[int, int] | None = None) -> None:
        self._mesh, self.simulated = mesh, simulated
        if replicas is None:
            axis: DeviceMesh | None = None if mesh is None else mesh["dp_replicate"]
            replicas = (1, 0) if axis is None else (axis.size(), axis.get_local_rank())
        self.replicas, self.replica = replicas
        self.ways = 1 if mesh is None else mesh.size() // self.replicas

    def whole(self, parameter: Tensor, values: Tensor) -> Any:
        """Return `values` (local shape) as a tensor for DCP that is sharded like the parameter."""
        if is_slice(parameter):
            boxes = flat_boxes(parameter.whole, parameter.start, values)
            return FlatSlices(parameter.whole, values.dtype, boxes)
        if not isinstance(parameter, DTensor):
            return values
        return _dtensor(values, parameter.device_mesh, parameter.placements, parameter.shape)

    def part(self, parameter: Tensor, values: Tensor, start: int) -> Any:
        """Return `values`, entries [start, start + n) of this rank's flat local tensor, as a part of the whole tensor.

        Ranks may save different parts under one name; of equal ones DCP writes one. All together must be the whole
        tensor.

        Args:
            parameter: a plain tensor, a DTensor without partial sums, or a slice, to which `start` is relative.
            values: (n,) or any contiguous shape. DCP reads and writes them in place.

        Returns:
            The result of `whole` if `values` are all entries, otherwise `FlatSlices`.
        """
        values, shape = own_storage(values), local(parameter).shape
        if values.numel() == shape.numel():
            return self.whole(parameter, values.view(shape))
        if is_slice(parameter):
            boxes = flat_boxes(parameter.whole, parameter.start + start, values)
            return FlatSlices(parameter.whole, values.dtype, boxes)
        origin = parameter.__create_chunk_list__()[0].offsets if isinstance(parameter, DTensor) else None
        return FlatSlices(parameter.shape, values.dtype, flat_boxes(shape, start, values, origin))

    def rows(self, parameter: Tensor, values: Tensor, count: int) -> Any:
        """Return `values` (rows of this rank, *local shape) as a tensor for DCP, (count, *global shape)."""
        if is_slice(parameter):
            first, size = self.replica * self.share_at_most(count), parameter.whole.numel()
            shape = (count, *parameter.whole)
            boxes: dict[tuple[int, ...], Tensor] = {}
            for i, row in enumerate(values):
                boxes |= flat_boxes(shape, (first + i) * size + parameter.start, row)
            return FlatSlices(shape, values.dtype, boxes)
        placements: list[Any] = []
        if isinstance(parameter, DTensor):
            placements = [_after_rows(p) for p in parameter.placements]
            if self.simulated > 1:  # a row of every replica, on each shard
                return _dtensor(values, parameter.device_mesh, placements, (count, *parameter.shape))
        if self.simulated > 1 or self._mesh is None:
            return values
        mesh = self._mesh[("dp_replicate", *self._sharded_dims(parameter))]
        return _dtensor(values, mesh, [Shard(0), *placements], (count, *parameter.shape))

    def _sharded_dims(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the names of the mesh dimensions over which a parameter is sharded."""
        if not isinstance(parameter, DTensor):
            return ()
        assert self._mesh is not None and self._mesh.mesh_dim_names is not None
        # A mesh without names (`fully_shard(model)`) has all dimensions but the replicas'.
        return parameter.device_mesh.mesh_dim_names or self._mesh.mesh_dim_names[1:]

    def of_optimizer(self, found: dict[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return an optimizer's state (flat, "state.NAME.KIND") with slices as in `whole`. Memory is shared."""
        loaded = dict(found)
        for key, values in found.items():
            parameter = parameters.get(parameter_of(key))
            if (
                is_slice(parameter)
                and isinstance(values, Tensor)
                and values.ndim
                and not isinstance(values, FlatSlices)
            ):
                loaded[key] = self.whole(parameter, own_storage(values))
        return loaded

    def share(self, count: int) -> int:
        """Return how many of `count` rows this rank reads: its own if replica counts are equal, else its part."""
        most = self.share_at_most(count)
        return count if self.simulated > 1 else max(0, min(most, count - self.replica * most))

    def share_at_most(self, count: int) -> int:
        """Return the largest `share` of all ranks."""
        return count if self.simulated > 1 else -(-count // self.replicas)


def parameter_of(key: str) -> str:
    """Return the name of the parameter in a key of an optimizer's state, "state.NAME.KIND"."""
    return key.removeprefix("state.").rpartition(".")[0]


def _after_rows(placement: Any) -> Any:
    if not hasattr(placement, "dim"):
        return placement
    if hasattr(placement, "split_factor"):
        return type(placement)(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1)


def _dtensor(values: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> DTensor:
    """Return a DTensor of these values on their own device; `from_local` would move them to the mesh's."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    meta = TensorMeta(torch.Size(shape), tuple(strides), values.dtype)
    return DTensor(values.detach(), DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def own_storage(values: Tensor) -> Tensor:
    """Return the same memory as a storage of its own that begins at `values`.

    Asynchronous saves copy whole storages, which may be flat buffers, and ignore the offset of a view in a DTensor
    (PyTorch 2.13).
    """
    return torch.from_dlpack(values.detach())
