"""The functions of `reference.py` on Triton kernels, one launch each. None synchronizes with the device."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.codec import triton_kernels
from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.kernels.codec.formats import HADAMARD_SIZE
from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import aligned

_TILE = 2048  # entries of a tile; at least one block


def encode(code: BlockCode, x: Tensor, error: Tensor | None) -> Tensor:
    """Encode as `reference.encode`; tensors are contiguous."""
    assert x.is_contiguous() and (error is None or error.is_contiguous())
    rows, m = x.shape
    messages = torch.empty(rows, code.message_bytes(m), dtype=torch.uint8, device=x.device)
    tensors = x, messages, x if error is None else error
    sizes = m // code.block_size, messages.shape[1] // 16
    _launch(code, triton_kernels.encode_kernel, rows, tensors, sizes, HAS_ERROR=error is not None)
    return messages


def decode(code: BlockCode, messages: Tensor, out: Tensor) -> None:
    """Decode as `reference.decode`; tensors are contiguous."""
    assert out.is_contiguous()
    rows, m = out.shape
    sizes = m // code.block_size, messages.shape[1] // 16
    _launch(code, triton_kernels.decode_kernel, rows, (aligned_bytes(messages), out), sizes)


def decode_and_sum(code: BlockCode, messages: Tensor, out: Tensor) -> None:
    """Sum as `reference.decode_and_sum`; tensors are contiguous. Decoded messages are never stored."""
    assert out.is_contiguous()
    rows, sums, size = messages.shape if messages.ndim > 2 else (len(messages), 1, messages.shape[1])
    sizes = rows, sums, out.numel() // sums // code.block_size, size // 16
    _launch(code, triton_kernels.decode_and_sum_kernel, sums, (aligned_bytes(messages), out), sizes)


def encode_mean(
    code: BlockCode, messages: Tensor, count: int, divisor: float, error: Tensor | None, adds_error: bool
) -> Tensor:
    """Encode as `reference.encode_mean`, in one launch that stores no decoded values."""
    assert error is None or error.is_contiguous()
    rows, size = messages.shape
    out = torch.empty(1, size, dtype=torch.uint8, device=messages.device)
    tensors = aligned_bytes(messages), out, out if error is None else error
    flags = dict(HAS_ERROR=error is not None, ADDS_ERROR=adds_error and error is not None)
    sizes = divisor, rows, count // code.block_size, size // 16
    _launch(code, triton_kernels.encode_mean_kernel, 1, tensors, sizes, **flags)
    return out


def hadamard_(x: Tensor) -> None:
    """Transform as `reference.hadamard_`; the tensor is contiguous."""
    rows, per_tile = x.numel() // HADAMARD_SIZE, _TILE // HADAMARD_SIZE
    grid, factor = (-(-rows // per_tile),), float(torch.tensor(HADAMARD_SIZE**-0.5, dtype=torch.float32, device="cpu"))
    launching.launch(
        triton_kernels.hadamard_kernel,
        grid,
        x,
        rows,
        warps=4,
        FACTOR=factor,
        HADAMARD_SIZE=HADAMARD_SIZE,
        ROWS=per_tile,
    )


def aligned_bytes(messages: Tensor) -> Tensor:
    """Return contiguous messages at a multiple of 16 bytes, a copy if necessary. Kernels access them as words."""
    messages = messages.contiguous()
    # An empty tensor has no address.
    return messages if aligned(messages) and messages.storage_offset() % 4 == 0 else messages.clone()


def scale_type(scale: torch.dtype) -> Any:
    """Return the constant SCALE of the kernels."""
    return tl.int16 if scale == torch.bfloat16 else tl.int32


def _launch(
    code: BlockCode, kernel: Any, rows: int, tensors: Sequence[Tensor], sizes: Sequence[float], **constants: bool
) -> None:
    """Launch one program per tile and row. sizes[-2]: blocks of a row."""
    per_tile = _TILE // code.block_size
    launching.launch(
        kernel,
        (rows * -(-int(sizes[-2]) // per_tile),),
        *tensors,
        *sizes,
        warps=4,
        FORM=code.name,
        SCALE=scale_type(code.scale),
        BLOCK=code.block_size,
        ROWS=per_tile,
        **constants,
    )
