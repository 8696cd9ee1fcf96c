"""TAGC's passes in Triton's interpreter, bitwise against PyTorch; started like test_interpreted.py."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/kernels/test_triton.py, with TRITON_INTERPRET=1", allow_module_level=True)

from tests.kernels.tagc.checks import check_offsets, check_packed


@pytest.mark.parametrize(("n", "k", "ties"), [(5 * 1024 + 77, 13, False), (2048, 300, True), (3, 1, False)])
def test_packing_equals_pytorch(n: int, k: int, ties: bool) -> None:
    check_packed(n, k, ties)


@pytest.mark.parametrize(("blocks", "k", "ranks"), [(7, 102, 3), (3, 13, 5), (1, 600, 2)])
def test_offsets_equal_pytorch(blocks: int, k: int, ranks: int) -> None:
    check_offsets(blocks, k, ranks)
