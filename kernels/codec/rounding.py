"""Hadamard transform before quantization, and reproducible random numbers for stochastic rounding.

Random numbers are Philox4x32-10 (Salmon et al., SC 2011): a function of a key and of an entry's position. A resumed run
therefore rounds as the uninterrupted run. Four entries share a counter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.kernels.codec.formats import HADAMARD_SIZE
from torchtitan_scape.kernels.common.launching import to_device

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def uniform(key: int, first: int, like: Tensor) -> Tensor:
    """Return random numbers in [0, 1), multiples of 2^-24, FP32 of the shape of `like`.

    first: position of the first entry. It and the number of entries are multiples of 4.
    """
    counters = torch.arange(first // 4, (first + like.numel()) // 4, dtype=torch.int64, device=like.device)
    return _fractions(key, counters).view(like.shape)


def row_keys(key: int | Sequence[int] | None, device: torch.device) -> Tensor | None:
    """Return the keys of single rows, int64 (rows,); None if all rows have one key, or none."""
    return to_device(torch.tensor(key, dtype=torch.int64, device="cpu"), device) if isinstance(key, Sequence) else None


def uniform_by_row(keys: Tensor, blocks_per_row: int, first: int, like: Tensor) -> Tensor:
    """Return the numbers of `uniform` for blocks of several rows, where positions count from the start of each row.

    Args:
        keys: Key of every row, int64 (rows,).
        blocks_per_row: Blocks of a row.
        first: First block, counted through all rows.
        like: (blocks, entries of a block); the entries are a multiple of 4.
    """
    blocks = torch.arange(first, first + len(like), dtype=torch.int64, device=like.device)[:, None]
    counters_per_block = like.shape[1] // 4
    in_block = torch.arange(counters_per_block, dtype=torch.int64, device=like.device)
    counters = blocks % blocks_per_row * counters_per_block + in_block
    return _fractions(keys[blocks // blocks_per_row], counters).view(like.shape)


def _fractions(key: int | Tensor, counters: Tensor) -> Tensor:
    """Return the random numbers of the counters, FP32 (..., 4)."""
    return (torch.stack(philox(key, counters), -1) >> 8).float() * 2.0**-24


def philox(key: int | Tensor, counters: Tensor) -> list[Tensor]:
    """Return the four 32-bit words of Philox4x32-10 for every counter, as int64.

    key: 64 bits, or int64 that broadcasts to the counters.
    """
    words = [counters & _LOW, counters >> 32 & _LOW, torch.zeros_like(counters), torch.zeros_like(counters)]
    keys = [key & _LOW, key >> 32 & _LOW]
    for _ in range(10):
        # The 64-bit products may overflow; their bits are correct.
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (second >> 32 & _LOW) ^ words[1] ^ keys[0],
            second & _LOW,
            (first >> 32 & _LOW) ^ words[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [(word + increment) & _LOW for word, increment in zip(keys, _INCREMENTS, strict=True)]
    return words


def hadamard_(x: Tensor) -> None:
    """Multiply each 32 entries of x, FP32 (n,), by the Hadamard matrix H / sqrt(32), in place.

    Each of the five stages replaces the entries by the sums of neighbors, followed by their differences.
    """
    values = x.view(-1, HADAMARD_SIZE)
    for _ in range(5):
        even, odd = values[:, ::2], values[:, 1::2]
        values = torch.cat((even + odd, even - odd), 1)
    torch.mul(values, HADAMARD_SIZE**-0.5, out=x.view(-1, HADAMARD_SIZE))
