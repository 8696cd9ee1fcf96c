"""What a Triton launch over many tensors needs from the host: the pointer table, the tiles, the launch itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# (tensor, first block, block after the last one)
Range = tuple[int, int, int]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies what the host made to the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class DeviceTable:
    """Rows of numbers on the device, sent when they change."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(rows, columns, dtype=dtype, device=device)
        self._content: list[Any] | None = None

    def set(self, content: list[Any]) -> Tensor:
        if content != self._content:
            rows = torch.tensor(content, dtype=self.values.dtype).view(self.values.shape)
            self.values.copy_(to_device(rows, self.values.device))
            self._content = content
        return self.values


class TileSchedule:
    """Lists of tiles over tensors in blocks, kept on the device; see `triton_common`.

    entries: what a tile holds, roughly; it has at least one block. per_warp: entries for every warp of a program.
    """

    def __init__(
        self, sizes: Sequence[int], block_size: int, entries: int, per_warp: int, device: torch.device
    ) -> None:
        self.sizes, self.block_size, self.device = sizes, block_size, device
        self.bytes = 1 << (block_size // 8 - 1).bit_length()
        self.rows = max(1, entries // (8 * self.bytes))
        self.warps = min(16, max(1, self.rows * self.bytes * 8 // per_warp))
        self._lists: dict[Any, list[tuple[Tensor, bool, Any]]] = {}

    @property
    def shape(self) -> dict[str, int]:
        return {"ROWS": self.rows, "BYTES": self.bytes, "BLOCK": self.block_size}

    def whole(self) -> list[Range]:
        """All blocks of all tensors."""
        return [(i, 0, -(-n // self.block_size)) for i, n in enumerate(self.sizes)]

    def lists(self, ranges: tuple[Range, ...], kinds: tuple[tuple[bool, Any], ...]) -> list[tuple[Tensor, bool, Any]]:
        """Launches that cover `ranges`: (int32 (tiles, 3), EASY, kind).

        kinds: per tensor, whether its storage is 16-byte aligned, and what else sets launches apart (dtypes).
        """
        key = (ranges, kinds)
        if key not in self._lists:
            # Gradients that keep changing their alignment. A step asks for a few lists of every stretch it goes by.
            if len(self._lists) > 128 + 16 * len(self.sizes):
                self._lists.clear()
            self._lists[key] = self._build(ranges, kinds)
        return self._lists[key]

    def _build(self, ranges: tuple[Range, ...], kinds: tuple[tuple[bool, Any], ...]) -> list[tuple[Tensor, bool, Any]]:
        launches: dict[tuple[bool, Any], list[Tensor]] = {}
        for tensor, first, end in ranges:
            aligned, kind = kinds[tensor]
            # Blocks from `complete` on are not full.
            complete = min(end, self.sizes[tensor] // self.block_size) if aligned else first
            easy = max(0, complete - first) // self.rows * self.rows
            for is_easy, start, stop in ((True, first, first + easy), (False, first + easy, end)):
                if start < stop:
                    rows = torch.arange(start, stop, self.rows, dtype=torch.int32)
                    count = (stop - rows).clamp(max=self.rows)
                    tiles = torch.stack([torch.full_like(rows, tensor), rows, count], dim=1)
                    launches.setdefault((is_easy, kind), []).append(tiles)
        return [(to_device(torch.cat(parts), self.device), easy, kind) for (easy, kind), parts in launches.items()]


def aligned(*tensors: Tensor) -> bool:
    return all(t.data_ptr() % 16 == 0 for t in tensors)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, **constants: Any) -> None:
    """Runs a Triton kernel on the device of its first argument; an empty grid runs nothing."""
    if 0 in grid:
        return
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)
        return
    kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)


class Writable:
    """Contiguous forms of tensors to write to; `store` takes back what had to be copied.

    masters: FP32, what is written to instead, and the tensors are copies of.
    """

    def __init__(self, tensors: list[Tensor], masters: list[Tensor] | None = None) -> None:
        self._tensors = tensors
        self.flat = masters if masters is not None else [t if t.is_contiguous() else t.contiguous() for t in tensors]

    def store(self, numbers: range | None = None) -> None:
        """Takes back the tensors of these numbers, all by default."""
        for i in numbers if numbers is not None else range(len(self.flat)):
            if self.flat[i] is not self._tensors[i]:
                self._tensors[i].copy_(self.flat[i].view(self._tensors[i].shape))


def as_flag(applied: Tensor) -> Tensor:
    """A bool as the byte that kernels load."""
    return applied.view(torch.uint8)
