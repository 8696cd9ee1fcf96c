"""Tables and lists of launches that are kept from step to step, and the changes after which they are computed again."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_scape.kernels.backends import block_code
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import AddressTable, DeviceTable, LatestResult, TileSchedule
from torchtitan_scape.kernels.common.tensors import Rates
from torchtitan_scape.kernels.common.triton_common import FIRST_BLOCK, GRADIENT, PARAMETER, RATES, STATE
from torchtitan_scape.kernels.dense import triton_passes
from torchtitan_scape.kernels.exchange import triton_passes as exchange
from torchtitan_scape.kernels.exchange.layout import FIRST, LISTS, SECOND, BlockSlice

CPU = torch.device("cpu")


def test_a_result_is_computed_again_for_another_key() -> None:
    calls: list[int] = []
    latest = LatestResult[int]()
    for key in ([1], [1], [2], [1], [1]):
        assert latest.get(key, lambda key=key: calls.append(key[0]) or key[0]) == key[0]  # type: ignore[misc, func-returns-value]
    assert calls == [1, 2, 1]


def test_rows_of_a_table_can_repeat() -> None:
    table = DeviceTable(4, 2, torch.float32, CPU)
    for distinct, numbers in (
        ([(1, 2), (3, 4)], [0, 1, 1, 0]),
        ([(1, 2), (3, 4)], [1, 0, 0, 0]),  # other numbers alone
        ([(5, 6), (3, 4)], [1, 0, 0, 0]),  # other rows alone
        ([(7, 8)], [0, 0, 0, 0]),
    ):
        expected = torch.tensor([distinct[number] for number in numbers], dtype=torch.float32)
        for _ in range(2):
            assert torch.equal(table.set_repeated(distinct, numbers), expected)


def test_lists_of_tiles_are_those_of_the_given_ranges() -> None:
    """Tuples that are created in place of freed ones may have their identities."""
    tiles, kinds = TileSchedule((5000,), 1024, 1024, 256, CPU), ((True, None),)
    for end in (1, 2, 3, 4, 5) * 100:
        ranges = ((0, 0, end),)
        assert tiles.lists(ranges, kinds) is tiles.lists(((0, 0, end),), kinds)
        assert sum(int(listed[:, 2].sum()) for listed, _, _ in tiles.lists(ranges, kinds)) == end
        del ranges


def test_all_tiles_are_found_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, kinds = TileSchedule((5000, 10), 1024, 1024, 256, CPU), ((True, None),) * 2
    assert tiles.whole() == ((0, 0, 5), (1, 0, 1))
    lists = tiles.lists(tiles.whole(), kinds)
    monkeypatch.setattr(tiles, "_find", None)
    assert tiles.lists(tiles.whole(), kinds) is lists


class _Streams:
    """Fakes of CUDA streams, which write down their waits as (stream, stream of the event, number of the event)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.waits, self.events = 1, [], 0  # type: ignore[var-annotated]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._stream(self.current))

    def _stream(self, number: int) -> SimpleNamespace:
        def record() -> tuple[int, int]:
            self.events += 1
            return number, self.events

        wait = lambda event: self.waits.append((number, *event))  # noqa: E731
        return SimpleNamespace(cuda_stream=number, record_event=record, wait_event=wait)


def test_another_stream_waits_for_the_last_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it finds the content in the table. On a CPU there are no streams."""
    streams, memory = _Streams(monkeypatch), torch.zeros(8)
    addresses = AddressTable(1, 1, CPU)
    table, repeated = (DeviceTable(2, 1, torch.float32, CPU) for _ in range(2))
    uploads = (
        (addresses, lambda of: addresses.set(0, [memory[of:]])),
        (table, lambda of: table.set([[of], [of]])),
        (repeated, lambda of: repeated.set_repeated([[of]], [0, 0])),
    )
    for each, upload in uploads:
        streams.current, streams.events = 1, 0
        upload(0)
        assert streams.events == 0
        each._last_upload = launching._LastUpload(torch.device("cuda"))  # type: ignore[attr-defined]
        for stream, of in ((1, 1), (1, 1), (2, 1), (2, 2), (2, 2), (1, 2)):
            streams.current = stream
            upload(of)
        assert streams.waits == [(2, 1, 1), (2, 1, 1), (1, 2, 2)]
        streams.waits.clear()


def test_tables_of_tensors_follow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    n, memory = 4096, torch.zeros(4, 4 * 4096)  # a complete tile
    columns = [[row[:n], row[n : 2 * n]] for row in memory]  # gradients, parameters, moments, variances
    every = triton_passes.TensorTables()
    tables = every.of(columns[1])
    lists = tables.lists(columns, columns[:2])
    assert every.of(columns[0]) is tables and every.of(columns[0][:1]) is not tables
    with monkeypatch.context() as patched:  # new views of the same memory are the usual case
        patched.setattr(triton_passes, "table_row", None)
        assert tables.lists([[t.view(-1) for t in tensors] for tensors in columns], columns[:2]) is lists
    positions = GRADIENT.value, PARAMETER.value, STATE.value, FIRST_BLOCK.value
    for tensors, row, position in zip(columns, memory, positions, strict=True):
        for start, alignments in ((2 * n + 1, {True, False}), (2 * n, {True})):
            tensors[1] = row[start : start + n]
            assert {full for _, full, _ in tables.lists(columns, columns[:2])} == alignments
            assert int(tables.addresses.values[1, position]) == tensors[1].data_ptr()
    for number in (0, 1):
        kept, columns[number][1] = columns[number][1], memory[number].view(torch.bfloat16)[4 * n : 5 * n]
        assert kept.data_ptr() == columns[number][1].data_ptr()
        kinds = {kind for _, _, kind in tables.lists(columns, columns[:2])}
        assert kinds == {(torch.float32,) * 2, tuple(pair[1].dtype for pair in columns[:2])}
        columns[number][1] = kept
    tables.lists(columns[:3], columns[:2])
    assert tables.addresses.values[:, FIRST_BLOCK.value].tolist() == [0, 2]  # the first tiles


def test_rates_of_tensors_are_set_again_after_a_change() -> None:
    rows, betas = (DeviceTable(3, width, torch.float64, CPU) for width in (RATES.value, 2))
    one, other, third = (Rates(lr, 0.9, beta2, 1e-8, 0.1) for lr, beta2 in ((0.1, 0.95), (0.2, 0.95), (0.1, 0.99)))
    for rates in ([one] * 3, [one, one, other], [replace(one), one, other], [third, one, other], [other, one, third]):
        triton_passes.set_rates(rows, betas, rates)
        assert rows.values.tolist() == [list(triton_passes.rates_row(each)) for each in rates]
        assert betas.values.tolist() == [[each.beta1, each.beta2] for each in rates]


def test_addresses_are_copied_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    table, memory = AddressTable(2, 2, CPU), torch.zeros(64)
    first, second = [memory[:16], memory[16:32]], [memory[32:48].view(torch.bfloat16), None]
    table.set(0, first)
    assert table.has(0) and not table.has(1)
    table.set(1, second)
    assert table.has(1)
    assert table.kinds == ((True, (torch.float32, torch.bfloat16)), (True, (torch.float32, None)))
    assert table.values.tolist() == [[t.data_ptr() for t in first], [second[0].data_ptr(), 0]]
    with monkeypatch.context() as patched:  # new views of the same memory are the usual case
        patched.setattr(launching, "to_device", None)
        table.set(0, [memory[:16], memory[16:32]])
    table.set(0, [memory[1:17], memory.view(torch.bfloat16)[32:48]])  # the second one at the same address
    assert table.values[0].tolist() == [memory[1:].data_ptr(), first[1].data_ptr()]
    assert table.kinds == ((False, (torch.float32, torch.bfloat16)), (True, (torch.bfloat16, None)))


def test_an_exchange_is_listed_again_after_a_change() -> None:
    """Two tensors in four blocks of 32 and two messages; the last block is short."""
    code: Any = block_code("torch", "int8", 32)
    slices = [BlockSlice(0, 0, 64, 32, 0), BlockSlice(1, 32, 40, 64, 2)]
    chunk = exchange.BlockExchange(slices, code, 128, 2, 0, True, CPU)
    table, memory = AddressTable(LISTS, 2, CPU), torch.zeros(128)
    table.set(FIRST, [memory, memory])
    launches = chunk._launches_of(table)
    assert [(each.full, each.entries) for each in launches] == [(True, 96), (False, 8)]
    assert [each.tiles.tolist() for each in launches] == [[[0, 0, 0, 2], [1, 0, 2, 1]], [[1, 1, 3, 1]]]
    table.set(FIRST, [memory, memory[1:]])
    assert [(each.full, each.entries) for each in chunk._launches_of(table)] == [(True, 64), (False, 40)]
    table.set(SECOND, [memory.view(torch.bfloat16), memory])
    assert {each.second for each in chunk._launches_of(table)} == {torch.bfloat16, torch.float32}
    table.set(SECOND, [None, None])
    table.set(FIRST, [memory, memory])
    assert chunk._launches_of(table) is launches
