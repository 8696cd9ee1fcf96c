"""First and last pass of a coded exchange on Triton kernels, one launch for each dtype and alignment.

None synchronizes with the device, except `BlockSlices.has_errors_elsewhere` after a load. The specification is the
exchange through a buffer: `sparta.method.Sparta._send`, `quantized.method.Quantized.send` and
`quantized_update.method.QuantizedUpdate._send_to_owners`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.codec.triton_passes import message_parts
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import DeviceTable, LatestResult, addresses, aligned, as_flag, to_device
from torchtitan_scape.kernels.dense.triton_passes import DTYPES
from torchtitan_scape.kernels.exchange import triton_kernels
from torchtitan_scape.kernels.exchange.layout import BlockSlices, SentMessages

_TILE = 2048  # entries of a tile; at least one block
_WARPS = 4


class _Launch(NamedTuple):
    """Tiles, int32 (tiles, 4), of one launch; see `triton_kernels`.

    Attributes:
        full: constant FULL.
        dtype, second: dtypes of the tensors.
        entries, steps: entries of the tiles, and those of them that have steps.
    """

    tiles: Tensor
    full: bool
    dtype: torch.dtype
    second: torch.dtype
    entries: int
    steps: int


class _Plan:
    """Table and tiles of a `BlockSlices`, and of later ones with the same sizes and strides."""

    def __init__(self, slices: BlockSlices) -> None:
        self.rows = _TILE // slices.code.block_size
        self._lengths = [each.numel() for each in slices.first]
        device = slices.first[0].device
        self._table = DeviceTable(len(self._lengths), triton_kernels.COLUMNS.value, torch.int64, device)
        self._lists: dict[Any, list[_Launch]] = {}
        self._latest = LatestResult[tuple[Tensor, list[_Launch]]]()

    def of(self, slices: BlockSlices) -> tuple[Tensor, list[_Launch]]:
        """Return the table on the device, and the launches that cover all blocks."""
        key = "fixed" if slices.fixed else self._key(slices)
        return self._latest.get(key, lambda: (self._table_of(slices), self._lists_of(slices)))

    def _key(self, slices: BlockSlices) -> Any:
        """Return everything that the table and the launches depend on and that may change."""
        columns = slices.first, slices.second, slices.owner_error
        dtypes = [[t.dtype for t in tensors] for tensors in columns[:2]]
        steps = [0 if step is None else step.data_ptr() for step in slices.steps]
        return [addresses(tensors) for tensors in columns], steps, dtypes

    def _table_of(self, slices: BlockSlices) -> Tensor:
        block, rows = slices.code.block_size, []
        for i, first in enumerate(slices.first):
            columns = [
                first,
                *(each[i] if each else None for each in (slices.second, slices.owner_error, slices.steps)),
            ]
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in columns]
            rows.append((*addresses, first.stride(0) if first.ndim == 2 else block, first.numel()))
        return self._table.set(rows)

    def _lists_of(self, slices: BlockSlices) -> list[_Launch]:
        kinds = []
        for i, first in enumerate(slices.first):
            others = [each[i] for each in (slices.second, slices.owner_error) if each]
            second = others[0].dtype if slices.second else torch.float32
            kinds.append((aligned(first, *others), (first.dtype, second)))
        key = tuple(kinds)
        if key not in self._lists:
            if len(self._lists) > 8:  # the alignment of gradients changes
                self._lists.clear()
            self._lists[key] = self._build(slices, kinds)
        return self._lists[key]

    def _build(self, slices: BlockSlices, kinds: list[tuple[bool, Any]]) -> list[_Launch]:
        found: dict[tuple[bool, Any], list[Tensor]] = {}
        entries: dict[tuple[bool, Any], list[int]] = {}
        block, slot = slices.code.block_size, 0
        for number, (length, (is_aligned, dtypes)) in enumerate(zip(self._lengths, kinds, strict=True)):
            blocks, complete = -(-length // block), length // block
            slot = slices.starts[number] if slices.starts else slot
            for full, begin, end in ((True, 0, complete), (False, complete, blocks)):
                while begin < end:  # no tile extends over two messages
                    stop = min(end, ((slot + begin) // slices.blocks + 1) * slices.blocks - slot)
                    rows = torch.arange(begin, stop, self.rows, dtype=torch.int32, device="cpu")
                    columns = torch.full_like(rows, number), rows, rows + slot, (stop - rows).clamp(max=self.rows)
                    kind = full and is_aligned, dtypes
                    found.setdefault(kind, []).append(torch.stack(columns, 1))
                    counts = entries.setdefault(kind, [0, 0])
                    counts[0] += min(stop * block, length) - begin * block
                    if slices.steps and slices.steps[number] is not None:
                        counts[1] += min(stop * block, length) - begin * block
                    begin = stop
            slot += blocks
        device = slices.first[0].device
        return [
            _Launch(to_device(torch.cat(parts), device), kind[0], *kind[1], *entries[kind])
            for kind, parts in found.items()
        ]


def _plan(slices: BlockSlices) -> tuple[_Plan, Tensor, list[_Launch]]:
    """Return the plan, its table on the device, and its launches."""
    if slices.plan is None:
        slices.plan = _Plan(slices)
    return slices.plan, *slices.plan.of(slices)


def encode(slices: BlockSlices, subtracts: bool, factor: float = 1.0, applied: Tensor | None = None) -> SentMessages:
    """Encode first - second (`subtracts`), or first * factor + second, plus the owner's error.

    The owner's error of the slice of this replica is not added here, but to the mean: `SentMessages.error` contains it.
    With `applied`, bool (), second becomes the quantization error if it is true, and `apply` adds the owner's.
    """
    assert slices.second or not (slices.owner_error or applied is not None)
    assert applied is None or not subtracts  # the second pass would need the parameters
    sent = SentMessages.allocate(slices, applied is not None)
    plan, table, launches = _plan(slices)
    for each in launches:
        read = (
            each.dtype.itemsize
            + each.second.itemsize * bool(slices.second)
            + _owner_error_bytes(slices, sent.errors_elsewhere)
        )
        launching.launch(
            triton_kernels.encode_kernel,
            (len(each.tiles),),
            each.tiles,
            table,
            *message_parts(sent.messages, slices.code.scale),
            each.tiles if sent.error is None else sent.error,
            each.tiles if applied is None else as_flag(applied),
            *_scalars(slices, sent, factor),
            warps=_WARPS,
            moved=round((read if applied is None else read + each.second.itemsize) * each.entries),
            LARGEST=FORMATS[slices.code.name].largest,
            REPEATS=slices.repeats,
            SUBTRACTS=subtracts,
            HAS_OWNER_ERROR=bool(slices.owner_error),
            STORES_ERROR=applied is not None,
            SECOND_DTYPE=DTYPES[each.second],
            HAS_SECOND=bool(slices.second),
            **_constants(slices, plan, each),
        )
    return sent


def apply(slices: BlockSlices, sent: SentMessages, applied: Tensor, subtracts: bool, factor: float = 1.0) -> None:
    """Write the means and the errors of an exchange that `encode` started with the same arguments.

    With `subtracts`, and if `applied`, bool (): first -= mean, second = first - error, steps += mean. Otherwise first =
    mean, and if `applied`, second = error. The owner's error, or the error, of the slice of this replica contains that
    of its mean, times the number of replicas.
    """
    plan, table, launches = _plan(slices)
    for each in launches:
        moved = each.dtype.itemsize + _owner_error_bytes(slices, sent.errors_elsewhere)
        if slices.second and not sent.stores_errors:
            moved += each.dtype.itemsize + 2 * each.second.itemsize
            if sent.errors_elsewhere:
                moved += 4 - _owner_error_bytes(slices, False)
        elif slices.second and not slices.owner_error:
            moved += 2 * each.second.itemsize / slices.replicas
        launching.launch(
            triton_kernels.apply_kernel,
            (len(each.tiles),),
            each.tiles,
            table,
            *message_parts(sent.means if sent.stores_errors else sent.messages, slices.code.scale),
            *message_parts(sent.means, slices.code.scale),
            each.tiles if sent.error is None else sent.error,
            as_flag(applied),
            *_scalars(slices, sent, factor),
            warps=_WARPS,
            moved=round(moved * each.entries) + 8 * each.steps,
            SUBTRACTS=subtracts,
            HAS_OWNER_ERROR=bool(slices.owner_error),
            HAS_STEPS=any(step is not None for step in slices.steps),
            ERRORS_STORED=sent.stores_errors,
            SECOND_DTYPE=DTYPES[each.second],
            HAS_SECOND=bool(slices.second),
            **_constants(slices, plan, each),
        )


def add(slices: BlockSlices, messages: Tensor) -> None:
    """Add the decoded messages, uint8 (messages, bytes): first += message."""
    plan, table, launches = _plan(slices)
    for each in launches:
        launching.launch(
            triton_kernels.add_kernel,
            (len(each.tiles),),
            each.tiles,
            table,
            *message_parts(messages, slices.code.scale),
            slices.blocks,
            messages.shape[1] // 16,
            warps=_WARPS,
            moved=2 * each.dtype.itemsize * each.entries,
            **_constants(slices, plan, each),
        )


def _scalars(slices: BlockSlices, sent: SentMessages, factor: float) -> tuple[Any, ...]:
    size = sent.messages.shape[1] // 16
    return slices.blocks, size, slices.replica, slices.replicas, factor, int(sent.errors_elsewhere)


def _owner_error_bytes(slices: BlockSlices, elsewhere: bool) -> float:
    """Return the bytes per entry that reading or writing the owner's errors moves, those elsewhere included or not."""
    return 0.0 if not slices.owner_error else 4.0 if elsewhere else 4.0 / slices.replicas


def _constants(slices: BlockSlices, plan: _Plan, each: _Launch) -> dict[str, Any]:
    form = FORMATS[slices.code.name]
    return {
        "FORM": form.name,
        "BITS": form.bits,
        "SCALES": form.scales,
        "BLOCK": slices.code.block_size,
        "ROWS": plan.rows,
        "DTYPE": DTYPES[each.dtype],
        "FULL": each.full,
    }
