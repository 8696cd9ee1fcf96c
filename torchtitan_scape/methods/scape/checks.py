"""Checks of the parameters and options of SCAPE, when it is built."""

import logging
from collections.abc import Sequence

from kernels.scape.blocks import BlockLayout
from torchtitan_scape.core.bf16_weights import ScaledTensor
from torchtitan_scape.core.parameters import Shard, local
from torchtitan_scape.methods.scape.options import ScapeOptions

logger = logging.getLogger(__name__)


def check_one_device(shards: list[Shard]) -> None:
    """Raises ValueError for parameters on several devices."""
    first = local(shards[0].parameter).device
    for shard in shards:
        if (device := local(shard.parameter).device) != first:
            raise ValueError(
                f"parameter {shard.name!r} is on {device}, {shards[0].name!r} on {first}; Scape keeps all its state on "
                "one device: move the model there, or give each device an optimizer of its own"
            )


def check_weights(shards: list[Shard], weights_dtype: str) -> None:
    """Raises ValueError for parameters that are not kept as `weights_dtype` says."""
    in_bf16 = [isinstance(local(s.parameter), ScaledTensor) for s in shards]
    if any(in_bf16) and not all(in_bf16):
        other = shards[in_bf16.index(False)].name
        raise ValueError(f"{other!r} is not kept in BF16, and others are; give all of them to hold_in_bfloat16")
    if in_bf16[0] != (weights_dtype == "bfloat16"):
        kept = "in BF16" if in_bf16[0] else "as they are"
        advice = (
            "set it to 'bfloat16'" if in_bf16[0] else "give the model to hold_in_bfloat16, or leave it at 'float32'"
        )
        raise ValueError(f"weights_dtype is {weights_dtype!r}, and the parameters are kept {kept}: {advice}")


def warn_of_density(sparse: Sequence[Shard], options: ScapeOptions) -> None:
    """Says it where the density is less than an entry a block."""
    density, size = options.density, options.block_size
    if options.selection == "block" and sparse and round(density * size) == 0:
        share = BlockLayout(tuple(s.size for s in sparse), size, 1).share(density)
        logger.warning(
            f"density {density:g} of a block of {size} entries is less than one: one is selected in each, which is a "
            f"density of {share:.3g}"
        )


def backend_for(selection: str, kernels: str, backend: str, logs: bool) -> str:
    """The passes' backend: the paper's selection runs in PyTorch on every device, which is said if `logs`.

    Raises ValueError where `kernels` asks for Triton all the same.
    """
    if selection != "tensor" or backend == "torch":
        return backend
    if kernels == "triton":
        raise ValueError(
            "kernels is 'triton', and selection 'tensor' runs in PyTorch only; choose kernels 'auto', or selection "
            "'block'"
        )
    if logs:
        logger.warning("selection 'tensor' runs in PyTorch, not in Triton")
    return "torch"
