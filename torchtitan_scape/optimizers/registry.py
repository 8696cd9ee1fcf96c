"""Registry of the optimizers that `[optimizer] name` can select, and of their states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan_scape.optimizers.elementwise import AdamS, SignSGD
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.topology.layout import Layout

FIRST, SECOND = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer, registered under the name of its class.

    Attributes:
        kind: Class whose step it runs. PyTorch's AdamW runs that of Adam.
        make: Constructor from named parameters, with keywords lr, betas, eps, weight_decay, `implementation` (PyTorch's
            AdamW: "fused", "foreach" or "for-loop"), `kernels`, `count`, which receives the bytes sent to each rank of
            the replica, and `share`, the `ReplicaShare` of replicas with equal gradients.
        has_moment: Whether it keeps a first moment of each parameter.
        on_matrices: Whether it needs matrices that are whole or sharded by rows.
    """

    kind: type[Optimizer]
    make: Callable[..., Optimizer]
    has_moment: bool = True
    on_matrices: bool = False


def decay_groups(named: Sequence[tuple[str, Tensor]], exclude: str) -> list[dict[str, Any]]:
    """Return the param groups for `[optimizer] decay_exclude`: one, or a second one without weight decay."""
    vectors = [(name, p) for name, p in named if exclude == "vectors" and p.ndim < 2]
    names = {name for name, _ in vectors}
    groups: list[dict[str, Any]] = [{"params": [(name, p) for name, p in named if name not in names]}]
    return groups + ([{"params": vectors, "weight_decay": 0.0}] if vectors else [])


def _adamw(named: Any, *, implementation: str, kernels: str, count: Any, share: Any = None, **rates: Any) -> Optimizer:
    return torch.optim.AdamW(named, **rates, fused=implementation == "fused", foreach=implementation == "foreach")


def _adams(named: Any, *, implementation: str, kernels: str, count: Any, share: Any = None, **others: Any) -> Optimizer:
    return AdamS(named, **others, kernels=kernels)


def _muon(named: Any, *, implementation: str, kernels: str, **others: Any) -> Optimizer:
    return Muon(named, **others, fused=implementation == "fused", foreach=implementation == "foreach")


def _signsgd(named: Any, *, lr: float, weight_decay: float, **others: Any) -> Optimizer:
    return SignSGD(named, lr, weight_decay)


OPTIMIZERS = {
    "AdamW": OptimizerEntry(torch.optim.Adam, _adamw),
    "AdamS": OptimizerEntry(AdamS, _adams),
    "Muon": OptimizerEntry(Muon, _muon, on_matrices=True),
    "SignSGD": OptimizerEntry(SignSGD, _signsgd, has_moment=False),
}


def check_layout(name: str, layout: Layout, levels: bool) -> None:
    """Check that the layout shards matrices as the optimizer needs.

    Args:
        name: Name of the optimizer.
        layout: Layout of the run.
        levels: Whether three-level sharding is used.

    Raises:
        ValueError: Matrices would not be whole or sharded by rows; the message contains the fix.
    """
    if not OPTIMIZERS[name].on_matrices:
        return
    conflicts = [f"parallelism.tensor_parallel_degree = {layout.tensor}"] if layout.tensor > 1 else []
    conflicts += ["[sharding.levels]"] if levels else []
    if conflicts:
        raise ValueError(
            f"[optimizer] name = {name!r} with {' and '.join(conflicts)}: it needs matrices that are whole or sharded "
            "by rows; use FSDP's own shards (parallelism.data_parallel_shard_degree) instead, or [optimizer] name = "
            "'AdamW'"
        )


def release_state(optimizer: Optimizer) -> None:
    """Drop the state of all parameters: it is stored elsewhere from now on."""
    if isinstance(optimizer, AdamS):
        optimizer.release_state()
    else:
        optimizer.state.clear()
