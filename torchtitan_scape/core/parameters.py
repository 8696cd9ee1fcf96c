"""Local views of parameters and gradients, plain tensors or DTensors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut

from torchtitan_scape.core.bf16_weights import ScaledTensor

_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


class SliceParameter(torch.nn.Parameter):
    """Entries [start, start + n) of a parameter of `whole` shape, flat, in a tensor of as many dimensions, (1, ..., n).

    A view of a larger buffer, as a rule. It takes part in a step, and in a checkpoint, under the parameter's name.
    """

    whole: torch.Size
    start: int

    def __new__(cls, values: Tensor, whole: Sequence[int], start: int) -> "SliceParameter":
        made = super().__new__(cls, values, True)
        made.whole, made.start = torch.Size(whole), start
        return made

    def __init__(self, values: Tensor, whole: Sequence[int], start: int) -> None:
        pass


def is_slice(tensor: Any) -> TypeGuard[SliceParameter]:
    """Fake tensors, of a dry run, are no subclasses and have its attributes alone."""
    return hasattr(tensor, "whole")


@dataclass(eq=False)
class Shard:
    """One parameter's local shard.

    name: as in `model.named_parameters()`, without what wrappers add.
    group: index of its param group.
    counted: False on ranks that hold another rank's copy (tensor parallelism replicates norms), so that a
        norm over the model counts every entry once.
    """

    name: str
    parameter: Tensor
    group: int
    counted: bool

    @property
    def size(self) -> int:
        return local(self.parameter).numel()

    @property
    def entries(self) -> int:
        """Of the whole parameter, over all ranks."""
        own = self.parameter
        return own.whole.numel() if is_slice(own) else own.numel()

    @property
    def local_shape(self) -> torch.Size:
        return local(self.parameter).shape

    @property
    def device(self) -> torch.device:
        return local(self.parameter).device

    @property
    def columns(self) -> int:
        """Entries of a row: of all dimensions but the first. A slice has whole rows of as many as divide both."""
        own = self.parameter
        if is_slice(own):
            return max(1, math.gcd(own.numel(), math.prod(own.whole[1:])))
        return max(1, math.prod(local(own).shape[1:]))


def plain_name(name: str) -> str:
    """The parameter's name without what activation checkpointing, FSDP1 or torch.compile put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, or the tensor itself."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def stored(parameter: Tensor) -> Tensor:
    """The numbers of the local shard: those that a `ScaledTensor` keeps, else the shard itself."""
    own = local(parameter).detach()
    return own.weight if isinstance(own, ScaledTensor) else own


def collect_shards(param_groups: list[dict[str, Any]]) -> list[Shard]:
    """Every parameter in constructor order. Raises ValueError for what cannot be trained."""
    shards = []
    for index, group in enumerate(param_groups):
        names = group.get("param_names") or [f"group{index}.{i}" for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            name = plain_name(name)
            if not parameter.dtype.is_floating_point:
                raise ValueError(
                    f"parameter {name!r} has dtype {parameter.dtype}; only real floating-point parameters can "
                    "be trained: leave it out of the optimizer"
                )
            _check_even(name, parameter)
            shards.append(Shard(name, parameter, index, _counted(parameter)))
    if not shards:
        raise ValueError("no parameters to optimise")
    return shards


def split(shards: Sequence[Shard], dense_names: Sequence[str]) -> tuple[list[Shard], list[Shard]]:
    """Shards that are compressed (global ndim of 2 or more, not named dense) and the others.

    Raises ValueError for a name that no parameter has.
    """
    unknown = set(dense_names) - {s.name for s in shards}
    if unknown:
        raise ValueError(f"dense_names has {sorted(unknown)[0]!r}, which is no parameter of the model")
    sparse = [s for s in shards if s.parameter.ndim >= 2 and s.name not in dense_names]
    dense = [s for s in shards if s.parameter.ndim < 2 or s.name in dense_names]
    return sparse, dense


def flat_gradient(shard: Shard) -> Tensor:
    """The local gradient, flat and contiguous (n,), of its own dtype: its own storage wherever that can be viewed so.

    Zeros where there is none: a replica that did not use a parameter still takes part in every collective.
    """
    gradient = shard.parameter.grad
    if gradient is None:
        return torch.zeros(shard.size, dtype=torch.float32, device=local(shard.parameter).device)
    if gradient.layout != torch.strided:
        raise ValueError(f"the gradient of {shard.name!r} is {gradient.layout}; build the module with sparse=False")
    if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, shard.parameter).placements:
        # A gradient may still be partial where tensor parallelism replicates its parameter.
        gradient = gradient.redistribute(placements=cast(DTensor, shard.parameter).placements)
    return local(gradient).detach().contiguous().view(-1)


def store_gradient(shard: Shard, flat: Tensor) -> None:
    """Puts FP32 (n,) back as the parameter's gradient, where it is no view of it already."""
    parameter = shard.parameter
    gradient = parameter.grad
    same_layout = not isinstance(gradient, DTensor) or gradient.placements == cast(DTensor, parameter).placements
    if gradient is not None and same_layout:
        own = local(gradient)
        if own.data_ptr() != flat.data_ptr():
            own.copy_(flat.view(own.shape))
        return
    values = flat.view(local(parameter).shape).to(parameter.dtype)
    if isinstance(parameter, DTensor):
        values = DTensor.from_local(
            values,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    parameter.grad = values


def model_group_of(shards: Iterable[Shard]) -> ProcessGroup | None:
    """The group over which DTensor parameters are sharded, read off their mesh; None for plain tensors.

    For a caller that names its replicas by a plain ProcessGroup. Raises ValueError where the mesh has more
    than one axis, or parameters have different meshes: then `ReplicaGroups` has to say.
    """
    meshes = {p.device_mesh for p in (s.parameter for s in shards) if isinstance(p, DTensor)}
    if not meshes:
        return None
    mesh = meshes.pop()
    if meshes or mesh.ndim != 1:
        raise ValueError(
            "the parameters are DTensors on more than one mesh axis; pass replicas=topology.groups.ReplicaGroups "
            "with the group of the ranks that hold one replica together"
        )
    return mesh.get_group() if mesh.size() > 1 else None


def _check_even(name: str, parameter: Tensor) -> None:
    """Ranks of tensor parallelism hold copies of what it does not cut. Where the rest of what they hold differs in
    size, copies lie elsewhere in what replicas exchange, other ranks add and code them, and they drift apart."""
    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    for axis, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=False):
        if axis == "tp" and isinstance(placement, Cut) and parameter.shape[placement.dim] % size:
            raise ValueError(
                f"parallelism.tensor_parallel_degree = {size} does not divide dimension {placement.dim} of {name!r}, "
                f"{tuple(parameter.shape)}; choose one that does, or a model whose vocabulary and width it divides"
            )


def _counted(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        index == 0 or not placement.is_replicate()
        for index, placement in zip(coordinate, parameter.placements, strict=True)
    )
