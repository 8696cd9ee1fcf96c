"""What the Triton kernels share: the pointer table, tiles, and the bits of a mask.

A launch covers many tensors. Program i works on tile i of a list, three int32 a tile: tensor, first block, blocks.
A tile is ROWS blocks of BLOCK entries of one tensor, held as [ROWS, BYTES, 8]: the last axis runs over the bits of a
mask's byte, and BYTES is the next power of two of BLOCK / 8. Where the entries lie stands in the table, a row of int64
a tensor. EASY tiles are whole and their storage is 16-byte aligned, so that loads are wide; all others go in a launch
of their own.

The entries of a mask are visited bit by bit (`lowest`), so that work on the payload is done by few lanes and not by
all. Nothing depends on the width of a warp. `enable_fp_fusion` is off at every launch: a multiplication and an
addition round twice, as they do in PyTorch.
"""

import triton
import triton.language as tl

# Columns of the pointer table, int64.
GRADIENT = tl.constexpr(0)  # address
PARAMETER = tl.constexpr(1)  # address
STATE = tl.constexpr(2)  # address
SIZE = tl.constexpr(3)  # entries
FIRST_BLOCK = tl.constexpr(4)  # in the masks; -1 for a tensor that is exchanged whole
PAYLOAD = tl.constexpr(5)  # position of its first entry in the payload
PER_BLOCK = tl.constexpr(6)  # entries of a full block in the payload
OUTSIDE = tl.constexpr(7)  # entries outside the mask in use
ROW = tl.constexpr(8)  # entries of a row
VISITED_ROWS = tl.constexpr(9)  # position of its first row in the rates of visits
VISITED_COLUMNS = tl.constexpr(10)  # and of its first column
START = tl.constexpr(11)  # its first entry in the tensor that it is a piece of
COMMON = tl.constexpr(12)  # address, of pieces that this replica owns
MASTER = tl.constexpr(13)  # address, likewise
WIDTH = tl.constexpr(14)


def table_row(*values: int) -> tuple[int, ...]:
    """A row of the pointer table; columns that the caller's kernels do not read are left out at the end."""
    return *values, *(0,) * (WIDTH.value - len(values))


# Columns of the rates, FP32.
BETA1 = tl.constexpr(0)
GRADIENT_RATE = tl.constexpr(1)  # (1 - beta1) * scale
ONE_MINUS_BETA1 = tl.constexpr(2)
BETA2 = tl.constexpr(3)
ONE_MINUS_BETA2 = tl.constexpr(4)
EPS = tl.constexpr(5)
LR = tl.constexpr(6)
DECAY = tl.constexpr(7)  # lr * weight_decay
COUNTED = tl.constexpr(8)  # 1 where the tensor counts in the norm, else 0
RATES = tl.constexpr(9)


@triton.jit
def cell(table, tensor, COLUMN: tl.constexpr):
    return tl.load(table + tensor * WIDTH + COLUMN)


@triton.jit
def rate(rates, tensor, COLUMN: tl.constexpr):
    return tl.load(rates + tensor * RATES + COLUMN)


@triton.jit
def pointer(table, tensor, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED_TILE: tl.constexpr):
    address = tl.load(table + tensor * WIDTH + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED_TILE:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def tile_of(tiles, table, BLOCK: tl.constexpr):
    """Tensor, first block in it, first entry (int64), and entries of this program's tile."""
    at = tiles + 3 * tl.program_id(0)
    tensor = tl.load(at)
    row = tl.load(at + 1)
    first = row.to(tl.int64) * BLOCK
    last = tl.minimum((row + tl.load(at + 2)).to(tl.int64) * BLOCK, cell(table, tensor, SIZE))
    return tensor, row, first, (last - first).to(tl.int32)


@triton.jit
def entries(left, ROWS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr, ALIGNED_TILE: tl.constexpr):
    """Numbers of the tile's entries, int32 [ROWS, BYTES, 8], and which of them exist."""
    byte = tl.arange(0, BYTES)[None, :, None]
    local = tl.arange(0, ROWS)[:, None, None] * BLOCK + byte * 8 + tl.arange(0, 8)[None, None, :]
    inside = (byte < BLOCK // 8) & (local >= 0)
    if not ALIGNED_TILE:
        inside = inside & (local < left)
    return local, inside


@triton.jit
def mask_bytes(mask, block, left, masked, ROWS: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """The tile's bytes of a packed mask, int32 [ROWS, BYTES]; all ones unless `masked`, 0 where no entry is."""
    line = tl.arange(0, ROWS)[:, None]
    byte = tl.arange(0, BYTES)[None, :]
    first = line * BLOCK + byte * 8
    inside = (byte < BLOCK // 8) & (first < left)
    at = mask + block.to(tl.int64) * (BLOCK // 8) + line * (BLOCK // 8) + byte
    bits = tl.load(at, mask=inside & (first < tl.where(masked, left, 0)), other=255).to(tl.int32)
    exist = tl.minimum(tl.maximum(left - first, 0), 8)
    return tl.where(inside, bits & ((1 << exist) - 1), 0)


@triton.jit
def spread(bits):
    """bool [ROWS, BYTES, 8] from bytes, int32 [ROWS, BYTES]."""
    return ((bits[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1) != 0


@triton.jit
def count_bits(bits):
    """Set bits of each byte."""
    bits = bits - ((bits >> 1) & 0x55)
    bits = (bits & 0x33) + ((bits >> 2) & 0x33)
    return (bits + (bits >> 4)) & 0x0F


@triton.jit
def lowest(bits):
    """Number of the lowest set bit of each byte; 0 for none."""
    low = bits & -bits
    return (
        ((low & 0xAA) != 0).to(tl.int32) + ((low & 0xCC) != 0).to(tl.int32) * 2 + ((low & 0xF0) != 0).to(tl.int32) * 4
    )


@triton.jit
def payload_places(table, tensor, row, used, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Where the tile's entries begin in the payload, int64 (), and from there those of each byte, int32 [ROWS, BYTES].

    Every block sends PER_BLOCK entries.
    """
    per_block = cell(table, tensor, PER_BLOCK)
    base = cell(table, tensor, PAYLOAD) + row * per_block
    before = tl.arange(0, ROWS)[:, None] * per_block.to(tl.int32)
    counts = count_bits(used)
    return base, before + (tl.cumsum(counts, 1) - counts)


@triton.jit
def adams(
    before,
    gradient,
    clipped,
    beta1,
    gradient_rate,
    beta2,
    square_rate,
    eps,
    unbias1,
    unbias2,
    CLIP_MOMENT: tl.constexpr,
):
    """AdamS: the new moment, and the step without the learning rate, from last step's moment and the gradient.

    unbias1, unbias2: 1 / (1 - beta^t) of both moments. `clipped` is what the second moment sees.
    """
    second = before * before * beta2 + clipped * clipped * square_rate
    if CLIP_MOMENT:
        gradient = clipped
    moment = before * beta1 + gradient * gradient_rate
    return moment, moment * unbias1 / (tl.sqrt_rn(second * unbias2) + eps)
