"""What may come before and into a block code: a Hadamard turn, and random numbers that can be had again.

Random numbers are Philox4x32-10 (Salmon et al., SC 2011): a function of a key and of an entry's place, so that a run
that is resumed rounds as the one that never stopped. Four entries share a counter.
"""

import torch
from torch import Tensor

from kernels.codec.formats import TURN

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def uniform(key: int, first: int, like: Tensor) -> Tensor:
    """FP32 of the shape of `like`, multiples of 2^-24 in [0, 1), of entries from `first` on; both multiples of 4."""
    counters = torch.arange(first // 4, (first + like.numel()) // 4, dtype=torch.int64, device=like.device)
    words = torch.stack(philox(key, counters), 1)
    return ((words >> 8).float() * 2.0**-24).view(like.shape)


def philox(key: int, counters: Tensor) -> list[Tensor]:
    """Four times int64, of 32 bits each, of every counter: the words of Philox4x32-10 with this key of 64 bits."""
    words = [counters & _LOW, counters >> 32 & _LOW, torch.zeros_like(counters), torch.zeros_like(counters)]
    keys = [key & _LOW, key >> 32 & _LOW]
    for _ in range(10):
        # A product of 64 bits that overflows has the right bits.
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (second >> 32 & _LOW) ^ words[1] ^ keys[0],
            second & _LOW,
            (first >> 32 & _LOW) ^ words[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [(one + increment) & _LOW for one, increment in zip(keys, _INCREMENTS, strict=True)]
    return words


def hadamard_(x: Tensor) -> None:
    """x, FP32 (n,), becomes H x / sqrt(32), 32 entries at a time.

    Five times: the sums of neighbours, then their differences.
    """
    values = x.view(-1, TURN)
    for _ in range(5):
        even, odd = values[:, ::2], values[:, 1::2]
        values = torch.cat((even + odd, even - odd), 1)
    torch.mul(values, TURN**-0.5, out=x.view(-1, TURN))
