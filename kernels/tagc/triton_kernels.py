"""TAGC's passes as Triton kernels; `reference.py` specifies them, to the last bit.

A program works on ROWS blocks of BLOCK entries, held as [ROWS, BLOCK]. Sums have the order of ranks, or of blocks, and
nothing is added by atomics. States of entries of a sketch are those of `reference.states_of`. Nothing depends on the
width of a warp. `enable_fp_fusion` is off at every launch.

Bytes an entry, of which a share u is in the index: selecting reads 4, packing reads 4 and writes 4 + 4u, expanding
reads 4u a rank and writes 4. A sketch reads each entry three times.
"""

import triton
import triton.language as tl

from kernels.scape.triton_select import choose_in_blocks, to_bytes


@triton.jit
def tile_of(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The program's blocks, int64 [ROWS, 1], and lanes, [1, BLOCK]."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return block, tl.arange(0, BLOCK)[None, :]


@triton.jit
def bits_at(bits, entry, inside):
    """int32: packed bits of these entries; 0 where not `inside`."""
    return (tl.load(bits + (entry >> 3), mask=inside, other=0).to(tl.int32) >> (entry & 7).to(tl.int32)) & 1


@triton.jit(do_not_specialize=["n", "blocks", "k"])
def select_kernel(x, bits, n, blocks, k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Bits of the k largest |x| of each block."""
    block, lane = tile_of(ROWS, BLOCK)
    entry = block * BLOCK + lane
    values = tl.load(x + entry, mask=entry < n, other=0.0)
    # As bits, magnitudes have the order of their numbers. Those of a few NaN have no number after them.
    keys = tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)
    packed = to_bytes(choose_in_blocks(keys, k), ROWS, BLOCK // 8)
    byte = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    tl.store(bits + byte, packed.to(tl.uint8), mask=block < blocks)


@triton.jit(do_not_specialize=["n", "blocks", "capacity"])
def pack_kernel(x, index, own, packed, n, blocks, capacity, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Values at the places of the index to `packed`, zeros after them; they are taken out of x."""
    block, lane = tile_of(ROWS, BLOCK)
    entry = block * BLOCK + lane
    exists = block + tl.zeros_like(lane) < blocks
    bits = bits_at(index, entry, exists)
    place = tl.cumsum(bits, 1) - bits
    travels = (bits != 0) & (place < capacity)
    sent = travels & (bits_at(own, entry, exists) != 0)
    values = tl.load(x + entry, mask=entry < n, other=0.0)
    start = packed + block * capacity
    tl.store(start + place, tl.where(sent, values, 0.0), mask=travels)
    unused = exists & (lane >= tl.sum(bits, 1)[:, None]) & (lane < capacity)
    tl.store(start + lane, tl.zeros_like(values), mask=unused)
    tl.store(x + entry, tl.where(sent, 0.0, values), mask=entry < n)


@triton.jit(do_not_specialize=["n", "blocks", "ranks", "capacity"])
def expand_kernel(packed, index, out, n, blocks, ranks, capacity, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of all ranks' values at the places of the index, in rank order; zero elsewhere."""
    block, lane = tile_of(ROWS, BLOCK)
    entry = block * BLOCK + lane
    bits = bits_at(index, entry, block + tl.zeros_like(lane) < blocks)
    place = tl.cumsum(bits, 1) - bits
    travels = (bits != 0) & (place < capacity)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for rank in range(ranks):
        total += tl.load(packed + (rank * blocks + block) * capacity + place, mask=travels, other=0.0)
    tl.store(out + entry, total, mask=entry < n)


@triton.jit
def member_of(members, row, j, most):
    """A row's j-th block, int64, its sign, FP32, and whether there is one."""
    member = tl.load(members + row * most + j)
    sign = (member > 0).to(tl.float32) - (member < 0).to(tl.float32)
    return tl.maximum(tl.abs(member) - 1, 0).to(tl.int64), sign, member != 0


@triton.jit(do_not_specialize=["most"])
def fold_kernel(x, own, members, cells, most, BLOCK: tl.constexpr):
    """A row of cells: the sum of its blocks' entries whose bit is set, with their signs."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(most):
        block, sign, exists = member_of(members, row, j, most)
        entry = block * BLOCK + lane
        used = tl.where(exists, bits_at(own, entry, entry >= 0), 0) > 0
        total += tl.load(x + entry, mask=used, other=0.0) * sign
    tl.store(cells + row * BLOCK + lane, total)


@triton.jit(do_not_specialize=["most"])
def count_kernel(state, members, counts, most, BLOCK: tl.constexpr):
    """How many entries are in each cell, int32."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for j in range(most):
        block, _, exists = member_of(members, row, j, most)
        there = tl.load(state + block * BLOCK + lane).to(tl.int32)
        total += tl.where(exists, (there == 1).to(tl.int32), 0)
    tl.store(counts + row * BLOCK + lane, total)


@triton.jit(do_not_specialize=["blocks"])
def find_kernel(state, places, signs, counts, cells, found, blocks, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    """Half a round, of a block: its entries that are alone in a cell are read there."""
    block, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    before = tl.load(state + at).to(tl.int32)
    now = tl.where(before == 2, 3, before)
    for seed in tl.static_range(3):
        row = tl.load(places + seed * blocks + block).to(tl.int64)
        alone = (now == 1) & (tl.load(counts + row * BLOCK + lane) == 1)
        now = tl.where(alone, 2, now)
        if VALUES:
            value = tl.load(cells + row * BLOCK + lane, mask=alone, other=0.0) * tl.load(signs + seed * blocks + block)
            tl.store(found + at, value, mask=alone)
    tl.store(state + at, now.to(tl.uint8))


@triton.jit(do_not_specialize=["most"])
def remove_kernel(state, members, counts, cells, found, most, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    """The other half, of a row of cells: what was found is taken out, in the order of the blocks."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = row * BLOCK + lane
    count = tl.load(counts + at)
    cell = tl.zeros((BLOCK,), tl.float32)
    if VALUES:
        cell = tl.load(cells + at)
    for j in range(most):
        block, sign, exists = member_of(members, row, j, most)
        taken = tl.where(exists, tl.load(state + block * BLOCK + lane).to(tl.int32), 0) == 2
        count -= taken.to(tl.int32)
        if VALUES:
            cell -= tl.load(found + block * BLOCK + lane, mask=taken, other=0.0) * sign
    tl.store(counts + at, count)
    if VALUES:
        tl.store(cells + at, cell)
