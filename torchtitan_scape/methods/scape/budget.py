"""SCAPE's options for a budget of bytes. Imports no torch.

The rule comes from docs/benchmarks/quality_study.md: for the same bytes, fewer bits per entry give a lower loss than a
lower density, down to four bits; below about 1 % of the dense bytes, down to two bits.
"""

import math
from dataclasses import replace
from typing import Any, TypeVar

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.options import MethodOptions, share_of_dense

BLOCK = 1024
# Largest number of entries per block: with 192 and 320 the study's loss was 2 and 7 % higher
# (results/quality_study/report.md).
MAX_ENTRIES = 112
# (minimum budget, code), tried in this order.
CODES = ((0.009, "int4"), (0.0, "2bit"), (0.0, "1bit"))

AnyOptions = TypeVar("AnyOptions", bound=MethodOptions)


def fit_to_budget(options: AnyOptions, budget: float, model: LocalModel, replicas: int) -> AnyOptions:
    """Return the options that the study found best among those that send at most `budget`.

    Only density, block size and code are chosen.

    Args:
        options: `ScapeOptions`.
        budget: Bytes of a step at the target density relative to dense FP32, masks and scales included.

    Raises:
        ValueError: No options fit; the message states the smallest possible budget.
    """

    def with_entries(code: str, k: int) -> AnyOptions:
        chosen: dict[str, Any] = {"density": k / BLOCK, "block_size": BLOCK, "code": code}
        return replace(options, bytes=0.0, **chosen)  # type: ignore[call-arg]

    def share(code: str, k: int) -> float:
        return share_of_dense(with_entries(code, k), model, replicas)

    for code in (code for least, code in CODES if budget >= least):
        for k in range(MAX_ENTRIES, 0, -1):
            if share(code, k) <= budget:
                return with_entries(code, k)
    least = min(share(code, 1) for _, code in CODES)
    raise ValueError(f"a step of this model sends at least {math.ceil(1e5 * least) / 1e5:g} of the dense bytes")
