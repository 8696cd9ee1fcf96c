"""The functions of `reference.py` on Triton kernels, each one launch. Nothing here waits for the device."""

from typing import Any

import torch
from torch import Tensor

from kernels.codec import triton_kernels
from kernels.codec.formats import FORMATS, TURN, message_bytes
from kernels.common import launching
from kernels.common.launching import aligned

_TILE = 2048  # entries of a tile, and no fewer than a block has


def encode(
    x: Tensor, name: str, block: int, scale: torch.dtype, error: Tensor | None, key: int | None = None
) -> Tensor:
    """As `reference.encode`, of contiguous tensors."""
    assert x.is_contiguous() and (error is None or error.is_contiguous())
    rows, m = x.shape
    messages = torch.empty(rows, message_bytes(name, m, block, scale.itemsize), dtype=torch.uint8, device=x.device)
    _launch(
        triton_kernels.encode_kernel,
        rows,
        (x, *_parts(messages, scale), x if error is None else error),
        (m // block, messages.shape[1] // 16),
        name,
        block,
        (1 << 62 if key is None else key,),
        warps=4,
        LARGEST=FORMATS[name].largest,
        HAS_ERROR=error is not None,
        STOCHASTIC=key is not None,
    )
    return messages


def decode(messages: Tensor, name: str, block: int, scale: torch.dtype, out: Tensor) -> None:
    """As `reference.decode`, of contiguous tensors."""
    assert out.is_contiguous()
    rows, m = out.shape
    sizes = m // block, messages.shape[1] // 16
    _launch(triton_kernels.decode_kernel, rows, (*_parts(messages, scale), out), sizes, name, block)


def decode_and_sum(messages: Tensor, name: str, block: int, scale: torch.dtype, out: Tensor) -> None:
    """As `reference.decode_and_sum`, of contiguous tensors; no message is decoded into memory."""
    assert out.is_contiguous()
    rows, size = messages.shape
    sizes = rows, out.numel() // block, size // 16
    _launch(triton_kernels.add_up_kernel, 1, (*_parts(messages, scale), out), sizes, name, block)


def hadamard_(x: Tensor) -> None:
    """As `reference.hadamard_`, of a contiguous tensor."""
    turns, rows = x.numel() // TURN, _TILE // TURN
    grid, factor = (-(-turns // rows),), float(torch.tensor(TURN**-0.5, dtype=torch.float32))
    launching.launch(triton_kernels.turn_kernel, grid, x, turns, warps=4, FACTOR=factor, TURN=TURN, ROWS=rows)


def _parts(messages: Tensor, scale: torch.dtype) -> tuple[Tensor, Tensor]:
    """The messages in words, int32, and in scales, int16 or int32."""
    flat = messages.reshape(-1)
    if not aligned(flat) or flat.storage_offset() % 4 > 0:  # what is empty has no address
        flat = flat.clone()
    return flat.view(torch.int32), flat.view(torch.int16 if scale == torch.bfloat16 else torch.int32)


def _launch(
    kernel: Any,
    rows: int,
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    name: str,
    block: int,
    more: tuple[int, ...] = (),
    warps: int | None = None,
    **constants: Any,
) -> None:
    """A program for every tile of every row; sizes[-2] are the blocks of a row. more: numbers after the sizes."""
    form, per_tile = FORMATS[name], _TILE // block
    launching.launch(
        kernel,
        (rows * -(-sizes[-2] // per_tile),),
        *tensors,
        *sizes,
        *more,
        warps=warps or min(4, _TILE * form.bits // 1024),  # no thread without a word
        FORM=name,
        BITS=form.bits,
        SCALES=form.scales,
        BLOCK=block,
        ROWS=per_tile,
        **constants,
    )
