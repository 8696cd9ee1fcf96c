"""Checks of SCAPE's parameters and options at construction."""

import logging
from collections.abc import Sequence

from torchtitan_scape.core.bf16_weights import ScaledTensor
from torchtitan_scape.core.parameters import Shard, local
from torchtitan_scape.kernels.scape.blocks import BlockLayout
from torchtitan_scape.methods.scape.options import ScapeOptions

logger = logging.getLogger(__name__)


def check_one_device(shards: list[Shard]) -> None:
    """Raise ValueError if the parameters are on several devices."""
    first = local(shards[0].parameter).device
    for shard in shards:
        if (device := local(shard.parameter).device) != first:
            raise ValueError(
                f"parameter {shard.name!r} is on {device}, {shards[0].name!r} on {first}; Scape keeps all its state on "
                "one device: move the model to one device, or use one optimizer per device"
            )


def check_weights(shards: list[Shard], weights_dtype: str) -> None:
    """Raise ValueError if the storage of the parameters does not match `weights_dtype`."""
    in_bf16 = [isinstance(local(s.parameter), ScaledTensor) for s in shards]
    if any(in_bf16) and not all(in_bf16):
        other = shards[in_bf16.index(False)].name
        raise ValueError(f"{other!r} is not stored in BF16, but other parameters are; convert all: hold_in_bfloat16")
    if in_bf16[0] != (weights_dtype == "bfloat16"):
        storage = "stored in BF16" if in_bf16[0] else "not converted"
        advice = "set it to 'bfloat16'" if in_bf16[0] else "call hold_in_bfloat16 on the model, or set it to 'float32'"
        raise ValueError(f"weights_dtype is {weights_dtype!r}, but the parameters are {storage}: {advice}")


def warn_of_density(sparse: Sequence[Shard], options: ScapeOptions) -> None:
    """Log a warning if the density is less than one entry per block."""
    density, size = options.density, options.block_size
    if options.selection == "block" and sparse and round(density * size) == 0:
        share = BlockLayout(tuple(s.size for s in sparse), size, 1).share(density)
        logger.warning(
            f"density {density:g} is less than one entry per block of {size}: one is selected per block, which is a "
            f"density of {share:.3g}"
        )


def backend_for(selection: str, kernels: str, backend: str, logs: bool) -> str:
    """Return the backend of the passes: selection "tensor" (the paper's) is implemented in PyTorch only.

    Args:
        kernels: The option, "auto", "triton" or "torch".
        backend: The backend of the device.
        logs: Log a warning if the backend changes.

    Raises:
        ValueError: `kernels` is "triton" and selection is "tensor".
    """
    if selection != "tensor" or backend == "torch":
        return backend
    if kernels == "triton":
        raise ValueError(
            "kernels is 'triton', but selection 'tensor' runs in PyTorch only; set kernels to 'auto', or selection to "
            "'block'"
        )
    if logs:
        logger.warning("selection 'tensor' runs in PyTorch, not in Triton")
    return "torch"
