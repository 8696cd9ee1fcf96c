"""Host side of Triton launches over many tensors: pointer table, tiles, and the launch."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

# (tensor, first block, end block)
Range = tuple[int, int, int]
T = TypeVar("T")


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without a synchronization."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class LatestResult(Generic[T]):
    """The result of the last call of a function, which is called again only if its key differs."""

    def __init__(self) -> None:
        self._key: Any = None
        self._result: T

    def get(self, key: Any, function: Callable[[], T]) -> T:
        """Return `function()`. The key, which is not None, contains everything that the result depends on."""
        if key != self._key:
            self._result, self._key = function(), key
        return self._result


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the address of every tensor."""
    return [t.data_ptr() for t in tensors]


class _LastUpload:
    """The last copy to a table, for which other streams wait; nothing on a CPU.

    Hooks of a backward pass may run on several streams, which have no order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, -1
        self._event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let the current stream wait for the copy, if it was on another one."""
        if self._event is not None:
            stream = torch.cuda.current_stream(self._device)
            if stream.cuda_stream != self._stream:
                stream.wait_event(self._event)

    def record(self) -> None:
        """Remember a copy on the current stream."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            self._stream, self._event = stream.cuda_stream, stream.record_event()


class DeviceTable:
    """A matrix on the device that is copied from the host when its content changes.

    Use one of `set` and `set_repeated` for a table.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(rows, columns, dtype=dtype, device=device)
        self._last_upload = _LastUpload(self.values.device)
        self._last_upload.record()
        self._content: list[Any] | None = None
        self._numbers: list[int] = []
        self._numbers_on_device = self.values  # until they are set

    def set(self, content: list[Any]) -> Tensor:
        """Update the rows if they differ from the previous content. Returns the tensor on the device."""
        self._last_upload.wait()
        if content != self._content:
            rows = torch.tensor(content, dtype=self.values.dtype, device="cpu").view(self.values.shape)
            self.values.copy_(to_device(rows, self.values.device))
            self._last_upload.record()
            self._content = content
        return self.values

    def set_repeated(self, distinct: list[Any], numbers: list[int]) -> Tensor:
        """Set row i to distinct[numbers[i]]. A change of a few distinct rows takes less time than in `set`."""
        self._last_upload.wait()
        if numbers != self._numbers:
            on_host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            self._numbers_on_device = to_device(on_host, self.values.device)
            self._numbers, self._content = numbers, None
        if distinct != self._content:
            rows = torch.tensor(distinct, dtype=self.values.dtype, device="cpu").view(-1, self.values.shape[1])
            rows = to_device(rows, self.values.device)
            torch.index_select(rows, 0, self._numbers_on_device, out=self.values)
            self._last_upload.record()
            self._content = distinct
        return self.values


class AddressTable:
    """Addresses of lists of tensors, int64 (lists, tensors), on the device. It does not keep the tensors in memory.

    Attributes:
        values: The table, with 0 for absent tensors. Kernels add the position of an entry to an address.
        kinds: For each tensor, whether all its addresses are multiples of 16 bytes, and its dtype in every list, None
            if it is absent.
    """

    def __init__(self, lists: int, tensors: int, device: torch.device) -> None:
        self.values = torch.zeros(lists, tensors, dtype=torch.int64, device=device)
        self._last_upload = _LastUpload(self.values.device)
        self._last_upload.record()
        self._pointers: list[list[tuple[int, torch.dtype | None]]] = [[(0, None)] * tensors for _ in range(lists)]
        self._has = [False] * lists
        self.kinds: tuple[tuple[bool, tuple[torch.dtype | None, ...]], ...] = ()

    def set(self, number: int, tensors: Sequence[Tensor | None], firsts: Sequence[int] = ()) -> None:
        """Set a list. It is copied to the device if an address differs from the previous one.

        firsts: The position of the first entry of each tensor, if kernels count from an earlier one.
        """
        self._last_upload.wait()
        firsts = firsts or [0] * len(tensors)
        pointers = [
            (0, None) if t is None else (t.data_ptr() - first * t.itemsize, t.dtype)
            for t, first in zip(tensors, firsts, strict=True)
        ]
        if pointers == self._pointers[number]:
            return
        self._pointers[number], self._has[number] = pointers, any(dtype is not None for _, dtype in pointers)
        on_host = torch.tensor([address for address, _ in pointers], dtype=torch.int64, device="cpu")
        self.values[number].copy_(to_device(on_host, self.values.device))
        self._last_upload.record()
        self.kinds = tuple(
            (not any(address % 16 for address, _ in column), tuple(dtype for _, dtype in column))
            for column in zip(*self._pointers, strict=True)
        )

    def has(self, number: int) -> bool:
        """Return whether a list contains a tensor."""
        return self._has[number]


class TileSchedule:
    """Lists of tiles over tensors in blocks, cached on the device; see `triton_common`.

    Args:
        sizes: Entries of each tensor.
        block_size: Entries of a block.
        entries: Approximate entries of a tile, which has at least one block.
        per_warp: Entries per warp of a program.
        device: Device of the lists.
    """

    def __init__(
        self, sizes: Sequence[int], block_size: int, entries: int, per_warp: int, device: torch.device
    ) -> None:
        self.sizes, self.block_size, self.device = sizes, block_size, device
        self.bytes = 1 << (block_size // 8 - 1).bit_length()
        self.rows = max(1, entries // (8 * self.bytes))
        self.warps = min(16, max(1, self.rows * self.bytes * 8 // per_warp))
        # There are more if the alignment of gradients changes: a step needs only a few for each chunk.
        self._most_lists = 128 + 16 * len(sizes)
        self._lists: dict[Any, list[tuple[Tensor, bool, Any]]] = {}
        self._of_same: dict[tuple[int, int], tuple[Any, Any, list[tuple[Tensor, bool, Any]]]] = {}
        self._whole = tuple([(i, 0, -(-n // block_size)) for i, n in enumerate(sizes)])

    def units(self, width: int) -> dict[str, int]:
        """Return the constants of kernels whose tiles have parts of `width` entries."""
        units = self.bytes * 8 // width
        return {"ROWS": self.rows, "UNITS": units, "WIDTH": width, "BLOCK": self.block_size}

    def whole(self) -> tuple[Range, ...]:
        """Return all blocks of all tensors, every time the same object."""
        return self._whole

    def lists(self, ranges: tuple[Range, ...], kinds: tuple[tuple[bool, Any], ...]) -> list[tuple[Tensor, bool, Any]]:
        """Return the launches that cover `ranges` as (tiles, int32 (tiles, 4); ALIGNED_TILE; kind).

        kinds: for each tensor, whether its storage is aligned to 16 bytes, and a key, such as its dtype; tensors with
            different keys need separate launches.
        """
        # By identity first, because hashing hundreds of tuples takes as long as a launch. The entry refers to both
        # tuples, so that no others can have their identities.
        same = self._of_same.get((id(ranges), id(kinds)))
        if same is None:
            if len(self._of_same) > self._most_lists:
                self._of_same.clear()
            same = self._of_same[id(ranges), id(kinds)] = ranges, kinds, self._find(ranges, kinds)
        return same[2]

    def _find(self, ranges: tuple[Range, ...], kinds: tuple[tuple[bool, Any], ...]) -> list[tuple[Tensor, bool, Any]]:
        key = (ranges, kinds)
        if key not in self._lists:
            if len(self._lists) > self._most_lists:
                self._lists.clear()
                self._of_same.clear()
            self._lists[key] = self._build(ranges, kinds)
        return self._lists[key]

    def _build(self, ranges: tuple[Range, ...], kinds: tuple[tuple[bool, Any], ...]) -> list[tuple[Tensor, bool, Any]]:
        launches: dict[tuple[bool, Any], list[Tensor]] = {}
        first_block = [0, *accumulate(-(-size // self.block_size) for size in self.sizes)]
        for tensor, first, end in ranges:
            aligned, kind = kinds[tensor]
            # Blocks from `complete` on are partial.
            complete = min(end, self.sizes[tensor] // self.block_size) if aligned else first
            full = max(0, complete - first) // self.rows * self.rows
            for is_full, start, stop in ((True, first, first + full), (False, first + full, end)):
                if start < stop:
                    rows = torch.arange(start, stop, self.rows, dtype=torch.int32, device="cpu")
                    count = (stop - rows).clamp(max=self.rows)
                    tiles = torch.stack([torch.full_like(rows, tensor), rows, count, first_block[tensor] + rows], dim=1)
                    launches.setdefault((is_full, kind), []).append(tiles)
        return [(to_device(torch.cat(parts), self.device), full, kind) for (full, kind), parts in launches.items()]


def aligned(*tensors: Tensor) -> bool:
    """Return True if all tensors begin at a multiple of 16 bytes."""
    for tensor in tensors:  # noqa: SIM110 - `all` with a generator takes three times as long
        if tensor.data_ptr() % 16:
            return False
    return True


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, moved: float = 0, **constants: Any) -> None:
    """Launch a Triton kernel on the device of its first argument, unless the grid is empty.

    moved: Bytes that `scripts.benchmarks.step_operators` counts in addition to one access to all arguments: those that
        the kernel reads and writes by addresses in a table, and second accesses, less the parts that it does not touch.
    """
    if 0 in grid:
        return
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)
        return
    kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)


class Writable:
    """Contiguous, writable versions of tensors, in `flat`. `store` copies back those that are not views.

    Attributes:
        copies: Whether some are copies of the tensors' present values.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self.copies = not all(t.is_contiguous() for t in tensors)
        self.flat = [t.contiguous() for t in tensors] if self.copies else tensors

    def store(self, numbers: range | None = None) -> None:
        """Copy the tensors of these indices back; all by default."""
        for i in numbers if numbers is not None else range(len(self.flat)):
            if self.flat[i] is not self._tensors[i]:
                self._tensors[i].copy_(self.flat[i].view(self._tensors[i].shape))
