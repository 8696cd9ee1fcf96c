"""Stochastic rounding and the Hadamard transform against their definitions."""

import math

import numpy as np
import pytest
import torch

from tests.kernels.codec.checks import NAN, blocks_of
from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.kernels.codec.reference import philox


def test_philox_is_the_published_one() -> None:
    """Compared with known answers of Random123 1.14 (kat_vectors)."""
    assert [int(word) for word in philox(0, torch.tensor([0]))] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF

    def literal(counter: list[int], key: list[int]) -> list[int]:
        for _ in range(10):
            first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
            counter = [
                second >> 32 ^ counter[1] ^ key[0],
                second & ones,
                first >> 32 ^ counter[3] ^ key[1],
                first & ones,
            ]
            key = [(key[0] + 0x9E3779B9) & ones, (key[1] + 0xBB67AE85) & ones]
        return counter

    assert literal([0, 0, 0, 0], [0, 0])[0] == 0x6627E8D5
    key, counter = 0x7A0B5F2390C1D2E3, 0x123456789ABC
    found = [int(word) for word in philox(key, torch.tensor([counter]))]
    assert found == literal([counter & ones, counter >> 32, 0, 0], [key & ones, key >> 32])


@pytest.mark.parametrize("name, largest", [("int8", 127.0), ("int4", 7.0)])
def test_stochastic_rounding_has_no_bias_and_repeats(name: str, largest: float) -> None:
    """The mean over 4,096 keys is within 5 standard errors, every value is an adjacent level, and keys repeat."""
    code = BlockCode(name, 32, torch.float32)
    x = torch.randn(32, generator=torch.Generator().manual_seed(0))
    rows, out = x.expand(4096, 32).contiguous(), torch.empty(4096, 32)
    # Entries of different rows have different positions, so one call draws independent numbers for all rows.
    messages = code.encode(rows, key=12345)
    assert torch.equal(messages, code.encode(rows, key=12345)) and not torch.equal(
        messages, code.encode(rows, key=12346)
    )
    code.decode(messages, out)
    step = x.abs().max() / largest
    assert ((out - x).abs() < step * (1 + 1e-5)).all()
    assert ((out.mean(0) - x).abs() <= 5 * step / 2 / math.sqrt(4096) + 1e-6).all()
    assert out.std(0).max() > step / 4


def test_stochastic_rounding_of_special_blocks() -> None:
    code = BlockCode("int4", 32, torch.float32)
    kinds = blocks_of(32)
    x = torch.stack([kinds[name] for name in ("zeros", "denormal", "nan", "inf", "largest")])
    out = torch.empty_like(x)
    code.decode(code.encode(x, key=7), out)
    assert not out[:2].any() and out[2:4].isnan().all() and (out[4].abs() <= x[4].abs()).all()
    assert code.encode(torch.empty(1, 0), key=7).shape == (1, 0)
    with pytest.raises(ValueError, match="int8 and int4"):
        BlockCode("e2m1", 32).encode(x, key=7)


def test_the_transform_is_hadamard_and_its_own_inverse() -> None:
    code, x = BlockCode("int4", 32, torch.float32), torch.randn(3 * 32, generator=torch.Generator().manual_seed(1))
    signs = np.array([[(-1) ** bin(i & j).count("1") for j in range(32)] for i in range(32)], dtype=np.float64)
    expected = torch.from_numpy(signs @ x.view(3, 32).double().numpy().T / math.sqrt(32)).T.reshape(-1)
    transformed = x.clone()
    code.hadamard_(transformed)
    torch.testing.assert_close(transformed.double(), expected, rtol=0, atol=1e-6)
    code.hadamard_(transformed)
    torch.testing.assert_close(transformed, x, rtol=0, atol=1e-6)
    x[5] = NAN
    code.hadamard_(x)
    assert x[:32].isnan().all() and x[32:].isfinite().all()  # the block remains recognizable as not finite
    with pytest.raises(ValueError, match="multiple of 32"):
        code.hadamard_(torch.zeros(33))


def test_rows_with_keys_of_their_own_and_several_sums_equal_single_ones() -> None:
    """The messages of all ranks are encoded at once, and summed at once."""
    code, x = BlockCode("int8", 32), torch.randn(4, 96, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([code.encode(row[None], key=key) for row, key in zip(x, (3, 1 << 62, 5, 7), strict=True)])
    assert torch.equal(code.encode(x, key=(3, 1 << 62, 5, 7)), alone)
    sums, total = torch.empty(2, 96), torch.empty(96)
    code.decode_and_sum(alone.view(2, 2, -1), sums)
    for number, found in enumerate(sums):
        code.decode_and_sum(alone.view(2, 2, -1)[:, number], total)
        assert torch.equal(found, total)
