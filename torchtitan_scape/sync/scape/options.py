"""What an optimizer option may be. Every error names the value and what is allowed."""

from collections.abc import Sequence


def check_hyperparameters(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raises ValueError for a value out of range."""
    if lr < 0:
        raise ValueError(f"lr is {lr}; it must be 0 or more")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} is {beta}; it must lie in [0, 1)")
    if eps < 0 or weight_decay < 0:
        raise ValueError(f"eps is {eps} and weight_decay {weight_decay}; both must be 0 or more")


def check_scape_options(
    density: float,
    density_warmup_steps: int,
    block_size: int,
    selection: str,
    max_wait: float,
    wait_by: str,
    keep_moment: float,
    max_norm: float | None,
    clip_mode: str,
    reduction: str,
    wire_dtype: str,
    chunk_bytes: int,
    parameters: str,
    values_dtype: str,
    offload: Sequence[str],
) -> None:
    """Raises ValueError for an option out of range, with the value and what is allowed."""
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density is {density}; it must lie in (0, 1], for example 0.1")
    if density_warmup_steps < 0:
        raise ValueError(f"density_warmup_steps is {density_warmup_steps}; it must be 0 (none) or more")
    if block_size % 8 or not 8 <= block_size <= 32768:
        raise ValueError(f"block_size is {block_size}; it must be a multiple of 8 from 8 to 32768")
    if selection not in ("block", "tensor"):
        raise ValueError(f"selection is {selection!r}; it must be 'block' or 'tensor'")
    if not max_wait >= 1:
        raise ValueError(f"max_wait is {max_wait}; it must be 1 or more")
    if wait_by not in ("tensor", "row_column"):
        raise ValueError(f"wait_by is {wait_by!r}; it must be 'tensor' or 'row_column'")
    if not 0.0 <= keep_moment <= 1.0:
        raise ValueError(f"keep_moment is {keep_moment}; it must lie in [0, 1]")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be positive, or None for no clipping")
    if clip_mode not in ("moment", "literal"):
        raise ValueError(f"clip_mode is {clip_mode!r}; it must be 'moment' or 'literal'")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if wire_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"wire_dtype is {wire_dtype!r}; it must be 'float32' or 'bfloat16'")
    if chunk_bytes < 4:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be 4 or more, for example {1 << 24}")
    if parameters not in ("local", "gather"):
        raise ValueError(f"parameters is {parameters!r}; it must be 'local' or 'gather'")
    if values_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"values_dtype is {values_dtype!r}; it must be 'float32' or 'bfloat16'")
    if values_dtype != "float32" and parameters == "local":
        raise ValueError(
            f"values_dtype is {values_dtype!r}, and parameters is 'local', where no values travel; it is for 'gather'"
        )
    for name in offload:
        if name not in ("state", "master"):
            raise ValueError(f"offload has {name!r}; it may have 'state' and 'master'")
