"""Sums of squares, scaling, and the elementwise parts of optimizer steps on Triton kernels, each one launch for all
tensors of a model.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import (
    DeviceTable,
    LatestResult,
    TileSchedule,
    Writable,
    addresses,
    aligned,
    to_device,
)
from torchtitan_scape.kernels.common.tensors import Rates
from torchtitan_scape.kernels.common.triton_common import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    FIRST_BLOCK,
    GRADIENT,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    PARAMETER,
    PAYLOAD,
    RATES,
    STATE,
    WIDTH,
    adams,
    cell,
    pointer,
    rate,
    table_row,
    tile_of,
)

# These tensors have no blocks in a mask and no payload.
VARIANCE = FIRST_BLOCK  # address
FIRST_TILE = FIRST_BLOCK  # of the tensor, among those of all tensors
END_TILE = PAYLOAD


@triton.jit
def entries_of_tile(left, TILE: tl.constexpr, ALIGNED_TILE: tl.constexpr):
    """Return the indices of the tile's entries, int32 [TILE], and a mask of those that exist."""
    local = tl.arange(0, TILE)
    inside = local >= 0
    if not ALIGNED_TILE:
        inside = local < left
    return local, inside


@triton.jit
def squares_kernel(
    tiles,
    table,
    sums,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Write the sum of squares of every tile, FP64. Products in FP32 would overflow from 1.8e19 on."""
    tensor, row, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    gradient = tl.load(pointer(table, tensor, GRADIENT, DTYPE, ALIGNED_TILE) + first + local, mask=inside, other=0.0)
    value = gradient.to(tl.float64)
    tl.store(sums + cell(table, tensor, FIRST_TILE) + row // (TILE // BLOCK), tl.sum(value * value, 0))


@triton.jit
def norms_kernel(table, sums, norms, EACH: tl.constexpr):
    """Write the norm of tensor i, FP64, from the sums of its tiles, which are added in a fixed order."""
    tensor = tl.program_id(0)
    end = cell(table, tensor, END_TILE)
    total = tl.zeros((EACH,), tl.float64)
    for first in range(cell(table, tensor, FIRST_TILE), end, EACH):
        at = first + tl.arange(0, EACH)
        total += tl.load(sums + at, mask=at < end, other=0.0)
    tl.store(norms + tensor, tl.sqrt(tl.sum(total, 0)))


@triton.jit
def scale_kernel(
    tiles,
    table,
    factor,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Multiply gradients by a factor; with 1, as of gradients that are not clipped, no memory is accessed."""
    by = tl.load(factor)
    if by == 1.0:
        return
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    gradients = pointer(table, tensor, GRADIENT, DTYPE, ALIGNED_TILE) + first + local
    gradient = tl.load(gradients, mask=inside, other=0.0).to(tl.float32)
    tl.store(gradients, (gradient * by).to(DTYPE), mask=inside)


@triton.jit
def update_kernel(
    tiles,
    table,
    rates,
    corrections,
    applied,
    factor,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
    RULE: tl.constexpr,
    DTYPE: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):
    """Update parameters and moments by the RULE "adams", "adamw" or "frozen", see `reference`.

    20 bytes of memory traffic per FP32 parameter, with "adamw" 28.
    """
    if tl.load(applied) == 0:
        return
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    gradients = pointer(table, tensor, GRADIENT, GRADIENT_DTYPE, ALIGNED_TILE) + first
    parameters = pointer(table, tensor, PARAMETER, DTYPE, ALIGNED_TILE) + first
    moments = pointer(table, tensor, STATE, STATE_DTYPE, ALIGNED_TILE) + first
    gradient = tl.load(gradients + local, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    parameter = tl.load(parameters + local, mask=inside, other=0.0).to(tl.float32)
    correction1, correction2 = tl.load(corrections + 2 * tensor), tl.load(corrections + 2 * tensor + 1)
    beta2, square_rate = rate(rates, tensor, BETA2), rate(rates, tensor, ONE_MINUS_BETA2)
    gradient_rate, eps = rate(rates, tensor, ONE_MINUS_BETA1), rate(rates, tensor, EPS)
    if RULE != "frozen":
        before = tl.load(moments + local, mask=inside, other=0.0).to(tl.float32)
    if RULE == "adams":
        moment, step = adams(
            before,
            gradient,
            gradient,
            rate(rates, tensor, BETA1),
            gradient_rate,
            beta2,
            square_rate,
            eps,
            1.0 / correction1,
            1.0 / correction2,
            True,
        )
    else:
        variances = pointer(table, tensor, VARIANCE, STATE_DTYPE, ALIGNED_TILE) + first
        variance = tl.load(variances + local, mask=inside, other=0.0).to(tl.float32)
        zeros = tl.zeros_like(variance)
        if RULE == "adamw":
            moment = before + (gradient - before) * gradient_rate
            variance = variance * beta2 + gradient * gradient * square_rate
            tl.store(variances + local, variance.to(STATE_DTYPE), mask=inside)
        else:
            moment = gradient * gradient_rate
        numerator = tl.div_rn(moment, zeros + correction1)
        step = tl.div_rn(numerator, tl.sqrt_rn(tl.div_rn(variance, zeros + correction2)) + eps)
        if RULE == "frozen":
            step = tl.where(variance > 0.0, step, 0.0)
    parameter = parameter - parameter * rate(rates, tensor, DECAY) - step * rate(rates, tensor, LR)
    tl.store(parameters + local, parameter.to(DTYPE), mask=inside)
    tl.store(moments + local, moment.to(STATE_DTYPE), mask=inside)


@triton.jit
def lerp(start, end, weight):
    """Interpolate as `torch.lerp`."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit
def average_kernel(
    tiles,
    table,
    weights,
    applied,
    factor,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
):
    """Add gradients to Muon's momentum, and write the directions to be orthogonalized, BF16, where there are any.

    weights: FP32 (tensors, 2), momentum and 1 - momentum. PARAMETER: address of the direction, or 0.
    """
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    gradients = pointer(table, tensor, GRADIENT, tl.float32, ALIGNED_TILE) + first
    averages = pointer(table, tensor, STATE, tl.float32, ALIGNED_TILE) + first
    gradient = tl.load(gradients + local, mask=inside, other=0.0) * tl.load(factor)
    before = tl.load(averages + local, mask=inside, other=0.0)
    average = lerp(before, gradient, tl.load(weights + 2 * tensor + 1))
    direction = lerp(gradient, average, tl.load(weights + 2 * tensor))
    is_applied = (tl.load(applied) != 0).to(tl.int32) + tl.zeros_like(local) > 0
    tl.store(averages + local, average, mask=inside & is_applied)
    if cell(table, tensor, PARAMETER) != 0:
        directions = pointer(table, tensor, PARAMETER, tl.bfloat16, ALIGNED_TILE) + first
        tl.store(directions + local, direction.to(tl.bfloat16), mask=inside)


@triton.jit
def move_kernel(
    tiles,
    table,
    factors,
    applied,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED_TILE: tl.constexpr,
):
    """Decay FP32 weights and move them along BF16 directions: weight * factor 0 + direction * factor 1.

    factors: FP32 (tensors, 2).
    """
    if tl.load(applied) == 0:
        return
    tensor, _, first, left = tile_of(tiles, table, BLOCK)
    local, inside = entries_of_tile(left, TILE, ALIGNED_TILE)
    parameters = pointer(table, tensor, PARAMETER, tl.float32, ALIGNED_TILE) + first
    directions = pointer(table, tensor, GRADIENT, tl.bfloat16, ALIGNED_TILE) + first
    weight = tl.load(parameters + local, mask=inside, other=0.0) * tl.load(factors + 2 * tensor)
    direction = tl.load(directions + local, mask=inside, other=0.0).to(tl.float32)
    tl.store(parameters + local, weight + direction * tl.load(factors + 2 * tensor + 1), mask=inside)


# Entries per tile and per warp.
_TILE, _WARP = 2048, 256
_MOST_LISTS = 64  # of sizes
Lists = list[tuple[Tensor, bool, Any]]  # of `TileSchedule.lists`
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def rates_row(r: Rates) -> tuple[float, ...]:
    """Return a row of the table of hyper-parameters, in the columns of `triton_common`."""
    row = (
        r.beta1,
        (1.0 - r.beta1) * r.scale,
        1.0 - r.beta1,
        r.beta2,
        1.0 - r.beta2,
        r.eps,
        r.lr,
        r.lr * r.weight_decay,
        float(r.counted),
    )
    assert len(row) == RATES.value
    return row


def set_rates(rows: DeviceTable, betas: DeviceTable, rates: list[Rates]) -> None:
    """Set the tables of hyper-parameters and of both betas, one row per tensor. Most tensors share a `Rates` object."""
    distinct = list({id(each): each for each in rates}.values())
    numbers = {id(each): number for number, each in enumerate(distinct)}
    by_tensor = [numbers[id(each)] for each in rates]
    rows.set_repeated([rates_row(each) for each in distinct], by_tensor)
    betas.set_repeated([(each.beta1, each.beta2) for each in distinct], by_tensor)


class TensorTables:
    """Tiles and tables of lists of tensors, by their sizes: addresses, sizes and hyper-parameters.

    Lists of other sizes have tables of their own: a step that uses several lists copies none of them again.
    """

    def __init__(self) -> None:
        self._of_sizes: dict[tuple[int, ...], _Tables] = {}

    def of(self, tensors: Sequence[Tensor]) -> "_Tables":
        """Return the tables for tensors of these sizes, which are on one device."""
        sizes = tuple([t.numel() for t in tensors])
        if sizes not in self._of_sizes:
            if len(self._of_sizes) > _MOST_LISTS:
                self._of_sizes.clear()
            self._of_sizes[sizes] = _Tables(sizes, tensors[0].device)
        return self._of_sizes[sizes]


class _Tables:
    """Tiles of tensors of fixed sizes, and the tables of their addresses and hyper-parameters."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self.tiles = TileSchedule(sizes, 1024, _TILE, _WARP, device)
        self.addresses = DeviceTable(len(sizes), WIDTH.value, torch.int64, device)
        self.rates = DeviceTable(len(sizes), RATES.value, torch.float32, device)
        self.betas = DeviceTable(len(sizes), 2, torch.float64, device)
        self.factors = DeviceTable(len(sizes), 2, torch.float32, device)
        self.entries = sum(sizes)
        self.one = torch.ones((), dtype=torch.float32, device=device)
        each = self.tiles.rows * self.tiles.block_size
        self.first_tiles = [0, *accumulate(-(-size // each) for size in sizes)]
        self._latest = LatestResult[Lists]()

    def lists(self, columns: Sequence[Sequence[Tensor]], dtypes: Sequence[Sequence[Tensor]] = ()) -> Lists:
        """Set `addresses`, and return the launches as (tiles, ALIGNED_TILE, dtypes of a tensor).

        Args:
            columns: Tensors for GRADIENT, PARAMETER, STATE and VARIANCE; the last ones may be missing. Without a
                VARIANCE there are the positions of tiles.
            dtypes: Those with a dtype in the launches.
        """
        pointers = [addresses(tensors) for tensors in columns]
        kinds = [[t.dtype for t in tensors] for tensors in dtypes]

        def build() -> Lists:
            none = [0] * len(self.tiles.sizes)
            first = pointers[:3] + [none] * (3 - len(pointers))
            fourth = pointers[3] if len(pointers) > 3 else self.first_tiles[:-1]
            rows = zip(*first, self.tiles.sizes, fourth, self.first_tiles[1:], strict=True)
            self.addresses.set([table_row(*row) for row in rows])
            is_aligned = [aligned(*each) for each in zip(*columns, strict=True)]
            keys = tuple(zip(is_aligned, zip(*kinds, strict=True) if kinds else none, strict=True))
            return self.tiles.lists(self.tiles.whole(), keys)

        return self._latest.get((pointers, kinds), build)

    def launch(self, kernel: Any, listed: Tensor, full: bool, *arguments: Any, **options: Any) -> None:
        """Launch a kernel on a list of tiles, and the table of addresses."""
        launching.launch(
            kernel,
            (len(listed),),
            listed,
            self.addresses.values,
            *arguments,
            warps=self.tiles.warps,
            TILE=self.tiles.rows * self.tiles.block_size,
            BLOCK=self.tiles.block_size,
            ALIGNED_TILE=full,
            **options,
        )


class Norms:
    """Norms of tensors, as `reference.norms`, in one read of them."""

    def __init__(self) -> None:
        self._tables = TensorTables()

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return FP64 (len(tensors),)."""
        tables, device = self._tables.of(tensors), tensors[0].device
        lists = tables.lists((tensors,), (tensors,))
        sums = torch.empty(tables.first_tiles[-1], dtype=torch.float64, device=device)
        for listed, full, (dtype,) in lists:
            moved = dtype.itemsize * tables.entries / len(lists)
            tables.launch(squares_kernel, listed, full, sums, moved=moved, DTYPE=DTYPES[dtype])
        norms = torch.empty(len(tensors), dtype=torch.float64, device=device)
        table = tables.addresses.values
        launching.launch(norms_kernel, (len(tensors),), table, sums, norms, warps=4, EACH=1024)
        return norms


class Scaling:
    """`torch._foreach_mul_` of tensors by an FP32 factor on the device. With the factor 1 nothing is moved."""

    def __init__(self) -> None:
        self._tables = TensorTables()

    def __call__(self, tensors: list[Tensor], factor: Tensor) -> None:
        if not tensors:
            return
        tables, written = self._tables.of(tensors), Writable(tensors)
        for listed, full, (dtype,) in tables.lists((written.flat,), (tensors,)):  # the factor is 1 in most steps
            tables.launch(scale_kernel, listed, full, factor, DTYPE=DTYPES[dtype])
        written.store()


class TritonUpdate:
    """The elementwise step of an optimizer on a Triton kernel; see `reference.TorchUpdate`."""

    def __init__(self, rule: str) -> None:
        self._rule, self._tables = rule, TensorTables()

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        rates: list[Rates],
        steps: Tensor,
        applied: Tensor,
        factor: Tensor | None = None,
    ) -> None:
        """Update all parameters in place; see `TorchUpdate.step`."""
        if not parameters:
            return
        tables, written = self._tables.of(parameters), [Writable(each) for each in (parameters, *states)]
        columns = gradients, *(each.flat for each in written)
        lists = tables.lists(columns, (columns[1], gradients, columns[2]))
        set_rates(tables.rates, tables.betas, rates)
        betas = tables.betas.values
        counts = to_device(steps, betas.device) if steps.is_cpu else steps
        corrections = (1.0 - betas ** counts.view(len(parameters), -1)).float()
        factor = tables.one if factor is None else factor
        accesses = {"adams": 2, "adamw": 4, "frozen": 2}[self._rule]  # to states
        for listed, full, (dtype, gradient_dtype, state_dtype) in lists:
            each = gradient_dtype.itemsize + 2 * dtype.itemsize + accesses * state_dtype.itemsize
            tables.launch(
                update_kernel,
                listed,
                full,
                tables.rates.values,
                corrections,
                applied,
                factor,
                moved=tables.entries * each / len(lists),
                RULE=self._rule,
                DTYPE=DTYPES[dtype],
                GRADIENT_DTYPE=DTYPES[gradient_dtype],
                STATE_DTYPE=DTYPES[state_dtype],
            )
        for tensors in written:
            tensors.store()


class TritonMuon:
    """Muon's momentum and steps on Triton kernels, one launch each; see `reference.TorchMuon`."""

    def __init__(self) -> None:
        self._averages, self._moves = TensorTables(), TensorTables()

    def average(
        self,
        gradients: list[Tensor],
        averages: list[Tensor],
        momenta: Sequence[float],
        applied: Tensor,
        factor: Tensor | None,
        needed: Sequence[bool],
    ) -> list[Tensor]:
        """Add the gradients to the momenta, and return directions; see `TorchMuon.average`."""
        tables = self._averages.of(gradients)
        written = Writable(averages)
        directions = [
            torch.empty_like(gradient, dtype=torch.bfloat16) if is_needed else gradient.new_empty(0)
            for gradient, is_needed in zip(gradients, needed, strict=True)
        ]
        weights = tables.factors.set([(momentum, 1 - momentum) for momentum in momenta])
        lists = tables.lists((gradients, directions, written.flat))
        moved = 12.0 * tables.entries + 2.0 * sum(d.numel() for d in directions)
        for listed, full, _ in lists:
            flags = applied, tables.one if factor is None else factor
            tables.launch(average_kernel, listed, full, weights, *flags, moved=moved / len(lists))
        written.store()
        return directions

    def move(
        self, weights: list[Tensor], directions: list[Tensor], factors: Sequence[tuple[float, float]], applied: Tensor
    ) -> None:
        """Decay weights and move them along directions; see `TorchMuon.move`."""
        tables, written = self._moves.of(weights), Writable(weights)
        flat = [direction.contiguous() for direction in directions]
        on_device = tables.factors.set(list(factors))
        lists = tables.lists((flat, written.flat))
        moved = 10.0 * tables.entries
        for listed, full, _ in lists:
            tables.launch(move_kernel, listed, full, on_device, applied, moved=moved / len(lists))
        written.store()
