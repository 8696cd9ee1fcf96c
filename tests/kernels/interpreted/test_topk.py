"""Top-k's passes in Triton's interpreter, bitwise against PyTorch; started like test_interpreted.py."""

import os
from itertools import product

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/kernels/test_triton.py, with TRITON_INTERPRET=1", allow_module_level=True)

from tests.kernels.topk.checks import CASES, check_components, check_mean, check_selection
from tests.marks import covering
from torchtitan_scape.kernels.topk.layout import BlockGrid


@pytest.mark.parametrize(
    ("grid", "k", "code", "ties", "applied"),
    covering(
        (*case, *more)
        for case, more in product(CASES, [("float32", True, True), ("2bit", False, True), ("2bit", True, False)])
    ),
)
def test_selection_equals_pytorch(grid: BlockGrid, k: int, code: str, ties: bool, applied: bool) -> None:
    check_selection(grid, k, code, ties, applied)


@pytest.mark.parametrize(
    ("grid", "k", "code", "over_senders"),
    covering(
        (*case, *more)
        for case, more in product(CASES, [("float32", False), ("2bit", True), ("1bit", True), ("2bit", False)])
    ),
)
def test_the_mean_equals_pytorch(grid: BlockGrid, k: int, code: str, over_senders: bool) -> None:
    check_mean(grid, k, code, over_senders)


COMPONENTS = [(BlockGrid(32, 48, 16, 16), 5), (BlockGrid(12, 10, 6, 5), 4), (BlockGrid(1, 60, 1, 60), 60)]


@pytest.mark.parametrize(
    ("grid", "k", "applied"), covering((*case, applied) for case, applied in product(COMPONENTS, (True, False)))
)
def test_components_equal_those_of_pytorch(grid: BlockGrid, k: int, applied: bool) -> None:
    check_components(grid, k, applied)
