"""The kernels of `dense.triton_kernels`, each one launch for all tensors of a model."""

import math
from collections.abc import Sequence
from typing import Any

import torch
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
    as_flag,
    to_device,
)
from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.kernels.common.triton_common import RATES, WIDTH, table_row
from torchtitan_scape.kernels.dense import triton_kernels

# Entries per tile and per warp.
_TILE, _WARP = 4096, 512
Lists = list[tuple[Tensor, bool, Any]]  # of `TileSchedule.lists`
FlatLists = tuple[TileSchedule, Tensor, Lists]
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


class FlatTensors:
    """Tiles and tables of lists of flat tensors, by their sizes."""

    def __init__(self) -> None:
        self._of_sizes: dict[tuple[int, ...], tuple[TileSchedule, DeviceTable]] = {}
        self._latest = LatestResult[FlatLists]()

    def lists(self, tensors: list[Tensor]) -> FlatLists:
        """Return the tiles, the table, and the launches as (tiles, ALIGNED_TILE, dtype)."""
        sizes = tuple([t.numel() for t in tensors])
        key = addresses(tensors), sizes, [t.dtype for t in tensors]
        return self._latest.get(key, lambda: self._build(tensors, sizes))

    def _build(self, tensors: list[Tensor], sizes: tuple[int, ...]) -> FlatLists:
        device = tensors[0].device
        if sizes not in self._of_sizes:
            table = DeviceTable(len(sizes), WIDTH.value, torch.int64, device)
            self._of_sizes[sizes] = TileSchedule(sizes, 1024, _TILE, _WARP, device), table
        tiles, table = self._of_sizes[sizes]
        rows = table.set([table_row(t.data_ptr(), 0, 0, t.numel(), -1) for t in tensors])
        return tiles, rows, tiles.lists(tuple(tiles.whole()), tuple((aligned(t), t.dtype) for t in tensors))


class Finite:
    """Check of gradients for NaN and Inf, as `reference.finite`, in one launch."""

    def __init__(self, limit: float = math.inf) -> None:
        self._flat = FlatTensors()
        # The bits of a power of two are those of its exponent.
        self._limit = int(torch.tensor(limit, dtype=torch.float32, device="cpu").view(torch.int32))

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        tiles, table, lists = self._flat.lists(gradients)
        bad = torch.zeros(len(gradients), dtype=torch.int32, device=gradients[0].device)
        for listed, full, dtype in lists:
            launching.launch(
                triton_kernels.finite_kernel,
                (len(listed),),
                listed,
                table,
                bad,
                warps=tiles.warps,
                **tiles.shape,
                ALIGNED_TILE=full,
                DTYPE=DTYPES[dtype],
                LIMIT=self._limit,
            )
        return bad == 0


class Scaling:
    """`torch._foreach_mul_` of FP32 gradients by a factor on the device. With the factor 1 nothing is moved."""

    def __init__(self) -> None:
        self._flat = FlatTensors()

    def __call__(self, gradients: list[Tensor], factor: Tensor) -> None:
        dtypes = {factor.dtype, *(g.dtype for g in gradients)}
        if dtypes != {torch.float32} or not all(map(Tensor.is_contiguous, gradients)):
            torch._foreach_mul_(gradients, factor)
            return
        tiles, table, lists = self._flat.lists(gradients)
        for listed, full, _ in lists:
            launching.launch(
                triton_kernels.scale_kernel,
                (len(listed),),
                listed,
                table,
                factor,
                warps=tiles.warps,
                moved=8.0 * sum(g.numel() for g in gradients) / len(lists),
                **tiles.shape,
                ALIGNED_TILE=full,
            )


class _Tables:
    """Tiles of parameters by their sizes, and the tables of their addresses and hyper-parameters."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self.tiles = TileSchedule(sizes, 1024, _TILE, _WARP, device)
        self.addresses = DeviceTable(len(sizes), WIDTH.value, torch.int64, device)
        self.rates = DeviceTable(len(sizes), RATES.value, torch.float32, device)
        self.betas = DeviceTable(len(sizes), 2, torch.float64, device)
        self._latest = LatestResult[Lists]()

    def lists(self, columns: Sequence[Sequence[Tensor]], dtypes: Sequence[Sequence[Tensor]]) -> Lists:
        """Set `addresses`, and return the launches as (tiles, ALIGNED_TILE, dtypes of a tensor).

        columns: Gradients, parameters, moments, and any further tensors. dtypes: Those with a dtype in the launches.
        """
        pointers = [addresses(tensors) for tensors in columns]
        kinds = [[t.dtype for t in tensors] for tensors in dtypes]

        def build() -> Lists:
            rows = zip(*pointers[:3], self.tiles.sizes, *(pointers[3:] or [[-1] * len(self.tiles.sizes)]), strict=True)
            self.addresses.set([table_row(*row) for row in rows])
            is_aligned = [aligned(*each) for each in zip(*columns, strict=True)]
            keys = tuple(zip(is_aligned, zip(*kinds, strict=True), strict=True))
            return self.tiles.lists(tuple(self.tiles.whole()), keys)

        return self._latest.get((pointers, kinds), build)


class TritonAdams:
    """Dense AdamS on a Triton kernel."""

    def __init__(self) -> None:
        self._tables: _Tables | None = None

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: list[Tensor],
        rates: list[Rates],
        steps: Tensor,
        applied: Tensor,
    ) -> None:
        """Update all parameters in place; see `TorchAdams.step`."""
        if not parameters:
            return
        tables = self._tables = tables_for(parameters, self._tables)
        writable, flat_moments = Writable(parameters), Writable(moments)
        lists = tables.lists((gradients, writable.flat, flat_moments.flat), (writable.flat, gradients))
        set_rates(tables.rates, tables.betas, rates)
        corrections = (1.0 - tables.betas.values ** steps.unsqueeze(1)).float()
        for listed, full, (dtype, gradient_dtype) in lists:
            launching.launch(
                triton_kernels.adams_kernel,
                (len(listed),),
                listed,
                tables.addresses.values,
                tables.rates.values,
                corrections,
                as_flag(applied),
                warps=tables.tiles.warps,
                **tables.tiles.shape,
                ALIGNED_TILE=full,
                DTYPE=DTYPES[dtype],
                GRADIENT_DTYPE=DTYPES[gradient_dtype],
            )
        writable.store()
        flat_moments.store()


class TritonFrozenAdam:
    """AdamW with a given first moment and a variance that does not change, on a Triton kernel."""

    def __init__(self) -> None:
        self._tables: _Tables | None = None

    def step(
        self,
        parameters: list[Tensor],
        momenta: list[Tensor],
        moments: list[Tensor],
        variances: list[Tensor],
        rates: list[Rates],
        updates: Tensor,
        applied: Tensor,
    ) -> None:
        """Update all parameters in place; see `TorchFrozenAdam.step`."""
        if not parameters:
            return
        tables = self._tables = tables_for(parameters, self._tables)
        writable, flat_moments = Writable(parameters), Writable(moments)
        flat_variances = [each.contiguous() for each in variances]
        columns = momenta, writable.flat, flat_moments.flat, flat_variances
        lists = tables.lists(columns, (writable.flat, flat_moments.flat))
        set_rates(tables.rates, tables.betas, rates)
        counts = to_device(updates, tables.betas.values.device) if updates.is_cpu else updates
        corrections = (1.0 - tables.betas.values[:, 1] ** counts).float()
        for listed, full, (dtype, state_dtype) in lists:
            launching.launch(
                triton_kernels.frozen_adam_kernel,
                (len(listed),),
                listed,
                tables.addresses.values,
                tables.rates.values,
                corrections,
                as_flag(applied),
                warps=tables.tiles.warps,
                **tables.tiles.shape,
                ALIGNED_TILE=full,
                DTYPE=DTYPES[dtype],
                STATE_DTYPE=DTYPES[state_dtype],
            )
        writable.store()
        flat_moments.store()


def tables_for(parameters: list[Tensor], known: _Tables | None) -> _Tables:
    """Return the tables for these parameters: the known ones if the sizes are theirs."""
    sizes = tuple(p.numel() for p in parameters)
    return known if known is not None and known.tiles.sizes == sizes else _Tables(sizes, parameters[0].device)
