"""The passes of a SCAPE step in plain PyTorch: the specification, and what runs on a CPU.

Every function works on one tensor's local shard, flattened. Names follow Algorithm 1 of the SCAPE paper:
m first moment, mt the replica's new moment with its residual (error feedback) added, A the mask in use,
P the mask that was in use one step before.

Masks are packed bits, entry i in bit i % 8 of byte i // 8; `None` stands for a mask of all ones. Shards are
padded to whole blocks, so a mask may be longer than the n entries it describes; what lies behind is not read.

One buffer `state` holds m on A and the residual off A. Their supports are disjoint after every step, so
nothing is lost, and SCAPE costs no more state than AdamS does.
"""

import torch
from torch import Tensor

from kernels.common.gating import decay_, gated, known_false
from kernels.scape.visits import MIN_VISIT_RATE

# --------------------------------------------------------------------------------------------- mask codec


def pack_bits(bits: Tensor) -> Tensor:
    """Packs bool (8*b,) into uint8 (b,)."""
    # The product moves bit 0 of byte i of a word, for every i, to bit 56 + i, with no carries.
    words = bits.view(torch.uint8).view(torch.int64)
    return ((words * 0x0102040810204080) >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Unpacks the first `count` bits of uint8 (b,) into bool (count,)."""
    # Eight copies of a byte, of which the i-th keeps its bit i.
    words = packed.to(torch.int64) * 0x0101010101010101
    words &= 0x8040201008040201 - (1 << 64)  # as a signed number
    return (words.view(torch.uint8) != 0)[:count]


def mask_indices(mask: Tensor, count: int, nnz: int) -> Tensor:
    """Ascending int64 positions (nnz,) of the set bits among the first `count`.

    `nnz` is known to the host from the layout, so that no device has to be asked for it.
    """
    return set_positions(unpack_bits(mask, count), nnz)


def set_positions(bits: Tensor, nnz: int) -> Tensor:
    """Ascending int64 positions (nnz,) of what is set in bool (n,)."""
    if bits.is_cpu:  # nonzero_static is several times slower there, and a CPU has nothing to wait for
        return bits.nonzero().view(-1)
    return torch.nonzero_static(bits, size=nnz).view(-1)


def offsets_to_mask(offsets: Tensor, block_size: int) -> Tensor:
    """Packed mask of whole blocks, uint8 (blocks * block_size / 8,), from offsets (blocks, k).

    An offset that stands there twice sets its bit once.
    """
    bits = torch.zeros(offsets.shape[0], block_size, dtype=torch.bool, device=offsets.device)
    return pack_bits(bits.scatter_(1, offsets, True).view(-1))


# ---------------------------------------------------------------------------------------------- selection


def _order_keys(values: Tensor) -> Tensor:
    """int64 keys whose order is |value| first, then lower position; values FP32 (rows, length).

    The bits of a non-negative float order as the integer does, and the low half breaks ties.
    """
    length = values.shape[1]
    position = torch.arange(length - 1, -1, -1, device=values.device)
    return (values.abs().view(torch.int32).long() << 32) | position


def select_blocks(values: Tensor, k: int, block_size: int) -> Tensor:
    """In-block offsets of the k largest |values| of each block; ties go to the lower index.

    Args:
        values: FP32 (n,), finite; the last block may be short, and then the missing entries are never chosen.
        k: entries per block, 1 <= k <= block_size.

    Returns:
        int64 (ceil(n / block_size), k), ascending. A block with fewer than k real entries gives them all and repeats
        the last of them, so that the shape is static.
    """
    n = values.numel()
    blocks = -(-n // block_size)
    padded = torch.nn.functional.pad(values, (0, blocks * block_size - n)).view(blocks, block_size)
    keys = _order_keys(padded)
    tail = n - (blocks - 1) * block_size
    if tail < block_size:
        keys[-1, tail:] = -1
    offsets = keys.topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    if tail < k:
        offsets[-1].clamp_(max=tail - 1)  # what is missing stands last
    return offsets


def select_largest(values: Tensor, k: int) -> Tensor:
    """bool (n,): where the k largest |values| of FP32 (n,) are; ties go to the lower index, NaN is above all.

    The keys of `select_rows` would take 28 bytes an entry, here of a whole tensor; this takes less than half of that.
    """
    magnitudes = values.abs().view(torch.int32)  # as numbers of the same order
    least = magnitudes.topk(k, sorted=False).values.min()
    found, equal = magnitudes > least, magnitudes == least
    return found | (equal & (equal.cumsum(0, dtype=torch.int32) <= k - found.sum()))


def select_rows(values: Tensor, k: int, real: Tensor | None = None) -> Tensor:
    """Ascending int64 places (rows, k) of the k largest |values| of each row; ties go to the lower place.

    Args:
        values: FP32 (rows, length), finite; k is at most the length.
        real: bool (rows, length); what is not real is chosen where a row has fewer than k real entries. None for all.
    """
    keys = _order_keys(values)
    if real is not None:
        keys = torch.where(real, keys, keys - (1 << 62))  # below all that are real, and in the same order
    return keys.topk(k, dim=1, sorted=False).indices.sort(dim=1).values


# --------------------------------------------------------------------------------------- the step's passes


def carry_(gradient: Tensor, indices: Tensor | None, errors: Tensor, beta1: float, scale: float) -> None:
    """g += errors / ((1 - beta1) * scale) on P: what rounding the last payload lost enters the new moment as it is.

    Args:
        gradient: FP32 (n,), written.
        indices: positions of P, int64 (nnz(P),); None for all.
        errors: FP32 (nnz(P),), in units of mt.
    """
    added = errors / ((1.0 - beta1) * scale)
    if indices is None:
        gradient.add_(added)
    else:
        gradient.index_add_(0, indices, added)


def new_moment_(gradient: Tensor, state: Tensor, previous: Tensor | None, beta1: float, scale: float) -> None:
    """mt = where(P, beta1 * m, residual) + (1 - beta1) * scale * g, written over `gradient` (FP32, (n,))."""
    if previous is None:
        carried = state * beta1
    else:
        carried = torch.where(unpack_bits(previous, state.numel()), state * beta1, state)
    gradient.mul_((1.0 - beta1) * scale).add_(carried)


def pack_(
    moment: Tensor,
    state: Tensor,
    indices: Tensor | None,
    previous: Tensor | None,
    payload: Tensor,
    last: Tensor | None,
    applied: Tensor,
) -> None:
    """payload = mt on A; state = residual off A, last step's m on A (0 where A is newly set).

    Args:
        moment: mt, FP32 (n,).
        state: FP32 (n,), written unless `applied` is false.
        indices: positions of A, int64 (nnz(A),); None for all.
        previous: packed P.
        payload: FP32 (nnz(A),); may be the storage of `moment` itself (its first nnz entries).
        last: FP32 (nnz(A),), receives last step's m on A too; or None.
        applied: bool (), false where some rank's gradient is not finite; then payload and last are undefined.
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


def synchronised_gradient_(payload: Tensor, last_moment: Tensor, beta1: float) -> None:
    """gh = (b - beta1 * q) / (1 - beta1), written over the averaged payload b; q is last step's m on A."""
    payload.sub_(last_moment, alpha=beta1).div_(1.0 - beta1)


def entering(indices: Tensor, previous: Tensor, n: int) -> Tensor:
    """bool (nnz(A),): which of the positions of A are not in P."""
    return ~unpack_bits(previous, n).index_select(0, indices)


def count_entering_(indices: Tensor, previous: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Newly entered entries of each row and column of a tensor.

    Args:
        indices: positions of A, int64 (nnz(A),).
        previous: packed P.
        rows, columns: int32 (rows,) and (columns,), written.
    """
    width = max(1, columns.numel())
    fresh = entering(indices, previous, rows.numel() * width).int()
    rows.zero_().index_add_(0, indices // width, fresh)
    columns.zero_().index_add_(0, indices % width, fresh)


def staleness(
    indices: Tensor, outside: int, fresh: Tensor, max_staleness: float, relative: tuple[Tensor, Tensor]
) -> Tensor:
    """For how many steps each entry of A would have been outside the mask if it entered now, in the mean: FP32.

    Args:
        indices: their positions in the tensor, int64.
        outside: entries of the tensor that are not in A.
        fresh: int64 (), how many of A are newly entered.
        max_staleness, relative: see `update_`.
    """
    mean = (outside / fresh.float()).clamp(1.0, max_staleness)  # Little's law
    rows, columns = relative
    width = max(1, columns.numel())
    often = rows.index_select(0, indices // width) * columns.index_select(0, indices % width)
    return (mean / often.clamp(min=MIN_VISIT_RATE)).clamp(1.0, max_staleness)


def scaled(step: Tensor, moment: Tensor, fresh: Tensor, factor: Tensor, keeps: float) -> tuple[Tensor, Tensor]:
    """Step and moment, where `fresh` multiplied by the factor and cut to the share that is kept."""
    cut = torch.where(fresh, moment * keeps, moment) if keeps < 1.0 else moment
    return torch.where(fresh, step * factor, step), cut


def adams(
    gradient: Tensor,
    last: Tensor,
    betas: tuple[float, float],
    eps: float,
    clip: Tensor,
    clip_moment: bool,
    bias_corrections: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """AdamS on the mask: the new moment, and the step without the learning rate; arguments as `update_`."""
    beta1, beta2 = betas
    clipped = gradient * clip
    second = last.square().mul_(beta2).add_(clipped.square(), alpha=1.0 - beta2)
    moment = (last * beta1).add_(clipped if clip_moment else gradient, alpha=1.0 - beta1)
    return moment, (moment / bias_corrections[0]).div_((second / bias_corrections[1]).sqrt_().add_(eps))


def update_(
    parameter: Tensor | None,
    gradient: Tensor,
    state: Tensor,
    last: Tensor | None,
    indices: Tensor | None,
    previous: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: Tensor,
    clip_moment: bool,
    bias_corrections: tuple[Tensor, Tensor],
    applied: Tensor,
    max_staleness: float = 1.0,
    relative: tuple[Tensor, Tensor] | None = None,
    keeps: float = 1.0,
) -> None:
    """The AdamS update on A, weight decay everywhere; writes `parameter` and `state` unless not `applied`.

    Args:
        parameter: FP32 (n,); None where another replica of this process writes it.
        gradient: gh on A before clipping, FP32 (nnz(A),); consumed.
        state: FP32 (n,), holds last step's m on A and receives the new one.
        last: last step's m on A, FP32 (nnz(A),); None to take it from `state`.
        indices: positions of A, int64 (nnz(A),); None for all.
        previous: packed P.
        clip: FP32 (), factor on gh. `clip_moment` false is the paper's printed form: v alone sees it.
        bias_corrections: (1 - beta1^t, 1 - beta2^t), t counting applied steps.
        relative: rates at which the mask visits rows and columns, FP32 (rows,) and (columns,), over their mean
            (`VisitRates`). With it the step of entries of A outside P is scaled by their staleness: those of a row and
            column that are visited more often have been outside for less long.
        max_staleness: upper clamp of that factor.
        keeps: share of the moment that entries keep whose step was scaled.
    """
    if known_false(applied):
        return
    if last is None:
        last = state if indices is None else state.index_select(0, indices)
    moment, step = adams(gradient, last, betas, eps, clip, clip_moment, bias_corrections)
    if relative is not None and indices is not None and previous is not None:
        n = state.numel()
        fresh = entering(indices, previous, n)
        factor = staleness(indices, n - indices.numel(), fresh.sum(), max_staleness, relative)
        step, moment = scaled(step, moment, fresh, factor, keeps)
    step = gated(applied, step * lr, torch.zeros_like(step))
    if parameter is not None:
        decay_(parameter, lr * weight_decay, applied)
        if indices is None:
            parameter.sub_(step)
        else:
            parameter.scatter_(0, indices, parameter.index_select(0, indices).sub_(step))
    if indices is None:
        state.copy_(gated(applied, moment, state))
    else:
        if not applied.is_cpu:  # what `pack_` has left there: `last` is 0 where A is newly set
            moment = gated(applied, moment, state.index_select(0, indices))
        state.scatter_(0, indices, moment)
