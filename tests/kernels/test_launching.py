"""Tables and lists of launches that are kept from step to step, and the changes after which they are computed again."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from torchtitan_scape.kernels.backends import block_code
from torchtitan_scape.kernels.common.launching import DeviceTable, LatestResult, TileSchedule
from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.kernels.common.triton_common import FIRST_BLOCK, GRADIENT, PARAMETER, RATES, STATE
from torchtitan_scape.kernels.dense import triton_passes
from torchtitan_scape.kernels.exchange import triton_passes as exchange
from torchtitan_scape.kernels.exchange.layout import BlockSlices
from torchtitan_scape.kernels.exchange.triton_kernels import FIRST, OWNER_ERROR, SECOND, STEP

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
    assert tables.addresses.values[:, FIRST_BLOCK.value].tolist() == [0, 1]  # the first tiles


def test_rates_of_tensors_are_set_again_after_a_change() -> None:
    rows, betas = (DeviceTable(3, width, torch.float64, CPU) for width in (RATES.value, 2))
    one, other, third = (Rates(lr, 0.9, beta2, 1e-8, 0.1) for lr, beta2 in ((0.1, 0.95), (0.2, 0.95), (0.1, 0.99)))
    for rates in ([one] * 3, [one, one, other], [replace(one), one, other], [third, one, other], [other, one, third]):
        triton_passes.set_rates(rows, betas, rates)
        assert rows.values.tolist() == [list(triton_passes.rates_row(each)) for each in rates]
        assert betas.values.tolist() == [[each.beta1, each.beta2] for each in rates]


def block_slices() -> BlockSlices:
    first, second, owner_error = ([torch.zeros(64), torch.zeros(2, 32)] for _ in range(3))
    code: Any = block_code("torch", "int8", 32)
    return BlockSlices(first, second, code, 128, 2, 0, owner_error, [None, torch.zeros(2, 32)])


def test_slices_of_an_exchange_are_listed_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    slices, columns = block_slices(), {"first": FIRST, "second": SECOND, "owner_error": OWNER_ERROR, "steps": STEP}
    plan, _, launches = exchange._plan(slices)
    with monkeypatch.context() as patched:
        patched.setattr(exchange._Plan, "_table_of", None)
        assert exchange._plan(slices)[2] is launches
    for name, column in columns.items():
        setattr(slices, name, [*getattr(slices, name)[:1], torch.zeros(2, 32)])
        _, table, _ = exchange._plan(slices)
        assert int(table[1, column.value]) == getattr(slices, name)[1].data_ptr(), name
    memory = torch.zeros(64)
    for name, attribute in (("first", "dtype"), ("second", "second")):
        for dtype in (torch.float32, torch.bfloat16):  # at the same address
            setattr(slices, name, [memory.view(dtype)[:64], *getattr(slices, name)[1:]])
            found = {getattr(each, attribute) for each in exchange._plan(slices)[2]}
            assert found == {dtype, torch.float32}, name
    assert slices.plan is plan
