"""Flat slices of tensors for `torch.distributed.checkpoint`, in the tensors' own shapes and with explicit offsets.

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

_aten = torch.ops.aten
# Operations that asynchronous saves apply to a tensor, and the conversion of an export. Each box gets them.
_BY_BOX = {
    _aten.detach.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
}


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

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, boxes: Mapping[tuple[int, ...], Tensor]) -> None:
        pass

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

    def _chunks(self) -> Iterator[ChunkStorageMetadata]:
        for offsets, values in self.boxes.items():
            yield ChunkStorageMetadata(torch.Size(offsets), values.shape)

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return list(self._chunks())

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
    flat, done, found = values.detach().view(values.numel()), 0, {}
    for offsets, sizes in boxes_of(shape, start, start + flat.numel()):
        count = math.prod(sizes)
        if origin is not None:
            offsets = tuple(at + first for at, first in zip(offsets, origin, strict=True))
        found[offsets] = flat[done : done + count].view(sizes)
        done += count
    return found


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that entries [start, stop) of a tensor of `shape` are, in their order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows are [first, last)
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * inner, stop - last * inner)
        return
    if start < first * inner:
        yield from _in_row(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * inner)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in boxes_of(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)
