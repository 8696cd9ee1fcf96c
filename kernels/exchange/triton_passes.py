"""First and last pass of a coded exchange on Triton kernels, one launch for each dtype and alignment.

None synchronizes with the device. The specification is the exchange through a buffer in `methods.coded_exchange`, and
`quantized_update.columns.Columns`.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.reference import BlockCode
from torchtitan_scape.kernels.codec.triton_passes import aligned_bytes, scale_type
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import AddressTable, to_device
from torchtitan_scape.kernels.dense.triton_passes import DTYPES
from torchtitan_scape.kernels.exchange import triton_kernels
from torchtitan_scape.kernels.exchange.layout import FIRST, OWNER_ERROR, SECOND, BlockSlice, SentMessages

_TILE = 2048  # entries of a tile; at least one block
_WARPS = 4


class _Launch(NamedTuple):
    """Tiles, int32 (tiles, 4), of one launch; see `triton_kernels`.

    Attributes:
        full: constant FULL.
        dtype, second: dtypes of the tensors; that of an absent second one is None.
        entries: entries of the tiles.
    """

    tiles: Tensor
    full: bool
    dtype: torch.dtype
    second: torch.dtype | None
    entries: int


class BlockExchange:
    """Passes over a chunk: slices of tensors that are exchanged together, encoded, and the chunk's messages.

    The tensors, contiguous and of any shape, are given to each pass as the lists of `layout` in an `AddressTable`.

    Args:
        slices: In any order, with gaps between them, which are zeros.
        code: Code of the messages.
        size: Entries of the chunk, padding included: a multiple of the number of messages times the block of the code.
        replicas: Number of messages, one per owner.
        replica: Index of the message of this replica; -1 if it keeps no error of a mean.
        repeats: The entries of a shorter last block are repeated in it; otherwise zeros follow.
        device: Device of the tensors.
    """

    def __init__(
        self,
        slices: Sequence[BlockSlice],
        code: BlockCode,
        size: int,
        replicas: int,
        replica: int,
        repeats: bool,
        device: torch.device,
    ) -> None:
        self.slices, self.code, self._replicas, self._replica, self._repeats = slices, code, replicas, replica, repeats
        self.count = size // replicas  # entries of a message
        self._blocks, self._bytes = self.count // code.block_size, code.message_bytes(self.count)
        self._rows = _TILE // code.block_size
        filled = sum(-(-each.length // code.block_size) for each in slices)
        # Kernels write neither blocks without a slice nor the padding of messages: zeros, the code of zeros.
        self._is_padded = filled < replicas * self._blocks or self._blocks * code.block_bytes < self._bytes
        rows = [(each.tensor, each.first, each.stride, each.length) for each in slices]
        self._slices = to_device(torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 4), device)
        self._launches: dict[Any, list[_Launch]] = {}
        self._kinds: Any = None  # of the latest call, and its launches
        self._latest: list[_Launch] = []

    def encode(
        self,
        tensors: AddressTable,
        subtracts: bool,
        factor: float = 1.0,
        applied: Tensor | None = None,
        errors_elsewhere: bool = False,
    ) -> SentMessages:
        """Encode first - second (`subtracts`), or first * factor + second, plus the owner's error.

        The owner's error of the slice of this replica is not added here, but to the mean: `SentMessages.error` contains
        it. With `applied`, bool (), second becomes the quantization error if it is true, and `apply` adds the owner's.
        With `subtracts` as well: second - first is encoded, or zeros unless it is true, and second becomes the first
        one after `add`, minus second.

        Args:
            errors_elsewhere: The owner's errors may be nonzero outside the message of this replica, for example after a
                load from another layout. An exchange that is applied leaves none there.
        """
        assert tensors.has(SECOND) or not (tensors.has(OWNER_ERROR) or applied is not None)
        sent = self._allocate(tensors, errors_elsewhere, applied is not None)
        for each in self._launches_of(tensors):
            second = 0 if each.second is None else each.second.itemsize
            read = each.dtype.itemsize + second + self._owner_error_bytes(tensors, errors_elsewhere)
            launching.launch(
                triton_kernels.encode_kernel,
                (len(each.tiles),),
                *self._tables(each, tensors),
                sent.messages,
                each.tiles if sent.error is None else sent.error,
                each.tiles if applied is None else applied,
                *self._scalars(sent, factor),
                warps=_WARPS,
                moved=round((read if applied is None else read + second) * each.entries),
                REPEATS=self._repeats,
                SUBTRACTS=subtracts,
                STORES_ERROR=applied is not None,
                **self._constants(each),
                **_errors(each, tensors),
            )
        return sent

    def apply(
        self, tensors: AddressTable, sent: SentMessages, applied: Tensor, subtracts: bool, factor: float = 1.0
    ) -> None:
        """Write the means and the errors of an exchange that `encode` started with the same arguments.

        With `subtracts`, and if `applied`, bool (): first -= mean, second = first - error. Otherwise
        first = mean, and if `applied`, second = error. The owner's error, or the error, of the slice of this replica
        contains that of its mean, times the number of replicas.
        """
        for each in self._launches_of(tensors):
            moved = each.dtype.itemsize + self._owner_error_bytes(tensors, sent.errors_elsewhere)
            if each.second is not None and not sent.stores_errors:
                moved += each.dtype.itemsize + 2 * each.second.itemsize
                if sent.errors_elsewhere:
                    moved += 4 - self._owner_error_bytes(tensors, False)
            elif each.second is not None and not tensors.has(OWNER_ERROR):
                moved += 2 * each.second.itemsize / self._replicas
            launching.launch(
                triton_kernels.apply_kernel,
                (len(each.tiles),),
                *self._tables(each, tensors),
                sent.means if sent.stores_errors else sent.messages,
                sent.means,
                each.tiles if sent.error is None else sent.error,
                applied,
                *self._scalars(sent, factor),
                warps=_WARPS,
                moved=round(moved * each.entries),
                SUBTRACTS=subtracts,
                ERRORS_STORED=sent.stores_errors,
                **self._constants(each),
                **_errors(each, tensors),
            )

    def keep_error(self, tensors: AddressTable, messages: Tensor, applied: Tensor, factor: float = 1.0) -> None:
        """Store the quantization error of messages of `encode`, which has not: second = first * factor + second - sent.

        Nothing changes unless `applied`, bool ().
        """
        for each in self._launches_of(tensors):
            assert each.second is not None
            launching.launch(
                triton_kernels.error_kernel,
                (len(each.tiles),),
                *self._tables(each, tensors),
                messages,
                applied,
                self._blocks,
                self._bytes // 16,
                factor,
                warps=_WARPS,
                moved=(each.dtype.itemsize + 2 * each.second.itemsize) * each.entries,
                SECOND_DTYPE=DTYPES[each.second],
                **self._constants(each),
            )

    def add(self, tensors: AddressTable, messages: Tensor) -> None:
        """Add the decoded messages, uint8 (messages, bytes): first += message."""
        self._decode(tensors, messages, 1, True)

    def store_mean(self, tensors: AddressTable, messages: Tensor, steps: int) -> None:
        """Decode the mean of messages, uint8 (n, bytes), of a chunk with one owner: first = mean / steps."""
        self._decode(tensors, messages, steps, False)

    def _decode(self, tensors: AddressTable, messages: Tensor, steps: int, adds: bool) -> None:
        for each in self._launches_of(tensors):
            launching.launch(
                triton_kernels.decode_kernel,
                (len(each.tiles),),
                *self._tables(each, tensors),
                aligned_bytes(messages),
                self._blocks,
                messages.shape[1] // 16,
                len(messages),
                steps,
                warps=_WARPS,
                moved=(2 if adds else 1) * each.dtype.itemsize * each.entries,
                ADDS=adds,
                **self._constants(each),
            )

    def subtract(self, tensors: AddressTable, applied: Tensor) -> None:
        """If `applied`, bool (): second = first - second."""
        self._move(tensors, applied, 1.0, True)

    def accumulate(self, tensors: AddressTable, applied: Tensor, factor: float) -> None:
        """If `applied`, bool (): second += first * factor."""
        self._move(tensors, applied, factor, False)

    def _move(self, tensors: AddressTable, applied: Tensor, factor: float, subtracts: bool) -> None:
        for each in self._launches_of(tensors):
            assert each.second is not None
            launching.launch(
                triton_kernels.move_kernel,
                (len(each.tiles),),
                *self._tables(each, tensors),
                applied,
                self._blocks,
                factor,
                warps=_WARPS,
                moved=(each.dtype.itemsize + 2 * each.second.itemsize) * each.entries,
                BLOCK=self.code.block_size,
                ROWS=self._rows,
                DTYPE=DTYPES[each.dtype],
                SECOND_DTYPE=DTYPES[each.second],
                FULL=each.full,
                SUBTRACTS=subtracts,
            )

    def _allocate(self, tensors: AddressTable, errors_elsewhere: bool, stores_errors: bool) -> SentMessages:
        device, shape = self._slices.device, (self._replicas, self._bytes)
        messages = (torch.zeros if self._is_padded else torch.empty)(shape, dtype=torch.uint8, device=device)
        means = torch.empty((shape[0] if self._replica >= 0 else 0, shape[1]), dtype=torch.uint8, device=device)
        error, adds_error = None, tensors.has(OWNER_ERROR)
        if tensors.has(SECOND) and self._replica >= 0:
            error = (torch.zeros if adds_error else torch.empty)(self.count, dtype=torch.float32, device=device)
        return SentMessages(messages, means, error, adds_error, errors_elsewhere, stores_errors)

    def _launches_of(self, tensors: AddressTable) -> list[_Launch]:
        """Return the launches that cover all blocks."""
        if tensors.kinds is not self._kinds:  # a new tuple if an address has changed
            key = tuple(tensors.kinds[each.tensor] for each in self.slices)
            if key not in self._launches:
                if len(self._launches) > 8:  # the alignment of gradients changes
                    self._launches.clear()
                self._launches[key] = self._build(key)
            self._kinds, self._latest = tensors.kinds, self._launches[key]
        return self._latest

    def _build(self, kinds: Sequence[tuple[bool, tuple[torch.dtype | None, ...]]]) -> list[_Launch]:
        tiles_by_kind: dict[Any, list[Tensor]] = {}
        entries: dict[Any, int] = defaultdict(int)
        block = self.code.block_size
        for number, (each, (is_aligned, dtypes)) in enumerate(zip(self.slices, kinds, strict=True)):
            blocks, complete = -(-each.length // block), each.length // block
            for full, begin, end in ((True, 0, complete), (False, complete, blocks)):
                kind = full and is_aligned, dtypes[FIRST], dtypes[SECOND]
                while begin < end:  # no tile extends over two messages
                    stop = min(end, ((each.start + begin) // self._blocks + 1) * self._blocks - each.start)
                    rows = torch.arange(begin, stop, self._rows, dtype=torch.int32, device="cpu")
                    left = (stop - rows).clamp(max=self._rows)
                    tiles = torch.stack((torch.full_like(rows, number), rows, rows + each.start, left), 1)
                    tiles_by_kind.setdefault(kind, []).append(tiles)
                    entries[kind] += min(stop * block, each.length) - begin * block
                    begin = stop
        device = self._slices.device
        return [
            _Launch(to_device(torch.cat(parts), device), full, dtype, second, entries[full, dtype, second])
            for (full, dtype, second), parts in tiles_by_kind.items()
        ]

    def _tables(self, each: _Launch, tensors: AddressTable) -> tuple[Any, ...]:
        return each.tiles, self._slices, tensors.values, tensors.values.shape[1]

    def _scalars(self, sent: SentMessages, factor: float) -> tuple[Any, ...]:
        return self._blocks, self._bytes // 16, self._replica, self._replicas, factor, int(sent.errors_elsewhere)

    def _owner_error_bytes(self, tensors: AddressTable, elsewhere: bool) -> float:
        """Return the bytes per entry that reading or writing the owner's errors moves, those elsewhere included or
        not.
        """
        return 0.0 if not tensors.has(OWNER_ERROR) else 4.0 if elsewhere else 4.0 / self._replicas

    def _constants(self, each: _Launch) -> dict[str, Any]:
        return {
            "FORM": self.code.name,
            "SCALE": scale_type(self.code.scale),
            "BLOCK": self.code.block_size,
            "ROWS": self._rows,
            "DTYPE": DTYPES[each.dtype],
            "FULL": each.full,
        }


def _errors(each: _Launch, tensors: AddressTable) -> dict[str, Any]:
    """Return the constants that describe the second tensor and the owner's errors."""
    return {
        "HAS_SECOND": each.second is not None,
        "SECOND_DTYPE": DTYPES[each.second or torch.float32],
        "HAS_OWNER_ERROR": tensors.has(OWNER_ERROR),
    }
