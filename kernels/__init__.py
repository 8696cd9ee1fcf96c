"""Passes over local tensors that an optimizer step is made of.

`reference.py` states each of them in plain PyTorch; the Triton kernels beside it are held against it. Nothing here
knows of process groups or of the trainer. What needs torch is imported when it is first asked for: block arithmetic
runs where torch is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.backends import (
        TRITON_DTYPES,
        adams_step,
        block_code,
        choose_backend,
        finite_check,
        scape_passes,
        tagc_passes,
    )

__all__ = ["TRITON_DTYPES", "adams_step", "block_code", "choose_backend", "finite_check", "scape_passes", "tagc_passes"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kernels.backends"), name)
