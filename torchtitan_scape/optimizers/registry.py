"""Which optimizers `[optimizer] name` may ask for, and what each keeps: one line each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from topology.layout import Layout
from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.optimizers.adams import AdamS
from torchtitan_scape.optimizers.muon import Muon, is_hidden
from torchtitan_scape.optimizers.signsgd import SignSGD

FIRST, SECOND = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer by its name, which is its class's.

    make: of named parameters, and by keyword lr, betas, eps, weight_decay, `implementation` (PyTorch's AdamW: "fused",
        "foreach" or "for-loop"), `kernels`, and `count`, told the bytes that go to each rank of the replica.
    moments: kinds of its state of a parameter, FP32 of the parameter's shape. Each state has "step" besides, how many
        were applied.
    on_matrices: whether it works on matrices, which must be whole or cut by rows.
    """

    make: Callable[..., Optimizer]
    moments: Callable[[Shard], tuple[str, ...]]
    on_matrices: bool = False


def _adamw(named: Any, *, implementation: str, kernels: str, count: Any, **rates: Any) -> Optimizer:
    return torch.optim.AdamW(named, **rates, fused=implementation == "fused", foreach=implementation == "foreach")


def _adams(named: Any, *, implementation: str, kernels: str, count: Any, **others: Any) -> Optimizer:
    return AdamS(named, **others, kernels=kernels)


def _muon(named: Any, *, implementation: str, kernels: str, **others: Any) -> Optimizer:
    return Muon(named, **others, fused=implementation == "fused", foreach=implementation == "foreach")


def _signsgd(named: Any, *, lr: float, weight_decay: float, **others: Any) -> Optimizer:
    return SignSGD(named, lr, weight_decay)


OPTIMIZERS = {
    "AdamW": OptimizerEntry(_adamw, lambda shard: (FIRST, SECOND)),
    "AdamS": OptimizerEntry(_adams, lambda shard: (FIRST,)),
    "Muon": OptimizerEntry(_muon, lambda shard: (FIRST,) if is_hidden(shard) else (FIRST, SECOND), on_matrices=True),
    "SignSGD": OptimizerEntry(_signsgd, lambda shard: ()),
}


def check_layout(name: str, layout: Layout, levels: bool) -> None:
    """Refuses an optimizer whose matrices the layout cuts otherwise than by rows. Raises ValueError with the fix.

    levels: whether weights, gradients and the rest lie on three levels, in pieces.
    """
    if not OPTIMIZERS[name].on_matrices:
        return
    cut = [f"parallelism.tensor_parallel_degree = {layout.tensor}"] if layout.tensor > 1 else []
    cut += ["[sharding.levels]"] if levels else []
    if cut:
        raise ValueError(
            f"[optimizer] name = {name!r} with {' and '.join(cut)}: it needs matrices that are whole or cut by rows; "
            "use FSDP's own shards (parallelism.data_parallel_shard_degree) instead, or [optimizer] name = 'AdamW'"
        )
