"""The passes of `reference.TorchTopk` on Triton kernels, one launch for each form of tiles."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_scape.kernels.common import launching
from torchtitan_scape.kernels.scape.blocks import offset_code
from torchtitan_scape.kernels.topk import triton_kernels
from torchtitan_scape.kernels.topk.layout import BlockGrid, MessageLayout
from torchtitan_scape.kernels.topk.triton_tiles import Form, TiledTensors, power

_LARGEST = 1 << 15  # entries of a tile; larger ones, of a whole tensor, use PyTorch
_ENTRIES = 1 << 13  # of a program
# Entries of a program that selects, and of its warps: its search keeps all in registers.
_SELECTED, _PER_WARP = 1 << 10, 1 << 8
_PROGRAMS = 1 << 11  # of a grid with a memory for each


def fits(grid: BlockGrid) -> bool:
    """Return whether the kernels can process the tiles of a grid."""
    return grid.coded and grid.size <= _LARGEST and grid.height * grid.columns < 1 << 31


class TritonTopk:
    """The passes of `reference.TorchTopk`. None synchronizes with the device."""

    def __init__(self, layout: MessageLayout) -> None:
        self.layout, self._tiled = layout, TiledTensors(layout)

    def select(
        self,
        residuals: Sequence[Tensor],
        gradients: Sequence[Tensor],
        decay: float,
        factor: float,
        applied: Tensor,
        message: Tensor,
        values: Tensor,
    ) -> None:
        """Select as `TorchTopk.select`."""
        for form, tables in self._tiled.launches(_SELECTED, residuals=residuals, gradients=gradients):
            code = offset_code(form.k, form.size)
            launching.launch(
                triton_kernels.select_kernel,
                (len(form.programs),),
                *(*tables, message, values, applied),
                *(decay, factor, form.k, code.nbytes, code.unary, code.low),
                warps=max(1, min(16, form.padded // _PER_WARP)),
                moved=12 * form.entries - (1 - form.share) * (message.nbytes + values.nbytes),
                CLEARS=self.layout.code == "float32",
                **form.constants,
            )

    def keep_(self, residuals: Sequence[Tensor], message: Tensor, errors: Tensor, applied: Tensor) -> None:
        """Set the residuals as `TorchTopk.keep_`."""
        for form, tables in self._tiled.launches(_ENTRIES, residuals=residuals):
            touched = min(4 * form.entries, 32 * form.share * errors.numel())  # a sector for each entry
            launching.launch(
                triton_kernels.keep_kernel,
                (len(form.programs),),
                *(*tables, message, errors, applied, form.k),
                warps=_warps(form),
                moved=touched - (1 - form.share) * (message.nbytes + errors.nbytes),
                **_code(form),
                **form.constants,
            )

    def mean_(self, outputs: Sequence[Tensor], messages: Tensor, over_senders: bool) -> None:
        """Compute the mean as `TorchTopk.mean_`."""
        numbers = messages.view(torch.float32)
        values = numbers if self.layout.code == "float32" else messages
        for form, tables in self._tiled.launches(_ENTRIES, gradients=outputs):
            grid = min(len(form.programs), _PROGRAMS) if over_senders else len(form.programs)
            size = grid * form.padded if over_senders else 1
            counts = torch.empty(size, dtype=torch.int16, device=messages.device)
            launching.launch(
                triton_kernels.mean_kernel,
                (grid,),
                *(*tables, counts, values, numbers, messages),
                *(values.stride(0), numbers.stride(0), messages.stride(0)),
                *(len(messages), float(len(messages)), len(form.programs), form.k),
                warps=_warps(form),
                moved=4 * form.entries - (1 - form.share) * messages.nbytes,
                CODE=self.layout.code,
                OVER_SENDERS=over_senders,
                **_code(form),
                **form.constants,
            )


def _code(form: Form) -> dict[str, int]:
    """Return the constants of the code of the offsets."""
    code = offset_code(form.k, form.size)
    return dict(LOW=code.low, UNARY=code.unary, CODE_BYTES=code.nbytes, LANES=power(max(code.unary, form.k)))


def _warps(form: Form) -> int:
    return 4 if form.padded <= 1 << 11 else 8 if form.padded <= _ENTRIES else 16
