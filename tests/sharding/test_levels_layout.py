"""Row layout of three-level sharding against a list of entries."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_scape.sharding.levels_hooks import RowLayout
from torchtitan_scape.sharding.options import LevelsOptions
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import get_machine

Entry = tuple[int, int] | None  # (tensor, entry of its part of the row); None for padding


def literal_slices(sizes: list[int], coded: list[bool], block: int, pairs: int, nodes: int) -> list[list[Entry]]:
    """Return every slice, entry by entry, as specified: two sections, each padded, then divided into K parts."""
    count = pairs * nodes
    sections: list[list[Entry]] = []
    for kind, block_size in ((True, block), (False, 1)):
        section: list[Entry] = []
        for tensor, size in enumerate(sizes):
            if coded[tensor] == kind:
                section += [(tensor, entry) for entry in range(size)]
                section += [None] * (-len(section) % block_size)
        section += [None] * (-len(section) % (count * block_size))
        sections.append(section)
    each = [len(section) // count for section in sections]
    return [
        [e for section, n in zip(sections, each, strict=True) for e in section[k * n : (k + 1) * n]]
        for k in range(count)
    ]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=5),
    st.sampled_from([1, 4, 8]),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_rows_are_divided_into_slices_as_specified(
    tensors: list[tuple[int, bool]], block: int, pairs: int, nodes: int
) -> None:
    sizes, coded = [size for size, _ in tensors], [kind for _, kind in tensors]
    layout = RowLayout(sizes, coded, block, pairs, nodes)
    expected = literal_slices(sizes, coded, block, pairs, nodes)
    assert layout.slice_size == len(expected[0])
    rows = 2
    parts = [torch.arange(rows * n, dtype=torch.float32).view(rows, n) + 1000 * (i + 1) for i, n in enumerate(sizes)]
    sections = layout.sections(parts)
    assert [section.shape for section in sections] == [(rows, layout.coded.entries), (rows, layout.raw.entries)]
    for row in range(rows):
        own = [section[row] for section in sections]
        assert all(torch.equal(a, b[row]) for a, b in zip(layout.tensors(*own), parts, strict=True))
        # Slice k is part k of both sections.
        for k, want in enumerate(expected):
            row_slice = torch.cat([part.view(layout.slice_count, -1)[k] if part.numel() else part for part in own])
            values = [0.0 if e is None else float(parts[e[0]][row, e[1]]) for e in want]
            assert row_slice.tolist() == values
    for k, want in enumerate(expected):
        found: list[Entry] = [None] * layout.slice_size
        for tensor, one in enumerate(layout.slices(k, sizes)):
            for entry in range(one.start, one.stop):
                found[one.at + entry - one.start] = (tensor, entry)
        assert found == want
        for first in range(0, layout.slice_coded, block):  # a block has entries of one tensor
            assert len({e[0] for e in want[first : first + block] if e is not None}) <= 1


def test_uneven_rows_have_shorter_slices() -> None:
    """The last of w ranks has fewer rows of a tensor, or none; the slice boundaries are those of the other ranks."""
    layout = RowLayout([6, 3], [True, False], 4, 2, 1)
    assert [tuple(s) for s in layout.slices(1, [6, 3])] == [(4, 6, 0), (2, 3, 4)]
    assert [tuple(s) for s in layout.slices(1, [5, 0])] == [(4, 5, 0), (0, 0, 0)]


@pytest.mark.parametrize(
    "degrees, shard, node, message",
    [
        ((2, 3), 3, 3, r"weights = 2; it must divide gradients = 3: set one of 1, 3"),
        ((2, 4), 4, 2, r"gradients = 4; sharding groups must not span nodes: with 2 ranks per node, set one of 1, 2"),
        ((2, 2), 4, 4, r"gradients = 2; it must be the degree of the shard axis, which is 4"),
        ((2, 0), 4, 4, r"gradients = 0; set both degrees"),
    ],
)
def test_degrees_that_do_not_nest_are_refused(degrees: tuple[int, int], shard: int, node: int, message: str) -> None:
    layout = plan_layout(12, ranks_per_node=node, machine=get_machine("local"), replicate=-1, shard=shard)
    with pytest.raises(ValueError, match=message):
        LevelsOptions(*degrees).check(layout)


def test_the_secondary_partition_is_over_the_degree_of_the_weights() -> None:
    with pytest.raises(ValueError, match="secondary = 8; it must be 0, or the degree of the weights, 2"):
        LevelsOptions(2, 8, secondary=8)
    with pytest.raises(ValueError, match="secondary = 1; with weights = 1 nothing is gathered"):
        LevelsOptions(1, 4, secondary=1)
    inner = LevelsOptions(2, 8).inner(
        plan_layout(16, ranks_per_node=8, machine=get_machine("frontier"), replicate=2, shard=8)
    )
    assert (inner.replicate, inner.shard) == (8, 2)
