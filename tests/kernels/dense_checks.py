"""Checks of the dense Triton kernels against PyTorch: in the interpreter on a CPU, and on a GPU."""

import torch
from torch import Tensor

from tests.kernels.checks import ULP, Case
from torchtitan_scape.kernels.common.tensors import Rates
from torchtitan_scape.kernels.dense.reference import RULES as TORCH_RULES
from torchtitan_scape.kernels.dense.reference import TorchMuon, TorchUpdate, finite, norms

RULES = [*TORCH_RULES]


def rates_of(tensors: int) -> list[Rates]:
    """Return other rates for every tensor, with steps that change a BF16 parameter by many roundings."""
    return [Rates(0.5 / (i + 1), 0.9 - 0.1 * i, 0.95 - 0.05 * i, 1e-8, 0.1 * i) for i in range(tensors)]


def assert_near(ours: list[Tensor], theirs: list[Tensor], before: list[Tensor]) -> None:
    """Compare within one rounding of a BF16 result, and the rounding errors of about ten operations in FP32."""
    for one, other, start in zip(ours, theirs, before, strict=True):
        last = ULP if one.dtype == torch.float32 else 2.0**-7
        bound = last * one.double().abs() + 16 * ULP * (one.double().abs() + start.double().abs() + 0.2)
        assert bool(((one.double() - other.double()).abs() <= bound).all())


def check_update(
    rule: str, sizes: list[int], offset: int, dtype: torch.dtype, seed: int, device: str, factor: float | None
) -> None:
    """Compare an elementwise step of both backends, with "frozen" FP32 moments bitwise. Some variances are zero."""
    from torchtitan_scape.kernels.dense.triton_passes import TritonUpdate

    case, rates = Case(tuple(sizes), device=device), rates_of(len(sizes))
    state_dtype = torch.float32 if rule == "adams" else dtype
    counts = torch.arange(1.0, len(sizes) + 1, dtype=torch.float64)
    if rule == "frozen":
        counts = torch.stack([2.0 * counts, counts], 1)
    multiplied = None if factor is None else torch.tensor(factor, device=device)
    for steps in (counts, counts.to(device)):  # counters of AdamW may be on the CPU
        results = []
        for backend in (TorchUpdate(rule), TritonUpdate(rule)):
            parameters, states = case.draw(dtype, seed), [case.draw(state_dtype, seed + 2)]
            if rule != "adams":
                states.append([each.square() * (each > 0) for each in case.draw(dtype, seed + 3)])
            if sizes[0] % 2 == 0:  # transposed, so that the kernels update copies
                for tensors in (parameters, *states):
                    tensors[0] = tensors[0].view(2, -1).T.contiguous().T
            before = [tensor.clone() for tensor in (*parameters, *states[0])]
            gradients = case.draw(torch.float32 if rule == "frozen" else dtype, seed + 1, (), offset)
            for applied in (True, False):
                flag = torch.tensor(applied, device=device)
                backend.step(parameters, gradients, states, rates, steps, flag, multiplied)
                gradients = [torch.full_like(each, torch.nan) for each in gradients]
            results.append((parameters, states))
        (ours, our_states), (theirs, their_states) = results
        assert_near(ours, theirs, before[: len(sizes)])
        for one, other in zip(our_states, their_states, strict=True):
            assert_near(one, other, before[len(sizes) :])
        if rule == "frozen" and dtype == torch.float32:
            assert all(torch.equal(*each) for each in zip(our_states[0], their_states[0], strict=True))


def check_muon(sizes: list[int], offset: int, seed: int, device: str) -> None:
    """Compare Muon's momentum and move of both backends. A tensor of an even size is a transposed matrix."""
    from torchtitan_scape.kernels.dense.triton_passes import TritonMuon

    case, results = Case(tuple(sizes), device=device), []
    momenta, needed = [0.95 / (i + 1) for i in range(len(sizes))], [i % 3 != 2 for i in range(len(sizes))]
    for backend in (TorchMuon(), TritonMuon()):
        weights, averages = case.draw(torch.float32, seed), case.draw(torch.float32, seed + 1)
        gradients = case.draw(torch.float32, seed + 2, (), offset)
        if sizes[0] % 2 == 0:
            for tensors in (weights, averages):
                tensors[0] = tensors[0].view(2, -1).T.contiguous().T
            gradients[0] = gradients[0].view(weights[0].shape)
        before = [tensor.clone() for tensor in (*weights, *averages)]
        for applied in (True, False):
            flag, factor = torch.tensor(applied, device=device), torch.tensor(0.3, device=device)
            directions = backend.average(gradients, averages, momenta, flag, factor, needed)
            present = [n and g.numel() > 0 for n, g in zip(needed, gradients, strict=True)]
            assert [d.numel() > 0 for d in directions] == present
            moves = [(w, d.clone()) for w, d in zip(weights, directions, strict=True) if d.numel() == w.numel()]
            factors = [(0.9 / (i + 1), -0.1 * i) for i in range(len(moves))]
            backend.move([w for w, _ in moves], [d for _, d in moves], factors, flag)
            if applied:
                kept = [d.float() for d in directions]
            gradients = [torch.full_like(each, torch.nan) for each in gradients]
        results.append((weights, averages, kept))
    (ours, our_averages, one), (theirs, their_averages, other) = results
    # A direction may round to the next BF16 number, which moves a weight by a part of it.
    for ours_each, theirs_each in ((ours, theirs), (one, other)):
        for a, b in zip(ours_each, theirs_each, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=5e-3)
    assert_near(our_averages, their_averages, before[len(sizes) :])


def check_norms(
    sizes: list[int], bad: dict[int, tuple[int, float]], dtype: torch.dtype, offset: int, device: str
) -> None:
    """Compare norms, also of tensors with entries that are not finite or whose squares overflow; and scaling."""
    from torchtitan_scape.kernels.dense.triton_passes import Norms, Scaling

    gradients = Case(tuple(sizes), device=device).draw(dtype, 0, (), offset)
    for tensor, (entry, value) in bad.items():
        gradients[tensor][entry] = value
    found = Norms()(gradients)
    torch.testing.assert_close(found, norms(gradients), rtol=1e-13, atol=0.0, equal_nan=True)
    assert found.isfinite().tolist() == [i not in bad for i in range(len(sizes))]
    assert finite(gradients).tolist() == found.isfinite().tolist()
    gradients[-1][0] = 2.0**120
    torch.testing.assert_close(Norms()(gradients), norms(gradients), rtol=1e-13, atol=0.0, equal_nan=True)
    for factor in (1.0, 0.3, 0.0, float("nan")):
        scaled, expected = [g.clone() for g in gradients], [g.clone() for g in gradients]
        by = torch.tensor(factor, device=gradients[0].device)
        Scaling()(scaled, by)
        torch._foreach_mul_(expected, by)
        for one, other in zip(scaled, expected, strict=True):
            exact = dtype == torch.float32  # on a CPU PyTorch rounds the factor, too
            torch.testing.assert_close(one, other, rtol=0 if exact else 2**-7, atol=0, equal_nan=True)
