"""Local tensors of a rank as parts of global ones, in the form that DCP saves and loads.

A DTensor describes whole rows of a tensor on a rank, but not its entries 1,000 to 5,000. Such a slice is stored as a
few boxes: the end of a row, whole rows, the beginning of a row. A checkpoint then has the whole tensor, however many
ranks have written it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from torchtitan_scape.core.parameters import Shard as LocalShard
from torchtitan_scape.core.parameters import is_slice, local

_aten = torch.ops.aten
# Operations that asynchronous saves apply to a tensor, and the conversion of an export. Each box gets them.
_BY_BOX = {getattr(_aten, name).default for name in ("detach", "clone", "_to_copy", "empty_like", "zeros_like")}


class FlatSlices(Tensor):
    """Boxes of a tensor of `shape`, with the methods that DCP calls on tensors which are distributed over ranks.

    It is a tensor because DCP's planners accept parts at an offset, and its stagers copies, of tensors alone. It
    supports no arithmetic.

    Args:
        shape: of the whole tensor.
        dtype: of the boxes.
        boxes: values by their offset in the whole tensor, with as many dimensions; see `flat_boxes`. Read and written
            in place.
    """

    boxes: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(
        cls: type["FlatSlices"], shape: Sequence[int], dtype: torch.dtype, boxes: Mapping[tuple[int, ...], Tensor]
    ) -> "FlatSlices":
        device = next((values.device for values in boxes.values()), torch.device("cpu"))
        made = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.boxes = dict(boxes)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, slices = kwargs or {}, args[0]
        if func in _BY_BOX:
            boxes = {offsets: func(values, *args[1:], **kwargs) for offsets, values in slices.boxes.items()}
            return FlatSlices(slices.shape, kwargs.get("dtype") or slices.dtype, boxes)
        if func is _aten.new_empty.default:  # The stager of threads fills it with copies of the attributes.
            return FlatSlices(args[1], kwargs.get("dtype") or slices.dtype, {})
        if (
            func is _aten.copy_.default
            and isinstance(args[1], FlatSlices)
            and args[1].boxes.keys() == slices.boxes.keys()
        ):
            for offsets, values in slices.boxes.items():
                values.copy_(args[1].boxes[offsets], *args[2:], **kwargs)
            return slices
        raise NotImplementedError(f"{func} of FlatSlices, which are for checkpoints only; use their boxes")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FlatSlices, (tuple(self.shape), self.dtype, self.boxes)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FlatSlices(shape={tuple(self.shape)}, dtype={self.dtype}, boxes={self.boxes})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), values.shape) for offsets, values in self.boxes.items()]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties, shard = TensorProperties(dtype=self.dtype), WriteItemType.SHARD
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets), shard, tensor_data=TensorWriteData(chunk, properties, self.shape)
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[tuple(index.offset)]


def flat_boxes(
    shape: Sequence[int], start: int, values: Tensor, origin: Sequence[int] | None = None
) -> dict[tuple[int, ...], Tensor]:
    """Return entries [start, start + n) of a tensor of `shape` as boxes by offset, which are views of `values`.

    Args:
        values: (n,) entries, contiguous and of any shape.
        origin: added to all offsets: where a larger tensor has this one.
    """
    flat, done, boxes = values.detach().view(values.numel()), 0, {}
    for offsets, sizes in boxes_of(shape, start, start + flat.numel()):
        count = math.prod(sizes)
        if origin is not None:
            offsets = tuple(at + first for at, first in zip(offsets, origin, strict=True))
        boxes[offsets] = flat[done : done + count].view(sizes)
        done += count
    return boxes


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of the boxes that entries [start, stop) of a tensor of `shape` are, in their order."""
    inner = math.prod(shape[1:])
    while start < stop:
        row, first = divmod(start, inner)
        whole_rows = 0 if first else (stop - start) // inner
        if whole_rows:
            yield (row, *(0 for _ in shape[1:])), (whole_rows, *shape[1:])
            start += whole_rows * inner
            continue
        end = min(stop, (row + 1) * inner)
        for offsets, sizes in boxes_of(shape[1:], first, end - row * inner):
            yield (row, *offsets), (1, *sizes)
        start = end


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
            return FlatSlices(parameter.whole, values.dtype, flat_boxes(parameter.whole, parameter.start, values))
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

    def of_optimizer(self, state: dict[str, Any], slices: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return an optimizer's state (flat, "state.NAME.KIND") with slices as in `whole`. Memory is shared.

        Args:
            slices: the result of `slices_of`.
        """
        wrapped = dict(state)
        for key, values in state.items() if slices else ():
            parameter = slices.get(key.removeprefix("state.").rpartition(".")[0])
            if parameter is not None and isinstance(values, Tensor) and values.ndim and type(values) is not FlatSlices:
                wrapped[key] = self.whole(parameter, own_storage(values))
        return wrapped

    def share(self, count: int) -> int:
        """Return how many of `count` rows this rank reads: its own if replica counts are equal, else its part."""
        most = self.share_at_most(count)
        return count if self.simulated > 1 else max(0, min(most, count - self.replica * most))

    def share_at_most(self, count: int) -> int:
        """Return the largest `share` of all ranks."""
        return count if self.simulated > 1 else -(-count // self.replicas)


def slices_of(shards: Sequence[LocalShard]) -> dict[str, Tensor]:
    """Return the parameters that are slices, by name."""
    return {shard.name: shard.parameter for shard in shards if is_slice(shard.parameter)}


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
