"""Checks of the dense Triton kernels against PyTorch: in the interpreter on a CPU, and on a GPU."""

import torch
from torch import Tensor

from tests.kernels.checks import ULP, Case
from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.kernels.dense.reference import finite


def rates_of(tensors: int) -> list[Rates]:
    """Return other rates for every tensor, with steps that change a BF16 parameter by many roundings."""
    return [Rates(0.5 / (i + 1), 0.9 - 0.1 * i, 0.95 - 0.05 * i, 1e-8, 0.1 * i) for i in range(tensors)]


def assert_near(ours: list[Tensor], theirs: list[Tensor], before: list[Tensor]) -> None:
    """Compare within one rounding of a BF16 result, and the rounding errors of about ten operations in FP32."""
    for one, other, start in zip(ours, theirs, before, strict=True):
        last = ULP if one.dtype == torch.float32 else 2.0**-7
        bound = last * one.double().abs() + 16 * ULP * (one.double().abs() + start.double().abs() + 0.2)
        assert bool(((one.double() - other.double()).abs() <= bound).all())


def check_adams(sizes: list[int], offset: int, dtype: torch.dtype, seed: int, device: str) -> None:
    """Compare dense AdamS of both backends."""
    from torchtitan_scape.kernels.dense.torch_passes import TorchAdams
    from torchtitan_scape.kernels.dense.triton_passes import TritonAdams

    case, results = Case(tuple(sizes), device=device), []
    for backend in (TorchAdams(), TritonAdams()):
        parameters, gradients = case.draw(dtype, seed), case.draw(dtype, seed + 1, (), offset)
        moments = case.draw(torch.float32, seed + 2)
        steps = torch.arange(1.0, len(sizes) + 1, dtype=torch.float64, device=device)
        for applied in (True, False):
            flag = torch.tensor(applied, device=device)
            backend.step(parameters, gradients, moments, rates_of(len(sizes)), steps, flag)
        results.append(parameters + moments)
    assert_near(*results, case.draw(dtype, seed) + case.draw(torch.float32, seed + 2))


def check_frozen_adam(sizes: list[int], offset: int, dtype: torch.dtype, seed: int, device: str) -> None:
    """Compare Adam with a frozen variance of both backends; FP32 moments bitwise. Some entries have no variance."""
    from torchtitan_scape.kernels.dense.torch_passes import TorchFrozenAdam
    from torchtitan_scape.kernels.dense.triton_passes import TritonFrozenAdam

    case, rates = Case(tuple(sizes), device=device), rates_of(len(sizes))
    counts = torch.arange(1.0, len(sizes) + 1, dtype=torch.float64)
    for updates in (counts, counts.to(device)):  # those of AdamW are on the CPU, those of fused AdamW on the device
        results = []
        for backend in (TorchFrozenAdam(), TritonFrozenAdam()):
            parameters, moments = case.draw(dtype, seed), case.draw(dtype, seed + 2)
            variances = [each.square() * (each > 0) for each in case.draw(dtype, seed + 3)]
            if sizes[0] % 2 == 0:  # transposed, so that the kernels update copies
                for tensors in (parameters, moments, variances):
                    tensors[0] = tensors[0].view(2, -1).T.contiguous().T
            before = [parameter.clone() for parameter in parameters]
            momenta = case.draw(torch.float32, seed + 1, (), offset)
            for applied in (True, False):
                flag = torch.tensor(applied, device=device)
                backend.step(parameters, momenta, moments, variances, rates, updates, flag)
                momenta = [torch.full_like(each, torch.nan) for each in momenta]
            results.append((parameters, moments))
        (ours, our_moments), (theirs, their_moments) = results
        assert_near(ours, theirs, before)
        assert_near(our_moments, their_moments, [torch.zeros_like(each) for each in our_moments])
        if dtype == torch.float32:
            assert all(torch.equal(one, other) for one, other in zip(our_moments, their_moments, strict=True))


def check_finite(
    sizes: list[int], bad: dict[int, tuple[int, float]], dtype: torch.dtype, offset: int, device: str
) -> None:
    from torchtitan_scape.kernels.dense.triton_passes import Finite, Scaling

    gradients = Case(tuple(sizes), device=device).draw(dtype, 0, (), offset)
    for tensor, (entry, value) in bad.items():
        gradients[tensor][entry] = value
    assert Finite()(gradients).tolist() == [i not in bad for i in range(len(sizes))]
    assert finite(gradients).tolist() == [i not in bad for i in range(len(sizes))]
    for limit in (2.0**-3, 2.0**120):
        gradients[-1][0] = limit
        for some in (gradients, [-gradients[-1].abs()], [gradients[-1] * 0.99]):
            assert Finite(limit)(some).tolist() == finite(some, limit).tolist()
    for factor in (1.0, 0.3, 0.0, float("nan")):
        scaled, expected = [g.clone() for g in gradients], [g.clone() for g in gradients]
        by = torch.tensor(factor, device=gradients[0].device)
        Scaling()(scaled, by)
        torch._foreach_mul_(expected, by)
        for one, other in zip(scaled, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
