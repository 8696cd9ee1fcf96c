"""TAGC's passes in plain PyTorch: the specification, and what runs on a CPU.

Entries go in blocks of 1024; of a short last block the rest counts as zeros. Bits are packed, entry i in bit i % 8 of
byte i // 8, in whole blocks: uint8 (blocks * 128,).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.common.offload import in_dry_run
from kernels.scape.reference import offsets_to_mask, pack_bits, select_rows, unpack_bits
from kernels.tagc.formats import BLOCK
from kernels.tagc.sketch import Sketch

ROUNDS = 64  # of peeling, at most


def select(x: Tensor, k: int) -> Tensor:
    """Bits of the k largest |x| of each block; ties go to the lower index. x: FP32 (n,)."""
    return offsets_to_mask(select_rows(in_blocks(x), k), BLOCK)


def pack(x: Tensor, index: Tensor, own: Tensor, capacity: int, out: Tensor) -> None:
    """What travels at the places of the index; x is left with what does not. x + what travels is x before, bit by bit.

    Args:
        x: FP32 (n,), written.
        index: bits that all ranks have. At most `capacity` of a block travel, the first ones.
        own: bits of what this rank sends there; the index itself to send all that it has.
        out: FP32 (blocks, capacity), written: a block's values in ascending order of their places, then zeros.
    """
    travels, place = places(index, capacity)
    sent = travels if own is index else travels & unpack_bits(own, travels.numel()).view(travels.shape)
    values = in_blocks(x)
    # One slot more, which takes what stays.
    slots = out.new_zeros(out.shape[0], capacity + 1)
    slots.scatter_(1, torch.where(travels, place, capacity), torch.where(sent, values, 0.0))
    out.copy_(slots[:, :capacity])
    x.copy_(torch.where(sent, 0.0, values).view(-1)[: x.numel()])


def expand(packed: Tensor, index: Tensor, out: Tensor) -> None:
    """out, FP32 (n,): the sum in rank order of what travelled, at its places; zero elsewhere.

    packed: FP32 (ranks, blocks, capacity), as `pack` makes them.
    """
    total = torch.zeros_like(packed[0])
    for values in packed:
        total += values
    travels, place = places(index, packed.shape[2])
    found = torch.where(travels, total.gather(1, place.clamp_(max=packed.shape[2] - 1)), 0.0)
    out.copy_(found.view(-1)[: out.numel()])


def fold(x: Tensor, own: Tensor, sketch: Sketch, out: Tensor) -> None:
    """out, FP32 (rows, 1024): cells of a count sketch of x where `own` is set; added in the order of the blocks.

    x: FP32 (blocks * 1024,).
    """
    values = torch.where(unpack_bits(own, x.numel()), x, 0.0).view(-1, BLOCK)
    out.zero_()
    for block, sign in sketch.each_member():
        out += torch.where(sign != 0, values.index_select(0, block) * sign, 0.0)


def solvable(bits: Tensor, sketch: Sketch) -> Tensor:
    """Bits of what peeling will find of a sketch of the entries whose `bits` are set. It depends on these alone."""
    state = states_of(bits)
    _peel(state, None, None, sketch)
    return pack_bits((state > 1).view(-1))


def unfold(cells: Tensor, bits: Tensor, sketch: Sketch, estimate: bool, out: Tensor) -> None:
    """out, FP32 (blocks * 1024,): what a sketch of the entries whose `bits` are set says of them; zero elsewhere.

    Args:
        cells: FP32 (rows, 1024); consumed.
        estimate: of what peeling leaves over, the median of its three cells; else zero.
    """
    state, found = states_of(bits), out.zero_().view(-1, BLOCK)
    _peel(state, cells, found, sketch)
    if estimate:
        median = estimates(cells, sketch)
        found.copy_(torch.where(state == 1, median, found))


# ------------------------------------------------------------------------------------------------------- parts


def in_blocks(x: Tensor) -> Tensor:
    """(blocks, 1024) of x (n,): a view of it where it can."""
    return pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def places(index: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """bool and int64 (blocks, 1024): which entries travel, and where among their block's."""
    bits = unpack_bits(index, 8 * index.numel()).view(-1, BLOCK)
    place = bits.cumsum(1).sub_(1)
    return bits & (place < capacity), place.clamp_(min=0)


def states_of(bits: Tensor) -> Tensor:
    """uint8 (blocks, 1024): 0 for what is not in the sketch, 1 for what is; later 2 found in this round, 3 before."""
    return unpack_bits(bits, 8 * bits.numel()).view(torch.uint8).view(-1, BLOCK)


def estimates(cells: Tensor, sketch: Sketch) -> Tensor:
    """FP32 (blocks, 1024): the median of the three cells of every entry."""
    a, b, c = (cells.index_select(0, rows) * signs for rows, signs in sketch.each_hash())
    return torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))


def _peel(state: Tensor, cells: Tensor | None, found: Tensor | None, sketch: Sketch) -> None:
    """Rounds of: what is alone in one of its cells is read there, and taken out of all three.

    state: as `states_of`, written. cells: FP32 (rows, 1024), written; None for the order alone. found: FP32
    (blocks, 1024), receives values.
    """
    count = torch.zeros(sketch.rows, BLOCK, dtype=torch.int32, device=state.device)
    for block, sign in sketch.each_member():
        count += (state.index_select(0, block) * sign.abs()).int()
    for _ in range(ROUNDS):
        state.masked_fill_(state == 2, 3)
        left = state == 1
        for rows, signs in sketch.each_hash():
            alone = left & (count.index_select(0, rows) == 1)
            state.masked_fill_(alone, 2)
            left &= ~alone
            if cells is not None and found is not None:
                found.copy_(torch.where(alone, cells.index_select(0, rows) * signs, found))
        if state.is_cpu and not in_dry_run() and not (state == 2).any():
            return
        for block, sign in sketch.each_member():
            taken = (state.index_select(0, block) == 2) & (sign != 0)
            count -= taken.int()
            if cells is not None and found is not None:
                cells -= torch.where(taken, found.index_select(0, block) * sign, 0.0)
