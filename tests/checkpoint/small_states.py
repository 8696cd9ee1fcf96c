"""Small states for tests of checkpoint files, and their save from one process."""

import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from torchtitan_scape.checkpoint.storage import CheckedWriter


def small(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"weight": torch.randn(40, 50), "optimizer": {"exp_avg": torch.randn(40, 50), "step": seed}}


def save(state: dict[str, Any], path: Any, threads: int = 1) -> None:
    """Save from this process only; `thread_count` files are written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=CheckedWriter(path, thread_count=threads), checkpoint_id=path)


def zeros(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else type(state)()


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return set(ours) == set(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, DTensor):
        ours, theirs = ours.to_local(), theirs.to_local()
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return type(ours) is type(theirs) and bool(ours == theirs)
