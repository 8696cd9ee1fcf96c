"""Division of tensors into chunks."""

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_scape.kernels.codec.formats import encoded_size
from torchtitan_scape.topology.partition import chunk_limit, chunk_sizes, chunks_of, whole_chunks


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


@given(st.lists(st.integers(0, 300), max_size=9), st.integers(1, 500))
def test_chunks_of_whole_tensors_are_in_reverse_order(sizes: list[int], least: int) -> None:
    chunks = whole_chunks(sizes, least)
    assert [s.tensor for c in chunks for s in c.slices] == [*reversed(range(len(sizes)))]
    for chunk in chunks:
        assert all(s.first == 0 and s.length == sizes[s.tensor] for s in chunk.slices)
        assert [s.at for s in chunk.slices] == [
            sum(s.length for s in chunk.slices[:i]) for i in range(len(chunk.slices))
        ]
        assert chunk.entries == sum(s.length for s in chunk.slices)
        assert chunk.entries - chunk.slices[-1].length < least
    assert all(chunk.entries >= least for chunk in chunks[:-1])


def test_chunks_grow_with_the_replicas_and_shrink_with_the_code() -> None:
    """Each pair of ranks exchanges 3 MiB of a chunk, unless that is more than a fifth of the model."""
    n, one_bit = 1831201280, encoded_size("1bit")
    assert chunk_limit(n, 2) == chunk_limit(n, 4) == 1 << 22
    assert chunk_limit(n, 64) == 64 * 3 << 18 and len(chunk_sizes([n], chunk_limit(n, 64))) == 37
    assert chunk_limit(n, 4, one_bit) == 86 << 20  # 3 MiB * 4 replicas * 8 bits / 1.125, rounded up
    assert 0 <= chunk_limit(n, 64, one_bit) - n / 5 < 1 << 20
    assert chunk_limit(1 << 24, 64, one_bit) == chunk_limit(0, 64) == 1 << 22
    assert chunk_sizes([10 << 22], 20 << 20) == [20 << 20] * 2


def test_small_models_have_eight_chunks_and_tiny_ones_fewer() -> None:
    assert chunk_sizes([10 << 22]) == [1 << 22] * 10
    assert chunk_sizes([1 << 22]) == [1 << 19] * 8
    assert chunk_sizes([1 << 17]) == [1 << 16] * 2 and chunk_sizes([7]) == [7] and chunk_sizes([]) == []
