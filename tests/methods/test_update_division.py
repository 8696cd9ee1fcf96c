"""Owners, groups and columns of `quantized_update`."""

import math

import pytest

from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.quantized_update.layout import ExchangeGroup, divide
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.topology.traffic import LevelSize


def entries_of(groups: tuple[ExchangeGroup, ...], sizes: list[int]) -> list[list[int]]:
    """Return the owner of every entry, by tensor; -1 for none."""
    found = [[-1] * size for size in sizes]
    for owner, s in ((owner, s) for group in groups for owner, row in enumerate(group.rows) for s in row):
        for i in range(s.first, s.first + s.length):
            assert found[s.tensor][i] == -1
            found[s.tensor][i] = owner
    return found


@pytest.mark.parametrize("groups", [1, 2, 9])
@pytest.mark.parametrize("equal_rows", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 16])
def test_every_entry_has_one_owner_and_one_place(replicas: int, equal_rows: bool, groups: int) -> None:
    sizes, whole = [200, 96, 64, 7, 0, 33, 64], [0, 96, 64, 0, 0, 0, 64]
    found = divide(sizes, whole, replicas, block=8, limit=40 * replicas, equal_rows=equal_rows, groups=groups)
    assert sorted(i for group in found for i in group.tensors) == list(range(len(sizes))) and len(found) == groups
    rows = [row for group in found for row in group.rows]
    assert all(len({s.tensor for s in row}) == len(row) for row in rows), "one slice of a tensor"
    owners = entries_of(found, sizes)
    assert all(-1 not in each for each in owners)
    assert all(len(set(owners[i])) == 1 for i, entries in enumerate(whole) if entries)
    sent: dict[tuple[int, int], int] = {}
    for group, column in [(each, column) for each in found for column in each.columns]:
        assert column.width > 0 and len(column.owners) * column.width <= 40 * replicas and column.width % 8 == 0
        assert not equal_rows or column.owners == tuple(range(replicas))
        for owner, slices in zip(column.owners, column.slices, strict=True):
            assert all(s.at % 8 == 0 and s.at + s.length <= column.width for s in slices)
            for s in slices:
                assert s.tensor in group.tensors
                for i in range(s.first, s.first + s.length):
                    assert (s.tensor, i) not in sent
                    sent[s.tensor, i] = owner
    assert sent == {(t, i): owner for t, each in enumerate(owners) for i, owner in enumerate(each)}


def test_blocks_of_other_parameters_equalize_the_rows() -> None:
    (group,) = divide([64, 64, 800], [64, 64, 0], 4, block=8, limit=1 << 20)
    assert [sum(s.length for s in row) for row in group.rows] == [232] * 4
    assert [column.owners for column in group.columns] == [(0, 1, 2, 3)]


def test_a_longer_row_has_columns_of_its_own() -> None:
    (group,) = divide([64, 16, 16], [64, 16, 16], 3, block=8, limit=1 << 20)
    assert [(column.width, column.owners) for column in group.columns] == [(16, (0, 1, 2)), (48, (0,))]


@pytest.mark.parametrize("is_whole", [False, True])
def test_columns_follow_the_backward_pass(is_whole: bool) -> None:
    """Ten layers of two matrices between a large embedding and an output, which may be divided."""
    sizes = [4000, *[400, 800] * 10, 4000]
    whole = [0, *(sizes[1:-1] if is_whole else [0] * 20), 0]
    (group,) = divide(sizes, whole, 4, block=8, limit=2000)
    first = [min(s.tensor for slices in column.slices for s in slices) for column in group.columns]
    last = [max(s.tensor for slices in column.slices for s in slices) for column in group.columns]
    assert first == sorted(first, reverse=True) and last == sorted(last, reverse=True)
    embeddings = sum(column.width for column, tensor in zip(group.columns, first, strict=True) if tensor == 0)
    assert embeddings * 4 < 4000 + 2 * 2000  # the embedding, and the rest of two columns


def test_a_small_model_has_about_eight_columns() -> None:
    (group,) = divide([100_000] * 20, [0] * 20, 4, block=512, limit=1 << 22)
    assert len(group.columns) in (8, 9)


def test_groups_and_owners_have_about_equally_many_entries() -> None:
    """Of eight equal matrices and a divisible tensor in two groups, four replicas own two matrices each."""
    sizes = [64] * 8 + [512]
    groups = divide(sizes, [64] * 8 + [0], 4, block=8, limit=1 << 20, groups=2)
    assert [sum(sizes[i] for i in group.tensors) for group in groups] == [512, 512]
    groups = divide(sizes[:8], sizes[:8], 4, block=8, limit=1 << 20, groups=4)
    assert [len(group.tensors) for group in groups] == [2] * 4
    assert [sum(len(group.rows[owner]) for group in groups) for owner in range(4)] == [2] * 4


def test_ranks_with_different_shards_choose_the_same_groups() -> None:
    entries, whole = [40, 30, 30, 20], [40, 0, 30, 0]
    for sizes in ([20, 30, 0, 4], [20, 0, 30, 16]):
        groups = divide(sizes, whole, 3, block=8, limit=1 << 20, groups=2, entries=entries)
        assert [group.tensors for group in groups] == [(0, 3), (1, 2)]


def test_the_planner_builds_no_rows() -> None:
    """Lists of the slices of every replica took minutes, and gigabytes, with the ranks of a whole machine."""
    model, options = get_workload("llama_1_8b").whole(), QuantizedUpdateOptions(interval=2)
    options.collective_calls(model, [LevelSize("network", 1000)])
    options.updated_model(model, 1000)
    assert not any("rows" in vars(group) for group in options.groups(model, 1000))


@pytest.mark.parametrize(("optimizer", "replicas"), [("Muon", 4), ("Muon", 64), ("AdamW", 4), ("AdamW", 64)])
def test_a_replica_has_at_most_one_slice_of_a_tensor(optimizer: str, replicas: int) -> None:
    model = get_workload("llama_1_8b")
    sizes = [math.prod(shape) for shape in model.shapes()]
    hidden = [len(shape) == 2 and shape[0] != model.vocab for shape in model.shapes()]
    whole = [size if optimizer == "Muon" and matrix else 0 for size, matrix in zip(sizes, hidden, strict=True)]
    for groups in (1, 3):
        for group in divide(sizes, whole, replicas, block=1024, limit=1 << 40, groups=groups):
            assert all(len({s.tensor for s in row}) == len(row) for row in group.rows)
