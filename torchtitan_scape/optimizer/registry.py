"""Which optimizers `[optimizer] name` may ask for, and what each keeps: one line each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from topology.layout import Layout
from torchtitan_scape.optimizer.adams import AdamS
from torchtitan_scape.optimizer.muon import Muon, is_hidden
from torchtitan_scape.optimizer.signsgd import SignSGD
from torchtitan_scape.sync.shards import Shard

FIRST, SECOND = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class Entry:
    """An optimizer by its name, which is its class's.

    make: of named parameters, and by keyword lr, betas, eps, weight_decay, `implementation` (PyTorch's AdamW: "fused",
        "foreach" or "for-loop") and `kernels`.
    moments: kinds of its state of a parameter, FP32 of the parameter's shape. Each state has "step" besides, how many
        were applied.
    whole: whether it needs whole matrices, and so no shards.
    """

    make: Callable[..., Optimizer]
    moments: Callable[[Shard], tuple[str, ...]]
    whole: bool = False


def _adamw(named: Any, *, implementation: str, kernels: str, **rates: Any) -> Optimizer:
    return torch.optim.AdamW(named, **rates, fused=implementation == "fused", foreach=implementation == "foreach")


def _adams(named: Any, *, implementation: str, kernels: str, **rates: Any) -> Optimizer:
    return AdamS(named, **rates, kernels=kernels)


def _muon(named: Any, *, implementation: str, kernels: str, **rates: Any) -> Optimizer:
    return Muon(named, **rates, fused=implementation == "fused", foreach=implementation == "foreach")


def _signsgd(named: Any, *, lr: float, weight_decay: float, **others: Any) -> Optimizer:
    return SignSGD(named, lr, weight_decay)


OPTIMIZERS = {
    "AdamW": Entry(_adamw, lambda shard: (FIRST, SECOND)),
    "AdamS": Entry(_adams, lambda shard: (FIRST,)),
    "Muon": Entry(_muon, lambda shard: (FIRST,) if is_hidden(shard) else (FIRST, SECOND), whole=True),
    "SignSGD": Entry(_signsgd, lambda shard: ()),
}


def check_layout(name: str, layout: Layout) -> None:
    """Refuses an optimizer whose matrices the layout cuts. Raises ValueError with the fix."""
    degrees = {
        "data_parallel_shard": layout.shard,
        "context_parallel": layout.context,
        "tensor_parallel": layout.tensor,
    }
    cut = [f"parallelism.{axis}_degree = {degree}" for axis, degree in degrees.items() if degree > 1]
    if OPTIMIZERS[name].whole and cut:
        raise ValueError(
            f"[optimizer] name = {name!r} with {' and '.join(cut)}: it needs whole matrices; set "
            f"{'it' if len(cut) == 1 else 'them'} to 1, with parallelism.data_parallel_replicate_degree = "
            f"{layout.world_size} for the ranks, or [optimizer] name = 'AdamW'"
        )
