"""Checks that TAGC's passes in Triton and PyTorch are bitwise equal, on any device."""

import torch
from torch import Tensor

from torchtitan_scape.kernels.backends import tagc_passes
from torchtitan_scape.kernels.tagc.formats import BLOCK
from torchtitan_scape.kernels.tagc.reference import union_of_bitmaps


def values(n: int, seed: int, ties: bool = False) -> Tensor:
    """Draw FP32 (n,) of many magnitudes. ties: small integers, with exact sums and many equal values."""
    generator = torch.Generator().manual_seed(seed)
    if ties:
        return torch.randint(-3, 4, (n,), generator=generator).float()
    return torch.randn(n, generator=generator) * torch.randint(-9, 9, (n,), generator=generator).float().exp2()


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def check_packed(n: int, k: int, ties: bool, device: str = "cpu") -> None:
    """Compare selection, packing of the index or of a part of it, and expansion of two ranks' payloads."""
    twin, kernels = tagc_passes("torch"), tagc_passes("triton")
    blocks = -(-n // BLOCK)
    given = [values(n, seed, ties).to(device) for seed in (0, 1)]
    own = [twin.select(x, k) for x in given]
    assert all(torch.equal(kernels.select(x, k), bits) for x, bits in zip(given, own, strict=True))
    index = union_of_bitmaps(torch.stack(own))
    for capacity in (2 * k, k):  # the capacity may be smaller than the index
        packed = torch.full((2, 2, blocks, capacity), torch.nan, device=device)
        for rank, x in enumerate(given):
            left = [x.clone(), x.clone()]
            for passes, x_left, out in zip((twin, kernels), left, packed[:, rank], strict=True):
                passes.pack(x_left, index, own[rank] if rank else index, capacity, out)
            assert same(*left)
            for applied in (True, False):
                rest = [x.clone().fill_(7.0) for _ in range(2)]
                for passes, kept in zip((twin, kernels), rest, strict=True):
                    flag = torch.tensor(applied, device=device)
                    passes.pack(x, index, index, capacity, packed[0, 0].clone(), kept, flag)
                assert same(*rest) and same(rest[0], x.clone().fill_(7.0)) != applied
        assert same(*packed)
        sums = [torch.full((n,), torch.nan, device=device) for _ in range(2)]
        twin.expand(packed[0], index, sums[0])
        kernels.expand(packed[0], index, sums[1])
        assert same(*sums)


def check_offsets(blocks: int, k: int, ranks: int, device: str = "cpu") -> None:
    """Compare the encoded offsets of every rank, and their union."""
    twin, kernels = tagc_passes("torch"), tagc_passes("triton")
    own = [twin.select(values(blocks * BLOCK, seed).to(device), k) for seed in range(ranks)]
    coded = torch.stack([twin.to_offsets(bits, k) for bits in own])
    assert torch.equal(torch.stack([kernels.to_offsets(bits, k) for bits in own]), coded)
    index = union_of_bitmaps(torch.stack(own))
    for passes in (twin, kernels):
        assert torch.equal(passes.union_of_offsets(coded, blocks, k), index)
