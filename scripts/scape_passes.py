"""All chunks of a step of SCAPE's passes, if nothing is exchanged between them."""

from torch import Tensor

from torchtitan_scape.kernels.scape.passes import ScapePasses


def pack_all(passes: ScapePasses) -> Tensor | None:
    """Pack all chunks and return the encoded selection."""
    for part in passes.parts:
        passes.pack(part)
    return passes.selected()


def squares_all(passes: ScapePasses) -> Tensor:
    """Return the sum of squares of all chunks, FP64 ()."""
    for part in passes.parts:
        passes.squares(part)
    return passes.norm_squared()


def update_all(passes: ScapePasses) -> None:
    """Update all chunks."""
    for part in passes.parts:
        passes.update(part)
