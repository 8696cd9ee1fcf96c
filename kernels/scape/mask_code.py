"""Encoding of masks as in-block offsets (`blocks.OffsetCode`) in plain PyTorch: the specification of the kernels."""

import torch
from torch import Tensor

from torchtitan_scape.kernels.scape.blocks import offset_code
from torchtitan_scape.kernels.scape.reference import pack_bits, set_positions, unpack_bits


def encode_offsets(offsets: Tensor, block_size: int) -> Tensor:
    """Encode in-block offsets, int64 (blocks, k), ascending in every block and possibly repeated.

    Returns:
        uint8 (offset_bytes(blocks, k, block_size),). Bit j of byte i is bit 8 i + j of the code.
    """
    blocks, k = offsets.shape
    code = offset_code(k, block_size)
    bits = torch.zeros(blocks, 8 * code.nbytes, dtype=torch.bool, device=offsets.device)
    if code.unary:
        bits.scatter_(1, (offsets >> code.low) + torch.arange(k, device=offsets.device), True)
    for i in range(code.low):
        bits[:, code.unary + i :: code.low][:, :k] = (offsets >> i) & 1
    return pack_bits(bits.view(-1))


def decode_offsets(coded: Tensor, blocks: int, k: int, block_size: int) -> Tensor:
    """Decode offsets to int64 (blocks, k); the inverse of `encode_offsets`."""
    code = offset_code(k, block_size)
    bits = unpack_bits(coded, 8 * coded.numel()).view(blocks, 8 * code.nbytes)
    offsets = torch.zeros(blocks, k, dtype=torch.int64, device=coded.device)
    if code.unary:
        positions = set_positions(bits[:, : code.unary].reshape(-1), blocks * k).view(blocks, k) % code.unary
        offsets = (positions - torch.arange(k, device=coded.device)) << code.low
    for i in range(code.low):
        offsets |= bits[:, code.unary + i :: code.low][:, :k].long() << i
    return offsets
