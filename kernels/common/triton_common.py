"""Shared parts of the Triton kernels: pointer table, tiles, bits of a mask, and the AdamS update.

A launch covers many tensors. Program i processes tile i of a list with four int32 per tile: tensor, first block,
number of blocks, and the first block among those of all tensors. A tile has ROWS blocks of BLOCK entries of one tensor,
as [ROWS, UNITS, WIDTH], with parts of WIDTH entries: with WIDTH = 8 a part has the bits of a mask's byte, with
WIDTH = 4 it is the 16 bytes that a thread loads at once, so that threads exchange nothing. UNITS is BLOCK / WIDTH,
rounded up to a power of two; SHAPE is (ROWS, UNITS, WIDTH, BLOCK). The pointer table has one row of int64 per tensor
with the addresses of its data. With ALIGNED_TILE the tile is complete and its storage is aligned to 16 bytes, so that
loads are wide; all other tiles use a separate launch.

No result depends on the warp size. `enable_fp_fusion` is off at every launch: a multiplication and an addition are
rounded separately, as in PyTorch.
"""

import triton
import triton.language as tl

# Columns of the pointer table, int64.
GRADIENT = tl.constexpr(0)  # address
PARAMETER = tl.constexpr(1)  # address
STATE = tl.constexpr(2)  # address
SIZE = tl.constexpr(3)  # entries
FIRST_BLOCK = tl.constexpr(4)  # in the masks; -1 for a tensor that is not sparsified
PAYLOAD = tl.constexpr(5)  # position of its first entry in the payload
PER_BLOCK = tl.constexpr(6)  # entries of a full block in the payload
OUTSIDE = tl.constexpr(7)  # entries outside the current mask
ROW = tl.constexpr(8)  # entries of a row
VISITED_ROWS = tl.constexpr(9)  # position of its first row in the visit rates
VISITED_COLUMNS = tl.constexpr(10)  # position of its first column
START = tl.constexpr(11)  # its first entry in the whole tensor, for a slice of a tensor
COMMON = tl.constexpr(12)  # address of the common buffer, for slices that this replica owns
MASTER = tl.constexpr(13)  # address of the master weights, likewise
WHOLE = tl.constexpr(14)  # number of the whole tensor, likewise
WIDTH = tl.constexpr(15)


def table_row(*values: int) -> tuple[int, ...]:
    """Return a row of the pointer table. Trailing columns that the caller's kernels do not read may be omitted."""
    return *values, *(0,) * (WIDTH.value - len(values))


# Columns of the table of hyper-parameters, FP32.
BETA1 = tl.constexpr(0)
GRADIENT_RATE = tl.constexpr(1)  # (1 - beta1) * scale
ONE_MINUS_BETA1 = tl.constexpr(2)
BETA2 = tl.constexpr(3)
ONE_MINUS_BETA2 = tl.constexpr(4)
EPS = tl.constexpr(5)
LR = tl.constexpr(6)
DECAY = tl.constexpr(7)  # lr * weight_decay
COUNTED = tl.constexpr(8)  # 1 if the tensor is part of the gradient norm, else 0
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
    """Return tensor, first block, first entry (int64) and number of entries of this program's tile."""
    at = tiles + 4 * tl.program_id(0)
    tensor = tl.load(at)
    row = tl.load(at + 1)
    first = row.to(tl.int64) * BLOCK
    last = tl.minimum((row + tl.load(at + 2)).to(tl.int64) * BLOCK, cell(table, tensor, SIZE))
    return tensor, row, first, (last - first).to(tl.int32)


@triton.jit
def entries_of_units(left, SHAPE: tl.constexpr, ALIGNED_TILE: tl.constexpr):
    """Return the indices of the tile's entries, int32 [ROWS, UNITS, WIDTH], and a mask of those that exist."""
    WIDTH: tl.constexpr = SHAPE[2]
    BLOCK: tl.constexpr = SHAPE[3]
    unit = tl.arange(0, SHAPE[1])[None, :, None]
    local = tl.arange(0, SHAPE[0])[:, None, None] * BLOCK + unit * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    inside = (unit < BLOCK // WIDTH) & (local >= 0)
    if not ALIGNED_TILE:
        inside = inside & (local < left)
    return local, inside


@triton.jit
def bits_of_units(mask, block, left, masked, SHAPE: tl.constexpr):
    """Load the bits of a packed mask, int32 [ROWS, UNITS]: all ones unless `masked`; 0 beyond the tensor.

    An exclusive or with zero at run time gives each thread one unit.
    """
    WIDTH: tl.constexpr = SHAPE[2]
    BLOCK: tl.constexpr = SHAPE[3]
    unit = tl.arange(0, SHAPE[1])[None, :] ^ tl.minimum(left, 0)
    row = tl.arange(0, SHAPE[0])[:, None]
    first = row * BLOCK + unit * WIDTH
    inside = (unit < BLOCK // WIDTH) & (first < left)
    at = mask + (block + row).to(tl.int64) * (BLOCK // 8) + unit * WIDTH // 8
    bits = tl.load(at, mask=inside & (first < tl.where(masked, left, 0)), other=255).to(tl.int32)
    bits = bits >> (unit * WIDTH % 8)
    exist = tl.minimum(tl.maximum(left - first, 0), WIDTH)
    return tl.where(inside, bits & ((1 << exist) - 1), 0)


@triton.jit
def spread_units(bits, WIDTH: tl.constexpr):
    """Unpack the bits of units to bool [ROWS, UNITS, WIDTH]."""
    return ((bits[:, :, None] >> tl.arange(0, WIDTH)[None, None, :]) & 1) != 0


@triton.jit
def count_bits(bits):
    """Return the number of set bits of each byte."""
    bits = bits - ((bits >> 1) & 0x55)
    bits = (bits & 0x33) + ((bits >> 2) & 0x33)
    return (bits + (bits >> 4)) & 0x0F


@triton.jit
def lowest(bits):
    """Return the index of the lowest set bit of each byte; 0 if no bit is set."""
    low = bits & -bits
    return (
        ((low & 0xAA) != 0).to(tl.int32) + ((low & 0xCC) != 0).to(tl.int32) * 2 + ((low & 0xF0) != 0).to(tl.int32) * 4
    )


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
    """Compute AdamS: the new first moment, and the update without the learning rate.

    before: first moment of the last step. clipped: clipped gradient, for the second moment, and with CLIP_MOMENT for
    the first one. unbias1, unbias2: 1 / (1 - beta^t) of both moments.
    """
    second = before * before * beta2 + clipped * clipped * square_rate
    if CLIP_MOMENT:
        gradient = clipped
    moment = before * beta1 + gradient * gradient_rate
    return moment, moment * unbias1 / (tl.sqrt_rn(second * unbias2) + eps)
