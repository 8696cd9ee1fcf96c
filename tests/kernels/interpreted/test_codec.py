"""Block codes in Triton's interpreter, bitwise against PyTorch; started like test_interpreted.py."""

import os
from itertools import product

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by tests/kernels/test_triton.py, with TRITON_INTERPRET=1", allow_module_level=True)

from tests.kernels.codec.checks import check_follows, check_sums_and_hadamard_follow
from tests.marks import covering
from torchtitan_scape.kernels.codec.formats import FORMATS

# NumPy warns about sums of the largest numbers.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


SIZES = [
    (32, torch.float32, 2, 66),  # more than one tile
    (32, torch.bfloat16, 3, 5),
    (128, torch.bfloat16, 2, 17),
    (1024, torch.bfloat16, 1, 13),
    (64, torch.float32, 0, 3),
    (64, torch.bfloat16, 2, 0),
]


@pytest.mark.parametrize(
    ("name", "block", "scale", "rows", "blocks"), covering((name, *sizes) for name, sizes in product(FORMATS, SIZES))
)
def test_kernels_equal_pytorch(name: str, block: int, scale: torch.dtype, rows: int, blocks: int) -> None:
    check_follows(name, block, scale, rows, blocks)


@pytest.mark.parametrize(("name", "block", "rows", "blocks"), [("int8", 256, 2, 9), ("int4", 32, 3, 65)])
def test_sums_and_hadamard_equal_pytorch(name: str, block: int, rows: int, blocks: int) -> None:
    check_sums_and_hadamard_follow(name, block, rows, blocks)
