"""Hadamard transform as a Triton kernel, bitwise equal to `rounding.hadamard_`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def hadamard_kernel(x, rows, FACTOR: tl.constexpr, HADAMARD_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Apply `rounding.hadamard_` to rows of HADAMARD_SIZE entries, ROWS per program.

    Each stage stores the sums of neighbors before their differences, so that the entries are in order after five.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = x + row[:, None] * HADAMARD_SIZE + tl.arange(0, HADAMARD_SIZE)[None, :]
    values = tl.load(at, mask=(row < rows)[:, None], other=0.0)
    for _ in tl.static_range(5):
        even, odd = tl.split(tl.reshape(values, (ROWS, HADAMARD_SIZE // 2, 2)))
        values = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, HADAMARD_SIZE))
    tl.store(at, values * FACTOR, mask=(row < rows)[:, None])
