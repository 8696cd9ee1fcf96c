"""Checkpoints of training loops around `replicate`, for `torch.distributed.checkpoint`.

They follow the trainer's migration rule (`checkpoint.migration`): another number of replicas, another shard degree and
another method can load them.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_scape.checkpoint.folder import names_in, read_record
from torchtitan_scape.checkpoint.metadata import RUN_METADATA, RunMetadata
from torchtitan_scape.checkpoint.migration import migrate
from torchtitan_scape.checkpoint.reader import (
    GlobalLayout,
    ModelCheckpoint,
    OptimizerCheckpoint,
    StateReader,
    load_into,
)
from torchtitan_scape.checkpoint.state import load_counters
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

MODEL, OPTIMIZER = "model", "optimizer"
RESIDUALS = ("exact", "mean", "drop")


def checkpoint_states(model: nn.Module, optimizer: ReplicaOptimizer, residual: str = "exact") -> dict[str, Stateful]:
    """Return what `dcp.save` has to store of a model and its optimizer. Collective.

    Add your own states, such as the step and the scheduler's, under other names:
    `dcp.save(checkpoint_states(model, optimizer) | {"train": mine}, checkpoint_id=path)`.

    Args:
        residual: "exact" saves the state of every replica; "mean" the replicas' mean; "drop" that without pending
            updates. The last two are smaller, and not an exact resume.

    Returns:
        "model": the weights that all replicas share, "optimizer" and "run_metadata". `load_checkpoint` loads them.

    Raises:
        ValueError: an unknown `residual`.
    """
    if residual not in RESIDUALS:
        raise ValueError(f"residual is {residual!r}; it must be one of {', '.join(RESIDUALS)}")
    layout = _layout_of(optimizer)
    return {
        MODEL: ModelCheckpoint(_ModelState(model), optimizer, layout),
        OPTIMIZER: OptimizerCheckpoint(optimizer, layout, residual),
        RUN_METADATA: _record(optimizer, residual),
    }


def load_checkpoint(path: str, model: nn.Module, optimizer: ReplicaOptimizer) -> str:
    """Load model and optimizer of a checkpoint with the entries of `checkpoint_states`. Collective.

    Learning rates and other hyperparameters become those of the checkpoint, as with `Optimizer.load_state_dict`, unless
    the method holds the optimizer's state (SCAPE) or keeps an optimizer for each replica.

    Returns:
        What was loaded and what differs, for the log.

    Raises:
        ValueError: the checkpoint is damaged, or of another model.
    """
    if not {MODEL, OPTIMIZER, RUN_METADATA} <= names_in(path):
        raise ValueError(f"{path} has no states of checkpoint_states(); save these, or load it with dcp.load")
    saved = read_record(path)
    record = _record(optimizer, saved["residual"])
    same_layout, different = record.compare(saved, path)
    layout = _layout_of(optimizer)
    weights = ModelCheckpoint(_ModelState(model), optimizer, layout)
    room = weights.room()
    load_into(path, {MODEL: room})
    weights.load_state_dict(room)
    reader = StateReader(path, saved, optimizer, layout, prefix=f"{MODEL}.")
    text = migrate(optimizer, reader, same_layout, step=0).text()
    load_counters(optimizer, saved["counters"])
    listed = ", ".join(f"{key} {change}" for key, change in different.items())
    return f"{text}; differs from the run that saved: {listed}" if listed else text


class _ModelState:
    """A module's weights and buffers, under names without wrappers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state_dict)


def _record(optimizer: ReplicaOptimizer, residual: str) -> RunMetadata:
    shards = optimizer.shards()
    size = f"{sum(shard.entries for shard in shards):,} parameters in {len(shards)} tensors"
    return RunMetadata(optimizer, residual, {"model": size})


def _layout_of(optimizer: ReplicaOptimizer) -> GlobalLayout:
    """Return the position of this rank's tensors. Collective over all ranks."""
    simulated, collectives = len(optimizer.replicas.endpoints), optimizer.collectives
    if simulated > 1 or not dist.is_initialized():
        return GlobalLayout(None, simulated)
    here = (collectives.replica, collectives.model_rank)
    positions: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(positions, here)
    ranks = {position: rank for rank, position in enumerate(positions)}
    rows = [[ranks[replica, k] for k in range(collectives.model_ranks)] for replica in range(collectives.replicas)]
    sharded = next((s.parameter for s in optimizer.shards() if isinstance(s.parameter, DTensor)), None)
    names = sharded.device_mesh.mesh_dim_names if sharded is not None else None
    device = optimizer.shards()[0].device.type
    return GlobalLayout(DeviceMesh(device, rows, mesh_dim_names=("dp_replicate", *(names or ("shard",)))), simulated)
