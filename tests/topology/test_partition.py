"""Division of tensors into chunks."""

from hypothesis import given
from hypothesis import strategies as st

from topology.partition import chunk_sizes, chunks_of


@given(st.lists(st.integers(0, 300), max_size=9), st.integers(1, 200), st.sampled_from([1, 32]))
def test_every_entry_is_in_one_chunk(sizes: list[int], most: int, block: int) -> None:
    """In reverse tensor order; tensors and chunks begin at multiples of the block."""
    chunks = chunks_of(sizes, most, block)
    assert [chunk.entries for chunk in chunks] == chunk_sizes(sizes, most, block)
    assert sum(chunk.entries for chunk in chunks) == sum(-(-size // block) * block for size in sizes)
    assert all(chunk.entries % block == 0 and 0 < chunk.entries <= max(most, block) for chunk in chunks)
    seen = [(s.tensor, entry) for c in chunks for s in c.slices for entry in range(s.first, s.first + s.length)]
    assert seen == [(tensor, entry) for tensor in reversed(range(len(sizes))) for entry in range(sizes[tensor])]
    for chunk in chunks:
        end = 0
        for s in chunk.slices:
            assert s.at >= end and (s.at - s.first) % block == 0
            end = s.at + s.length
        assert end <= chunk.entries


def test_small_models_have_eight_chunks_and_tiny_ones_fewer() -> None:
    assert chunk_sizes([10 << 22]) == [1 << 22] * 10
    assert chunk_sizes([1 << 22]) == [1 << 19] * 8
    assert chunk_sizes([1 << 17]) == [1 << 16] * 2 and chunk_sizes([7]) == [7] and chunk_sizes([]) == []
