"""Checks that block codes in Triton and PyTorch are bitwise equal, on any device; and the blocks of the tests."""

import torch
from torch import Tensor

from torchtitan_scape.kernels.backends import block_code

NAN, INF, LARGEST = float("nan"), float("inf"), torch.finfo(torch.float32).max


def ordinary(block: int, generator: torch.Generator) -> Tensor:
    """Draw normally distributed numbers of many magnitudes."""
    sizes = torch.randint(-12, 12, (block,), generator=generator).float().exp2()
    return torch.randn(block, generator=generator) * sizes


def blocks_of(block: int, seed: int = 0) -> dict[str, Tensor]:
    """Return blocks of every kind, FP32 (block,): ordinary numbers and special cases."""
    generator = torch.Generator().manual_seed(seed)
    plain = ordinary(block, generator)
    halves = torch.randint(-14, 15, (block,), generator=generator) * 0.5
    halves[0] = 7.0  # int4 has scale 1
    kinds = dict(
        ordinary=plain,
        halves=halves,
        quarters=torch.cat((halves.new_tensor([-6.0]), halves[1:].clamp(-12, 12) / 2)),  # e2m1 has scale 1
        zeros=torch.tensor([0.0, -0.0]).repeat(block // 2),
        equal=torch.full((block,), -0.3),
        denormal=torch.full((block,), 1e-42).copysign(plain),
        least=plain / plain.abs().max() * 2.0**-100,
        tiny=plain / plain.abs().max() * 2.0**-101,
        huge=plain / plain.abs().max() * 1e30,
        largest=torch.full((block,), LARGEST).copysign(plain),
    )
    for name, value in (("nan", NAN), ("inf", INF), ("-inf", -INF)):
        kinds[name] = plain.clone()
        kinds[name][block // 3] = value
    return kinds


def rows_of(rows: int, blocks: int, block: int, device: str) -> Tensor:
    """Return FP32 (rows, blocks * block): blocks of all kinds, repeated with other seeds."""
    kinds: list[Tensor] = []
    while len(kinds) < rows * blocks:
        kinds += blocks_of(block, len(kinds)).values()
    return torch.cat([*kinds[: rows * blocks], torch.empty(0)]).view(rows, blocks * block).to(device)


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if tensors are bitwise equal; all NaN bit patterns are considered equal."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    known = ~one.isnan()
    return torch.equal(known, ~other.isnan()) and torch.equal(
        one.view(torch.int32)[known], other.view(torch.int32)[known]
    )


def check_follows(name: str, block: int, scale: torch.dtype, rows: int, blocks: int, device: str = "cpu") -> None:
    """Compare encoding with and without errors, decoding and summing, also of misaligned messages."""
    twin, kernel = (block_code(backend, name, block, scale) for backend in ("torch", "triton"))
    x = rows_of(rows, blocks, block, device)
    errors = [torch.full_like(x, NAN), x.clone()]
    messages = twin.encode(x, errors[0])
    assert torch.equal(messages, kernel.encode(x))
    assert torch.equal(messages, kernel.encode(errors[1], errors[1]))
    assert same(*errors)

    misaligned = torch.cat((messages.new_zeros(1), messages.flatten()))[1:].view_as(messages)
    for given in (messages, misaligned):
        values = [torch.full_like(x, NAN) for _ in range(2)]
        sums = [torch.full((blocks * block,), NAN, device=device) for _ in range(2)]
        for code, value, total in zip((twin, kernel), values, sums, strict=True):
            code.decode(given, value)
            code.decode_and_sum(given, total)
        assert same(*values) and same(*sums)
        errors = [x[:1].flatten().clone() for _ in range(2)] if rows else []
        for adds_error in (False, True) if rows else ():
            means = [
                code.encode_mean(given, x.shape[1], 3.0, error, adds_error)
                for code, error in zip((twin, kernel), errors, strict=True)
            ]
            assert torch.equal(*means) and same(*errors)
            assert torch.equal(kernel.encode_mean(given, x.shape[1], 3.0), twin.encode_mean(given, x.shape[1], 3.0))


def check_sums_and_hadamard_follow(name: str, block: int, rows: int, blocks: int, device: str = "cpu") -> None:
    """Compare several sums at once, and the Hadamard transform."""
    twin, kernel = (block_code(backend, name, block, torch.float32) for backend in ("torch", "triton"))
    x = rows_of(rows, blocks, block, device)
    messages = twin.encode(x)
    sums = [torch.full((2, blocks * block), NAN, device=device) for _ in range(2)]
    for code, total in zip((twin, kernel), sums, strict=True):
        code.decode_and_sum(messages.repeat(2, 1).view(rows, 2, -1), total)
    assert same(*sums)
    transformed = [x.clone(), x.clone()]
    twin.hadamard_(transformed[0])
    kernel.hadamard_(transformed[1])
    assert same(*transformed)
