"""TAGC passes as Triton kernels, bitwise equal to `reference.py`.

A program processes ROWS blocks of BLOCK entries, as [ROWS, BLOCK]. Sums are in the order of ranks or blocks, without
atomics on floats. States of entries of a sketch are those of `reference.states_of`. No result depends on the warp size.
`enable_fp_fusion` is off at every launch.

Memory traffic per entry, with a fraction u in the index: selection reads 4 bytes; packing reads 4 and writes 4 + 4u;
expansion reads 4u per rank and writes 4. A sketch reads each entry three times.
"""

import triton
import triton.language as tl

from torchtitan_scape.kernels.scape.triton_tiles import select_in_blocks, to_bytes


@triton.jit
def tile_of(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the blocks of this program, int64 [ROWS, 1], and the offsets in a block, [1, BLOCK]."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return block, tl.arange(0, BLOCK)[None, :]


@triton.jit
def bits_at(bits, entry, inside):
    """Return the packed bits of entries, int32; 0 where not `inside`."""
    return (tl.load(bits + (entry >> 3), mask=inside, other=0).to(tl.int32) >> (entry & 7).to(tl.int32)) & 1


@triton.jit(do_not_specialize=["n", "blocks", "k"])
def select_kernel(x, bits, n, blocks, k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the bitmap of the k largest |x| of each block."""
    block, byte = tile_of(ROWS, BLOCK // 8)
    byte += block * (BLOCK // 8)
    entry = byte[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    values = tl.load(x + entry, mask=entry < n, other=0.0)
    # The bits of magnitudes are ordered as the numbers. The largest key is excluded, as the search needs one above all.
    keys = tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)
    packed = to_bytes(select_in_blocks(keys, k))
    tl.store(bits + byte, packed.to(tl.uint8), mask=block < blocks)


@triton.jit(do_not_specialize=["n", "blocks", "capacity"])
def pack_kernel(
    x,
    index,
    own,
    packed,
    rest,
    applied,
    n,
    blocks,
    capacity,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Copy the values at the index from x to `packed`, followed by zeros, and all others to `rest`.

    GATED: write `rest` only if `applied`.
    """
    block, offset = tile_of(ROWS, BLOCK)
    entry = block * BLOCK + offset
    exists = block + tl.zeros_like(offset) < blocks
    bits = bits_at(index, entry, exists)
    position = tl.cumsum(bits, 1) - bits
    valid = (bits != 0) & (position < capacity)
    sent = valid & (bits_at(own, entry, exists) != 0)
    values = tl.load(x + entry, mask=entry < n, other=0.0)
    start = packed + block * capacity
    tl.store(start + position, tl.where(sent, values, 0.0), mask=valid)
    unused = exists & (offset >= tl.sum(bits, 1)[:, None]) & (offset < capacity)
    tl.store(start + offset, tl.zeros_like(values), mask=unused)
    written = entry < n
    if GATED:
        written = entry < tl.where(tl.load(applied) != 0, n, 0)
    tl.store(rest + entry, tl.where(sent, 0.0, values), mask=written)


@triton.jit(do_not_specialize=["n", "blocks", "ranks", "capacity"])
def expand_kernel(packed, index, out, n, blocks, ranks, capacity, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sum of all ranks' values at the index, in rank order; zero elsewhere."""
    block, offset = tile_of(ROWS, BLOCK)
    entry = block * BLOCK + offset
    bits = bits_at(index, entry, block + tl.zeros_like(offset) < blocks)
    position = tl.cumsum(bits, 1) - bits
    valid = (bits != 0) & (position < capacity)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for rank in range(ranks):
        total += tl.load(packed + (rank * blocks + block) * capacity + position, mask=valid, other=0.0)
    tl.store(out + entry, total, mask=entry < n)


@triton.jit
def member_of(members, row, j, most):
    """Return the j-th block of a row, int64, its sign, FP32, and whether it exists."""
    member = tl.load(members + row * most + j)
    sign = (member > 0).to(tl.float32) - (member < 0).to(tl.float32)
    return tl.maximum(tl.abs(member) - 1, 0).to(tl.int64), sign, member != 0


@triton.jit(do_not_specialize=["most"])
def fold_kernel(x, own, members, cells, most, BLOCK: tl.constexpr):
    """Compute one row of cells: the signed sum of its blocks' entries whose bits are set."""
    row, offset = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(most):
        block, sign, exists = member_of(members, row, j, most)
        entry = block * BLOCK + offset
        used = tl.where(exists, bits_at(own, entry, entry >= 0), 0) > 0
        total += tl.load(x + entry, mask=used, other=0.0) * sign
    tl.store(cells + row * BLOCK + offset, total)


@triton.jit(do_not_specialize=["most"])
def count_kernel(state, members, counts, most, BLOCK: tl.constexpr):
    """Count the entries in each cell, int32."""
    row, offset = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for j in range(most):
        block, _, exists = member_of(members, row, j, most)
        current = tl.load(state + block * BLOCK + offset).to(tl.int32)
        total += tl.where(exists, (current == 1).to(tl.int32), 0)
    tl.store(counts + row * BLOCK + offset, total)


@triton.jit(do_not_specialize=["blocks"])
def find_kernel(state, block_rows, signs, counts, cells, found, blocks, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    """First half of a round of peeling, for one block: read the entries that are alone in a cell."""
    block, offset = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = block * BLOCK + offset
    before = tl.load(state + at).to(tl.int32)
    now = tl.where(before == 2, 3, before)
    for seed in tl.static_range(3):
        row = tl.load(block_rows + seed * blocks + block).to(tl.int64)
        alone = (now == 1) & (tl.load(counts + row * BLOCK + offset) == 1)
        now = tl.where(alone, 2, now)
        if VALUES:
            sign = tl.load(signs + seed * blocks + block)
            value = tl.load(cells + row * BLOCK + offset, mask=alone, other=0.0) * sign
            tl.store(found + at, value, mask=alone)
    tl.store(state + at, now.to(tl.uint8))


@triton.jit(do_not_specialize=["most"])
def remove_kernel(state, members, counts, cells, found, most, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    """Second half of a round of peeling, for one row of cells: subtract recovered entries, in block order."""
    row, offset = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = row * BLOCK + offset
    count = tl.load(counts + at)
    cell = tl.zeros((BLOCK,), tl.float32)
    if VALUES:
        cell = tl.load(cells + at)
    for j in range(most):
        block, sign, exists = member_of(members, row, j, most)
        removed = tl.where(exists, tl.load(state + block * BLOCK + offset).to(tl.int32), 0) == 2
        count -= removed.to(tl.int32)
        if VALUES:
            cell -= tl.load(found + block * BLOCK + offset, mask=removed, other=0.0) * sign
    tl.store(counts + at, count)
    if VALUES:
        tl.store(cells + at, cell)
