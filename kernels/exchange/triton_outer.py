"""The outer step of local updates as a Triton kernel; its specification is that of `methods.local_updates`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.common.launching import AddressTable, LatestResult, TileSchedule, to_device
from torchtitan_scape.kernels.dense.triton_passes import DTYPES

_TILE = 4096
ANCHOR, THETA, VELOCITY, MEAN = (tl.constexpr(i) for i in range(4))  # lists of the table of addresses


@triton.jit
def tensor_of(table, tensors, tensor, LIST: tl.constexpr, DTYPE: tl.constexpr, FULL: tl.constexpr):
    address = tl.load(table + LIST * tensors + tensor).to(tl.pointer_type(DTYPE))
    if FULL:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit(do_not_specialize=["tensors", "rate", "mu", "mix", "rest"])
def outer_kernel(
    tiles,
    table,
    sizes,
    tensors,
    rate,
    mu,
    mix,
    rest,
    DTYPE: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    MIXES: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update anchor, momentum and parameters of a tile with the mean displacement; see `OuterStep`."""
    tensor = tl.load(tiles + 4 * tl.program_id(0))
    at = tl.load(tiles + 4 * tl.program_id(0) + 1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at >= 0
    if not FULL:
        inside = at < tl.load(sizes + tensor)
    anchor = tensor_of(table, tensors, tensor, ANCHOR, tl.float32, FULL)
    theta = tensor_of(table, tensors, tensor, THETA, DTYPE, FULL)
    update = tl.load(tensor_of(table, tensors, tensor, MEAN, tl.float32, FULL) + at, mask=inside, other=0.0)
    none = tl.zeros_like(update)
    if HAS_MOMENTUM:
        velocity = tensor_of(table, tensors, tensor, VELOCITY, tl.float32, FULL)
        momentum = tl.load(velocity + at, mask=inside, other=0.0) * mu + update
        tl.store(velocity + at, momentum, mask=inside)
        update = tl.fma(momentum, none + mu, update)
    shared = tl.fma(update, none - rate, tl.load(anchor + at, mask=inside, other=0.0))
    tl.store(anchor + at, shared, mask=inside)
    own = shared
    if MIXES:
        kept = tl.load(theta + at, mask=inside, other=0.0).to(tl.float32) * mix
        own = tl.fma(shared, none + rest, kept.to(DTYPE).to(tl.float32))
    tl.store(theta + at, own.to(DTYPE), mask=inside)


class OuterStep:
    """The outer step of a list of tensors in place, one launch for each dtype: read and write each tensor once.

    v = mu v + mean, anchor -= rate (mean + mu v), theta = mix theta + (1 - mix) anchor. A product is rounded together
    with its sum where PyTorch does so on a GPU.
    """

    def __init__(self) -> None:
        self._tables = LatestResult[tuple[TileSchedule, AddressTable, Tensor]]()

    def __call__(
        self,
        anchors: Sequence[Tensor],
        thetas: Sequence[Tensor],
        velocities: Sequence[Tensor],
        means: Sequence[Tensor],
        rate: float,
        mu: float,
        mix: float,
    ) -> None:
        """Take the step. Tensors are contiguous.

        Args:
            anchors: FP32.
            thetas: Any dtypes of the kernels.
            velocities: FP32; empty without momentum.
            means: FP32.
            rate, mu, mix: Outer learning rate, momentum, and the share of the old parameters.
        """
        sizes, device = tuple(anchor.numel() for anchor in anchors), anchors[0].device
        schedule, table, sizes_on_device = self._tables.get(
            sizes,
            lambda: (
                TileSchedule(sizes, _TILE, _TILE, _TILE // 8, device),
                AddressTable(4, len(sizes), device),
                to_device(torch.tensor(sizes, dtype=torch.int64, device="cpu"), device),
            ),
        )
        for number, tensors in enumerate((anchors, thetas, velocities, means)):
            table.set(number, tensors or [None] * len(sizes))
        moved = 12 + 8 * bool(velocities) + (2 if mix else 1) * thetas[0].element_size()
        launches = schedule.lists(schedule.whole(), table.kinds)
        for tiles, full, dtypes in launches:
            launching.launch(
                outer_kernel,
                (len(tiles),),
                *(tiles, table.values, sizes_on_device, len(sizes), rate, mu, mix, 1.0 - mix),
                warps=schedule.warps,
                moved=moved * sum(sizes) / len(launches),
                DTYPE=DTYPES[dtypes[THETA.value]],
                HAS_MOMENTUM=bool(velocities),
                MIXES=mix != 0.0,
                FULL=full,
                TILE=_TILE,
            )
