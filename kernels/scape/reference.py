"""The passes of a SCAPE step in plain PyTorch: the specification, and the CPU implementation.

Every function processes the flattened local shard of one tensor. Letters follow Algorithm 1 of the SCAPE paper: m is
the first moment, mt the replica's new moment with its residual (error feedback) added, A the current mask, and P the
mask of the previous step.

Masks are packed bits, entry i in bit i % 8 of byte i // 8; `None` stands for a mask with all bits set. Shards are
padded to whole blocks, so a mask may be longer than the n entries of a shard; the excess bits are not read.

One buffer `state` holds m on A and the residual off A. Their supports are disjoint after every step, so one buffer
suffices, and SCAPE needs no more state than AdamS.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from torchtitan_scape.kernels.common.tensors import divisor_of, gated, known_false
from torchtitan_scape.kernels.scape.blocks import offset_code

# Decay rate of the exponential moving average over steps; the time constant is five steps.
SMOOTHING = 0.8
# Lower limit of the estimated rate of an entry, relative to the mean of its tensor.
MIN_VISIT_RATE = 1e-3
# Upper limit of the estimated steps outside the mask, by which the step of an entering entry is multiplied.
MAX_STALENESS = 1000.0
# Factor on the moment of an entering entry after its scaled step. At the target density such an entry is also excluded
# from the next mask if enough other entries exist: its large mt is consumed by this step.
KEPT_MOMENT = 0.5


# --------------------------------------------------------------------------------------------- mask codec


def pack_bits(bits: Tensor) -> Tensor:
    """Pack bool (8*b,) into uint8 (b,)."""
    # The product moves bit 0 of byte i of a word to bit 56 + i, for every i, without carries.
    words = bits.view(torch.uint8).view(torch.int64)
    return ((words * 0x0102040810204080) >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Unpack the first `count` bits of uint8 (b,) into bool (count,)."""
    # Eight copies of each byte; copy i keeps only bit i. On a CPU, clamping is several times faster than `!= 0`.
    words = packed.to(torch.int64) * 0x0101010101010101
    words &= 0x8040201008040201 - (1 << 64)  # as a signed number
    return words.view(torch.uint8).clamp_(max=1).view(torch.bool)[:count]


def mask_indices(mask: Tensor, count: int, nnz: int) -> Tensor:
    """Return the ascending int64 positions (nnz,) of the set bits among the first `count`.

    The host computes `nnz` from the layout, so that no synchronization with the device is needed.
    """
    return set_positions(unpack_bits(mask, count), nnz)


def set_positions(bits: Tensor, nnz: int) -> Tensor:
    """Return the ascending int64 positions (nnz,) of the true entries of bool (n,)."""
    if bits.is_cpu:  # nonzero_static is several times slower there, and a CPU needs no synchronization
        return bits.nonzero().view(-1)
    return torch.nonzero_static(bits, size=nnz).view(-1)


def offsets_to_mask(offsets: Tensor, block_size: int, count: int | None = None) -> Tensor:
    """Return the packed mask of whole blocks, uint8 (blocks * block_size / 8,), of in-block offsets (blocks, k).

    Repeated offsets set the same bit. With `count`, bits after the first `count` are zero.
    """
    bits = torch.zeros(offsets.shape[0], block_size, dtype=torch.bool, device=offsets.device)
    bits = bits.scatter_(1, offsets, True).view(-1)
    if count is not None:
        bits[count:] = False
    return pack_bits(bits)


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


# ---------------------------------------------------------------------------------------------- selection


def select_blocks(values: Tensor, k: int, block_size: int) -> Tensor:
    """Return the in-block offsets of the k largest |values| of each block; ties go to the lower index.

    Args:
        values: FP32 (n,), finite. The last block may be short; missing entries are never selected.
        k: Entries per block, 1 <= k <= block_size.

    Returns:
        int64 (ceil(n / block_size), k), ascending and distinct. A block with fewer than k entries selects all of them
        and the next positions, which are after the end of the tensor, so that the shape is static.
    """
    n = values.numel()
    padded = torch.nn.functional.pad(values, (0, -n % block_size)).view(-1, block_size)
    real = (torch.arange(padded.numel(), device=values.device) < n).view(padded.shape) if n % block_size else None
    return select_rows(padded, k, real)


def select_largest(values: Tensor, k: int) -> Tensor:
    """Return bool (n,): true for the k largest |values| of FP32 (n,); ties go to the lower index, NaN is the largest.

    This uses less than half of the memory of the keys of `select_rows`, 28 bytes per entry, for a whole tensor.
    """
    magnitudes = values.abs().view(torch.int32)  # the bits have the same order
    threshold = magnitudes.topk(k, sorted=False).values.min()
    above, equal = magnitudes > threshold, magnitudes == threshold
    return above | (equal & (equal.cumsum(0, dtype=torch.int32) <= k - above.sum()))


def select_rows(values: Tensor, k: int, real: Tensor | None = None) -> Tensor:
    """Return the ascending int64 indices (rows, k) of the k largest |values| of each row; ties go to the lower index.

    Args:
        values: FP32 (rows, length), finite; k is at most the length.
        real: bool (rows, length), false for padding, which is selected only in rows with fewer than k real entries.
            None if all entries are real.
    """
    # The bits of non-negative floats are ordered as integers; the low half of a key breaks ties.
    position = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    keys = (values.abs().view(torch.int32).long() << 32) | position
    if real is not None:
        keys = torch.where(real, keys, keys - (1 << 62))  # below all real entries, in the same order
    return keys.topk(k, dim=1, sorted=False).indices.sort(dim=1).values


# --------------------------------------------------------------------------------------- the step's passes


def carry_(gradient: Tensor, indices: Tensor | None, errors: Tensor, beta1: float, scale: float) -> None:
    """Add g += errors / ((1 - beta1) * scale) on P, so that the new moment contains the errors with weight 1.

    The errors are the quantization errors of the last payload.

    Args:
        gradient: FP32 (n,), written.
        indices: Positions of P, int64 (nnz(P),); None for all.
        errors: FP32 (nnz(P),), in units of mt.
    """
    added = errors / divisor_of(errors, (1.0 - beta1) * scale)
    if indices is None:
        gradient.add_(added)
    else:
        gradient.index_add_(0, indices, added)


def retained(state: Tensor, previous: Tensor | None, beta1: float) -> Tensor:
    """Return the part of mt that a state contains: beta1 * m on P, the residual off P. previous: packed P."""
    if previous is None:
        return state * beta1
    return torch.where(unpack_bits(previous, state.numel()), state * beta1, state)


def new_moment_(gradient: Tensor, state: Tensor, previous: Tensor | None, beta1: float, scale: float) -> None:
    """Write mt = where(P, beta1 * m, residual) + (1 - beta1) * scale * g to `gradient`, FP32 (n,)."""
    gradient.mul_((1.0 - beta1) * scale).add_(retained(state, previous, beta1))


def pack_(
    moment: Tensor,
    state: Tensor,
    indices: Tensor | None,
    previous: Tensor | None,
    payload: Tensor,
    last: Tensor | None,
    applied: Tensor,
) -> None:
    """Set payload = mt on A, and state = mt off A (the residual) and m of the last step on A (0 for new entries).

    Args:
        moment: mt, FP32 (n,).
        state: FP32 (n,), written if `applied`.
        indices: Positions of A, int64 (nnz(A),); None for all.
        previous: Packed P.
        payload: FP32 (nnz(A),); may be the first nnz(A) entries of `moment`.
        last: FP32 (nnz(A),), also receives m of the last step on A; or None.
        applied: bool (), false if a gradient of any rank is not finite; payload and last are then undefined.
    """
    if known_false(applied):
        return
    old = state if indices is None else state.index_select(0, indices)
    kept = old
    if previous is not None:
        held = unpack_bits(previous, state.numel())
        kept = torch.where(held if indices is None else held.index_select(0, indices), old, 0.0)
    if last is not None:
        last.copy_(kept)
    if indices is None:
        state.copy_(gated(applied, kept, old))
        values = moment
    else:
        state.copy_(gated(applied, moment, state))
        state.scatter_(0, indices, gated(applied, kept, old))
        values = moment.index_select(0, indices)
    if payload.data_ptr() != values.data_ptr():
        payload.copy_(values)


def synchronized_gradient_(payload: Tensor, last_moment: Tensor, beta1: float) -> None:
    """Replace the averaged payload b by gh = (b - beta1 * q) / (1 - beta1); q is m of the last step on A."""
    payload.sub_(last_moment, alpha=beta1).div_(1.0 - beta1)


def entering(indices: Tensor, previous: Tensor, n: int) -> Tensor:
    """Return bool (nnz(A),): true for the positions of A that are not in P."""
    return ~unpack_bits(previous, n).index_select(0, indices)


def staleness(indices: Tensor, outside: int, fresh: Tensor, relative: tuple[Tensor, Tensor]) -> Tensor:
    """Estimate for each entry of A the number of steps that it was outside the mask, if it entered now. Returns FP32.

    Args:
        indices: Positions in the tensor, int64.
        outside: Number of entries of the tensor that are not in A.
        fresh: int64 (), number of newly entered entries of A.
        relative: Rates at which rows and columns enter the mask, FP32 (rows,) and (columns,), relative to their mean
            (`VisitRates`). The staleness is lower for rows and columns that enter more often.
    """
    mean = (outside / fresh.float()).clamp(1.0, MAX_STALENESS)  # Little's law
    rows, columns = relative
    width = max(1, columns.numel())
    rate = rows.index_select(0, indices // width) * columns.index_select(0, indices % width)
    return (mean / rate.clamp(min=MIN_VISIT_RATE)).clamp(1.0, MAX_STALENESS)


def scaled(step: Tensor, moment: Tensor, fresh: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return step and moment; where `fresh`, the step is multiplied by `factor` and the moment by `KEPT_MOMENT`."""
    return torch.where(fresh, step * factor, step), torch.where(fresh, moment * KEPT_MOMENT, moment)


def write_(parameter: Tensor, indices: Tensor | None, values: Tensor, applied: Tensor) -> None:
    """Set parameter = values on A, if `applied`. FP32 (n,); indices: int64 (nnz(A),) or None for all."""
    if known_false(applied):
        return
    if indices is None:
        parameter.copy_(gated(applied, values, parameter))
    else:
        parameter.scatter_(0, indices, gated(applied, values, parameter.index_select(0, indices)))


# ------------------------------------------------------------------------------------------ sharded update

# Algorithm 2 of the paper. A replica's state contains only its local residual, which is zero on A. For the entries that
# it owns, a replica has a second buffer, `common`: the first moment m on A, and off A the decayed moments of entries
# that left the mask. The latter are the part of the residual that is equal on all replicas. No replica includes it in
# its payload; the owner adds it to the mean. These functions process one owned slice of one tensor, n entries.


def keep_common_(common: Tensor, previous: Tensor | None, in_use: Tensor | None, beta1: float, applied: Tensor) -> None:
    """Set `common` to its part of mt off A. On A it keeps its value, for `owned_moment`.

    Args:
        common: FP32 (n,), written if `applied`.
        previous: Packed P; None if all bits are set.
        in_use: Packed A; None if all bits are set.
        beta1: Decay rate of the first moment.
        applied: bool ().
    """
    if in_use is not None and not known_false(applied):
        used = unpack_bits(in_use, common.numel())
        common.copy_(gated(applied, torch.where(used, common, retained(common, previous, beta1)), common))


def owned_moment(common: Tensor, indices: Tensor | None, previous: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return m of the last step, and the common residual that is now applied, of the entries of A.

    Both are FP32 (nnz(A),). indices: positions of A, int64 (nnz(A),); None for all. previous: packed P.
    """
    values = common if indices is None else common.index_select(0, indices)
    if previous is None:
        return values, torch.zeros_like(values)
    held = unpack_bits(previous, common.numel())
    if indices is not None:
        held = held.index_select(0, indices)
    return torch.where(held, values, 0.0), torch.where(held, 0.0, values)


def owned_gradient_(mean: Tensor, released: Tensor, beta1: float) -> None:
    """Replace the mean of the payloads by gh = (b - beta1 * q) / (1 - beta1).

    b is the mean plus the common part of mt. For entries in P that part is beta1 * q, which cancels; for others it is
    the common residual, `released`.
    """
    mean.add_(released).div_(1.0 - beta1)


# ---------------------------------------------------------------------------------------------- staleness


class VisitRates:
    """Moving average of the newly entered entries per step of every row and column; bitwise equal on all replicas.

    They estimate the staleness of entries without their age. By Little's law, the number of entries that enter per step
    gives the mean time that entries spend outside the mask. Entries differ: an input that is rarely active has small
    gradients in its whole column, so that its entries stay outside for longer. The rate at which entry (r, c) enters is
    estimated as rate[r] * rate[c] / rate of the tensor, the rank-1 form of the second moments of Adafactor (Shazeer and
    Stern 2018, Section 3). It needs rows + columns numbers per tensor.

    Args:
        sizes: Entries of each sparsified tensor's local shard.
        columns: Row length of each shard; one of several dimensions counts as a matrix (first dimension, all others).
        device: Device of the tensors.

    Attributes:
        rates: FP32 (rows and columns of all tensors, then one entry per tensor,): the averages; the saved state.
        relative: FP32 (rows and columns of all tensors,): rates relative to the tensor's mean row or column.
        counts: int32, of the same shape: entries that entered in this step. Set it before `accumulate`.
        fresh: int64 (tensors,): entries of each tensor that entered in the step of the last `accumulate`.
        starts: First index of the rows, then of the columns, of every tensor in these tensors; ends with their size.
    """

    def __init__(self, sizes: Sequence[int], columns: Sequence[int], device: torch.device) -> None:
        self.columns = tuple(columns)
        self.rows = tuple(n // c for n, c in zip(sizes, columns, strict=True))
        lengths = [length for pair in zip(self.rows, self.columns, strict=True) for length in pair]
        self.starts = (0, *accumulate(lengths))
        axes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        # The first row of every tensor, and the entry after its last one.
        edges = torch.tensor(self.starts[:-1], dtype=torch.int64, device="cpu")
        # `output_size` is needed in a dry run, because fake tensors have no values.
        axis = torch.arange(len(lengths), device="cpu").repeat_interleave(axes, output_size=self.starts[-1])
        self._row_edges = edges.to(device)
        self._axis, self._axis_lengths = axis.to(device, torch.int32), axes.to(device, torch.float32)
        self.counts = torch.zeros(self.starts[-1], dtype=torch.int32, device=device)
        self.fresh = torch.zeros(len(self.rows), dtype=torch.int64, device=device)
        self.rates = torch.zeros(self.starts[-1] + len(self.rows), dtype=torch.float32, device=device)
        self.relative = torch.ones(self.starts[-1], dtype=torch.float32, device=device)

    def of(self, values: Tensor, tensor: int) -> tuple[Tensor, Tensor]:
        """Return the entries of a tensor's rows and columns in `counts`, `rates` or `relative`."""
        rows, columns, end = self.starts[2 * tensor : 2 * tensor + 3]
        return values[rows:columns], values[columns:end]

    def count(self, tensor: int, fresh: Tensor) -> None:
        """Set the counts of a tensor by PyTorch. fresh: bool (n,), true for the entries in A and not in P."""
        rows, columns = self.of(self.counts, tensor)
        fresh = fresh.view(rows.numel(), columns.numel())
        rows.copy_(fresh.sum(1))
        columns.copy_(fresh.sum(0))

    def accumulate(self, applied: Tensor) -> None:
        """Update `rates` with `counts`, if `applied`, and then `relative`.

        Sums are over integers, so that the result does not depend on their order.
        """
        sums = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)).index_select(0, self._row_edges)
        # Not `counts * number`: PyTorch computes integers times a number in the default dtype.
        self.fresh = sums[1::2] - sums[::2]
        counts = torch.cat((self.counts, self.fresh)).float()
        new = self.rates * SMOOTHING + counts * (1.0 - SMOOTHING)
        torch.where(applied, new, self.rates, out=self.rates)
        axes, tensors = self.rates.split((self.starts[-1], len(self.rows)))
        mean = (tensors.repeat_interleave(2) / self._axis_lengths).index_select(0, self._axis)
        self.relative.copy_(torch.where(mean > 0, axes / mean, 1.0))
