"""Kernels access no memory outside of tensors; the slow run checks this in all tests of this folder."""

import os
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/kernels/test_triton.py, with TRITON_INTERPRET=1", allow_module_level=True)

from tests.kernels.checks import Case, check_rotate, check_step
from tests.kernels.exchange_checks import quantized, radius, sparta
from torchtitan_scape.kernels.common import launching


@triton.jit
def doubled_kernel(x, n):
    at = tl.arange(0, 8)
    tl.store(x + at, 2.0 * tl.load(x + at, mask=at < n, other=0.0), mask=at < n)


@pytest.mark.usefixtures("accesses_are_checked")
def test_an_access_outside_of_a_tensor_is_an_error() -> None:
    x = torch.ones(5)
    launching.launch(doubled_kernel, (1,), x, 5, warps=1)
    assert x.tolist() == [2.0] * 5
    with pytest.raises(Exception, match="load of 1 of 6 entries outside of all tensors"):
        launching.launch(doubled_kernel, (1,), x, 6, warps=1)


@pytest.mark.usefixtures("accesses_are_checked")
def test_steps_of_scape() -> None:
    """Short last blocks, aligned and not, with quantization errors and staleness, and a mask of all ones."""
    case = Case((2100, 5, 300), (7,), 64, replicas=3, replica=1, columns=(20, 1, 10), keeps_code_error=True)
    for one in (case, replace(case, offset=1, parameter_offset=1), replace(case, in_use=1.0, previous=0.5)):
        check_step(one)
    check_rotate(replace(case, keeps_code_error=False, replica=None))


@pytest.mark.usefixtures("accesses_are_checked")
def test_exchanges() -> None:
    with torch.no_grad():
        sparta("cpu", "triton", 2, torch.float32, code="1bit", warmup_steps=1, interval=2)
        quantized("cpu", "triton", 2, code="2bit", steps=2)
        radius("cpu", "triton", replicas=2, chunk_entries=1 << 12)
