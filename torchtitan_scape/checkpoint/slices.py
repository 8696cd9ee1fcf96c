"""Flat slices of tensors for `torch.distributed.checkpoint`, in the tensors' own shapes and with explicit offsets.

A DTensor describes whole rows of a tensor on a rank, but not its entries 1,000 to 5,000. Such a slice is stored as a
few boxes: the end of a row, whole rows, the beginning of a row. A checkpoint then has the whole tensor, however many
ranks have written it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class FlatSlices:
    """Slices of a tensor of `shape`, with the methods that DCP calls on an object that is no tensor.

    slices: (first entry in the flat tensor, values), the values contiguous and of any shape; read in place.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, slices: Sequence[tuple[int, Tensor]]) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self.boxes: dict[tuple[int, ...], Tensor] = {}  # by offset
        for start, values in slices:
            flat, done = values.detach().view(values.numel()), 0
            for offsets, sizes in boxes_of(self.shape, start, start + flat.numel()):
                count = math.prod(sizes)
                self.boxes[offsets] = flat[done : done + count].view(sizes)
                done += count

    def size(self) -> torch.Size:
        return self.shape

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


class SlicePlanner(DefaultSavePlanner):
    """DCP's save planner, which looks for a part at an offset in tensors alone."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict.get(index.fqn)
        return found.__get_tensor_shard__(index) if isinstance(found, FlatSlices) else super().lookup_object(index)


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
