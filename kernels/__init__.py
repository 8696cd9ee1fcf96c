"""Passes over local tensors, of which optimizer steps and encoded messages consist.

Each `reference.py` specifies its passes in plain PyTorch, and the tests compare the Triton kernels next to it with it.
The package depends neither on process groups nor on the trainer. Names that need torch are imported on first use, so
that block arithmetic runs without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.backends import (
        TRITON_DTYPES,
        adams_step,
        block_code,
        choose_backend,
        cosine_passes,
        exchange_passes,
        finite_check,
        frozen_adam_step,
        masked_payload,
        outer_step,
        scaling,
        scape_passes,
        tagc_passes,
        topk_passes,
    )

__all__ = [
    "TRITON_DTYPES",
    "adams_step",
    "block_code",
    "choose_backend",
    "cosine_passes",
    "exchange_passes",
    "finite_check",
    "frozen_adam_step",
    "masked_payload",
    "outer_step",
    "scaling",
    "scape_passes",
    "tagc_passes",
    "topk_passes",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kernels.backends"), name)
