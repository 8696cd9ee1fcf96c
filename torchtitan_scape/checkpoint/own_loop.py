"""Checkpoints of training loops around `replicate`, for `torch.distributed.checkpoint`.

They follow the trainer's migration rule (`checkpoint.migration`): another number of replicas, another shard degree and
another method can load them.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_scape.checkpoint.metadata import (
    RUN_METADATA,
    RunMetadata,
    forget_metadata,
    load_into,
    names_in,
    read_record,
)
from torchtitan_scape.checkpoint.migration import StateReader, migrate
from torchtitan_scape.checkpoint.state import (
    RESIDUALS,
    GlobalLayout,
    ModelCheckpoint,
    OptimizerCheckpoint,
    restore_groups,
)
from torchtitan_scape.core.parameters import plain_name
from torchtitan_scape.replica.optimizer import ReplicaOptimizer

MODEL, OPTIMIZER = "model", "optimizer"
_LAYOUTS: "WeakKeyDictionary[ReplicaOptimizer, GlobalLayout]" = WeakKeyDictionary()


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
        DamagedParametersError: on every rank, if parameters are not finite or far too large.
        ReplicasDifferError: on every rank, if replicas differ, unless `consistency_interval` is 0.
    """
    if residual not in RESIDUALS:
        raise ValueError(f"residual is {residual!r}; it must be one of {', '.join(RESIDUALS)}")
    optimizer.refuse_inside_shared_weights("checkpoint_states")
    optimizer.joint_calls.expect("checkpoint_states")
    optimizer.check_parameters(optimizer.attempted_steps)
    if optimizer.consistency_interval:
        optimizer.check_consistency(optimizer.attempted_steps)
    layout = _layout_of(optimizer)
    return {
        MODEL: ModelCheckpoint(_ModelState(model), optimizer, layout),
        OPTIMIZER: OptimizerCheckpoint(optimizer, layout, residual),
        RUN_METADATA: _record(optimizer, residual),
    }


def load_checkpoint(path: str, model: nn.Module, optimizer: ReplicaOptimizer) -> str:
    """Load model and optimizer of a checkpoint with the entries of `checkpoint_states`. Collective.

    The values of param groups (learning rates, betas and others) become those of the checkpoint, as with
    `Optimizer.load_state_dict`; of another optimizer class the numbers that both have, except `weight_decay`. Set other
    values after the load.

    Returns:
        A line about the loaded state, the values of param groups and the differences, for the log.

    Raises:
        ValueError: the checkpoint is incomplete, or of another model. There are no checksums.
    """
    optimizer.refuse_inside_shared_weights("load_checkpoint")
    if not {MODEL, OPTIMIZER, RUN_METADATA} <= names_in(path):
        raise ValueError(
            f"{path} lacks {sorted({MODEL, OPTIMIZER, RUN_METADATA} - names_in(path))[0]!r}, which checkpoint_states() "
            "saves; checkpoints of the trainer have another form: export their model, or resume with the trainer"
        )
    saved = read_record(path)
    record = _record(optimizer, saved["residual"])
    same_layout, different = record.compare(saved, path)
    layout = _layout_of(optimizer)
    weights = ModelCheckpoint(_ModelState(model), optimizer, layout)
    targets = weights.load_targets()
    load_into(path, {MODEL: targets})
    weights.load_state_dict(targets)
    reader = StateReader(path, saved, optimizer, layout, prefix=f"{MODEL}.")
    groups = restore_groups(optimizer.inner, optimizer.shards(), reader.group_values(), saved["optimizer"])
    text = migrate(optimizer, reader, same_layout)
    optimizer.count_bytes_from_here()
    forget_metadata()
    different.pop("betas", None)  # of the run before the load: they are values of param groups
    listed = ", ".join(f"{key} {change}" for key, change in different.items())
    return f"{text}; {groups}" + (f"; differs from the run that saved: {listed}" if listed else "")


class _ModelState:
    """A module's weights and buffers, under names without wrappers.

    Hooks of a module may rename or split parameters in its state, as TorchTitan 0.3.0 splits a fused projection. The
    state of the optimizer has the names of the parameters, so the weights are then stored under these as well.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        if self._is_renamed():
            return self._tensors()
        return get_model_state_dict(self._model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._is_renamed():
            set_model_state_dict(self._model, state_dict)
            return
        with torch.no_grad():
            for name, values in self._tensors().items():
                values.copy_(state_dict[name])

    def _is_renamed(self) -> bool:
        """Return whether the module's state lacks the name of a parameter. FSDP2 reshards the module meanwhile."""
        names = {plain_name(name) for name in self._model.state_dict()}
        return not names.issuperset(plain_name(name) for name, _ in self._model.named_parameters())

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and the persistent buffers."""
        transient = {
            f"{prefix}.{name}".removeprefix(".")
            for prefix, module in self._model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        buffers = self._model.named_buffers(remove_duplicate=False)
        tensors = dict(self._model.named_parameters(remove_duplicate=False))
        tensors |= {name: buffer for name, buffer in buffers if name not in transient}
        return {plain_name(name): values.detach() for name, values in tensors.items()}


def _record(optimizer: ReplicaOptimizer, residual: str) -> RunMetadata:
    shards = optimizer.shards()
    size = f"{sum(shard.entries for shard in shards):,} parameters in {len(shards)} tensors"
    return RunMetadata(optimizer, residual, {"model": size})


def _layout_of(optimizer: ReplicaOptimizer) -> GlobalLayout:
    """Return the position of this rank's tensors. Collective over all ranks at the first call of an optimizer."""
    if optimizer not in _LAYOUTS:  # every mesh creates process groups, so it is made once
        _LAYOUTS[optimizer] = _find_layout(optimizer)
    return _LAYOUTS[optimizer]


def _find_layout(optimizer: ReplicaOptimizer) -> GlobalLayout:
    simulated, collectives = len(optimizer.replicas.endpoints), optimizer.collectives
    meshes = [s.parameter.device_mesh for s in optimizer.shards() if isinstance(s.parameter, DTensor)]
    if not dist.is_initialized() or (simulated > 1 and not meshes):
        return GlobalLayout(None, simulated)
    # With tensor parallelism some parameters are on one dimension of the mesh only.
    sharded = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    shape = (1,) if sharded is None else tuple(sharded.shape)
    names = None if sharded is None else sharded.mesh_dim_names
    inner = (0,) if sharded is None else tuple(sharded.get_coordinate() or ())
    replicas, replica = (1, 0) if simulated > 1 else (collectives.replicas, collectives.replica)
    if (own := collectives.replicas * collectives.model_ranks) < dist.get_world_size() and simulated == 1:
        raise ValueError(
            f"the replicas of this model are {own} of the job's {dist.get_world_size()} ranks, and a checkpoint of "
            "torch.distributed.checkpoint needs all; save optimizer.state_dict() and model.state_dict() by torch.save "
            "on every rank, or start a job for every model"
        )
    positions: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(positions, (replica, *inner))
    ranks = torch.empty((replicas, *shape), dtype=torch.int, device="cpu")
    for rank, position in enumerate(positions):
        ranks[position] = rank
    names = ("dp_replicate", *(names or (f"shard{i}" for i in range(len(shape)))))
    device = optimizer.shards()[0].device.type
    return GlobalLayout(DeviceMesh(device, ranks, mesh_dim_names=names), simulated)
